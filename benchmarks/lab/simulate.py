"""Compare simulated runs with the measured server, and time the simulations.

Run it with `make bench WHAT=simulate`.

The same requests, from a published trace scaled to this machine, are sent to the server at the
same times and simulated. Steps of the simulation have the times of measured steps of the model
(`plan --calibrate`), and of steps of the server under other requests (`plan --calibrate
--server`). Because a machine's speed drifts, the load is sent in blocks with such other requests
between them: a block is simulated with the steps measured just before and just after it. Loads
are shares of the rate at which the server answers requests that arrive at the same time. The
Mooncake trace, whose prompts share beginnings, compares hits of the prefix cache.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from benchmarks.common.pipe import Worker, WorkerError
from benchmarks.common.quiet import MAX_SHARE, Watch
from benchmarks.common.report import caption, machine_facts, note, positive, save, table
from benchmarks.common.servers import MODEL_NAME, Server, our_command
from benchmarks.common.texts import FreshPrompts, heldout_tokens
from twostroke.core.options import CacheOptions
from twostroke.engine.output import Timings
from twostroke.lab.measure.requests import Objectives, RequestLog, make_report
from twostroke.lab.measure.single_step import StepShape
from twostroke.lab.planner import Calibration, find_device, load_planned_model, this_machine
from twostroke.lab.planner.calibration import measured_points
from twostroke.lab.planner.question import Question
from twostroke.lab.planner.reference_calibration import reference_steps
from twostroke.lab.planner.served import group_steps, read_steps
from twostroke.lab.simulator import RequestArrival, SimulationSetup, Workload, read_trace, simulate
from twostroke.model.loader import load as load_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.lab.measure.requests import RunReport

    Steps = Sequence[Sequence[Any]]

_KV_BYTES = 256 << 20
_FIGURES = (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"))
_LIMITS = {"p50": 0.15, "p99": 0.25}
_REQUESTS = 550  # of which some 20 have a single token, and so no TPOT
_SPEED_REQUESTS, _SPEED_REPLICAS = 4000, 8
STEPS = (
    *(StepShape.decode(count, context) for context in (64, 384) for count in (1, 4, 16)),
    *map(StepShape.prefill, (16, 64, 256)),
)
_BLOCKS = 8  # of a load
_WATCHED = 2  # requests of a block for each one that is watched before it
_LOOK_S = 0.7  # between looks at the server's last steps, while it is watched
_ALONE = 20  # requests one after another, for the time outside the engine
HEADER = ("load", "figure", "measured", "simulated", "error", "limit")


def main() -> None:
    """Measure, simulate, then print and keep the tables."""
    args, began_s = _arguments(), time.monotonic()
    parts, result = [], dict[str, Any](machine_facts())
    with tempfile.TemporaryDirectory() as folder_name, contextlib.ExitStack() as stack:
        if "speed" in args.parts:
            parts.append(_speed(args, result))
        if {"latency", "hits"} & set(args.parts):
            pair = _Pair(args, Path(folder_name), stack)
        if "latency" in args.parts:
            parts.append(_latency(args, pair, result))
        if "hits" in args.parts:
            parts.append(_hits(args, pair, result))
    minutes = (time.monotonic() - began_s) / 60
    parts.append(f"It took {minutes:.0f} minutes. {caption(result, args.model)}")
    save("simulate", result, "\n\n".join(parts))
    if failures := result.get("failures"):
        raise SystemExit("\n".join(failures))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--parts", nargs="+", default=("speed", "latency", "hits"))
    parser.add_argument("--trace", default="azure-conv", help="of latencies and speed")
    parser.add_argument("--shared", default="mooncake-conversation", help="trace of hits")
    parser.add_argument("--scale", type=float, default=0.05, help="of the first trace's lengths")
    text = "at each load; p99 needs 500 with two tokens or more"
    parser.add_argument("--requests", type=positive, default=_REQUESTS, help=text)
    parser.add_argument("--loads", type=positive, nargs="+", default=[50, 70, 90], metavar="%")
    text = "of the engine; HTTP and the clients need a core, too"
    parser.add_argument("--threads", type=positive, default=1, help=text)
    return parser.parse_args()


def calibrated_setup(model: str, kv_bytes: int, num_threads: int) -> SimulationSetup:
    """Measure steps of a model on this machine, and return a simulation that they correct."""
    note("Measuring steps")
    points = measured_points(model, STEPS, note, num_threads=num_threads)
    return SimulationSetup(
        load_planned_model(model),
        this_machine(num_threads),
        Question(),
        CacheOptions(memory_bytes=kv_bytes),
        calibration=Calibration(points, "", num_threads),
        is_here=True,
    )


def request_logs(
    arrivals: Sequence[RequestArrival], answers: Sequence[dict[str, Any]]
) -> list[RequestLog]:
    """Return what was measured of each request, from the reports of `load_clients`."""
    return [
        RequestLog(
            Timings(arrival.at_s, 0.0, answer["first_s"], answer["last_s"]),
            answer["sent_s"],
            arrival.num_prompt,
            arrival.num_output,
            answer["num_cached"],
        )
        for arrival, answer in zip(arrivals, answers, strict=True)
    ]


class _Pair:
    """The server with its clients, and its simulation."""

    def __init__(self, args: argparse.Namespace, folder: Path, stack: contextlib.ExitStack) -> None:
        self.setup = calibrated_setup(args.model, _KV_BYTES, args.threads)
        self.vocab_size = self.setup.model.program.vocab_size
        command = (*our_command(args.model, args.threads), "--kv-memory", str(_KV_BYTES))
        self._server = Server("Twostroke", command, folder, stack)
        path = [sys.executable, "-m", "benchmarks.serving.load_clients"]
        self._clients = Worker("clients", path, folder / "load.log")
        stack.callback(self._clients.close)
        self.others_share: list[float] = []

    def watched(
        self, load: Workload, prompts: Sequence[list[int]]
    ) -> tuple[list[RequestLog], Steps]:
        """Send the requests of a load; return what became of them and the server's steps."""
        has_ended = threading.Event()
        steps: list[Sequence[Any]] = []
        url = f"http://127.0.0.1:{self._server.port}"

        def watch() -> None:
            while not has_ended.wait(_LOOK_S):
                steps.extend(read_steps(url, None, self.setup.model))

        thread = threading.Thread(target=watch)
        before = set(map(tuple, read_steps(url, None, self.setup.model)))
        thread.start()
        try:
            logs = self.measure(load, prompts)
        finally:
            has_ended.set()
            thread.join()
        return logs, [step for step in steps if tuple(step) not in before]

    def simulate(self, load: Workload, steps: Steps) -> Sequence[RequestLog]:
        """Simulate a load on a server that took these steps."""
        assert self.setup.calibration is not None
        calibration = replace(self.setup.calibration, served_steps=group_steps(steps))
        return simulate(replace(self.setup, calibration=calibration), load).logs

    def measure(self, load: Workload, prompts: Sequence[list[int]]) -> list[RequestLog]:
        """Send the requests of a load to the server.

        Raises:
            SystemExit: a request failed.
        """
        watch = Watch(self._server.pid, self._clients.pid)
        try:
            answer = self._clients.call(
                "replay",
                port=self._server.port,
                model=MODEL_NAME,
                times_s=[arrival.at_s for arrival in load.arrivals],
                prompts=prompts,
                num_tokens=[arrival.num_output for arrival in load.arrivals],
            )
        except WorkerError as error:
            raise SystemExit(f"the clients' process {error}") from None
        self.others_share.append(watch.others_share())
        return request_logs(load.arrivals, answer["requests"])


