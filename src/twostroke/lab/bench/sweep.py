"""Measures several loads one after the other: a list of rates or clients, or a search."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.lab.bench.audit import BUSY_CLIENT
from twostroke.lab.bench.capacity import (
    CAPACITY_FOUND,
    CLIENT_LIMITED,
    INTERRUPTED,
    CapacitySearch,
    GoodputCapacity,
    LoadPoint,
    SearchInterruptedError,
    estimate_share,
)
from twostroke.lab.measure.report_text import format_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.lab.bench.benchmark import BenchLoad, Benchmark, BenchResult
    from twostroke.lab.bench.runner import LoadRunner
    from twostroke.lab.measure.requests import Objectives, RequestLog, RunReport

    WatchPoint = Callable[[BenchLoad, LoadRunner, float], None]

_PAUSE_S: Final = 0.5  # between two loads
NUM_ALONE: Final = 50  # requests that a search sends one at a time


class SweepRun(Frozen):
    """One measured load of a sweep: its figures for the search, and the whole run."""

    point: LoadPoint
    result: BenchResult


class BenchSweep:
    """Measures several loads of one endpoint.

    Attributes:
        runs: the loads measured so far, in the order in which they ran.
        capacity: the result of a search; None for a list of loads.
        is_interrupted: whether the user ended the sweep early.
    """

    def __init__(
        self, benchmark: Benchmark, objectives: Objectives, share: float, watch: WatchPoint
    ) -> None:
        """Prepare a sweep; `watch` is called with the load, its runner and the runner's time."""
        self._benchmark = benchmark
        self._objectives = objectives
        self._share = share
        self._watch = watch
        self._search: CapacitySearch | None = None
        self.runs: list[SweepRun] = []
        self.capacity: GoodputCapacity | None = None
        self.is_interrupted = False

    @property
    def runs_by_load(self) -> list[SweepRun]:
        """The runs from the lowest to the highest load; closed loops are first."""
        return sorted(self.runs, key=lambda run: (run.point.rate or 0, run.point.num_clients or 0))

    async def measure_loads(self, loads: Sequence[BenchLoad]) -> None:
        """Measure loads in their order; after an interrupted load, the sweep ends."""
        try:
            for load in loads:
                await self._measure(load, can_end_early=False)
        except SearchInterruptedError:
            self.is_interrupted = True
        finally:
            self._benchmark.close()

    async def search(
        self, load_at: Callable[[float | None], BenchLoad], start_rate: float | None
    ) -> None:
        """Search for the goodput capacity.

        `load_at(rate)` returns the load with a rate; `load_at(None)` returns the load of one
        client.
        """

        async def measure(rate: float | None) -> LoadPoint:
            return await self._measure(load_at(rate), can_end_early=True)

        self._search = CapacitySearch(measure, self._share)
        try:
            self.capacity = await self._search.run(start_rate)
        finally:
            self._benchmark.close()
        self.is_interrupted = self.capacity.end == INTERRUPTED

    def interrupt(self) -> None:
        """Record that Ctrl-C ended the sweep between two loads."""
        self.is_interrupted = True
        if self._search is not None:
            self.capacity = self._search.result(INTERRUPTED)

    async def _measure(self, load: BenchLoad, *, can_end_early: bool) -> LoadPoint:
        """Measure a load; raise SearchInterruptedError if the user ends it."""
        benchmark, objectives = self._benchmark, self._objectives
        if self.runs:
            await asyncio.sleep(_PAUSE_S)
            await benchmark.wait_until_idle()
        num_requests = load.num_planned
        max_bad = (1 - self._share) * num_requests

        def watch(runner: LoadRunner, now_s: float) -> None:
            self._watch(load, runner, now_s)
            if can_end_early:
                num_bad = sum(not objectives.are_met(answer.log) for answer in runner.answers)
                if num_bad > max_bad:
                    runner.stop(is_hopeless=True)

        result = await benchmark.measure(load, objectives, watch)
        e2e = result.report.run.latencies.get("e2e")
        logs = [answer.log for answer in result.record.answers]
        are_good = [objectives.are_met(log) for log in logs]
        point = LoadPoint(
            rate=load.workload.rate if load.is_open else None,
            num_clients=load.limits.num_clients,
            num_requests=num_requests,
            mean_e2e_s=e2e.mean if e2e else math.inf,
            good=estimate_share(are_good) if objectives else None,
            is_growing=load.is_open and result.report.run.is_growing,
            is_client_limited=self._is_client_limited(result),
        )
        self.runs.append(SweepRun(point, result))
        if benchmark.is_stopped:
            if self._search is not None:
                self._search.points.append(point)
            raise SearchInterruptedError
        return point

    def _is_client_limited(self, result: BenchResult) -> bool:
        """Whether requests that miss the objectives may do so because of the client.

        That is so if the client used up its core. It is also so if enough requests would meet the
        objectives when their latencies counted from the time at which they were really sent.
        """
        if any(finding.name == BUSY_CLIENT for finding in result.audit.findings):
            return True
        logs = [answer.log for answer in result.record.answers]
        num_good = sum(self._objectives.are_met(_from_sent(log)) for log in logs)
        num_good_as_scheduled = sum(map(self._objectives.are_met, logs))
        return num_good_as_scheduled < self._share * len(logs) <= num_good


