"""Record a load, ask `twostroke advise`, and measure its advice beside the defaults.

Run it with `make bench WHAT=advice`. It takes the steps of a user, with the same commands:

1. `plan --calibrate` measures the model's steps on this machine.
2. `serve --record-trace` records the load of a run of `twostroke bench`.
3. `advise` reads the trace, and prints a command with its expected gain.
4. This command runs beside the default one. Both get the same loads in turn, so that both see the
   same machine, whose speed drifts; the one that begins changes from round to round.

The measured gain of goodput is printed beside the expected one. If the advice is to keep the
defaults, the best other setting is measured: its gain should be within the noise, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from benchmarks.common.quiet import MAX_SHARE, Watch
from benchmarks.common.records import ROWS, machine_slug
from benchmarks.common.report import caption, machine_facts, note, positive, read, table, write
from benchmarks.common.servers import MODEL_NAME, Server
from benchmarks.lab.what_if import chosen_objectives
from twostroke.lab.bench.record import read_record
from twostroke.lab.measure.requests import COMPLETED, Objectives, RequestLog
from twostroke.lab.simulator.gain import Gain, Interval, expected_gain, objective_ratios

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MIN_RATIO: Final = 0.8  # of the measured gain to the expected one
_FOLDER = "advice"
_OPTION_FLAGS = {"token_budget": "--token-budget", "max_running": "--max-running"}
_CAPACITY_CLIENTS, _CAPACITY_REQUESTS = 8, 48
_MAX_RUN_S = 1800.0


@dataclass(slots=True)
class AdviceResult:
    """The advice for a load, and the rounds that measured it.

    Attributes:
        model: the model's name.
        load: the load in words.
        objectives: the latency objectives.
        options: the measured options of `serve`, in place of the defaults.
        is_advised: whether these options are the advice, and not only the best other setting.
        expected: the gain that `advise` expects.
        slowness: the speeds of the machine that the expected gain counts with.
        rounds: the shares of good requests of each round: default, advised.
        measured: the gain over all rounds.
        num_disturbed: runs during which other programs used the processor.
        findings: the audit's verdicts of the runs that are not valid.
        facts: the machine and the date.
    """

    model: str
    load: str
    objectives: Objectives
    options: str
    is_advised: bool
    expected: Gain
    slowness: tuple[float, ...]
    rounds: list[tuple[float, float]]
    measured: Gain
    num_disturbed: int = 0
    findings: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=machine_facts)

    @property
    def ratio(self) -> float | None:
        """The measured gain of the share of good requests, over the expected one."""
        expected = self.expected.share.expected
        return self.measured.share.expected / expected if expected > 0 else None

    @property
    def is_within(self) -> bool:
        """Whether the measured interval and the expected one have a gain in common."""
        measured, expected = self.measured.share, self.expected.share
        return measured.low <= expected.high and expected.low <= measured.high

    def parts(self) -> Iterator[str]:
        """Yield the paragraphs of a report."""
        limits = (("TTFT", self.objectives.ttft_s), ("TPOT", self.objectives.tpot_s))
        objectives = ", ".join(f"{name} {s * 1e3:,.0f} ms" for name, s in limits if s is not None)
        yield f"### {self.model}: {self.load}; {objectives}\n"
        advice = "Advised" if self.is_advised else "The defaults are advised; measured instead"
        speeds = f"{self.slowness[0]:.2f} to {self.slowness[-1]:.2f}"
        yield f"{advice}: `{self.options}`. Steps take {speeds} times as long as simulated.\n"
        rows = [
            (str(number), f"{default:.1%}", f"{advised:.1%}", f"{100 * (advised - default):+.1f}")
            for number, (default, advised) in enumerate(self.rounds, 1)
        ]
        rows.append(("all, 95% interval", "", "", _points(self.measured.share)))
        rows.append(("expected", "", "", _points(self.expected.share)))
        yield table(("round", "good, default", "good, changed", "gain, points"), rows) + "\n"
        yield " ".join(self._verdict()) + "\n"
        yield f"{caption(self.facts)}. Command: `make bench WHAT=advice`.\n"

    def _verdict(self) -> Iterator[str]:
        if self.ratio is not None:
            yield f"The measured gain is {self.ratio:.2f} of the expected one."
        yield "The intervals overlap." if self.is_within else "The intervals do not overlap."
        if self.num_disturbed or self.findings:
            yield (
                f"Other programs disturbed {self.num_disturbed} of {2 * len(self.rounds)} runs; "
                f"the audit calls {len(self.findings)} not valid."
            )


def load_advice_results(machine: str) -> list[AdviceResult]:
    """Return the stored results of a machine."""
    return [read(path, AdviceResult) for path in sorted((ROWS / machine / _FOLDER).glob("*.json"))]


def measured_gain(
    rounds: Sequence[tuple[Sequence[RequestLog], Sequence[RequestLog]]], objectives: Objectives
) -> Gain:
    """Return the gain of the second runs of the rounds over the first ones.

    Request by request, both runs of a round have the same arrivals and lengths.
    """
    before, after = (
        np.concatenate([objective_ratios(one[side], objectives) for one in rounds])
        for side in (0, 1)
    )
    return expected_gain([before], [after])


def measured_options(printed: dict[str, Any]) -> tuple[list[str], bool]:
    """Return the options to measure, by the JSON of `advise`, and whether they are advised."""
    advice = printed["advice"]
    if advice["changes"]:
        words = shlex.split(printed["commands"][0])
        return words[words.index("serve") + 2 :], True
    best = advice["best"]
    return [word for key, value in best.items() for word in (_OPTION_FLAGS[key], str(value))], False


def main() -> None:
    """Record, advise, measure, then print and keep the result."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder_name, contextlib.ExitStack() as stack:
        result = _AdviceRun(args, Path(folder_name), stack).measure()
    if result is None:
        return
    path = ROWS / machine_slug(result.facts) / _FOLDER / f"{args.name}.json"
    write(path, json.dumps(msgspec.to_builtins(result), indent=1) + "\n")
    print("\n".join(result.parts()))


