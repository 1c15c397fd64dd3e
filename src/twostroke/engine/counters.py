"""What a running engine counts, and the snapshot through which everybody reads it."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, NamedTuple

from twostroke.core.request import FinishReason
from twostroke.core.service import SERVICES
from twostroke.engine.histogram import ROW_BOUNDS, Histogram
from twostroke.engine.seconds import Seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.core.hardware import Hardware
    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan, StepResult
    from twostroke.engine.histogram import Distribution
    from twostroke.engine.output import Timings
    from twostroke.engine.seconds import Span
    from twostroke.program import BatchShape
    from twostroke.program.cost import StepCost
    from twostroke.schedule import SchedulerStats
    from twostroke.spec import SpeculationStats

LATENCIES: Final = ("queue", "ttft", "tpot", "itl", "e2e")
COMPLETED: Final = (FinishReason.STOP, FinishReason.LENGTH)

_NUM_RECENT: Final = 120  # steps


@dataclass(frozen=True, slots=True)
class Stroke:
    """Sums over the steps of one kind; `rows` are tokens computed."""

    steps: int = 0
    rows: int = 0
    flops: int = 0
    bytes: int = 0
    time_s: float = 0.0
    kernel_s: float = 0.0

    def __sub__(self, earlier: Stroke) -> Stroke:
        """Return what was added since `earlier`."""
        names = [field.name for field in fields(self)]
        return Stroke(*(getattr(self, name) - getattr(earlier, name) for name in names))

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


@dataclass(frozen=True, slots=True)
class Strokes:
    """Both strokes; a step counts as prefill when most of its rows are prompt tokens."""

    prefill: Stroke = Stroke()
    decode: Stroke = Stroke()

    def __sub__(self, earlier: Strokes) -> Strokes:
        """Return what was added since `earlier`."""
        return Strokes(self.prefill - earlier.prefill, self.decode - earlier.decode)


class TimedRows(NamedTuple):
    """One step: its rows, how many of them were prompt tokens, its requests, and its time."""

    rows: int
    prompt_rows: int
    requests: int
    step_s: float


@dataclass(frozen=True, slots=True)
class ServiceTotals:
    """Sums for one class of service.

    A prompt counts when its first token has come, `completion_tokens` as they are generated.
    `ends` are counted by finish reason; `latencies` are in seconds, by the names in `LATENCIES`.
    Embedded texts are counted apart from answers, when their vectors are ready.
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


