"""Kill engines and servers behind a router under load, and simulate the same failures.

Run it with `make bench WHAT=availability`; `ARGS="--minutes 60"` takes an hour.

Two servers run behind `twostroke route`. Requests arrive at random times, at a third of what the
servers can do. At random times, which the seed decides, an engine's process or a whole server is
killed with SIGKILL; a killed server is started again after some seconds. The simulation gets the
same arrivals, and the same times of failures and restarts. Its steps have the times of the servers'
own steps. Compared are the shares of requests that fail or begin late, and the pauses of streams.
A second simulation has the restart times that were measured before the load.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from benchmarks.common.pipe import Worker
from benchmarks.common.quiet import Watch, descendants
from benchmarks.common.report import caption, machine_facts, note, positive, save, table
from benchmarks.common.servers import MODEL_NAME, Server, free_port, our_command
from benchmarks.lab.simulate import calibrated_setup
from twostroke.core.errors import TwostrokeError
from twostroke.engine.output import Timings
from twostroke.lab.measure.requests import COMPLETED, FAILED, REFUSED, Objectives, RequestLog
from twostroke.lab.planner import Calibration
from twostroke.lab.planner.served import group_steps, read_steps
from twostroke.lab.simulator import (
    RequestArrival,
    SimulationSetup,
    SyntheticWorkload,
    Workload,
)
from twostroke.lab.simulator.availability import find_outcome, num_nines, play_failures
from twostroke.lab.simulator.failing_fleet import LOST_STREAM, NO_REPLICA
from twostroke.lab.simulator.failures import (
    ENGINE,
    REPLICA,
    Failure,
    FailureRates,
    RouterTimes,
    random_failures,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_KV_BYTES = 256 << 20
_NUM_REPLICAS = 2
_ENGINE = b"twostroke.engine.process"
_POLL_S = 0.03
_READY_WITHIN_S = 120.0
_NOTICE_S = 0.2  # after which a server knows that its engine has died
_LOOK_S = 0.5  # between looks at the servers' last steps
_LEAD_S = 2.0  # before the first request
_TAIL_S = 15.0  # without failures, at the end
_BURST = 60  # requests at the same time, for the capacity
_ALONE = 15  # requests one after another, for the time outside the engine
_MAX_DIFFERENCE = 0.1
_CONTINUED = re.compile(r"(?m)^(\S+) info Request (\S+) continues at ")
_MAX_LOG_DELAY_S = 0.1  # between the end of a pause at the client and the router's log
_CAUSES = {"503": NO_REPLICA}  # of a refusal, by its status


class Figures(NamedTuple):
    """The figures of a run that are compared; times are in seconds.

    Attributes:
        num_failed, num_late: requests that failed, and requests over the TTFT objective.
        good_share, time_share: availability, by requests and by time.
        num_pauses, mean_pause_s, longest_pause_s: pauses of streams that were continued.
        ttft_p50_s: median time to the first token.
    """

    num_failed: int
    num_late: int
    good_share: float
    time_share: float
    num_pauses: int
    mean_pause_s: float
    longest_pause_s: float
    ttft_p50_s: float

    @classmethod
    def of(
        cls,
        logs: Sequence[RequestLog],
        causes: dict[int, str],
        pauses_s: Sequence[float],
        objectives: Objectives,
        span_s: tuple[float, float],
    ) -> Figures:
        """Return the figures of a run, measured or simulated; `span_s` is the time that counts."""
        outcome = find_outcome(logs, causes, objectives, *span_s)
        num_failed = sum(log.outcome != COMPLETED for log in logs)
        return cls(
            num_failed=num_failed,
            num_late=outcome.num_bad - num_failed,
            good_share=1 - outcome.num_bad / outcome.num_requests,
            time_share=1 - outcome.bad_s / outcome.seconds,
            num_pauses=len(pauses_s),
            mean_pause_s=fmean(pauses_s) if pauses_s else 0.0,
            longest_pause_s=max(pauses_s, default=0.0),
            ttft_p50_s=median(log.timings.ttft_s for log in logs if log.outcome == COMPLETED),
        )


def main() -> None:
    """Measure, simulate, then print and keep the table."""
    args, began_s = _arguments(), time.monotonic()
    result = dict[str, Any](machine_facts())
    setup = replace(calibrated_setup(args.model, _KV_BYTES, 1), replicas=_NUM_REPLICAS)
    with tempfile.TemporaryDirectory() as folder_name, contextlib.ExitStack() as stack:
        run = _Run(args, setup, Path(folder_name), stack)
        text = run.compare(result)
    minutes = (time.monotonic() - began_s) / 60
    text += f"\n\nIt took {minutes:.0f} minutes. {caption(result, args.model)}"
    save("availability", result, text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=8.0, help="of load")
    parser.add_argument("--percent", type=positive, default=33, help="of the measured capacity")
    parser.add_argument("--prompt", type=positive, default=64, help="mean tokens of a prompt")
    parser.add_argument("--output", type=positive, default=96, help="mean tokens of an answer")
    parser.add_argument("--engine-mtbf", type=float, default=25.0, help="seconds, of a replica")
    parser.add_argument("--mtbf", type=float, default=35.0, help="seconds, of a replica")
    parser.add_argument("--restart", type=float, default=6.0, help="seconds, of a server")
    parser.add_argument("--wait", type=float, default=2.0, help="of the router, in seconds")
    parser.add_argument("--resume-wait", type=float, default=20.0, help="of the router")
    parser.add_argument("--ttft", type=float, default=1000.0, help="objective, in ms")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class _Run:
    """Two servers, their router, the clients, and what they are compared with."""

    def __init__(
        self,
        args: argparse.Namespace,
        setup: SimulationSetup,
        folder: Path,
        stack: contextlib.ExitStack,
    ) -> None:
        self._args = args
        self._setup = setup
        command = (*our_command(args.model, 1), "--kv-memory", str(_KV_BYTES), "--no-access-log")
        self._replicas = [_Replica(f"replica {n}", command, folder, stack) for n in (1, 2)]
        for replica in self._replicas:
            replica.wait_ready()
        urls = [word for replica in self._replicas for word in ("--replica", replica.url)]
        waits = ("--wait", str(args.wait), "--resume-wait", str(args.resume_wait))
        entry = (sys.executable, "-m", "twostroke.fleet.cluster.process")
        policy = ("--policy", setup.routing, "--no-access-log")
        self._router = Server("router", (*entry, "route", *policy, *waits, *urls), folder, stack)
        self._router_log = folder / "router.log"
        clients = [sys.executable, "-m", "benchmarks.serving.failing_clients"]
        self._clients = Worker("clients", clients, folder / "load.log")
        stack.callback(self._clients.close)
        self._times = RouterTimes(detection_s=0.0, wait_s=args.wait, resume_wait_s=args.resume_wait)

    def compare(self, result: dict[str, Any]) -> str:
        """Measure and simulate; return the table, and put the figures into `result`."""
        args = self._args
        self._setup = self._learn_overhead()
        capacity = self._capacity_per_s()
        rate = args.percent / 100 * capacity
        count = max(20, round(rate * 60 * args.minutes))
        load = self._shape(rate, count).load(args.seed)
        end_s = load.arrivals[-1].at_s
        restarts = {
            ENGINE: self._replicas[0].kill_engine().down_s,
            REPLICA: self._replicas[0].kill_server(args.restart).down_s,
        }
        note(f"Restarts take {restarts}; {rate:.2f} requests/s of {capacity:.2f}")
        planted = self._plan(restarts, end_s - _TAIL_S)
        time.sleep(2.0)  # until the router knows that all replicas are ready
        watch = Watch(self._router.pid, self._clients.pid, *(r.pid for r in self._replicas))
        start_s = time.monotonic() + _LEAD_S
        played, answers, steps = self._play(load, planted, start_s)
        result["others_share"] = watch.others_share()
        setup = self._with_steps(steps)
        objectives = Objectives(ttft_s=args.ttft / 1e3)
        logs, causes = _logs(load, answers)
        log = self._router_log.read_text(errors="replace")
        pauses_s = _pauses_s(answers, log, time.time() - time.monotonic() + start_s)
        measured = Figures.of(logs, causes, pauses_s, objectives, (0.0, end_s + 1e-6))
        before = [replace(f, down_s=restarts[f.kind]) for f in played]
        simulated, simulated_bad = self._simulated(setup, load, played, objectives)
        predicted, _ = self._simulated(setup, load, before, objectives)
        figures = [measured, simulated, predicted]
        num_different = len(simulated_bad ^ _bad_requests(logs, causes, objectives))
        result |= msgspec.to_builtins(
            {
                "rate": rate,
                "requests": count,
                "restarts_s": restarts,
                "failures": played,
                "pauses_s": pauses_s,
                "different": num_different,
                "figures": [figure._asdict() for figure in figures],
                "errors": [answer["error"] for answer in answers if answer["error"]],
            }
        )
        text = _text(count, rate, capacity, played, figures)
        return f"{text} Of the requests, {num_different} are good in one and bad in the other."

    def _simulated(
        self,
        setup: SimulationSetup,
        load: Workload,
        failures: Sequence[Failure],
        objectives: Objectives,
    ) -> tuple[Figures, set[int]]:
        """Return the figures of a simulation, and its requests that are bad."""
        run = play_failures(setup, load, failures, self._times)
        start_s = run.logs[0].timings.arrival_s - load.arrivals[0].at_s
        span_s = start_s, start_s + load.arrivals[-1].at_s + 1e-6
        pauses_s = [pause.seconds for pause in run.pauses]
        figures = Figures.of(run.logs, run.causes, pauses_s, objectives, span_s)
        return figures, _bad_requests(run.logs, run.causes, objectives)

    def _plan(self, restarts: dict[str, float], end_s: float) -> list[Failure]:
        """Return random failures; a replica that has failed gets some seconds to work again."""
        args = self._args
        rates = FailureRates(
            mtbf_s=args.mtbf,
            engine_mtbf_s=args.engine_mtbf,
            cold_start_s=1.5 * restarts[REPLICA] + 3,
            engine_start_s=1.5 * restarts[ENGINE] + 3,
        )
        rng = np.random.default_rng(args.seed)
        return list(random_failures(rates, _NUM_REPLICAS, end_s, rng))

    def _play(
        self, load: Workload, planted: Sequence[Failure], start_s: float
    ) -> tuple[list[Failure], list[dict[str, Any]], list[tuple[Any, ...]]]:
        """Send the load from `start_s` of the monotonic clock on, while replicas fail.

        Returns the failures with their real times, the answers, and the steps of the servers.
        """
        played: list[Failure] = []
        has_ended = threading.Event()

        def fail(failure: Failure) -> None:
            time.sleep(max(0.0, start_s + failure.at_s - time.monotonic()))
            replica = self._replicas[failure.replica]
            if failure.kind == ENGINE:
                kill = replica.kill_engine()
            else:
                kill = replica.kill_server(self._args.restart)
            played.append(replace(failure, at_s=kill.at_s - start_s, down_s=kill.down_s))
            note(f"{failure.kind} of replica {failure.replica + 1}: {kill.down_s:.2f} s")

        steps: list[tuple[Any, ...]] = []
        threads = [threading.Thread(target=fail, args=(failure,)) for failure in planted]
        threads.append(threading.Thread(target=self._watch_steps, args=(has_ended, steps)))
        for thread in threads:
            thread.start()
        try:
            answers = self._send(load, start_s)
        finally:
            has_ended.set()
            for thread in threads:
                thread.join()
        return sorted(played, key=lambda failure: failure.at_s), answers, steps

    def _watch_steps(self, has_ended: threading.Event, steps: list[tuple[Any, ...]]) -> None:
        while not has_ended.wait(_LOOK_S):
            for replica in self._replicas:
                with contextlib.suppress(TwostrokeError, OSError):  # it restarts
                    steps += map(tuple, read_steps(replica.url, None, self._setup.model))

    def _send(self, load: Workload, start_s: float, first: int = 0) -> list[dict[str, Any]]:
        """Send a load through the router; `first` chooses the tokens of the prompts."""
        size = self._setup.model.program.vocab_size
        answer = self._clients.call(
            "replay",
            port=self._router.port,
            model=MODEL_NAME,
            start_s=start_s,
            times_s=[arrival.at_s for arrival in load.arrivals],
            prompts=[
                arrival.tokens(first + number, size).tolist()
                for number, arrival in enumerate(load.arrivals)
            ],
            num_tokens=[arrival.num_output for arrival in load.arrivals],
        )
        requests: list[dict[str, Any]] = answer["requests"]
        return requests

    def _learn_overhead(self) -> SimulationSetup:
        """Measure requests one after another: a first token's time beyond its step is overhead."""
        load = Workload("alone", tuple(RequestArrival(0.4 * n, 64, 8) for n in range(_ALONE)))
        self._send(load, time.monotonic() + _LEAD_S, first=50_000)
        steps: list[tuple[Any, ...]] = []
        has_ended = threading.Event()
        thread = threading.Thread(target=self._watch_steps, args=(has_ended, steps))
        thread.start()
        try:
            answers = self._send(load, time.monotonic() + _LEAD_S, first=60_000)
        finally:
            has_ended.set()
            thread.join()
        prefill_s = [step_s for _, prompt, _, step_s, *_ in dict.fromkeys(steps) if prompt]
        ttft_s = [answer["first_s"] - answer["sent_s"] for answer in answers]
        overhead_s = max(0.0, median(ttft_s) - median(prefill_s))
        note(f"A request takes {1e3 * overhead_s:.1f} ms outside the engine")
        return replace(self._setup, overhead_s=overhead_s)

    def _with_steps(self, steps: Sequence[tuple[Any, ...]]) -> SimulationSetup:
        assert isinstance(self._setup.calibration, Calibration)
        calibration = replace(self._setup.calibration, served_steps=group_steps(steps))
        return replace(self._setup, calibration=calibration)

    def _capacity_per_s(self) -> float:
        """Return the rate at which the servers answer requests that arrive at the same time."""
        shape = self._shape(1.0, _BURST)
        burst = shape.load(self._args.seed + 1).changed(speed=1e6)
        answers = self._send(burst, time.monotonic() + _LEAD_S, first=70_000)
        last_s: float = max(answer["last_s"] for answer in answers)
        return _BURST / last_s

    def _shape(self, rate: float, count: int) -> SyntheticWorkload:
        args = self._args
        return SyntheticWorkload(
            rate, count=count, prompt=args.prompt, output=args.output, spread=0.4
        )