class _AdviceRun:
    """Runs the commands of a user, one after another."""

    def __init__(self, args: argparse.Namespace, folder: Path, stack: contextlib.ExitStack) -> None:
        self._args = args
        self._folder = folder
        self._stack = stack
        self._num_disturbed = 0
        self._findings: list[str] = []

    def measure(self) -> AdviceResult | None:
        """Return the advice and what it brought; None if no setting was worth a measurement."""
        args, trace = self._args, self._folder / "trace"
        if not args.no_calibration:
            note("Measuring steps")
            self._twostroke("plan", args.model, "--calibrate", *self._threads())
        rate = args.rate or self._rate()
        default = self._server("default", ("--record-trace", str(trace)))
        load = self._load(rate)
        logs = self._bench(default, load, seed=0)
        objectives = chosen_objectives(logs)
        if args.ttft is not None or args.tpot is not None:
            objectives = Objectives(
                *(None if limit is None else limit / 1e3 for limit in (args.ttft, args.tpot))
            )
        printed = self._advice(trace, objectives)
        options, is_advised = measured_options(printed)
        if not options:
            print("Keep the defaults: no other setting is better, so nothing is measured.")
            return None
        note(f"Advice: {' '.join(options)}{'' if is_advised else ' (not beyond the noise)'}")
        changed = self._server("changed", options)
        self._bench(changed, self._load(rate, requests=20), seed=0)  # warms it up
        self._findings, self._num_disturbed = [], 0
        rounds = [self._round(number, default, changed, load) for number in range(args.rounds)]
        gain = measured_gain(rounds, objectives)
        return AdviceResult(
            model=args.model,
            load=f"{rate:.2f} requests/s ({args.arrivals}), {args.requests} in each run",
            objectives=objectives,
            options=" ".join(options),
            is_advised=is_advised,
            expected=msgspec.convert(printed["advice"]["gain"], Gain),
            slowness=tuple(printed["advice"]["machine"]["slowness"]),
            rounds=[
                (_good(before, objectives), _good(after, objectives)) for before, after in rounds
            ],
            measured=gain,
            num_disturbed=self._num_disturbed,
            findings=self._findings,
        )

    def _round(
        self, number: int, default: Server, changed: Server, load: Sequence[str]
    ) -> tuple[list[RequestLog], list[RequestLog]]:
        servers = [default, changed] if number % 2 == 0 else [changed, default]
        logs = {server.port: self._bench(server, load, seed=number + 1) for server in servers}
        return logs[default.port], logs[changed.port]

    def _rate(self) -> float:
        """Return a share of the rate at which a few clients keep a server busy."""
        with contextlib.ExitStack() as stack:
            server = self._server("capacity", (), stack)
            load = ("--clients", str(_CAPACITY_CLIENTS), *self._lengths())
            requests = ("--requests", str(_CAPACITY_REQUESTS))
            logs = self._bench(server, (*load, *requests), seed=99)
        ends_s = [log.timings.last_token_s for log in logs if log.outcome == COMPLETED]
        rate = float(len(ends_s) / max(ends_s))
        note(f"{rate:.2f} requests per second with {_CAPACITY_CLIENTS} clients")
        share: int = self._args.busy
        return round(share / 100 * rate, 2)

    def _load(self, rate: float, requests: int | None = None) -> tuple[str, ...]:
        count = ("--requests", str(requests or self._args.requests))
        arrivals = ("--arrivals", self._args.arrivals)
        return ("--rate", str(rate), *arrivals, *count, *self._lengths())

    def _lengths(self) -> tuple[str, ...]:
        args = self._args
        lengths = ("--prompt", str(args.prompt), "--output", str(args.output))
        return (*lengths, "--spread", str(args.spread))

    def _threads(self) -> tuple[str, ...]:
        return ("--threads", str(self._args.threads))

    def _server(
        self, name: str, options: Sequence[str], stack: contextlib.ExitStack | None = None
    ) -> Server:
        command = (
            *(sys.executable, "-m", "twostroke.fleet.cluster.process", "serve", self._args.model),
            *("--name", MODEL_NAME, *self._threads(), *self._args.serve_options, *options),
        )
        return Server(name, command, self._folder, stack or self._stack)

    def _bench(self, server: Server, load: Sequence[str], *, seed: int) -> list[RequestLog]:
        """Send a load by `twostroke bench`; return its requests in the order of the schedule."""
        record = self._folder / "run.json"
        url = f"http://127.0.0.1:{server.port}"
        watch = Watch(server.pid)
        options = ("--record", str(record), "--seed", str(seed), "--no-energy")
        self._twostroke("bench", url, *load, *options, ok_codes=(0, 1))
        self._num_disturbed += watch.others_share() > MAX_SHARE
        run = read_record(record)
        if "NOT VALID" in run.setup.verdict:
            self._findings.append(run.setup.verdict)
        note(run.setup.verdict)
        answers = sorted(run.answers, key=lambda answer: answer.number)
        return [answer.log for answer in answers]

    def _advice(self, trace: Path, objectives: Objectives) -> dict[str, Any]:
        limits = (("--ttft", objectives.ttft_s), ("--tpot", objectives.tpot_s))
        options = [w for flag, s in limits if s is not None for w in (flag, f"{1e3 * s:.3f}")]
        start_s = time.monotonic()
        text = self._twostroke(
            "advise", self._args.model, str(trace), *options, *self._threads(), "--json"
        )
        printed: dict[str, Any] = json.loads(text)
        note(f"Advice after {time.monotonic() - start_s:.0f} s")
        return printed

    @staticmethod
    def _twostroke(*words: str, ok_codes: tuple[int, ...] = (0,)) -> str:
        command = (sys.executable, "-m", "twostroke", *words)
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_MAX_RUN_S
        )
        if result.returncode not in ok_codes:
            raise SystemExit(f"twostroke {words[0]}: {result.stderr.strip()[-1000:]}")
        return result.stdout