def _latency(args: argparse.Namespace, pair: _Pair, result: dict[str, Any]) -> str:
    """Compare latencies at shares of the knee."""
    trace = read_trace(args.trace).changed(scale=args.scale)
    requests = _Requests(trace.first(args.requests), trace.arrivals[args.requests :])
    fresh = FreshPrompts(heldout_tokens(load_model(args.model)))
    overhead_s = _find_overhead(pair, fresh)
    burst, other = (halve.changed(speed=1e6) for halve in requests.halves(args.requests // 3))
    _, steps = pair.watched(other, _texts(fresh, other))
    both = pair.measure(burst, _texts(fresh, burst)), pair.simulate(burst, steps)
    rates = [report.num_requests / report.duration_s for report in map(_report, both)]
    rows = [("all at once", "requests/s", *(f"{r:.2f}" for r in rates), _error(*rates[::-1]), "")]
    note(" ".join(rows[0]))
    partial_result: dict[str, Any] = {"knee_per_s": rates[0], "overhead_s": overhead_s, "loads": {}}
    for percent in args.loads:
        try:
            outcome = _in_blocks(pair, fresh, requests, percent / 100 * rates[0])
        except SystemExit as error:  # what was measured before is kept
            result.setdefault("failures", []).append(f"Load of {percent}%: {error}")
            break
        reports = [*map(_report, outcome)]
        compared = list(_compared(f"{percent}%", *reports))
        note("\n".join(map(" ".join, compared)))
        rows += compared
        names = ("measured", "simulated", "requests")
        partial_result["loads"][percent] = dict(zip(names, [*reports, outcome[0]], strict=True))
    result["latency"] = msgspec.to_builtins(partial_result)
    disturbed = sum(share > MAX_SHARE for share in pair.others_share)
    text = (
        f"{args.requests} requests of {args.trace}, lengths times {args.scale:g}: "
        f"{disturbed} of {len(pair.others_share)} runs were disturbed. A request takes "
        f"{overhead_s * 1e3:.1f} ms outside the engine."
    )
    return f"## Simulated and measured latencies\n\n{table(HEADER, rows)}\n\n{text}"


class _Requests(NamedTuple):
    """The requests that are compared, and others."""

    load: Workload
    others: Sequence[RequestArrival]

    def halves(self, count: int) -> tuple[Workload, Workload]:
        """Return the first `count` of both."""
        return self.load.first(count), _begun("others", self.others[:count])

    def blocks(self, per_s: float) -> Iterator[tuple[Workload, Workload]]:
        """Yield others, and a block of the load, both at this rate."""
        arrivals, speed = self.load.arrivals, per_s / self.load.rate
        size = -(-len(arrivals) // _BLOCKS)
        for first in range(0, len(arrivals), size):
            load_part = _begun(self.load.name, arrivals[first : first + size])
            at = first // _WATCHED
            other = _begun("others", self.others[at : at + max(2, size // _WATCHED)])
            yield other.changed(speed=per_s / other.rate), load_part.changed(speed=speed)


def _begun(name: str, arrivals: Sequence[RequestArrival]) -> Workload:
    """Return a load whose first request comes at once."""
    moved = [replace(arrival, at_s=arrival.at_s - arrivals[0].at_s) for arrival in arrivals]
    return Workload(name, tuple(moved))


def _in_blocks(
    pair: _Pair, fresh: FreshPrompts, requests: _Requests, per_s: float
) -> tuple[list[RequestLog], list[RequestLog]]:
    """Return what became of the load's requests at this rate, measured and simulated."""
    note(f"Load of {per_s:.2f} requests/s")
    watched: list[Steps] = []
    measured: list[Sequence[RequestLog]] = []
    blocks = list(requests.blocks(per_s))
    for other, block in [*blocks, (blocks[0][0], None)]:
        watched.append(pair.watched(other, _texts(fresh, other))[1])
        if block is not None:
            measured.append(pair.measure(block, _texts(fresh, block)))
    simulated = [
        pair.simulate(block, [*before, *after])
        for (_, block), (before, after) in zip(blocks, pairwise(watched), strict=True)
    ]
    return [*chain.from_iterable(measured)], [*chain.from_iterable(simulated)]


def _report(logs: Sequence[RequestLog]) -> RunReport:
    return make_report(logs, Objectives())


def _find_overhead(pair: _Pair, fresh: FreshPrompts) -> float:
    """Measure requests one after another; a first token's time beyond its step is the overhead."""
    load = Workload("alone", tuple(RequestArrival(0.5 * n, 64, 4) for n in range(_ALONE)))
    pair.measure(load, _texts(fresh, load))  # the server's first requests warm it up
    logs, steps = pair.watched(load, _texts(fresh, load))
    seen = [step_s for _, prompt, _, step_s, *_ in dict.fromkeys(map(tuple, steps)) if prompt]
    ttft_s = [log.timings.ttft_s for log in logs]
    overhead_s = max(0.0, median(ttft_s) - float(median(seen)))
    pair.setup = replace(pair.setup, overhead_s=overhead_s)
    return overhead_s


def _compared(load: str, measured: RunReport, simulated: RunReport) -> Iterator[tuple[str, ...]]:
    for name, percentile in _FIGURES:
        both = []
        for report in (measured, simulated):
            result = report.latencies[name].percentiles.get(percentile)
            both.append(None if result is None else result.value)
        if None in both:
            continue
        cells = (f"{value * 1e3:,.1f} ms" for value in both if value is not None)
        limit = f"{_LIMITS[percentile]:.0%}"
        figure = f"{name.upper()} {percentile}"
        yield (load, figure, *cells, _error(both[1] or 0.0, both[0] or 1.0), limit)


def _hits(args: argparse.Namespace, pair: _Pair, result: dict[str, Any]) -> str:
    """Compare hit rates of the prefix cache on prompts of which a page is a block."""
    scale = 16 / 512
    load = read_trace(args.shared).first(args.requests // 2).changed(scale=scale)
    burst = load.first(args.requests // 8).changed(speed=1e6)
    seconds = simulate(pair.setup, burst).report.duration_s
    load = load.changed(speed=0.7 * len(burst.arrivals) / seconds / load.rate)
    note("Prefix hits")
    prompts = [
        arrival.tokens(n, pair.vocab_size).tolist() for n, arrival in enumerate(load.arrivals)
    ]
    measured = make_report(pair.measure(load, prompts), Objectives())
    simulated = simulate(pair.setup, load).report
    result["hits"] = msgspec.to_builtins({"measured": measured, "simulated": simulated})
    rates = [report.hit_rate for report in (measured, simulated)]
    row = (load.name, *(f"{rate:.1%}" for rate in rates), f"{(rates[1] - rates[0]) * 100:+.1f}")
    header = ("trace", "measured", "simulated", "points (at most 2)")
    return (
        f"## Prefix hits\n\n{table(header, [row])}\n\n{args.requests // 2} requests, lengths "
        f"times 1/32, {_KV_BYTES >> 20} MB of keys and values."
    )


def _speed(args: argparse.Namespace, result: dict[str, Any]) -> str:
    """Measure how many requests are simulated in a second of processor time."""
    note("Speed")
    load = read_trace(args.trace).first(_SPEED_REQUESTS)
    planned, device = load_planned_model(args.model), this_machine(args.threads)
    here = SimulationSetup(
        planned,
        device,
        Question(),
        CacheOptions(memory_bytes=_KV_BYTES),
        calibration=reference_steps(device),
        is_here=True,
    )
    replicas = SimulationSetup(
        planned.with_weights("bf16"),
        find_device("A100-80GB"),
        Question(mfu=0.02, mbu=0.03),
        replicas=_SPEED_REPLICAS,
        routing="least-work",
    )
    rows, rates = [], {}
    many = f"{_SPEED_REPLICAS} replicas"
    for name, setup, timed_load in (
        (f"{many}, lengths as they are", replicas, load.changed(speed=8)),
        (f"{many}, lengths times 0.1", replicas, load.changed(speed=80, scale=0.1)),
        ("this machine, lengths times 0.05", here, load.changed(speed=2, scale=0.05)),
    ):
        began_s = time.process_time()
        outcome = simulate(setup, timed_load)
        rate = len(timed_load.arrivals) / (time.process_time() - began_s)
        rates[name] = rate
        busy = sum(outcome.busy) / len(outcome.busy)
        rows.append((name, f"{rate:,.0f}", f"{outcome.num_steps:,}", f"{busy:.0%}"))
    result["simulated_per_s"] = rates
    note("\n".join(map(" ".join, rows)))
    header = (load.name, "requests a second", "steps", "busy")
    return f"## Speed of the simulation, one core\n\n{table(header, rows)}"


def _texts(fresh: FreshPrompts, load: Workload) -> list[list[int]]:
    return [fresh.take(arrival.num_prompt) for arrival in load.arrivals]


def _error(simulated: float, measured: float) -> str:
    return f"{simulated / measured - 1:+.0%}"


if __name__ == "__main__":
    main()