class _Kill(NamedTuple):
    """When a process was killed, on the monotonic clock, and how long its successor took."""

    at_s: float
    down_s: float


class _Replica:
    """A server that can be killed, with its engine or alone, and started again.

    Attributes:
        url: its address.
        pid: its process.
    """

    def __init__(
        self, name: str, command: tuple[str, ...], folder: Path, stack: contextlib.ExitStack
    ) -> None:
        """Start the server; it ends with the stack."""
        self._port = free_port()
        self._command = (*command, "--host", "127.0.0.1", "--port", str(self._port))
        self._log = (folder / f"{name}.log").open("ab")
        stack.callback(self._log.close)
        self.url = f"http://127.0.0.1:{self._port}"
        self._start()
        stack.callback(self._end)

    @property
    def pid(self) -> int:
        """The process of the server, which may have others below it."""
        return self._process.pid

    def wait_ready(self) -> float:
        """Wait until the server answers requests; return when, on the monotonic clock."""
        deadline_s = time.monotonic() + _READY_WITHIN_S
        while time.monotonic() < deadline_s:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return time.monotonic()
            except OSError:
                pass
            time.sleep(_POLL_S)
        raise SystemExit(f"{self.url} did not get ready in {_READY_WITHIN_S:.0f} s.")

    def kill_engine(self) -> _Kill:
        """Kill the engine's process, and wait until the next one computes."""
        engines = [pid for pid in descendants(self.pid) if _is_engine(pid)]
        if not engines:
            raise SystemExit(f"{self.url} has no engine.")
        at_s = time.monotonic()
        os.kill(engines[0], signal.SIGKILL)
        time.sleep(_NOTICE_S)
        return _Kill(at_s, self.wait_ready() - at_s)

    def kill_server(self, restart_s: float) -> _Kill:
        """Kill the server's process; start it again after some seconds, and wait for it."""
        at_s = time.monotonic()
        self._process.kill()
        self._process.wait()
        time.sleep(restart_s)
        self._start()
        return _Kill(at_s, self.wait_ready() - at_s)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log
        )

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _is_engine(pid: int) -> bool:
    try:
        return _ENGINE in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _logs(
    load: Workload, answers: Sequence[dict[str, Any]]
) -> tuple[list[RequestLog], dict[int, str]]:
    """Return the measured requests, and why some of them failed."""
    logs, causes = [], {}
    for number, (arrival, answer) in enumerate(zip(load.arrivals, answers, strict=True)):
        outcome = COMPLETED
        if error := answer["error"]:
            causes[number] = _CAUSES.get(error, LOST_STREAM)
            outcome = REFUSED if error in _CAUSES else FAILED
        times = Timings(arrival.at_s, 0.0, answer["first_s"], answer["last_s"])
        logs.append(
            RequestLog(
                times, answer["sent_s"], arrival.num_prompt, arrival.num_output, outcome=outcome
            )
        )
    return logs, causes