def _good(logs: Sequence[RequestLog], objectives: Objectives) -> float:
    return sum(map(objectives.are_met, logs)) / len(logs)


def _points(interval: Interval) -> str:
    expected, low, high = (100 * value for value in msgspec.structs.astuple(interval))
    return f"{expected:+.1f} ({low:+.1f} to {high:+.1f})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--name", default="smollm2", help="of the stored result")
    text = "of the servers; HTTP and the client need a core, too"
    parser.add_argument("--threads", type=positive, default=1, help=text)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--requests", type=positive, default=200, help="of each run")
    parser.add_argument("--rate", type=float, help="requests per second, in place of --busy")
    text = "percent of the rate that 8 clients reach"
    parser.add_argument("--busy", type=positive, default=60, help=text)
    parser.add_argument("--arrivals", choices=("poisson", "constant", "gamma"), default="poisson")
    parser.add_argument("--prompt", type=positive, default=200)
    parser.add_argument("--output", type=positive, default=24)
    parser.add_argument("--spread", type=float, default=1.0)
    text = "ms; by default objectives that the recorded run misses for two fifths of its requests"
    parser.add_argument("--ttft", type=float, help=text)
    parser.add_argument("--tpot", type=float, help="ms")
    text = 'of all servers, such as "--speculate off"'
    parser.add_argument("--serve-options", type=shlex.split, default=[], help=text)
    text = "use the steps that were measured before"
    parser.add_argument("--no-calibration", action="store_true", help=text)
    return parser.parse_args()


if __name__ == "__main__":
    main()
