"""Predicts the time of a step from its cost and from measured steps."""

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

_NUM_TRUSTED_STEPS = 10  # of a size, after which its time is trusted
# Weights of a new measurement:
_FIT_WEIGHT = 0.02
_RATIO_WEIGHT = 0.03
_RATIO_WEIGHT_IF_SIZE_CHANGED = 0.12  # the step before had another size: the two can be compared
_SLOWDOWN_WEIGHT = 0.4
_SLOWDOWN_DECAY = 0.98  # with each step
_MIN_FACTOR = 0.05
_MAX_RATIO_CHANGE = 1.5  # by one measurement, since other programs may have used the processor
_MAX_SURPRISE = 2.0  # of one step, for the slowdown
_TRUST_STEPS = 1000  # after which an old measurement counts less than neighbouring sizes
_MAX_SIZE_DISTANCE = 4  # between neighbouring size classes


@dataclass(slots=True)
class _Ratio:
    """Measured over fitted time of steps of one size, from `count` steps.

    The last of them was step number `step`.
    """

    value: float
    count: int
    step: int


@dataclass(slots=True)
class StepTimeModel:
    """Predicts the seconds of a step from its rows, and learns from measured steps.

    It learns three things. Over all steps: how much longer memory traffic and arithmetic take than
    at the machine's limits. For each size: how long steps take compared with that (`_ratios`). And
    how slow the machine is at present (`slowdown`), because machines are shared, and sizes that are
    measured in the same slow period must compare as they do at other times.

    Attributes:
        cost: computes bytes and FLOPs of a step.
        hardware: the limits of the machine; None if they are not known.
        rows_together: up to this number, rows take as long as the next power of two of rows.
        num_steps: measured steps.
        memory, arithmetic: factors on the times at the machine's limits.
        slowdown: factor on all times at present.
    """

    cost: StepCost
    hardware: Hardware | None
    rows_together: int = 1
    num_steps: int = 0
    memory: float = 1.0
    arithmetic: float = 1.0
    slowdown: float = 1.0
    _ratios: dict[int, _Ratio] = field(default_factory=dict)
    _last_size: int = 0

    def seconds(self, batch: BatchShape) -> float:
        """Return the predicted seconds of a step."""
        fitted_s = self._fitted_s(*self._padded_s(batch))
        return fitted_s * self._ratio(_size_class(batch.num_rows)) * self.slowdown

    def age(self, num_rows: int) -> int:
        """Return how many steps ago a step of about `num_rows` rows was measured."""
        measured = self._ratios.get(_size_class(num_rows))
        return self.num_steps - (0 if measured is None else measured.step)

    def with_drafts(self, batch: BatchShape) -> Callable[[int, int], float]:
        """Return a function that predicts the time of a step with drafts besides `batch`.

        Its arguments are the number of drafts, and how many of them fork from a path. All drafts
        are taken to be at the longest request's position. A path of drafts reads the keys and
        values once, and each fork begins another path.
        """
        start, num_plain = max(batch.starts), batch.num_rows
        fitted_s, with_one_s, with_two_s = (
            self._fitted_s(*self._min_s(shape)) * self.slowdown
            for shape in (batch, batch.with_request(start, 1), batch.with_request(start, 2))
        )
        path_s = with_one_s - fitted_s  # the first draft of a path
        row_s = with_two_s - with_one_s  # each other draft
        ratio = cache(self._ratio)

        def seconds(num_drafts: int, num_forks: int) -> float:
            num_rows = num_plain + num_drafts
            num_paths = num_forks + (num_drafts > num_forks)
            num_idle = num_padded(num_rows, self.rows_together) - num_rows
            drafts_s = num_paths * path_s + (num_drafts - num_paths) * row_s
            return (fitted_s + num_idle * row_s + drafts_s) * ratio(_size_class(num_rows))

        return seconds

    def learn(self, batch: BatchShape, elapsed_s: float) -> None:
        """Learn from the measured seconds of a step."""
        memory_s, arithmetic_s = self._padded_s(batch)
        size = _size_class(batch.num_rows)
        if not memory_s + arithmetic_s or not elapsed_s:
            return
        self.num_steps += 1
        normal_s = elapsed_s / self.slowdown
        surprise = normal_s / (self._fitted_s(memory_s, arithmetic_s) * self._ratio(size))
        self._fit(memory_s, arithmetic_s, normal_s)
        ratio = self._learn_ratio(size, normal_s / self._fitted_s(memory_s, arithmetic_s))
        if ratio.count > _NUM_TRUSTED_STEPS:
            surprise = min(max(surprise, 1 / _MAX_SURPRISE), _MAX_SURPRISE)
            self.slowdown = (self.slowdown * surprise**_SLOWDOWN_WEIGHT) ** _SLOWDOWN_DECAY

    def _fitted_s(self, memory_s: float, arithmetic_s: float) -> float:
        """Return the fitted seconds of a step from the times of its memory traffic and arithmetic.

        They are added: the times overlap, but the sum grows with the rows as steps do.
        """
        return self.memory * memory_s + self.arithmetic * arithmetic_s

    def _fit(self, memory_s: float, arithmetic_s: float, elapsed_s: float) -> None:
        """Move the factors of memory and arithmetic towards a measured step.

        The method is normalized least mean squares.
        """
        fitted_s = self._fitted_s(memory_s, arithmetic_s)
        error_s = elapsed_s - fitted_s
        if self.num_steps > _NUM_TRUSTED_STEPS:
            error_s = min(max(error_s, -fitted_s / 2), fitted_s / 2)
        weight = max(_FIT_WEIGHT, 1 / self.num_steps)
        step = weight * error_s / (memory_s**2 + arithmetic_s**2)
        self.memory = max(_MIN_FACTOR, self.memory + step * memory_s)
        self.arithmetic = max(_MIN_FACTOR, self.arithmetic + step * arithmetic_s)

    def _ratio(self, size: int) -> float:
        """Return measured over fitted time of steps of a size class.

        Old measurements fade into the ratio of the neighbouring sizes.
        """
        measured = self._ratios.get(size)
        if measured is None:
            return self._neighbours_ratio(size)
        age = self.num_steps - measured.step
        trust = math.exp(-age / (_TRUST_STEPS * min(1.0, measured.count / _NUM_TRUSTED_STEPS)))
        return measured.value + (1 - trust) * (self._neighbours_ratio(size) - measured.value)

    def _neighbours_ratio(self, size: int) -> float:
        """Return the mean ratio of the next measured size classes, or 1 without near sizes."""
        below = max((other for other in self._ratios if other < size), default=None)
        above = min((other for other in self._ratios if other > size), default=None)
        neighbours = [
            other
            for other in (below, above)
            if other is not None and abs(other - size) <= _MAX_SIZE_DISTANCE
        ]
        product = math.prod(self._ratios[other].value for other in neighbours)
        return product ** (1 / max(1, len(neighbours)))

    def _learn_ratio(self, size: int, value: float) -> _Ratio:
        """Take in a measured over fitted time for a size class; return the class's new ratio."""
        ratio = self._ratios.get(size)
        if ratio is None:  # a single measurement may be far off
            mean = math.sqrt(value * self._neighbours_ratio(size))
            ratio = self._ratios[size] = _Ratio(mean, 1, self.num_steps)
        else:
            value = min(
                max(value, ratio.value / _MAX_RATIO_CHANGE), ratio.value * _MAX_RATIO_CHANGE
            )
            ratio.count += 1
            ratio.step = self.num_steps
            has_changed = size != self._last_size
            weight = _RATIO_WEIGHT_IF_SIZE_CHANGED if has_changed else _RATIO_WEIGHT
            ratio.value += max(weight, 1 / ratio.count) * (value - ratio.value)
        self._last_size = size
        return ratio

    def _padded_s(self, batch: BatchShape) -> tuple[float, float]:
        """Return the seconds of memory traffic and of arithmetic at the machine's limits.

        They are for the number of rows that kernels compute.
        """
        memory_s, arithmetic_s = self._min_s(batch)
        num_rows = batch.num_rows
        return memory_s, arithmetic_s * num_padded(num_rows, self.rows_together) / max(1, num_rows)

    def _min_s(self, batch: BatchShape) -> tuple[float, float]:
        """Return the seconds of a step's memory traffic and arithmetic at the machine's limits."""
        cost, hardware = self.cost.of(batch), self.hardware
        if hardware is None:  # any limits do, because the learned factors correct them
            return cost.bytes / 10e9, cost.flops / 100e9
        return cost.bytes / hardware.bandwidth, cost.flops / hardware.peak


def num_padded(num_rows: int, rows_together: int) -> int:
    """Return how many rows kernels compute for `num_rows` rows of a step.

    It is a power of two, up to `rows_together` rows.
    """
    return 1 << (num_rows - 1).bit_length() if 0 < num_rows <= rows_together else num_rows


def _size_class(num_rows: int) -> int:
    """Return the size class of a step's number of rows.

    Each number up to 8 is a class; then there are four for each doubling.
    """
    if num_rows <= 8:
        return num_rows
    return math.ceil(4 * math.log2(num_rows / 8)) + 8
