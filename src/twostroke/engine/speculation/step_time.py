"""How long a step takes, from its cost and from steps that were measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.core.hardware import Hardware
    from twostroke.model.program import BatchShape
    from twostroke.model.program.cost import StepCost

_CLEAR = 10  # steps of a size, after which its time is trusted
# Shares of a new measurement in what is known:
_FIT_STEP = 0.02
_RATIO_STEP = 0.03
_RATIO_STEP_IF_NEW = 0.12  # where the step before had another size: the two can be compared
_SLOWDOWN_STEP = 0.4
_SLOWDOWN_KEPT = 0.98  # a step
_LEAST_RATE = 0.05
_MOST_CHANGE = 1.5  # of a ratio by one measurement: others may have had the processor
_MOST_SURPRISE = 2.0  # that one step may count for in the slowdown
_TRUST = 1000  # steps after which neighbouring sizes say as much as an old measurement
_NEAR = 4  # classes of sizes


@dataclass(slots=True)
class _Ratio:
    """Measured over fitted time, from `count` steps; `step` is the most recent one."""

    value: float
    count: int
    step: int


@dataclass(slots=True)
class StepTimeModel:
    """Predicts the seconds of a step.

    Three things are learned: how much longer memory traffic and arithmetic take than at the
    machine's limits, over all steps; how long steps of each size take compared with that
    (`_ratios`); and how slow the machine is at the moment (`slowdown`). Machines are shared, and
    sizes that are met in the same slow period must still compare as they would outside it. Up to
    `rows_together` rows take as long as the next power of two of them.
    """

    cost: StepCost
    hardware: Hardware | None
    rows_together: int = 1
    num_steps: int = 0
    memory: float = 1.0  # times as long as at the machine's limits
    arithmetic: float = 1.0
    slowdown: float = 1.0
    _ratios: dict[int, _Ratio] = field(default_factory=dict)
    _last_size: int = 0

    def seconds(self, batch: BatchShape) -> float:
        """Return about how long a step takes."""
        fitted_s = self._fitted_s(*self._padded_s(batch))
        return fitted_s * self._ratio(_size(batch.num_rows)) * self.slowdown

    def age(self, num_rows: int) -> int:
        """Return how many steps ago one of about as many rows was measured."""
        known = self._ratios.get(_size(num_rows))
        return self.num_steps - (0 if known is None else known.step)

    def outlook(self, batch: BatchShape) -> Callable[[int, int], float]:
        """Return a function that predicts steps with guesses besides the rows of `batch`.

        It takes the number of guesses, and how many of them fork. All are at the longest request's
        position. Chains of guesses read the keys and values once; each that forks reads them again.
        """
        start, num_plain = max(batch.starts), batch.num_rows
        fitted_s, one_s, two_s = (
            self._fitted_s(*self._least_s(shape)) * self.slowdown
            for shape in (batch, batch.with_request(start, 1), batch.with_request(start, 2))
        )
        path_s, row_s = one_s - fitted_s, two_s - one_s  # of a path's first guess, and the others
        ratio = cache(self._ratio)

        def seconds(num_guesses: int, num_forks: int) -> float:
            num_rows = num_plain + num_guesses
            num_paths = num_forks + (num_guesses > num_forks)
            num_idle = num_padded(num_rows, self.rows_together) - num_rows
            more_s = num_paths * path_s + (num_guesses - num_paths) * row_s
            return (fitted_s + num_idle * row_s + more_s) * ratio(_size(num_rows))

        return seconds

    def learn(self, batch: BatchShape, elapsed_s: float) -> None:
        """Take in how long a step took."""
        parts, size = self._padded_s(batch), _size(batch.num_rows)
        if not sum(parts) or not elapsed_s:
            return
        self.num_steps += 1
        usual_s = elapsed_s / self.slowdown
        surprise = usual_s / (self._fitted_s(*parts) * self._ratio(size))
        self._fit(*parts, usual_s)
        ratio = self._learn_ratio(size, usual_s / self._fitted_s(*parts))
        if ratio.count > _CLEAR:
            surprise = min(max(surprise, 1 / _MOST_SURPRISE), _MOST_SURPRISE)
            self.slowdown = (self.slowdown * surprise**_SLOWDOWN_STEP) ** _SLOWDOWN_KEPT

    def _fitted_s(self, memory_s: float, arithmetic_s: float) -> float:
        """Return the sum of both: they overlap, but it grows with the rows as real steps do."""
        return self.memory * memory_s + self.arithmetic * arithmetic_s

    def _fit(self, memory_s: float, arithmetic_s: float, elapsed_s: float) -> None:
        """Move both factors towards a step (normalized least mean squares)."""
        fitted_s = self._fitted_s(memory_s, arithmetic_s)
        wrong_s = elapsed_s - fitted_s
        if self.num_steps > _CLEAR:
            wrong_s = min(max(wrong_s, -fitted_s / 2), fitted_s / 2)
        share = max(_FIT_STEP, 1 / self.num_steps)
        step = share * wrong_s / (memory_s**2 + arithmetic_s**2)
        self.memory = max(_LEAST_RATE, self.memory + step * memory_s)
        self.arithmetic = max(_LEAST_RATE, self.arithmetic + step * arithmetic_s)

    def _ratio(self, size: int) -> float:
        """Return measured over fitted time; old measurements fade into those of neighbours."""
        known = self._ratios.get(size)
        if known is None:
            return self._neighbours(size)
        age = self.num_steps - known.step
        trust = math.exp(-age / (_TRUST * min(1.0, known.count / _CLEAR)))
        return known.value + (1 - trust) * (self._neighbours(size) - known.value)

    def _neighbours(self, size: int) -> float:
        """Return the mean ratio of the next measured sizes, if they are near; otherwise 1."""
        below = max((other for other in self._ratios if other < size), default=None)
        above = min((other for other in self._ratios if other > size), default=None)
        near = [s for s in (below, above) if s is not None and abs(s - size) <= _NEAR]
        return math.prod(self._ratios[s].value for s in near) ** (1 / max(1, len(near)))

    def _learn_ratio(self, size: int, measured: float) -> _Ratio:
        known = self._ratios.get(size)
        if known is None:  # one measurement may be far off
            known = _Ratio(math.sqrt(measured * self._neighbours(size)), 1, self.num_steps)
            self._ratios[size] = known
        else:
            measured = min(max(measured, known.value / _MOST_CHANGE), known.value * _MOST_CHANGE)
            known.count += 1
            known.step = self.num_steps
            step = _RATIO_STEP_IF_NEW if size != self._last_size else _RATIO_STEP
            known.value += max(step, 1 / known.count) * (measured - known.value)
        self._last_size = size
        return known

    def _padded_s(self, batch: BatchShape) -> tuple[float, float]:
        """Return both times at the machine's limits, for as many rows as kernels compute."""
        memory_s, arithmetic_s = self._least_s(batch)
        num_rows = batch.num_rows
        return memory_s, arithmetic_s * num_padded(num_rows, self.rows_together) / max(1, num_rows)

    def _least_s(self, batch: BatchShape) -> tuple[float, float]:
        """Return the times of memory traffic and of arithmetic at the machine's limits."""
        cost, hardware = self.cost.of(batch), self.hardware
        if hardware is None:  # any rates do: what is learned corrects them
            return cost.bytes / 10e9, cost.flops / 100e9
        return cost.bytes / hardware.bandwidth, cost.flops / hardware.peak


def num_padded(num_rows: int, together: int) -> int:
    """Return how many rows kernels compute, which fill up to `together` to a power of two."""
    return 1 << (num_rows - 1).bit_length() if 0 < num_rows <= together else num_rows


def _size(num_rows: int) -> int:
    """Return a class of numbers of rows: each to 8, then four to a doubling."""
    if num_rows <= 8:
        return num_rows
    return math.ceil(4 * math.log2(num_rows / 8)) + 8
