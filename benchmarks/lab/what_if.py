"""Measure recorded loads, changed settings and advice beside their simulations.

Run it with `make bench WHAT=what-if`; `ARGS="--traces azure-conv"` takes a third of the time.

Each trace, scaled to this machine, is sent in blocks: first to a server with the default settings,
which records its traffic (`--record-trace`), and then to a server with a changed setting, so that
both see the same machine, whose speed drifts. Predictions come from the recorded block, from steps
as `plan --calibrate` measures them, and from the steps that the default server took meanwhile.
Three questions are asked:

- Is the recorded load, simulated with the same settings, as it was measured?
- Is the change of the 99th percentiles predicted that a changed setting brings?
- Does the advice of `twostroke advise` bring the goodput that it expects?
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from benchmarks.common.pipe import Worker
from benchmarks.common.report import caption, machine_facts, note, positive, save, table
from benchmarks.common.servers import MODEL_NAME, Server, our_command
from benchmarks.lab.simulate import calibrated_setup, request_logs
from twostroke.lab.measure.requests import Objectives, RequestLog, make_report
from twostroke.lab.planner import Calibration
from twostroke.lab.planner.served import group_steps, read_steps
from twostroke.lab.simulator import RequestArrival, SimulationSetup, Workload, read_trace, simulate
from twostroke.lab.simulator.advice import advise, changed_setup
from twostroke.lab.simulator.load import sorted_workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_KV_BYTES = 256 << 20
_SCALES = {"azure-conv": 0.025, "azure-code": 0.025, "mooncake-conversation": 1 / 32}
_REQUESTS = {"azure-conv": 500, "azure-code": 500, "mooncake-conversation": 150}
_CHANGES: tuple[dict[str, Any], ...] = (
    {"token_budget": 32},
    {"max_running": 2},
    {"kv_format": "int8"},
    {"speed": 0.7},
)
_FLAGS = {
    "token_budget": "--token-budget",
    "max_running": "--max-running",
    "kv_format": "--kv-format",
}
_TTFT_ROOM = 3  # the objective of TTFT over the 99th percentile with the default settings
_TPOT_SHARE = 0.6  # of the requests that meet the objective of TPOT with the default settings
_WARM_UP = 70_000  # number of the first request that warms a server up; its tokens are new
_CALM_SHARE = 0.3  # of the time in which the engine computes, by steps of an engine alone
_ALONE = 15  # requests one after another, for the time outside the engine
_LOOK_S = 0.7  # between looks at the server's last steps
_NUM_BLOCKS = 4  # of a load
_NUM_SPEEDS = 16  # that are simulated to find the one at which the engine is busy enough
_MIN_FOR_QUANTILES = 20
_NUM_RESAMPLES = 400
_SMALL_CHANGE = 0.1  # of a percentile; noise decides its direction
_LIMITS = {"p50": 0.15, "p99": 0.25}


class Figures(NamedTuple):
    """The figures of a run that are compared; times are in seconds, None if unknown."""

    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    hit_rate: float

    @classmethod
    def of(cls, logs: Sequence[RequestLog]) -> Figures:
        """Return the figures of a run, measured or simulated."""
        latencies = [log.latencies for log in logs]

        def quantile(name: str, share: float) -> float | None:
            values = [value for row in latencies if (value := row[name]) is not None]
            return float(np.quantile(values, share)) if len(values) > _MIN_FOR_QUANTILES else None

        return cls(
            ttft_p50=quantile("ttft", 0.5),
            ttft_p99=quantile("ttft", 0.99),
            tpot_p50=quantile("tpot", 0.5),
            tpot_p99=quantile("tpot", 0.99),
            hit_rate=make_report(logs, Objectives()).hit_rate,
        )


class Round(NamedTuple):
    """The requests of a round of blocks: each measured, and predicted.

    `default` had the settings as they are, and `changed` the changed ones.
    """

    name: str
    default: tuple[list[RequestLog], list[RequestLog]]
    changed: tuple[list[RequestLog], list[RequestLog]]


def main() -> None:
    """Measure, simulate, then print and keep the tables."""
    args, began_s = _arguments(), time.monotonic()
    result = dict[str, Any](machine_facts()) | {"traces": {}}
    setup = calibrated_setup(args.model, _KV_BYTES, args.threads)
    parts = []
    with tempfile.TemporaryDirectory() as folder_name, contextlib.ExitStack() as stack:
        for name in args.traces:
            run = _TraceRun(name, args, setup, Path(folder_name), stack)
            facts = run.compare()
            result["traces"][name] = msgspec.to_builtins(facts)
            parts.append(_text(name, facts))
            note(parts[-1])
    minutes = (time.monotonic() - began_s) / 60
    parts.append(f"It took {minutes:.0f} minutes. {caption(result, args.model)}")
    save("what_if", result, "\n\n".join(parts))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--traces", nargs="+", default=[*_SCALES], choices=[*_SCALES])
    text = "percent of the time in which the engine computes, by simulation"
    parser.add_argument("--busy", type=positive, default=50, help=text)
    text = "of each trace; by default 500, and 150 of the Mooncake trace"
    parser.add_argument("--requests", type=positive, help=text)
    text = "of the engine's settings that are measured"
    parser.add_argument("--changes", type=int, default=len(_CHANGES), help=text)
    text = "of the engine; HTTP and the clients need a core, too"
    parser.add_argument("--threads", type=positive, default=1, help=text)
    return parser.parse_args()


class _TraceRun:
    """Sends one trace to servers with different settings, and simulates it."""

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        setup: SimulationSetup,
        folder: Path,
        stack: contextlib.ExitStack,
    ) -> None:
        self._args = args
        self._setup = setup
        self._folder = folder / name
        self._folder.mkdir()
        count = args.requests or _REQUESTS[name]
        trace = read_trace(name).first(2 * count).changed(scale=_SCALES[name])
        self._trace = trace.first(count)
        self._all_steps: list[tuple[Any, ...]] = []  # of the default server with the load
        self._load = self._trace  # at a rate that this machine can serve, once that is known
        # Without the trace's blocks, so that they leave nothing useful in the prefix cache.
        others = [
            replace(arrival, blocks=(), block_size=0)
            for arrival in trace.arrivals[count : count + count // 3]
        ]
        self._others = at_busy_share(setup, sorted_workload("others", others), _CALM_SHARE)
        path = [sys.executable, "-m", "benchmarks.serving.load_clients"]
        self._clients = Worker("clients", path, self._folder / "load.log")
        stack.callback(self._clients.close)

    def compare(self) -> dict[str, Any]:
        """Return what was measured and predicted, by question."""
        trace = self._folder / "recorded"
        with self._server({}, ("--record-trace", str(trace))) as server:
            overhead_s = self._overhead_s(server)
            steps = self._watched(server, self._others, first=10_000)
            setup = self._with_steps(replace(self._setup, overhead_s=overhead_s), steps)
            self._load = at_busy_share(setup, self._trace, self._args.busy / 100)
            note(f"{self._load.rate:.2f} requests per second")
            rounds = []
            for number, change in enumerate(_CHANGES[: self._args.changes], 1):
                rounds.append(self._round(setup, server, trace, number, change))
                note(_round_text(rounds[-1]))
            recorded = read_trace(str(trace)).last(len(self._load.arrivals))
            same = [[log for one in rounds for log in one.default[at]] for at in (0, 1)]
            objectives = chosen_objectives(same[0])
            setup = self._with_steps(setup, self._all_steps)
            advice = advise(setup, recorded, objectives)
            advised = None
            if advice.changes:
                advised = self._round(setup, server, trace, len(rounds) + 1, advice.changes)
                note(_round_text(advised))

        def good_share(logs: Sequence[RequestLog]) -> float:
            return make_report(logs, objectives).good_share or 0.0

        return {
            "overhead_s": overhead_s,
            "rate": self._load.rate,
            "requests": len(same[0]),
            "same": tuple(map(Figures.of, same)),
            "changes": [
                (
                    one.name,
                    tuple(map(Figures.of, one.default)),
                    tuple(map(Figures.of, one.changed)),
                    change_intervals(one.default[0], one.changed[0]),
                )
                for one in rounds
            ],
            "advice": {
                "objectives": objectives,
                "changes": advice.changes,
                "expected": (advice.default.good_share, advice.advised.good_share),
                "gain": advice.gain,
                "machine": advice.machine,
                "measured": None
                if advised is None
                else (good_share(advised.default[0]), good_share(advised.changed[0])),
            },
        }

    def _round(
        self,
        setup: SimulationSetup,
        default_server: Server,
        trace: Path,
        number: int,
        change: dict[str, Any],
    ) -> Round:
        """Send the load in blocks, each first to the default server and then to a changed one.

        So both see the same machine, whose speed drifts. The simulation of a block uses the
        recorded block, and the steps that the default server takes meanwhile.
        """
        changes = dict(change)
        speed = changes.pop("speed", 1.0)
        name = " ".join(f"{key}={value}" for key, value in change.items())
        default: tuple[list[RequestLog], list[RequestLog]] = ([], [])
        changed: tuple[list[RequestLog], list[RequestLog]] = ([], [])
        with self._server(changes) as server:
            self._replay(server, self._others.first(20), first=_WARM_UP)
            for at, block in enumerate(_blocks(self._load, number)):
                first = 100_000 * number + 1000 * at
                measured: list[RequestLog] = []
                steps = self._watched(default_server, block, first=first, logs=measured)
                self._all_steps += steps
                recorded = read_trace(str(trace)).last(len(block.arrivals))
                default[0].extend(measured)
                changed[0].extend(self._replay(server, block.changed(speed=speed), first=first))
                calibrated = self._with_steps(setup, steps)
                default[1].extend(simulate(calibrated, recorded).logs)
                changed_server = changed_setup(calibrated, changes)
                changed[1].extend(simulate(changed_server, recorded.changed(speed=speed)).logs)
        return Round(name, default, changed)

    def _with_steps(
        self, setup: SimulationSetup, steps: Sequence[tuple[Any, ...]]
    ) -> SimulationSetup:
        assert isinstance(setup.calibration, Calibration)
        calibration = replace(setup.calibration, served_steps=group_steps(steps))
        return replace(setup, calibration=calibration)

    @contextlib.contextmanager
    def _server(self, changes: dict[str, Any], more: tuple[str, ...] = ()) -> Iterator[Server]:
        """Start a server with changed settings; end it at the end of the block."""
        options = [word for key, value in changes.items() for word in (_FLAGS[key], str(value))]
        base = our_command(self._args.model, self._args.threads)
        command = (*base, "--kv-memory", str(_KV_BYTES), *options, *more)
        with contextlib.ExitStack() as stack:
            yield Server("Twostroke", command, self._folder, stack)

    def _overhead_s(self, server: Server) -> float:
        """Measure requests one after another; a first token's time beyond its step is overhead."""
        load = Workload("alone", tuple(RequestArrival(0.4 * n, 64, 4) for n in range(_ALONE)))
        self._replay(server, load, first=50_000)
        logs: list[RequestLog] = []
        steps = self._watched(server, load, first=60_000, logs=logs)
        prefill_s = [step_s for _, prompt, _, step_s, *_ in dict.fromkeys(steps) if prompt]
        return max(0.0, median(log.timings.ttft_s for log in logs) - float(median(prefill_s)))

    def _watched(
        self, server: Server, load: Workload, *, first: int, logs: list[RequestLog] | None = None
    ) -> list[tuple[Any, ...]]:
        """Send the requests of a load; return the steps that the server took meanwhile."""
        has_ended = threading.Event()
        url, model = f"http://127.0.0.1:{server.port}", self._setup.model
        steps: list[tuple[Any, ...]] = []

        def watch() -> None:
            while not has_ended.wait(_LOOK_S):
                steps.extend(map(tuple, read_steps(url, None, model)))

        before = set(map(tuple, read_steps(url, None, model)))
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            replayed = self._replay(server, load, first=first)
        finally:
            has_ended.set()
            thread.join()
        if logs is not None:
            logs += replayed
        return [step for step in steps if step not in before]

    def _replay(self, server: Server, load: Workload, *, first: int = 0) -> list[RequestLog]:
        """Send a load; requests that share no blocks have tokens of their own from `first` on."""
        size = self._setup.model.program.vocab_size
        arrivals = load.arrivals
        answer = self._clients.call(
            "replay",
            port=server.port,
            model=MODEL_NAME,
            times_s=[arrival.at_s for arrival in arrivals],
            prompts=[
                arrival.tokens(first + number, size).tolist()
                for number, arrival in enumerate(arrivals)
            ],
            num_tokens=[arrival.num_output for arrival in arrivals],
        )
        return request_logs(arrivals, answer["requests"])