@dataclass(frozen=True, slots=True)
class SpeculationTotals:
    """Guesses: `proposed` and `accepted` by source, `accepted_at` by place after the newest token.

    `passes` are steps of a request with guesses: each brought one token besides the accepted ones.
    `saved_s` estimates the time that the same tokens would have taken in addition.
    """

    proposed: Counter[str]
    accepted: Counter[str]
    accepted_at: Counter[int]
    passes: int
    saved_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's counts at one moment. Sums are since it started, `age_s` seconds ago.

    `services` are by class of service. `prefill_rows` and `decode_rows` distribute steps by their
    number of rows; `recent_steps` are the last steps. `scheduler` also says how many requests and
    pages there are in each state now.
    """

    age_s: float
    services: dict[str, ServiceTotals]
    strokes: Strokes
    prefill_rows: Distribution
    decode_rows: Distribution
    recent_steps: tuple[TimedRows, ...]
    speculation: SpeculationTotals
    scheduler: SchedulerStats


class ServiceCounter:
    """Counts for one class of service. The engine's loop writes, under its lock.

    The gaps before a step's tokens are counted together: in most steps they are all the same.
    """

    def __init__(self) -> None:
        """Count from 0."""
        self.gaps: list[float] = []  # when the tokens before those of this step were generated
        self.num_tokens = 0
        self._latencies = {name: Histogram() for name in LATENCIES}
        self._num_prompt = self._num_cached = 0
        self._embedded_texts = self._embedded_tokens = 0
        self._ends: Counter[FinishReason] = Counter()

    def begin(self, request: Request, now_s: float) -> None:
        """Count a request whose first token has come."""
        self._num_prompt += request.num_prompt
        self._num_cached += request.num_cached
        self._latencies["queue"].observe(request.started_s - request.arrival_s)
        self._latencies["ttft"].observe(now_s - request.arrival_s)

    def count_embedded(self, request: Request) -> None:
        """Count a text whose vector is ready."""
        self._embedded_texts += 1
        self._embedded_tokens += request.num_prompt

    def count_gaps(self, now_s: float) -> None:
        """Count the gaps before the tokens of a step."""
        gaps = self.gaps
        if not gaps:
            return
        if gaps.count(gaps[0]) == len(gaps):
            self._latencies["itl"].observe(now_s - gaps[0], len(gaps))
        else:
            for before_s, count in Counter(gaps).items():
                self._latencies["itl"].observe(now_s - before_s, count)
        gaps.clear()

    def end(self, reason: FinishReason, timings: Timings | None, num_output: int) -> None:
        """Count a request that has ended; a completed one has `timings`."""
        self._ends[reason] += 1
        if reason not in COMPLETED or timings is None:
            return
        self._latencies["e2e"].observe(timings.e2e_s)
        tpot_s = timings.tpot_s(num_output)
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
    """The engine's counts. The loop writes and reads them under its lock."""

    def __init__(
        self,
        cost: StepCost,
        scheduler: Callable[[], SchedulerStats],
        speculation: SpeculationStats,
    ) -> None:
        """Count work by the Program's `cost`; a snapshot includes what the others count."""
        self.services = {service: ServiceCounter() for service in SERVICES}
        self._cost = cost
        self._scheduler = scheduler
        self._speculation = speculation
        self._began_s = time.monotonic()
        self._strokes = Strokes()
        self._prefill_rows, self._decode_rows = Histogram(ROW_BOUNDS), Histogram(ROW_BOUNDS)
        self._recent: deque[TimedRows] = deque(maxlen=_NUM_RECENT)
        self._seconds = Seconds(self.snapshot)

    def add_step(self, plan: StepPlan, batch: BatchShape, result: StepResult) -> None:
        """Count one step, whose shape is `batch`."""
        prompt_rows = sum(
            [
                min(s.start + s.count, s.request.num_prompt) - s.start
                for s in plan.slices
                if s.start < s.request.num_prompt
            ]
        )
        cost, rows, strokes = self._cost.of(batch), batch.num_rows, self._strokes
        is_prefill = 2 * prompt_rows > rows
        old = strokes.prefill if is_prefill else strokes.decode
        new = Stroke(
            old.steps + 1,
            old.rows + rows,
            old.flops + cost.flops,
            old.bytes + cost.bytes,
            old.time_s + result.elapsed_s,
            old.kernel_s + result.kernel_s,
        )
        if is_prefill:
            self._strokes = Strokes(new, strokes.decode)
            self._prefill_rows.observe(rows)
        else:
            self._strokes = Strokes(strokes.prefill, new)
            self._decode_rows.observe(rows)
        self._recent.append(TimedRows(rows, prompt_rows, len(plan.slices), result.elapsed_s))

    def count_gaps(self, now_s: float) -> None:
        """Count the gaps before a step's tokens."""
        for service in self.services.values():
            service.count_gaps(now_s)

    def turn(self, now_s: float) -> None:
        """Keep a snapshot if a new second has begun; to be called before a step is counted."""
        self._seconds.turn(now_s)

    def span(self, seconds: int) -> Span[Snapshot]:
        """Return snapshots of both ends of the last whole seconds."""
        return self._seconds.span(seconds)

    def snapshot(self) -> Snapshot:
        """Return all counts as of now."""
        guesses = self._speculation
        return Snapshot(
            age_s=time.monotonic() - self._began_s,
            services={name: service.read() for name, service in self.services.items()},
            strokes=self._strokes,
            prefill_rows=self._prefill_rows.read(),
            decode_rows=self._decode_rows.read(),
            recent_steps=tuple(self._recent),
            speculation=SpeculationTotals(
                Counter(guesses.proposed),
                Counter(guesses.accepted),
                Counter(guesses.accepted_at),
                guesses.passes,
                guesses.saved_s,
            ),
            scheduler=self._scheduler(),
        )
