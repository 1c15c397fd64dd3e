"""What is learned of how long steps take: of all, of each size, and of the moment."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

_NEAR = 4  # classes of sizes


@dataclass(slots=True)
class Fit:
    """How many times as long as at the machine's limits memory traffic and arithmetic take."""

    STEP: ClassVar[float] = 0.02  # of a step's way into what is believed of all
    LEAST: ClassVar[float] = 0.05
    MANY: ClassVar[int] = 10  # steps, after which none is believed to be that far off

    memory: float = 1.0
    arithmetic: float = 1.0
    num_steps: int = 0

    def seconds(self, memory_s: float, arithmetic_s: float) -> float:
        """Return the time of both, one after the other.

        They overlap, but their sum grows with the rows as real steps do, without a corner.
        """
        return self.memory * memory_s + self.arithmetic * arithmetic_s

    def learn(self, memory_s: float, arithmetic_s: float, elapsed_s: float) -> None:
        """Move what is believed of both towards a step (normalized least mean squares)."""
        self.num_steps += 1
        fitted_s = self.seconds(memory_s, arithmetic_s)
        wrong_s = elapsed_s - fitted_s
        if self.num_steps > self.MANY:
            wrong_s = min(max(wrong_s, -fitted_s / 2), fitted_s / 2)
        share = max(self.STEP, 1 / self.num_steps)
        step = share * wrong_s / (memory_s**2 + arithmetic_s**2)
        self.memory = max(self.LEAST, self.memory + step * memory_s)
        self.arithmetic = max(self.LEAST, self.arithmetic + step * arithmetic_s)


@dataclass(slots=True)
class Ratio:
    """Measured over fitted time, from so many steps, of which the last was that one."""

    value: float
    count: int
    step: int


@dataclass(slots=True)
class Ratios:
    """What steps of each size take beside what is fitted to all.

    Sizes are numbers of rows, in classes that grow with them: kernels take so many rows at once. A
    size of which nothing is known, or nothing new for long, is thought to be like its
    neighbours.
    """

    STEP: ClassVar[float] = 0.03  # of a new measurement's way into what is believed,
    STEP_IF_NEW: ClassVar[float] = (
        0.12  # if the step before had another size: that tells them apart
    )
    MOST_CHANGE: ClassVar[float] = 1.5  # of one measurement: others may have had the processor
    TRUST: ClassVar[int] = 1000  # steps after which what was measured of other sizes says as much,
    MANY: ClassVar[int] = 10  # if what is known comes from so many steps; sooner if from fewer

    _known: dict[int, Ratio] = field(default_factory=dict)
    _num_steps: int = 0
    _last_size: int = 0

    def next_step(self) -> Ratios:
        """Count one more step."""
        self._num_steps += 1
        return self

    def of(self, size: int) -> float:
        """Return measured over fitted time, for steps of a size."""
        known = self._known.get(size)
        if known is None:
            return self._beside(size)
        age = self._num_steps - known.step
        trust = math.exp(-age / (self.TRUST * min(1.0, known.count / self.MANY)))
        return known.value + (1 - trust) * (self._beside(size) - known.value)

    def age(self, size: int) -> int:
        """Return how many steps ago one of a size was measured."""
        known = self._known.get(size)
        return self._num_steps - known.step if known is not None else self._num_steps

    def learn(self, size: int, measured: float) -> int:
        """Hear what the newest step took; returns how often steps of its size were measured."""
        known = self._known.get(size)
        if known is None:  # one measurement may be far off
            known = Ratio(math.sqrt(measured * self._beside(size)), 1, self._num_steps)
            self._known[size] = known
        else:
            most = self.MOST_CHANGE
            measured = min(max(measured, known.value / most), known.value * most)
            known.count += 1
            step = self.STEP_IF_NEW if size != self._last_size else self.STEP
            known.value += max(step, 1 / known.count) * (measured - known.value)
            known.step = self._num_steps
        self._last_size = size
        return known.count

    def _beside(self, size: int) -> float:
        """Return what the next sizes, if they are near, let expect of one."""
        below = max((other for other in self._known if other < size), default=None)
        above = min((other for other in self._known if other > size), default=None)
        near = [s for s in (below, above) if s is not None and abs(s - size) <= _NEAR]
        return math.prod(self._known[s].value for s in near) ** (1 / max(1, len(near)))


@dataclass(slots=True)
class Spell:
    """How many times longer steps take at the moment than they do otherwise.

    Machines are shared, and slow for a while now and then. The best of several sizes must not be
    the one that had the better moments: so a step is held against those just before it, and what
    all of them took longer is put down to a spell, which is soon forgotten.
    """

    STEP: ClassVar[float] = 0.4  # of what a step took longer than expected
    KEPT: ClassVar[float] = 0.98  # a step
    MOST_WRONG: ClassVar[float] = 2.0
    FEW: ClassVar[int] = 10  # steps of a size, which say nothing of the moment yet

    factor: float = 1.0

    def learn(self, wrong: float, count: int) -> None:
        """Hear that the `count`th step of its size took `wrong` times as long as expected."""
        if count > self.FEW:
            wrong = min(max(wrong, 1 / self.MOST_WRONG), self.MOST_WRONG)
            self.factor = (self.factor * wrong**self.STEP) ** self.KEPT
