"""Counts of a running engine: histograms, sums over steps, and the snapshot of all of them."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from itertools import accumulate
from operator import sub
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from msgspec.structs import astuple

from twostroke.core.frozen import Frozen
from twostroke.core.request import SERVICE_TIERS, FinishReason
from twostroke.engine.scheduler import SchedulerStats  # noqa: TC001 - read when a message is decoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.core.hardware import Hardware
    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan, StepResult
    from twostroke.engine.faults import StepLimit
    from twostroke.engine.output import Output
    from twostroke.engine.speculation import SpeculationStats
    from twostroke.model.program import BatchShape
    from twostroke.model.program.cost import StepCost

LATENCIES: Final = ("queue", "ttft", "tpot", "itl", "e2e")
COMPLETED: Final = (FinishReason.STOP, FinishReason.LENGTH)

_NUM_RECENT_STEPS: Final = 120


# Upper bounds of buckets from 10 microseconds to hours, 20 a decade: percentiles have an error of
# at most 6%.
_DECADE: Final = (
    *("1", "1.1", "1.25", "1.4", "1.6", "1.8", "2", "2.25", "2.5", "2.8"),
    *("3.2", "3.6", "4", "4.5", "5", "5.6", "6.3", "7.1", "8", "9"),
)
TIME_BOUNDS_S: Final = tuple(float(f"{step}e{power}") for power in range(-5, 4) for step in _DECADE)
ROW_BOUNDS: Final = tuple(float(2**power) for power in range(15))
BOUNDS: Final = {"seconds": TIME_BOUNDS_S, "rows": ROW_BOUNDS}


class Distribution(Frozen):
    """A histogram of measured values, such as latencies, at one moment.

    Attributes:
        unit: a name in `BOUNDS`, which has the upper bounds of the buckets.
        counts: the number of values in each bucket; the last bucket has no upper bound.
        sum: the sum of all values.
    """

    unit: str
    counts: tuple[int, ...]
    sum: float

    @property
    def bounds(self) -> tuple[float, ...]:
        """The inclusive upper bounds of the histogram's buckets; the last bucket has no bound."""
        return BOUNDS[self.unit]

    def __sub__(self, earlier: Distribution) -> Distribution:
        """Return the histogram of the values that were counted after `earlier` was taken."""
        pairs = zip(self.counts, earlier.counts, strict=True)
        counts = tuple([count - earlier_count for count, earlier_count in pairs])
        return Distribution(self.unit, counts, self.sum - earlier.sum)

    @property
    def count(self) -> int:
        """The number of values in all buckets."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """The mean of the values; None if no value was counted."""
        count = self.count
        return self.sum / count if count else None

    def percentile(self, fraction: float) -> float | None:
        """Return an estimate of a percentile of the values: the median for a fraction of 0.5.

        The estimate interpolates linearly within a bucket. None if no value was counted.
        """
        cumulative = list(accumulate(self.counts))
        if not cumulative[-1]:
            return None
        rank = fraction * cumulative[-1]
        bucket = bisect_left(cumulative, rank) if rank else bisect_right(cumulative, 0)
        num_below = cumulative[bucket - 1] if bucket else 0
        low = self.bounds[bucket - 1] if bucket else 0.0
        high = self.bounds[min(bucket, len(self.bounds) - 1)]
        return low + (high - low) * (rank - num_below) / self.counts[bucket]

    def cumulative(self, bounds: Sequence[float]) -> Iterator[tuple[float, int]]:
        """Yield each of `bounds` with the number of values up to this bound, as Prometheus wants.

        Each of `bounds` must be an upper bound of one of the buckets.
        """
        cumulative = list(accumulate(self.counts))
        for bound in bounds:
            yield bound, cumulative[bisect_left(self.bounds, bound)]


class Histogram:
    """Counts measured values, such as latencies, in buckets. Not thread-safe."""

    __slots__ = ("_bounds", "_counts", "_read", "_sum", "_unit")

    def __init__(self, unit: str = "seconds") -> None:
        """Start with empty buckets, whose upper bounds are `BOUNDS[unit]`; the last has none."""
        self._unit = unit
        self._bounds = BOUNDS[unit]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._read: Distribution | None = None

    def observe(self, value: float, count: int = 1) -> None:
        """Add a measured value, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count
        self._read = None

    def read(self) -> Distribution:
        """Return the histogram of all values so far, as immutable data.

        The same object is returned until another value is added.
        """
        if self._read is None:
            self._read = Distribution(self._unit, tuple(self._counts), self._sum)
        return self._read


T = TypeVar("T")

MAX_SECONDS: Final = 130  # that a history remembers


