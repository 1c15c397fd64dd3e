"""Counts what the two strokes achieve: work and time of prefill and of decode steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from twostroke.engine.histogram import ROW_BOUNDS, Histogram

if TYPE_CHECKING:
    from twostroke.core.hardware import Hardware
    from twostroke.core.step import StepPlan, StepResult
    from twostroke.program import BatchShape
    from twostroke.program.cost import StepCost


_NUM_RECENT = 120  # steps


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
        return Stroke(
            self.steps - earlier.steps,
            self.rows - earlier.rows,
            self.flops - earlier.flops,
            self.bytes - earlier.bytes,
            self.time_s - earlier.time_s,
            self.kernel_s - earlier.kernel_s,
        )

    @property
    def flops_per_s(self) -> float:
        """The rate of arithmetic while steps ran."""
        return self.flops / self.time_s if self.time_s else 0.0

    @property
    def bytes_per_s(self) -> float:
        """The rate at which memory was read and written while steps ran."""
        return self.bytes / self.time_s if self.time_s else 0.0

    def mfu(self, hardware: Hardware) -> float:
        """Model FLOPs utilization: FLOPs a second over the machine's peak."""
        return self.flops_per_s / hardware.peak

    def mbu(self, hardware: Hardware) -> float:
        """Model bandwidth utilization: bytes a second over the machine's bandwidth."""
        return self.bytes_per_s / hardware.bandwidth


@dataclass(frozen=True, slots=True)
class Strokes:
    """Both strokes; a step counts as prefill when most of its rows are prompt."""

    prefill: Stroke = Stroke()
    decode: Stroke = Stroke()

    def __sub__(self, earlier: Strokes) -> Strokes:
        """Return what was added since `earlier`."""
        return Strokes(self.prefill - earlier.prefill, self.decode - earlier.decode)


class TimedRows(NamedTuple):
    """One step: its rows, how many of them were prompt, of how many requests, and its time."""

    rows: int
    prompt_rows: int
    requests: int
    step_s: float


class Meter:
    """Adds up steps as they end, and remembers the last ones.

    Rows a step are counted beside their strokes.
    """

    def __init__(self, cost: StepCost) -> None:
        """Count by the Program's own cost."""
        self._cost = cost
        self.strokes = Strokes()
        self.recent: deque[TimedRows] = deque(maxlen=_NUM_RECENT)
        self.prefill_rows, self.decode_rows = Histogram(ROW_BOUNDS), Histogram(ROW_BOUNDS)

    def add(self, plan: StepPlan, batch: BatchShape, result: StepResult) -> None:
        """Count one step, whose shape is `batch`."""
        prompt_rows = sum(
            [
                min(s.start + s.count, s.request.num_prompt) - s.start
                for s in plan.slices
                if s.start < s.request.num_prompt
            ]
        )
        cost, rows = self._cost.of(batch), batch.num_rows
        strokes = self.strokes
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
        self.strokes = Strokes(new, strokes.decode) if is_prefill else Strokes(strokes.prefill, new)
        (self.prefill_rows if is_prefill else self.decode_rows).observe(rows)
        self.recent.append(TimedRows(rows, prompt_rows, len(plan.slices), result.elapsed_s))