def at_busy_share(setup: SimulationSetup, load: Workload, share: float) -> Workload:
    """Return a load at the speed at which the simulated engine computes for `share` of the time.

    Times of requests depend little on small errors of the steps at such a load. Near the capacity
    they depend on nothing else.
    """
    low, high = 1e-4, 1e4  # speeds, which are searched on a logarithmic scale
    for _ in range(_NUM_SPEEDS):
        speed = math.sqrt(low * high)
        if simulate(setup, load.changed(speed=speed)).busy[0] < share:
            low = speed
        else:
            high = speed
    return load.changed(speed=math.sqrt(low * high))


def chosen_objectives(logs: Sequence[RequestLog]) -> Objectives:
    """Return objectives that the default settings miss, although other settings may meet them.

    TTFT has room, and a part of the requests, which ran with the default settings, miss TPOT.
    """
    times = {
        name: [value for log in logs if (value := log.latencies[name]) is not None]
        for name in ("ttft", "tpot")
    }
    return Objectives(
        ttft_s=_TTFT_ROOM * float(np.quantile(times["ttft"], 0.99)),
        tpot_s=float(np.quantile(times["tpot"], _TPOT_SHARE)),
    )


def _blocks(load: Workload, number: int) -> Iterator[Workload]:
    """Yield the load in parts that begin at once, with shared blocks of their own round."""
    size = -(-len(load.arrivals) // _NUM_BLOCKS)
    for first in range(0, len(load.arrivals), size):
        arrivals = [
            replace(arrival, blocks=tuple([(number << 32) + block for block in arrival.blocks]))
            for arrival in load.arrivals[first : first + size]
        ]
        yield sorted_workload(load.name, arrivals)


def _round_text(one: Round) -> str:
    figures = [Figures.of(logs) for logs in (*one.default, *one.changed)]
    return f"{one.name}\n" + "\n".join(map(str, figures))


def _text(name: str, facts: dict[str, Any]) -> str:
    """Return the tables of a trace."""
    measured, predicted = facts["same"]
    rows = []
    for field in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"):
        both = getattr(measured, field), getattr(predicted, field)
        if None not in both:
            cells = (f"{value * 1e3:,.1f} ms" for value in both)
            limit = f"{_LIMITS[field[-3:]]:.0%}"
            label = field.replace("_", " ").upper()
            rows.append((label, *cells, f"{both[1] / both[0] - 1:+.0%}", limit))
    rates = (measured.hit_rate, predicted.hit_rate)
    points = f"{(rates[1] - rates[0]) * 100:+.1f} points"
    rows.append(("hit rate", *(f"{rate:.1%}" for rate in rates), points, "2 points"))
    header = ("same settings", "measured", "predicted", "error", "asked")
    changed = [row for change in facts["changes"] for row in _change_rows(*change)]
    change_header = ("change", "figure", "measured", "predicted", "direction", "error (25%)")
    return (
        f"## {name}: {facts['requests']} requests, {facts['rate']:.2f} per second\n\n"
        f"{table(header, rows)}\n\n{table(change_header, changed)}\n\n"
        f"{_advice_text(facts['advice'])}"
    )


def _advice_text(advice: dict[str, Any]) -> str:
    objectives = advice["objectives"]
    limits = f"TTFT {objectives.ttft_s * 1e3:,.0f} ms, TPOT {objectives.tpot_s * 1e3:,.1f} ms"
    slowness = advice["machine"].slowness
    machine = f"Steps take {slowness[0]:.2f} to {slowness[-1]:.2f} times as long as simulated."
    if advice["measured"] is None:
        return f"Advice for {limits}: keep the defaults. {machine}"
    changes = " ".join(f"{key}={value}" for key, value in advice["changes"].items())
    expected_gain, measured_gain = (
        after - before for before, after in (advice["expected"], advice["measured"])
    )
    shares = (f"{share:.1%}" for share in (*advice["expected"], *advice["measured"]))
    text = (
        "Advice: {0}. Requests that meet the objectives ({1}): expected {2} to {3}, measured {4} "
        "to {5}: {6} of the expected gain (asked: 0.8, and never worse than the defaults). The "
        "interval of the gain is {7:+.1%} to {8:+.1%}. {9}"
    )
    ratio = f"{measured_gain / expected_gain:.2f}" if expected_gain > 0 else "no part"
    share = advice["gain"].share
    return text.format(changes, limits, *shares, ratio, share.low, share.high, machine)


def _change_rows(
    change: str,
    default: tuple[Figures, Figures],
    changed: tuple[Figures, Figures],
    intervals: dict[str, tuple[float, float]],
) -> Iterator[tuple[str, ...]]:
    """Yield a row for each 99th percentile: how it changed, as measured and as predicted.

    A direction is right if both changes have the same sign, or if both are below a tenth. It is
    unclear if the measured change may have either sign by its interval.
    """
    for field in ("ttft_p99", "tpot_p99"):
        values = [getattr(figures, field) for figures in (*default, *changed)]
        if None in values or field not in intervals:
            continue
        measured_change, predicted_change = values[2] / values[0] - 1, values[3] / values[1] - 1
        low, high = intervals[field]
        is_small = max(abs(measured_change), abs(predicted_change)) < _SMALL_CHANGE
        if is_small or (measured_change > 0) is (predicted_change > 0):
            verdict = "right"
        else:
            verdict = "unclear" if low <= 0 <= high else "wrong"
        yield (
            change,
            field.replace("_", " ").upper(),
            f"{measured_change:+.0%} ({low:+.0%} to {high:+.0%})",
            f"{predicted_change:+.0%}",
            verdict,
            f"{(1 + predicted_change) / (1 + measured_change) - 1:+.0%}",
        )


def change_intervals(
    default: Sequence[RequestLog], changed: Sequence[RequestLog]
) -> dict[str, tuple[float, float]]:
    """Return the 90% intervals of the changes of 99th percentiles, by resampling the requests."""
    rng, intervals = np.random.default_rng(0), dict[str, tuple[float, float]]()
    for name in ("ttft", "tpot"):
        before, after = (
            np.array([value for log in logs if (value := log.latencies[name]) is not None])
            for logs in (default, changed)
        )
        if min(len(before), len(after)) > _MIN_FOR_QUANTILES:
            ratios = [
                np.quantile(rng.choice(after, len(after)), 0.99)
                / np.quantile(rng.choice(before, len(before)), 0.99)
                for _ in range(_NUM_RESAMPLES)
            ]
            low, high = np.quantile(ratios, (0.05, 0.95)) - 1
            intervals[f"{name}_p99"] = (float(low), float(high))
    return intervals


if __name__ == "__main__":
    main()