def _from_sent(log: RequestLog) -> RequestLog:
    return replace(log, timings=replace(log.timings, arrival_s=log.sent_s))


def describe_capacity(
    capacity: GoodputCapacity, runs: Sequence[SweepRun], objectives: Objectives
) -> str:
    """Return the result of a search as sentences."""
    good = f"at least {capacity.share:.0%} of the requests meet the objectives"
    if capacity.rate is None:
        return _describe_no_rate(capacity, runs, objectives)
    high = "no load missed them for sure" if capacity.high is None else f"{capacity.high:.3g}"
    low = f"{capacity.low:.3g}" if capacity.low else "no load met them for sure"
    interval = f"(95% interval: {low} to {high})"
    if capacity.high is None or not capacity.low:
        interval = f"(lower bound: {low}; upper bound: {high}; more requests narrow this)"
    if capacity.end == CAPACITY_FOUND:
        return f"Goodput capacity: {capacity.rate:.3g} requests/s {interval}. There, {good}."
    reason = {
        CLIENT_LIMITED: "at higher rates the client itself was late or busy, so it is the limit; "
        "divide the load over several clients",
        INTERRUPTED: "the search was interrupted",
    }.get(
        capacity.end,
        "all requests of a higher rate would arrive within the time of one request; use more "
        "requests",
    )
    return (
        f"The goodput capacity is at least {capacity.rate:.3g} requests/s, at which {good}: "
        f"{reason}."
    )


def _describe_no_rate(
    capacity: GoodputCapacity, runs: Sequence[SweepRun], objectives: Objectives
) -> str:
    if capacity.end == INTERRUPTED:
        return "The search was interrupted before any rate met the objectives."
    if capacity.end == CLIENT_LIMITED:
        return "No rate met the objectives, and the client itself was late or busy."
    lowest = min(runs, key=lambda run: run.point.rate or 0.0)
    if not lowest.point.meets(capacity.share):
        load = "one request at a time"
    else:
        lowest = min((run for run in runs if run.point.rate), key=lambda run: run.point.rate or 0.0)
        load = f"{lowest.point.rate:.3g} requests/s"
    missed = "; ".join(_missed_objectives(lowest.result.report.run, objectives))
    value = lowest.point.good.value if lowest.point.good else 0.0
    return (
        f"There is no goodput capacity: even with {load}, only {value:.0%} of the requests meet "
        f"the objectives, and {capacity.share:.0%} must{f' ({missed})' if missed else ''}."
    )


def _missed_objectives(run: RunReport, objectives: Objectives) -> Iterator[str]:
    """Yield a clause about each objective that the median or the 90th percentile misses."""
    for name, limit_s in (("ttft", objectives.ttft_s), ("tpot", objectives.tpot_s)):
        latency = run.latencies.get(name)
        if latency is None or limit_s is None:
            continue
        for percentile in ("p50", "p90"):
            value_s = latency.percentiles[percentile].value
            if value_s > limit_s:
                yield (
                    f"{percentile.upper()} of {name.upper()} is {format_ms(value_s)} ms, and the "
                    f"objective {format_ms(limit_s)} ms"
                )
                break
    if run.num_completed < run.num_requests:
        num_failed = run.num_requests - run.num_completed
        yield f"{counted_noun(num_failed, 'request', form=',')} failed"
