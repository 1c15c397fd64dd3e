"""Counts of a running engine, and the snapshot in which others read them."""

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

_NUM_RECENT: Final = 120  # steps


class PhaseTotals(Frozen):
    """Sums over the steps of one kind; `rows` are tokens computed.

    `collective_s` is what rank 0 spent in collectives, waiting for other ranks included;
    `crowded_s` are the seconds of steps with fewer threads than all.
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
        """Return what was added since `earlier`."""
        return PhaseTotals(*map(sub, astuple(self), astuple(earlier)))

    @property
    def flops_per_s(self) -> float:
        """FLOPs a second while steps ran."""
        return self.flops / self.time_s if self.time_s else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes of memory traffic a second while steps ran."""
        return self.bytes / self.time_s if self.time_s else 0.0

    def mfu(self, hardware: Hardware) -> float:
        """Model FLOPs utilization: FLOPs a second over the machine's peak."""
        return self.flops_per_s / hardware.peak

    def mbu(self, hardware: Hardware) -> float:
        """Model bandwidth utilization: bytes a second over the machine's bandwidth."""
        return self.bytes_per_s / hardware.bandwidth


class PrefillDecodeTotals(Frozen):
    """Sums for prefill and decode; a step is prefill if most of its rows are prompt tokens."""

    prefill: PhaseTotals = PhaseTotals()
    decode: PhaseTotals = PhaseTotals()

    def __sub__(self, earlier: PrefillDecodeTotals) -> PrefillDecodeTotals:
        """Return what was added since `earlier`."""
        return PrefillDecodeTotals(self.prefill - earlier.prefill, self.decode - earlier.decode)

    @property
    def max_bytes_per_s(self) -> float:
        """The memory traffic of the faster phase, in bytes a second."""
        return max(self.prefill.bytes_per_s, self.decode.bytes_per_s)

    @property
    def max_flops_per_s(self) -> float:
        """The arithmetic of the faster phase, in FLOPs a second."""
        return max(self.prefill.flops_per_s, self.decode.flops_per_s)


class TierTotals(Frozen):
    """Counts of a tier since the engine's start; `stored` is as of now, None if it is not known.

    `saved_s` is the computing that fetched pages have saved, less the time for them. `slow` counts
    transfers that were given up, or not begun, because computing is faster.
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
    """One step: its rows, how many of them were prompt tokens, its requests, and its time.

    `attended` counts pairs of a row and a position that it attends to. `turn_s` is the time since
    the end of the step before, with all that the loop does between two; 0 after a pause.
    """

    rows: int
    prompt_rows: int
    requests: int
    step_s: float
    attended: int = 0
    turn_s: float = 0.0


class ServiceTotals(Frozen):
    """Sums for one class of service.

    Prompts are counted at their first token, `completion_tokens` as they are generated. `ends` are
    by finish reason; `latencies` are in seconds, by the names in `LATENCIES`. Texts to embed are
    not answers: they are counted separately, when their vectors are ready.
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
        """How many answers were completed."""
        return sum(self.ends.get(reason, 0) for reason in COMPLETED)


class SpeculationTotals(Frozen):
    """Guesses: `proposed` and `accepted` by source, `accepted_at` by place after the newest token.

    `passes` are slices with guesses; each drew one token besides the accepted ones. `saved_s`
    estimates how much longer the same tokens would have taken without guesses.
    """

    proposed: dict[str, int]
    accepted: dict[str, int]
    accepted_at: dict[int, int]
    passes: int
    saved_s: float


class Snapshot(Frozen):
    """The engine's counts at one moment; sums are since its start, `age_s` seconds ago.

    `services` are by class of service. `prefill_rows` and `decode_rows` are the distributions of a
    step's rows; `recent_steps` are the last steps. `scheduler` also counts the requests and pages
    in each state now. `num_compiled` counts kernels compiled and graphs captured while steps ran.
    `num_shortages` counts steps for which the memory was too short, and a step may compute
    `most_tokens` now.
    """

    age_s: float
    services: dict[str, ServiceTotals]
    strokes: PrefillDecodeTotals
    prefill_rows: Distribution
    decode_rows: Distribution
    recent_steps: tuple[TimedRows, ...]
    speculation: SpeculationTotals
    scheduler: SchedulerStats
    tiers: tuple[TierTotals, ...] = ()
    num_compiled: int = 0
    num_shortages: int = 0
    most_tokens: int | None = None


