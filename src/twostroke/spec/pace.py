"""How long a step will take, from what it must do and how long others took."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twostroke.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.core.hardware import Hardware
    from twostroke.program.cost import StepCost

_STEP = 0.15  # of a new measurement's way into what is believed
_MOST_CHANGE = 1.5  # of one measurement: others may have had the processor
_NEAR = 8  # classes of sizes: further ones are another kind of step, as prompts are
_TRUST = 1000  # steps after which what was measured of other sizes says as much,
_MANY = 10  # if what is known comes from so many steps; sooner if from fewer


@dataclass(slots=True)
class _Ratio:
    """Measured over least possible time, from so many steps, of which the last was that one."""

    value: float
    count: int
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

    def outlook(self, batch: BatchShape) -> Outlook:
        """Return how to predict steps with guesses beside those of `batch`."""
        start = max(start for start, _ in batch.spans)
        least_s, one_s, two_s = (
            self._least_s(BatchShape((*batch.spans, *more), batch.num_sampled + count))
            for count, more in enumerate(((), ((start, 1),), ((start, 2),)))
        )
        return Outlook(batch.num_rows, least_s, one_s - least_s, two_s - one_s, self._ratio)

    def learn(self, batch: BatchShape, elapsed_s: float) -> None:
        """Hear how long a step took."""
        least_s = self._least_s(batch)
        if not least_s or not elapsed_s:
            return
        self._num_steps += 1
        size, measured = _size(batch.num_rows), elapsed_s / least_s
        known = self._ratios.get(size)
        if known is None:
            near = self._near(size)
            if near:  # one measurement may be far off
                measured = math.sqrt(measured * min(near))
            self._ratios[size] = _Ratio(measured, 1, self._num_steps)
            return
        measured = min(max(measured, known.value / _MOST_CHANGE), known.value * _MOST_CHANGE)
        known.count += 1
        known.value += max(_STEP, 1 / known.count) * (measured - known.value)
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
        """Return measured over least possible time, for steps of a size."""
        known = self._ratios.get(size)
        if known is None:
            return min(self._near(size), default=1.0)
        around = self._around(size)
        if not around:
            return known.value
        age = self._num_steps - known.step
        trust = math.exp(-age / (_TRUST * min(1.0, known.count / _MANY)))
        best = min(known.value, *[self._ratios[other].value for other in around])
        return known.value + (1 - trust) * (best - known.value)

    def _near(self, size: int) -> list[float]:
        """Return what is known of the next sizes, if they are of the same kind."""
        around = [other for other in self._around(size) if abs(other - size) <= _NEAR]
        return [self._ratios[other].value for other in around]

    def _around(self, size: int) -> list[int]:
        """Return the next smaller and the next larger size of which something is known."""
        below = max((other for other in self._ratios if other < size), default=None)
        above = min((other for other in self._ratios if other > size), default=None)
        return [other for other in (below, above) if other is not None]


@dataclass(slots=True)
class Outlook:
    """Predicts a step to which guesses are added, each behind as much as the longest request sees.

    A chain of guesses, whoever's they are, reads the keys and values once, and each that leaves the
    path of others reads them anew.
    """

    num_rows: int  # without guesses
    least_s: float
    fork_s: float  # what the first guess of a path adds
    row_s: float  # and what another one does
    ratio: Callable[[int], float]
    _ratios: dict[int, float] = field(default_factory=dict)

    def seconds(self, num_guesses: int, num_forks: int = 0) -> float:
        """Return about how long the step takes with guesses, of which some fork."""
        size = _size(self.num_rows + num_guesses)
        ratio = self._ratios.get(size)
        if ratio is None:
            ratio = self._ratios[size] = self.ratio(size)
        least_s = self.least_s
        if num_guesses:
            num_paths = num_forks + (num_guesses > num_forks)
            least_s += num_paths * self.fork_s + (num_guesses - num_paths) * self.row_s
        return least_s * ratio


def _size(num_rows: int) -> int:
    """Return a class of numbers of rows: each to 8, then four to a doubling."""
    if num_rows <= 8:
        return num_rows
    return math.ceil(4 * math.log2(num_rows / 8)) + 8