def _bad_requests(
    logs: Sequence[RequestLog], causes: dict[int, str], objectives: Objectives
) -> set[int]:
    """Return the indices of the requests that failed or missed an objective."""
    return {
        index for index, log in enumerate(logs) if index in causes or not objectives.are_met(log)
    }


def _pauses_s(
    answers: Sequence[dict[str, Any]], router_log: str, started_at_s: float
) -> list[float]:
    """Return the gaps in streams that end when the router lets a stream continue elsewhere.

    `started_at_s` is the start of the load in the time of the router's log. A gap may contain
    several losses.
    """
    gaps = {answer["id"]: answer["gaps"] for answer in answers if answer["id"]}
    pauses: dict[tuple[str, float], float] = {}
    for time_text, id_ in _CONTINUED.findall(router_log):
        continued_s = datetime.fromisoformat(time_text).timestamp() - started_at_s
        for begin_s, end_s in gaps.get(id_, ()):
            if abs(end_s - continued_s) < _MAX_LOG_DELAY_S:
                pauses[id_, begin_s] = end_s - begin_s
    return list(pauses.values())


def _text(
    count: int,
    rate: float,
    capacity: float,
    failures: Sequence[Failure],
    figures: Sequence[Figures],
) -> str:
    def row(name: str, values: Sequence[float], form: str) -> tuple[str, ...]:
        measured, simulated, _ = values
        difference = f"{simulated / measured - 1:+.0%}" if measured else "–"
        cells = (format(value, form) for value in values)
        return (name, *cells, difference)

    rows = [
        row("requests that failed", [f.num_failed / count for f in figures], ".2%"),
        row("over the TTFT objective", [f.num_late / count for f in figures], ".2%"),
        row("both", [1 - f.good_share for f in figures], ".2%"),
        row("time in which requests are bad", [1 - f.time_share for f in figures], ".2%"),
        row("nines", [num_nines(f.good_share) for f in figures], ".3f"),
        row("pauses", [f.num_pauses for f in figures], "d"),
        row("mean pause, s", [f.mean_pause_s for f in figures], ".3f"),
        row("longest pause, s", [f.longest_pause_s for f in figures], ".3f"),
        row("TTFT p50, s", [f.ttft_p50_s for f in figures], ".3f"),
    ]
    num_engines = sum(failure.kind == ENGINE for failure in failures)
    header = ("figure", "measured", "simulated", "restarts known before", "difference")
    return (
        f"## Failures, measured and simulated\n\n{table(header, rows)}\n\n{count} requests at "
        f"{rate:.2f} per second, {rate / capacity:.0%} of the capacity; {num_engines} engines and "
        f"{len(failures) - num_engines} servers were killed. Asked: at most {_MAX_DIFFERENCE:.0%} "
        "difference."
    )


if __name__ == "__main__":
    main()