class ServiceCounter:
    """Counts for one class of service; the loop's lock guards it."""

    def __init__(self) -> None:
        """Count from 0."""
        self.gaps: list[float] = []  # times of the tokens that precede this step's
        self.num_tokens = 0
        self._latencies = {name: Histogram() for name in LATENCIES}
        self._num_prompt = self._num_cached = 0
        self._embedded_texts = self._embedded_tokens = 0
        self._ends: Counter[FinishReason] = Counter()

    def begin(self, request: Request, now_s: float) -> None:
        """Count a request that gets its first token."""
        self._num_prompt += request.num_prompt
        self._num_cached += request.num_cached
        self._latencies["queue"].observe(request.started_s - request.arrival_s)
        self._latencies["ttft"].observe(now_s - request.arrival_s)

    def count_gaps(self, now_s: float) -> None:
        """Count the times between this step's tokens and the previous ones."""
        gaps = self.gaps
        if not gaps:
            return
        if gaps.count(gaps[0]) == len(gaps):  # as in most steps
            self._latencies["itl"].observe(now_s - gaps[0], len(gaps))
        else:
            for before_s, count in Counter(gaps).items():
                self._latencies["itl"].observe(now_s - before_s, count)
        gaps.clear()

    def end(self, request: Request, last: Output) -> None:
        """Count a request that has ended with the output `last`; a text only if it has a vector."""
        reason, timings, usage = last.finish_reason, last.timings, last.usage
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
        """Return the sums so far."""
        return ServiceTotals(
            self._num_prompt,
            self._num_cached,
            self.num_tokens,
            dict(self._ends),
            {name: histogram.read() for name, histogram in self._latencies.items()},
            self._embedded_texts,
            self._embedded_tokens,
        )


class Counters:
    """The engine's counts; the loop's lock guards them."""

    def __init__(
        self,
        cost: StepCost,
        scheduler: Callable[[], SchedulerStats],
        speculation: SpeculationStats,
        tiers: Callable[[], tuple[TierTotals, ...]] = tuple,
        limit: StepLimit | None = None,
    ) -> None:
        """Count work by `cost`; snapshots include the counts of the others."""
        self._tiers, self._limit = tiers, limit
        self.services = {service: ServiceCounter() for service in SERVICE_TIERS}
        self._cost = cost
        self._scheduler = scheduler
        self._speculation = speculation
        self._began_s = time.monotonic()
        self._strokes = PrefillDecodeTotals()
        self._prefill_rows, self._decode_rows = Histogram("rows"), Histogram("rows")
        self._recent: deque[TimedRows] = deque(maxlen=_NUM_RECENT)
        self._num_compiled = 0
        self.seconds = Seconds(self.snapshot)

    def add_step(
        self, plan: StepPlan, batch: BatchShape, result: StepResult, turn_s: float = 0.0
    ) -> None:
        """Count one step, whose shape is `batch`; `turn_s` as in `TimedRows`."""
        prompt_rows, rows = plan.num_prompt_rows, batch.num_rows
        cost, strokes = self._cost.of(batch), self._strokes
        is_prefill = 2 * prompt_rows > rows
        old = strokes.prefill if is_prefill else strokes.decode
        new = PhaseTotals(
            old.steps + 1,
            old.rows + rows,
            old.flops + cost.flops,
            old.bytes + cost.bytes,
            old.time_s + result.elapsed_s,
            old.kernel_s + result.kernel_s,
            old.collective_s + result.collective_s,
            old.crowded_s + result.crowded_s,
        )
        if is_prefill:
            self._strokes = PrefillDecodeTotals(new, strokes.decode)
            self._prefill_rows.observe(rows)
        else:
            self._strokes = PrefillDecodeTotals(strokes.prefill, new)
            self._decode_rows.observe(rows)
        counts = rows, prompt_rows, len(plan.slices)
        self._num_compiled += result.num_compiled
        self._recent.append(TimedRows(*counts, result.elapsed_s, batch.num_attended(), turn_s))

    def count_gaps(self, now_s: float) -> None:
        """Count the times between this step's tokens and the previous ones."""
        for service in self.services.values():
            service.count_gaps(now_s)

    def snapshot(self) -> Snapshot:
        """Return all counts as of now."""
        guesses, limit = self._speculation, self._limit
        return Snapshot(
            age_s=time.monotonic() - self._began_s,
            services={name: service.read() for name, service in self.services.items()},
            strokes=self._strokes,
            prefill_rows=self._prefill_rows.read(),
            decode_rows=self._decode_rows.read(),
            recent_steps=tuple(self._recent),
            speculation=SpeculationTotals(
                dict(guesses.proposed),
                dict(guesses.accepted),
                dict(guesses.accepted_at),
                guesses.passes,
                guesses.saved_s,
            ),
            scheduler=self._scheduler(),
            tiers=self._tiers(),
            num_compiled=self._num_compiled,
            num_shortages=limit.num_shortages if limit else 0,
            most_tokens=limit.most_tokens if limit else None,
        )


