"""Estimates the availability of replicas that fail.

Failures are rare, and their effects short. Therefore random failures of many years are drawn, which
is cheap, and divided into episodes that do not influence each other. Episodes with the same kinds
of failures, and with the same number of replicas that are down at once, form a stratum. Only some
episodes of each stratum are simulated with the load. Their effects are weighted by the number of
episodes in the stratum.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.process_tuning import without_garbage_collection
from twostroke.lab.measure.requests import COMPLETED
from twostroke.lab.simulator.failing_fleet import NOT_VALID, FailingFleet, Pause
from twostroke.lab.simulator.failures import (
    FAILURE_KINDS,
    Episode,
    RouterTimes,
    find_episodes,
    random_failures,
)
from twostroke.lab.simulator.fleet import START_S
from twostroke.lab.simulator.load import Workload
from twostroke.lab.simulator.simulation import ReplicaBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from twostroke.lab.measure.requests import Objectives, RequestLog
    from twostroke.lab.simulator.failures import Failure, FailureRates
    from twostroke.lab.simulator.load import RequestArrival
    from twostroke.lab.simulator.simulation import SimulationSetup

# Why a completed request is not good.
SLOW_TTFT: Final = "TTFT"
SLOW_TPOT: Final = "TPOT"

DEFAULT_TIMES: Final = RouterTimes()
MONTH_S: Final = 365.25 / 12 * 86400
DEFAULT_NUM_FAILURES: Final = 60  # that are simulated
MIN_FAILURES: Final = 10  # fewer say nothing about availability
_NUM_DRAWN: Final = 20_000  # failures of the years that are drawn
_MIN_EPISODES: Final = 3  # of a stratum, if it has that number
_MAX_BUSY_SHARE: Final = 0.5  # of the time in episodes; else they are not divided
_NUM_RUNS: Final = 5  # if they are not divided
_MIN_SETTLE_S: Final = 5.0
_MAX_SETTLE_S: Final = 120.0
_MAX_EXTENSIONS: Final = 4  # of the time after an episode, each twice as long as the last
_Z_95_PERCENT: Final = 1.96  # of a 95% interval
_RULE_OF_THREE: Final = 3.0  # without an event in n trials, the 95% interval ends at 3 / n


class DisturbedRun(Frozen):
    """A simulated load on replicas that fail.

    Attributes:
        logs: times and counts of each request.
        causes: why requests did not get a complete answer, by index of the log.
        pauses: the pauses of streams that were lost and continued.
        num_failures: failures that happened.
    """

    logs: tuple[RequestLog, ...]
    causes: dict[int, str]
    pauses: tuple[Pause, ...]
    num_failures: int


def play_failures(
    setup: SimulationSetup,
    load: Workload,
    failures: Sequence[Failure],
    times: RouterTimes = DEFAULT_TIMES,
) -> DisturbedRun:
    """Simulate a load on replicas that fail at these times; return the view of the clients.

    Raises:
        MemoryLimitError: the model and its KV cache do not fit into the devices' memory.
        UsageError: a failure or the setup is not valid.
    """
    for field in ("prefill_replicas", "page_cache_size"):
        if getattr(setup, field):
            raise UsageError("cannot be combined with failures.", field=field)
    builder = ReplicaBuilder(setup)
    fleet = FailingFleet(
        builder.build,
        setup.replicas,
        setup.routing,
        clock=builder.clock,
        vocab_size=setup.model.program.vocab_size,
        times=times,
        overhead_s=setup.overhead_s,
    )
    with without_garbage_collection():
        fleet.run(load, failures)
    logs = tuple([fleet.logs[number] for number in range(len(load.arrivals))])
    return DisturbedRun(logs, fleet.causes, tuple(fleet.pauses), fleet.num_failures)


class Outcome(Frozen):
    """The requests of a span of time, and how many of them failed or missed an objective.

    Attributes:
        num_requests: valid requests that arrived.
        causes: number of requests that failed or missed an objective, by cause.
        seconds: the span of time.
        bad_s: the part of the time in which such requests arrived; a request counts for the time
            until the next request.
    """

    num_requests: int
    causes: dict[str, int]
    seconds: float
    bad_s: float

    @property
    def num_bad(self) -> int:
        """The number of requests that failed or missed an objective."""
        return sum(self.causes.values())


def find_outcome(
    logs: Sequence[RequestLog],
    causes: Mapping[int, str],
    objectives: Objectives,
    begin_s: float,
    end_s: float,
) -> Outcome:
    """Return the outcome of the requests that arrived within a span of time, on the logs' clock.

    The logs are in the order of arrival. `causes` says why requests did not get a complete answer,
    by index of the log.
    """
    counts: Counter[str] = Counter()
    num_requests, bad_s = 0, 0.0
    for index, log in enumerate(logs):
        at_s, cause = log.timings.arrival_s, causes.get(index)
        if not begin_s <= at_s < end_s or cause == NOT_VALID:
            continue
        num_requests += 1
        cause = cause or _missed_objective(log, objectives)
        if cause:
            counts[cause] += 1
            next_s = logs[index + 1].timings.arrival_s if index + 1 < len(logs) else end_s
            bad_s += min(next_s, end_s) - at_s
    return Outcome(num_requests, dict(counts), end_s - begin_s, bad_s)


def _missed_objective(log: RequestLog, objectives: Objectives) -> str:
    """Return the objective that a completed request misses; empty if it meets all."""
    assert log.outcome == COMPLETED
    if objectives.are_met(log):
        return ""
    ttft_s = log.latencies["ttft"] or 0.0
    return SLOW_TTFT if ttft_s > (objectives.ttft_s or math.inf) else SLOW_TPOT


class Availability(Frozen):
    """The availability of replicas that fail, estimated from simulated episodes of failures.

    Shares are of all requests, from 0 to 1.

    Attributes:
        share: requests that get a complete answer within the objectives.
        low, high: the 95% interval of `share`; it covers only the randomness of failures.
        time_share: the share of time in which arriving requests are answered in this way.
        undisturbed_share: `share` without failures.
        num_undisturbed: the number of simulated requests from which `undisturbed_share` is
            estimated.
        causes: share of requests that fail or miss an objective, by cause.
        num_failures: failures that were simulated.
        failures_per_month: expected failures of all replicas, by kind.
        num_pauses: pauses of streams in the simulated episodes.
        pause_p99_s, longest_pause_s: 99th percentile and maximum of these pauses; None without
            pauses.
    """

    share: float
    low: float
    high: float
    time_share: float
    undisturbed_share: float
    num_undisturbed: int
    causes: dict[str, float]
    num_failures: int
    failures_per_month: dict[str, float]
    num_pauses: int
    pause_p99_s: float | None
    longest_pause_s: float | None

    @property
    def downtime_min_per_month(self) -> float:
        """Minutes of a month in which requests that arrive are not answered well."""
        return (1 - self.time_share) * MONTH_S / 60


def num_nines(share: float) -> float:
    """Return the number of nines of an availability: 3 for 0.999; infinity for 1."""
    return max(0.0, -math.log10(1 - share)) if share < 1 else math.inf


class AvailabilityQuestion(Frozen):
    """The load and the failures for which an availability is estimated.

    Attributes:
        load: the requests. They are repeated without end, and episodes of failures begin at random
            times of them.
        objectives: latency objectives; without any, requests must only be answered.
        rates: how often replicas fail, and how long their restarts take.
        times: the times of the router.
        num_failures: number of failures to simulate.
        seed: equal seeds give equal results.
    """

    load: Workload
    objectives: Objectives
    rates: FailureRates
    times: RouterTimes = DEFAULT_TIMES
    num_failures: int = DEFAULT_NUM_FAILURES
    seed: int = 0


def estimate_availability(
    setup: SimulationSetup,
    question: AvailabilityQuestion,
    watch: Callable[[int, int], None] = lambda _done, _total: None,
) -> Availability:
    """Estimate how many requests are answered well by replicas that fail at random times.

    `watch` is called as `watch(done, total)` with the number of simulated failures.

    Raises:
        UsageError: the setup or the rates are not valid for this load.
        MemoryLimitError: the model and its KV cache do not fit into the devices' memory.
    """
    load, objectives, rates, times = (
        question.load,
        question.objectives,
        question.rates,
        question.times,
    )
    if rates.never_fail:
        raise UsageError("Which failures? Give the mean time between failures of a kind.")
    cycle = _Cycle(load)
    if rates.spot_mtbf_s is not None and rates.notice_s > cycle.period_s:
        reason = (
            f"must be shorter than the load, which lasts {cycle.period_s:.3g} s, got "
            f"{rates.notice_s:g} s: use more requests."
        )
        raise UsageError(reason, field="notice_s")
    base_run = play_failures(setup, load, (), times)
    base = find_outcome(
        base_run.logs, base_run.causes, objectives, START_S, START_S + cycle.period_s
    )
    if not base.num_requests:
        raise UsageError("No request of the load is valid for this model: they are too long.")
    settle_s = _settle_s(base_run.logs)
    rng = np.random.default_rng(question.seed)
    sample = _draw(rates, setup.replicas, settle_s, question.num_failures, rng)
    player = _EpisodePlayer(setup, question, cycle, base, settle_s)
    estimator = _Estimator(base, cycle, sample)
    total = sum(len(episode.failures) for _, episodes in sample.strata for episode in episodes)
    done = 0
    for num_episodes, episodes in sample.strata:
        effects = []
        for episode in episodes:
            effects.append(player.play(episode, float(rng.random()) * cycle.period_s))
            done += len(episode.failures)
            watch(done, total)
        estimator.add_stratum(num_episodes, effects)
    per_month = Counter(failure.kind for failure in sample.failures)
    months = sample.duration_s / MONTH_S
    return estimator.availability({kind: per_month[kind] / months for kind in FAILURE_KINDS})


class _FailureSample(NamedTuple):
    """Random failures of a long time, and the episodes of failures that will be simulated.

    Each item of `strata` is (number of episodes of a stratum in that time, the chosen episodes).
    `has_gaps`: time passes between episodes, so the numbers of episodes are random.
    """

    failures: tuple[Failure, ...]
    duration_s: float
    strata: list[tuple[int, list[Episode]]]
    has_gaps: bool = True


def _draw(
    rates: FailureRates,
    num_replicas: int,
    settle_s: float,
    num_failures: int,
    rng: np.random.Generator,
) -> _FailureSample:
    """Draw failures, and choose about `num_failures` of them to simulate.

    `settle_s` is the time after a restart until its effects are over.
    """
    per_s = rates.failures_per_s(num_replicas)
    if not per_s:
        return _FailureSample((), MONTH_S, [])
    duration_s = _NUM_DRAWN / per_s
    failures = random_failures(rates, num_replicas, duration_s, rng)
    if not failures:
        return _FailureSample((), duration_s, [])
    episodes = find_episodes(failures, settle_s)
    in_episodes_s = sum(episode.duration_s + settle_s for episode in episodes)
    if in_episodes_s > _MAX_BUSY_SHARE * duration_s:
        # Failures follow so closely that there is no time between episodes.
        run_s = num_failures / _NUM_RUNS / (len(failures) / duration_s)
        runs = [random_failures(rates, num_replicas, run_s, rng) for _ in range(_NUM_RUNS)]
        return _FailureSample(
            failures=tuple([failure for run in runs for failure in run]),
            duration_s=run_s * _NUM_RUNS,
            strata=[(_NUM_RUNS, [Episode(run, run_s, num_down=0) for run in runs])],
            has_gaps=False,
        )
    strata: dict[tuple[int, ...], list[Episode]] = {}
    for episode in episodes:
        strata.setdefault(episode.stratum, []).append(episode)
    quota = max(_MIN_EPISODES, num_failures // len(strata))
    sampled_strata = []
    for stratum in sorted(strata):
        members, left = strata[stratum], quota
        picked = []
        for index in rng.permutation(len(members)):
            picked.append(members[index])
            left -= len(picked[-1].failures)
            if left <= 0 and len(picked) >= _MIN_EPISODES:
                break
        sampled_strata.append((len(members), picked))
    return _FailureSample(failures, duration_s, sampled_strata)


def _settle_s(logs: Sequence[RequestLog]) -> float:
    """Return the time until a load is in its steady state: twice the longest request."""
    longest_s = max((log.timings.e2e_s for log in logs if log.outcome == COMPLETED), default=0.0)
    return min(max(2 * longest_s, _MIN_SETTLE_S), _MAX_SETTLE_S)


class _Cycle:
    """A load that is repeated without end.

    Attributes:
        period_s: the time after which it begins again.
        rate: requests per second.
    """

    def __init__(self, load: Workload) -> None:
        self._arrivals = load.arrivals
        self._times_s = [arrival.at_s for arrival in load.arrivals]
        count, last_s = len(load.arrivals), load.arrivals[-1].at_s
        # The last request stands for the mean time between requests.
        self.period_s = last_s * count / (count - 1) if last_s > 0 and count > 1 else 1.0 + last_s
        self.rate = count / self.period_s

    def window(self, begin_s: float, seconds: float) -> Workload:
        """Return the requests of a span of time, with times since its begin."""
        shift_s = math.floor(begin_s / self.period_s) * self.period_s
        return Workload("window", tuple(self._requests(begin_s - shift_s, seconds)))

    def _requests(self, begin_s: float, seconds: float) -> Iterator[RequestArrival]:
        index, lap_s = bisect_left(self._times_s, begin_s), 0.0
        while True:
            if index == len(self._times_s):
                index, lap_s = 0, lap_s + self.period_s
            at_s = self._times_s[index] + lap_s - begin_s
            if at_s >= seconds:
                return
            yield replace(self._arrivals[index], at_s=at_s)
            index += 1


class _Effect(NamedTuple):
    """The effect of an episode of failures: the outcome of requests, and pauses of streams."""

    outcome: Outcome
    pauses_s: list[float]
    num_failures: int


class _EpisodePlayer:
    """Simulates episodes of failures with a part of the load before, during and after them."""

    def __init__(
        self,
        setup: SimulationSetup,
        question: AvailabilityQuestion,
        cycle: _Cycle,
        base: Outcome,
        settle_s: float,
    ) -> None:
        self._setup = setup
        self._cycle = cycle
        self._question = question
        self._bad_share = base.num_bad / base.num_requests
        self._settle_s = settle_s

    def play(self, episode: Episode, at_s: float) -> _Effect:
        """Simulate an episode that begins at `at_s` of the load, until its effects are over."""
        warm_s = after_s = self._settle_s
        failures = [replace(failure, at_s=failure.at_s + warm_s) for failure in episode.failures]
        for extension in range(_MAX_EXTENSIONS + 1):
            end_s = warm_s + episode.duration_s + after_s
            load = self._cycle.window(at_s - warm_s, end_s)
            if not load.arrivals:
                return _Effect(Outcome(0, {}, episode.duration_s + after_s, 0.0), [], 0)
            run = play_failures(self._setup, load, failures, self._question.times)
            tail = self._outcome(run, end_s - after_s / 2, end_s)
            expected = self._bad_share * tail.num_requests
            is_over = tail.num_bad <= expected + 2 * math.sqrt(expected) + 1
            if is_over or extension == _MAX_EXTENSIONS:
                break
            after_s *= 2
        outcome = self._outcome(run, warm_s, end_s)
        return _Effect(outcome, [pause.seconds for pause in run.pauses], run.num_failures)

    def _outcome(self, run: DisturbedRun, begin_s: float, end_s: float) -> Outcome:
        return find_outcome(
            run.logs, run.causes, self._question.objectives, START_S + begin_s, START_S + end_s
        )


class _Estimator:
    """Adds up the effects of simulated episodes, weighted by the episodes that they stand for."""

    def __init__(self, base: Outcome, cycle: _Cycle, sample: _FailureSample) -> None:
        self._base = base
        self._num_requests = cycle.rate * sample.duration_s
        self._duration_s = sample.duration_s
        self._has_gaps = sample.has_gaps
        self._bad_share = base.num_bad / base.num_requests
        self._bad_time_share = base.bad_s / base.seconds
        self._excess = self._variance = self._excess_s = 0.0
        self._causes = {cause: count / base.num_requests for cause, count in base.causes.items()}
        self._pauses: list[tuple[float, float]] = []  # with their weights
        self._num_failures = 0
        self._num_simulated = self._num_bad = 0
        self._episode_requests = 0.0

    def add_stratum(self, num_episodes: int, effects: Sequence[_Effect]) -> None:
        """Add a stratum with `num_episodes` episodes; `effects` has the simulated episodes."""
        weight = num_episodes / len(effects)
        excesses = []
        for effect in effects:
            outcome = effect.outcome
            excesses.append(outcome.num_bad - self._bad_share * outcome.num_requests)
            self._excess_s += weight * (outcome.bad_s - self._bad_time_share * outcome.seconds)
            for cause in {*outcome.causes, *self._base.causes}:
                usual = self._base.causes.get(cause, 0) / self._base.num_requests
                num_more = outcome.causes.get(cause, 0) - usual * outcome.num_requests
                share = weight * num_more / self._num_requests
                self._causes[cause] = self._causes.get(cause, 0.0) + share
            self._pauses += [(seconds, weight) for seconds in effect.pauses_s]
            self._num_failures += effect.num_failures
            self._num_simulated += outcome.num_requests
            self._num_bad += outcome.num_bad
            self._episode_requests += weight * outcome.num_requests
        mean = sum(excesses) / len(excesses)
        deviation = sum((excess - mean) ** 2 for excess in excesses)
        # A single episode says nothing about the spread: assume an exponential distribution.
        spread = deviation / (len(excesses) - 1) if len(excesses) > 1 else mean**2
        self._excess += num_episodes * mean
        self._variance += num_episodes**2 * spread / len(excesses)
        if self._has_gaps:  # the number of episodes is random, too
            self._variance += num_episodes * mean**2

    def availability(self, failures_per_month: dict[str, float]) -> Availability:
        """Return the availability over the whole time."""
        excess = self._excess / self._num_requests
        error = _Z_95_PERCENT * math.sqrt(self._variance) / self._num_requests
        if not self._num_bad and self._num_simulated:
            error = (
                _RULE_OF_THREE / self._num_simulated * self._episode_requests / self._num_requests
            )
        share = _clip(1 - self._bad_share - excess)
        pauses = sorted(self._pauses)
        return Availability(
            share=share,
            low=_clip(share - error),
            high=_clip(min(share + error, 1 - self._bad_share) if excess > 0 else share),
            time_share=_clip(1 - self._bad_time_share - self._excess_s / self._duration_s),
            undisturbed_share=1 - self._bad_share,
            num_undisturbed=self._base.num_requests,
            causes={cause: max(0.0, share) for cause, share in sorted(self._causes.items())},
            num_failures=self._num_failures,
            failures_per_month=failures_per_month,
            num_pauses=len(pauses),
            pause_p99_s=_weighted_quantile(pauses, 0.99),
            longest_pause_s=pauses[-1][0] if pauses else None,
        )


def _weighted_quantile(ordered: Sequence[tuple[float, float]], share: float) -> float | None:
    """Return a quantile of ordered values, each with a weight; None without values."""
    if not ordered:
        return None
    sums = np.cumsum([weight for _, weight in ordered])
    index = int(np.searchsorted(sums, share * sums[-1]))
    return ordered[min(index, len(ordered) - 1)][0]


def _clip(share: float) -> float:
    return min(1.0, max(0.0, share))
