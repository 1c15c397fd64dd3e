"""How long a step will take, from what it must do and how long others took."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.core.hardware import Hardware
    from twostroke.program import BatchShape
    from twostroke.program.cost import StepCost

_STEP = 0.15  # of a new measurement's way into what is believed
_MOST_CHANGE = 1.5  # of one measurement: others may have had the processor
_NEAR = 8  # classes of sizes: further ones are another kind of step, as prompts are
_TRUST = 400  # steps after which what was measured of other sizes says as much


@dataclass(slots=True)
class _Ratio:
    """Measured over least possible time, and at which step it was last measured."""

    value: float
    step: int


@dataclass(slots=True)
class Pace:
    """Predicts the seconds of a step by its cost, corrected by what steps of its size took.

    Sizes are numbers of rows, in classes that grow with them: kernels take rows by fours and
    eights, and larger steps use the machine better. A size of which nothing is known, or nothing
    new for long, is thought to be as good as the best of its neighbours, and without any as the
    machine's limits: it will be tried, and then it is known.
    """

    cost: StepCost
    hardware: Hardware | None
    _ratios: dict[int, _Ratio] = field(default_factory=dict)
    _num_steps: int = 0

    def seconds(self, batch: BatchShape) -> float:
        """Return about how long a step takes."""
        return self._least_s(batch) * self._ratio(_size(batch.num_rows))

    def learn(self, batch: BatchShape, elapsed_s: float) -> None:
        """Hear how long a step took."""
        least_s = self._least_s(batch)
        if not least_s or not elapsed_s:
            return
        self._num_steps += 1
        size, measured = _size(batch.num_rows), elapsed_s / least_s
        known = self._ratios.get(size)
        if known is None:
            self._ratios[size] = _Ratio(measured, self._num_steps)
            return
        measured = min(max(measured, known.value / _MOST_CHANGE), known.value * _MOST_CHANGE)
        known.value += _STEP * (measured - known.value)
        known.step = self._num_steps

    def _least_s(self, batch: BatchShape) -> float:
        """Return the time of memory traffic and arithmetic, one after the other.

        They overlap, but their sum grows with the rows as real steps do, without a corner.
        """
        cost, hardware = self.cost.of(batch), self.hardware
        if hardware is None:  # the rates of some machine: what is learned makes up for it
            return cost.bytes / 10e9 + cost.flops / 100e9
        return cost.bytes / hardware.bandwidth + cost.flops / hardware.peak

    def _ratio(self, size: int) -> float:
        if not self._ratios:
            return 1.0
        below = max((s for s in self._ratios if s < size), default=None)
        above = min((s for s in self._ratios if s > size), default=None)
        around = [self._ratios[s].value for s in (below, above) if s is not None]
        known = self._ratios.get(size)
        if known is None:
            near = [self._ratios[s].value for s in (below, above) if s and abs(s - size) <= _NEAR]
            return min(near, default=1.0)
        if not around:
            return known.value
        trust = math.exp((known.step - self._num_steps) / _TRUST)
        return known.value + (1 - trust) * (min(known.value, *around) - known.value)


def _size(num_rows: int) -> int:
    """Return a class of numbers of rows: each to 8, then four to a doubling."""
    if num_rows <= 8:
        return num_rows
    return math.ceil(4 * math.log2(num_rows / 8)) + 8