_DECADE: Final = (
    *("1", "1.1", "1.25", "1.4", "1.6", "1.8", "2", "2.25", "2.5", "2.8"),
    *("3.2", "3.6", "4", "4.5", "5", "5.6", "6.3", "7.1", "8", "9"),
)

# From 10 microseconds to hours, twenty to a decade: percentiles have an error of at most 6%.
TIME_BOUNDS_S: Final = tuple(float(f"{step}e{power}") for power in range(-5, 4) for step in _DECADE)
ROW_BOUNDS: Final = tuple(float(2**power) for power in range(15))


BOUNDS: Final = {"seconds": TIME_BOUNDS_S, "rows": ROW_BOUNDS}


class Distribution(Frozen):
    """`counts[i]` values are at most `bounds[i]` and above the previous bound; the last are above.

    `sum` is the sum of all values, `unit` a name in `BOUNDS`.
    """

    unit: str
    counts: tuple[int, ...]
    sum: float

    @property
    def bounds(self) -> tuple[float, ...]:
        """The upper bounds of all buckets but the last."""
        return BOUNDS[self.unit]

    def __sub__(self, earlier: Distribution) -> Distribution:
        """Return what was counted since `earlier`."""
        pairs = zip(self.counts, earlier.counts, strict=True)
        counts = tuple([late - early for late, early in pairs])
        return Distribution(self.unit, counts, self.sum - earlier.sum)

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """The mean; None without values."""
        count = self.count
        return self.sum / count if count else None

    def percentile(self, share: float) -> float | None:
        """Return about the value that `share` of all values are below; None without values.

        Values are assumed to lie evenly within a bucket.
        """
        below = list(accumulate(self.counts))
        if not below[-1]:
            return None
        rank = share * below[-1]
        place = bisect_left(below, rank) if rank else bisect_right(below, 0)
        before = below[place - 1] if place else 0
        low = self.bounds[place - 1] if place else 0.0
        high = self.bounds[min(place, len(self.bounds) - 1)]
        return low + (high - low) * (rank - before) / self.counts[place]

    def cumulative(self, bounds: Sequence[float]) -> Iterator[tuple[float, int]]:
        """Yield how many values are at most each of `bounds`, a part of the distribution's own."""
        below = list(accumulate(self.counts))
        for bound in bounds:
            yield bound, below[bisect_left(self.bounds, bound)]


class Histogram:
    """Counts values into buckets. Not thread-safe."""

    __slots__ = ("_bounds", "_counts", "_read", "_sum", "_unit")

    def __init__(self, unit: str = "seconds") -> None:
        """Have a bucket up to each of the unit's `BOUNDS`, and one above."""
        self._unit, self._bounds = unit, BOUNDS[unit]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._read: Distribution | None = None

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count
        self._read = None

    def read(self) -> Distribution:
        """Return the counts so far: the same ones again if nothing was counted since."""
        if self._read is None:
            self._read = Distribution(self._unit, tuple(self._counts), self._sum)
        return self._read


T = TypeVar("T")

MAX_SECONDS: Final = 130


class TimeSpan(Frozen, Generic[T]):
    """Sums at the beginning and at the end of some whole seconds."""

    first: T
    last: T
    seconds: int


class Seconds(Generic[T]):
    """Remembers sums at the beginning of each second in which they changed. Not thread-safe."""

    def __init__(self, read: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        """Take sums from `read`, which returns immutable values."""
        self._read = read
        self._clock = clock
        self._began_s = clock()
        self._marks: deque[tuple[int, T]] = deque([(0, read())], maxlen=MAX_SECONDS + 2)

    def turn(self, now_s: float) -> None:
        """Keep the sums if a new second has begun; call this before each change."""
        second = int(now_s - self._began_s)
        if second != self._marks[-1][0]:
            self._marks.append((second, self._read()))

    def span(self, seconds: int, ago_s: int = 0) -> TimeSpan[T]:
        """Return the last whole `seconds` up to `ago_s`, or as many as there have been."""
        last = max(0, int(self._clock() - self._began_s) - ago_s)
        first = max(0, last - seconds)
        return TimeSpan(self._at(first), self._at(last), last - first)

    def _at(self, second: int) -> T:
        """Return the sums at the beginning of a second: nothing changed until the next mark."""
        for at, sums in self._marks:
            if at >= second:
                return sums
        return self._read()