class TimeSpan(Frozen, Generic[T]):
    """An engine's counts at the start (`first`) and at the end (`last`) of a span of time.

    Their difference is the work within the span, which lasts `seconds`.
    """

    first: T
    last: T
    seconds: int


class SumHistory(Generic[T]):
    """The history of an engine's counts: their values at the beginning of each recent second.

    The counts, such as the number of tokens, never decrease. Their difference over a time span
    gives a rate. Not thread-safe.
    """

    def __init__(self, read: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        """Start the history of the counts that `read` returns, as immutable data."""
        self._read = read
        self._clock = clock
        self._start_s = clock()
        # (second, sums at its beginning), for seconds in which the sums changed.
        self._marks: deque[tuple[int, T]] = deque([(0, read())], maxlen=MAX_SECONDS + 2)

    def advance(self, now_s: float) -> None:
        """Record the counts if a new second has begun; call this before each change of a count."""
        second = int(now_s - self._start_s)
        if second != self._marks[-1][0]:
            self._marks.append((second, self._read()))

    def span(self, seconds: int, ago_s: int = 0) -> TimeSpan[T]:
        """Return the counts at both ends of a span of `seconds` that ended `ago_s` seconds ago.

        The span is shorter than `seconds` if the history is shorter.
        """
        last = max(0, int(self._clock() - self._start_s) - ago_s)
        first = max(0, last - seconds)
        return TimeSpan(self._at(first), self._at(last), last - first)

    def _at(self, second: int) -> T:
        """Return the counts at the beginning of the second with this number since the start."""
        for marked_second, sums in self._marks:
            if marked_second >= second:
                return sums
        return self._read()


class PhaseTotals(Frozen):
    """Sums over all prefill steps, or over all decode steps, of an engine.

    Attributes:
        rows: number of computed tokens.
        flops, bytes: arithmetic and memory traffic, as the cost model counts them.
        time_s: time of the steps.
        kernel_s: the part of `time_s` that was spent in kernels.
        collective_s: time of rank 0 in collectives, waiting for other ranks included.
        crowded_s: time of steps that ran with fewer threads, because other processes were busy.
    """

    steps: int = 0
    rows: int = 0
    flops: int = 0
    bytes: int = 0
    time_s: float = 0.0
    kernel_s: float = 0.0
    collective_s: float = 0.0
    crowded_s: float = 0.0

    def __sub__(self, earlier: PhaseTotals) -> PhaseTotals:
        """Return the sums over the steps that ran after `earlier` was taken."""
        return PhaseTotals(*map(sub, astuple(self), astuple(earlier)))

    @property
    def flops_per_s(self) -> float:
        """Floating-point operations per second of step time in this phase."""
        return self.flops / self.time_s if self.time_s else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes of memory traffic per second of step time in this phase."""
        return self.bytes / self.time_s if self.time_s else 0.0

    def mfu(self, hardware: Hardware) -> float:
        """Return the phase's model FLOPs utilization.

        It is the number of FLOPs per second over the machine's arithmetic peak.
        """
        return self.flops_per_s / hardware.peak

    def mbu(self, hardware: Hardware) -> float:
        """Return the phase's model bandwidth utilization.

        It is the memory traffic per second over the machine's memory bandwidth.
        """
        return self.bytes_per_s / hardware.bandwidth


class PrefillDecodeTotals(Frozen):
    """Sums over prefill steps, in which most rows are prompt tokens, and over decode steps."""

    prefill: PhaseTotals = PhaseTotals()
    decode: PhaseTotals = PhaseTotals()

    def __sub__(self, earlier: PrefillDecodeTotals) -> PrefillDecodeTotals:
        """Return the sums over the steps that ran after `earlier` was taken."""
        return PrefillDecodeTotals(self.prefill - earlier.prefill, self.decode - earlier.decode)

    @property
    def max_bytes_per_s(self) -> float:
        """Bytes of memory traffic per second in prefill or decode steps, the larger of both."""
        return max(self.prefill.bytes_per_s, self.decode.bytes_per_s)

    @property
    def max_flops_per_s(self) -> float:
        """Floating-point operations per second in prefill or decode steps, the larger of both."""
        return max(self.prefill.flops_per_s, self.decode.flops_per_s)


class TierTotals(Frozen):
    """Counts of a KV offload tier, such as the disk, since the engine's start.

    Attributes:
        lookups, hits: requests that looked for pages in the tier, and that found pages.
        slow: transfers that were stopped, or not started, because computing is faster.
        saved_s: computing time that fetched pages saved, less the time of the fetches.
        pages_stored, bytes_stored: the contents of the tier now; None if unknown.
    """

    tier: str
    lookups: int = 0
    hits: int = 0
    pages_read: int = 0
    bytes_read: int = 0
    read_s: float = 0.0
    pages_written: int = 0
    bytes_written: int = 0
    write_s: float = 0.0
    slow: int = 0
    saved_s: float = 0.0
    pages_stored: int | None = None
    bytes_stored: int | None = None


class TimedRows(NamedTuple):
    """The rows of one engine step, and how long the step took.

    Attributes:
        rows: tokens computed.
        prompt_rows: prompt tokens among the rows.
        requests: requests in the step.
        step_s: time of the step.
        attended: number of positions that the rows attend to, summed over the rows.
        interval_s: time since the end of the previous step, with the loop's work in between; 0
            after a pause.
    """

    rows: int
    prompt_rows: int
    requests: int
    step_s: float
    attended: int = 0
    interval_s: float = 0.0


class ServiceTotals(Frozen):
    """Counts and latencies of the requests of one service tier.

    Prompts are counted at their first token, and `completion_tokens` as they are generated. `ends`
    counts answers by finish reason. `latencies` are in seconds, by the names in `LATENCIES`. Texts
    to embed are counted separately, when their vectors are ready.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ends: dict[FinishReason, int]
    latencies: dict[str, Distribution]
    embedded_texts: int
    embedded_tokens: int

    @property
    def answers(self) -> int:
        """The number of completed answers of this service tier."""
        return sum(self.ends.get(reason, 0) for reason in COMPLETED)


class SpeculationTotals(Frozen):
    """Counts of the draft tokens of speculative decoding since the engine's start.

    Attributes:
        proposed, accepted: draft tokens by proposer.
        accepted_at: accepted draft tokens by their offset after the newest token.
        passes: slices with drafts. Each yields one token besides the accepted drafts.
        saved_s: estimated time that the same tokens would have taken longer without drafts.
    """

    proposed: dict[str, int]
    accepted: dict[str, int]
    accepted_at: dict[int, int]
    passes: int
    saved_s: float


class Snapshot(Frozen):
    """The engine's counts at one moment. Sums are since its start.

    Attributes:
        age_s: seconds since the engine's start.
        services: sums by service tier.
        phases: sums over prefill and decode steps.
        prefill_rows, decode_rows: the distribution of the rows of a step.
        recent_steps: the last steps.
        speculation: counts of draft tokens.
        scheduler: counts of the scheduler, with the requests and pages in each state now.
        tiers: counts of the KV offload tiers.
        num_compiled: kernels compiled and graphs captured while steps ran.
        num_shortages: steps that failed because the memory was too short.
        max_step_tokens: tokens that a step may compute now.
    """

    age_s: float
    services: dict[str, ServiceTotals]
    phases: PrefillDecodeTotals
    prefill_rows: Distribution
    decode_rows: Distribution
    recent_steps: tuple[TimedRows, ...]
    speculation: SpeculationTotals
    scheduler: SchedulerStats
    tiers: tuple[TierTotals, ...] = ()
    num_compiled: int = 0
    num_shortages: int = 0
    max_step_tokens: int | None = None


class ServiceCounter:
    """Counts the requests of one service tier. Callers hold the engine loop's lock."""

    def __init__(self) -> None:
        """Start with all counts of the service tier at 0."""
        self.gaps: list[float] = []  # times of the tokens before this step's tokens
        self.num_tokens = 0
        self._latencies = {name: Histogram() for name in LATENCIES}
        self._num_prompt = 0
        self._num_cached = 0
        self._embedded_texts = 0
        self._embedded_tokens = 0
        self._ends: Counter[FinishReason] = Counter()

    def begin(self, request: Request, now_s: float) -> None:
        """Count a request's prompt and its time to first token, when it gets its first token.

        `now_s` is the time of that token on the engine's clock.
        """
        self._num_prompt += request.num_prompt
        self._num_cached += request.num_cached
        self._latencies["queue"].observe(request.started_s - request.arrival_s)
        self._latencies["ttft"].observe(now_s - request.arrival_s)

    def count_gaps(self, now_s: float) -> None:
        """Count the inter-token latency of each token that a step returned at the time `now_s`."""
        gaps = self.gaps
        if not gaps:
            return
        if gaps.count(gaps[0]) == len(gaps):  # equal in most steps
            self._latencies["itl"].observe(now_s - gaps[0], len(gaps))
        else:
            for before_s, count in Counter(gaps).items():
                self._latencies["itl"].observe(now_s - before_s, count)
        gaps.clear()

    def end(self, request: Request, last: Output) -> None:
        """Count an ended request's finish reason and latencies, given its last output.

        A text to embed is only counted if it succeeded.
        """
        reason = last.finish_reason
        timings = last.timings
        usage = last.usage
        assert reason is not None
        assert timings is not None
        assert usage is not None
        is_complete = reason in COMPLETED
        if request.pooling is not None:
            self._embedded_texts += is_complete
            self._embedded_tokens += is_complete * request.num_prompt
            return
        self._ends[reason] += 1
        if not is_complete:
            return
        self._latencies["e2e"].observe(timings.e2e_s)
        tpot_s = timings.tpot_s(usage.completion_tokens)
        if tpot_s is not None:
            self._latencies["tpot"].observe(tpot_s)

    def read(self) -> ServiceTotals:
        """Return the counts and latencies of this service tier so far."""
        return ServiceTotals(
            prompt_tokens=self._num_prompt,
            cached_tokens=self._num_cached,
            completion_tokens=self.num_tokens,
            ends=dict(self._ends),
            latencies={name: histogram.read() for name, histogram in self._latencies.items()},
            embedded_texts=self._embedded_texts,
            embedded_tokens=self._embedded_tokens,
        )


class Counters:
    """All counts of an engine, the source of its metrics. Callers hold the engine loop's lock."""

    def __init__(
        self,
        cost: StepCost,
        *,
        scheduler: Callable[[], SchedulerStats],
        speculation: SpeculationStats,
        tiers: Callable[[], tuple[TierTotals, ...]] = tuple,
        step_limit: StepLimit | None = None,
    ) -> None:
        """Count steps with the help of `cost`, which gives the work (FLOPs and bytes) of a step.

        The other arguments provide counts for each snapshot: `scheduler` counts requests and pages,
        `speculation` drafts, `tiers` pages in KV offload, and `step_limit` shortages of memory.
        """
        self._tiers = tiers
        self._step_limit = step_limit
        self.services = {service: ServiceCounter() for service in SERVICE_TIERS}
        self._cost = cost
        self._scheduler = scheduler
        self._speculation = speculation
        self._start_s = time.monotonic()
        self._phases = PrefillDecodeTotals()
        self._prefill_rows = Histogram("rows")
        self._decode_rows = Histogram("rows")
        self._recent: deque[TimedRows] = deque(maxlen=_NUM_RECENT_STEPS)
        self._num_compiled = 0
        self.history = SumHistory(self.snapshot)

    def add_step(
        self, plan: StepPlan, batch: BatchShape, result: StepResult, interval_s: float = 0.0
    ) -> None:
        """Count one finished step with its plan, its shape `batch` and its result.

        `interval_s` is the time since the end of the previous step; 0 after a pause.
        """
        prompt_rows = plan.num_prompt_rows
        rows = batch.num_rows
        cost = self._cost.of(batch)
        phases = self._phases
        is_prefill = 2 * prompt_rows > rows
        old = phases.prefill if is_prefill else phases.decode
        new = PhaseTotals(
            steps=old.steps + 1,
            rows=old.rows + rows,
            flops=old.flops + cost.flops,
            bytes=old.bytes + cost.bytes,
            time_s=old.time_s + result.elapsed_s,
            kernel_s=old.kernel_s + result.kernel_s,
            collective_s=old.collective_s + result.collective_s,
            crowded_s=old.crowded_s + result.crowded_s,
        )
        if is_prefill:
            self._phases = PrefillDecodeTotals(new, phases.decode)
            self._prefill_rows.observe(rows)
        else:
            self._phases = PrefillDecodeTotals(phases.prefill, new)
            self._decode_rows.observe(rows)
        self._num_compiled += result.num_compiled
        self._recent.append(
            TimedRows(
                rows=rows,
                prompt_rows=prompt_rows,
                requests=len(plan.slices),
                step_s=result.elapsed_s,
                attended=batch.num_attended(),
                interval_s=interval_s,
            )
        )

    def count_gaps(self, now_s: float) -> None:
        """Count the inter-token latency of each token that a step returned at the time `now_s`."""
        for service in self.services.values():
            service.count_gaps(now_s)

    def snapshot(self) -> Snapshot:
        """Return all counts of the engine at this moment."""
        drafts = self._speculation
        step_limit = self._step_limit
        return Snapshot(
            age_s=time.monotonic() - self._start_s,
            services={name: service.read() for name, service in self.services.items()},
            phases=self._phases,
            prefill_rows=self._prefill_rows.read(),
            decode_rows=self._decode_rows.read(),
            recent_steps=tuple(self._recent),
            speculation=SpeculationTotals(
                proposed=dict(drafts.proposed),
                accepted=dict(drafts.accepted),
                accepted_at=dict(drafts.accepted_at),
                passes=drafts.passes,
                saved_s=drafts.saved_s,
            ),
            scheduler=self._scheduler(),
            tiers=self._tiers(),
            num_compiled=self._num_compiled,
            num_shortages=step_limit.num_shortages if step_limit else 0,
            max_step_tokens=step_limit.max_tokens if step_limit else None,
        )
