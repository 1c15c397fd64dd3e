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
    """How much longer steps of one size take than the fitted model says.

    Attributes:
        value: measured time divided by fitted time.
        count: the number of measured steps.
        step: the number of the step that was measured last.
    """

    value: float
    count: int
    step: int


@dataclass(slots=True)
class StepTimeModel:
    """Predicts the seconds of a step from its rows, and learns from measured steps.

    The speculator uses it to decide how many drafts pay. It learns three things: how much longer
    memory traffic and arithmetic take than at the machine's limits; how much longer steps of each
    size take than that (`_ratios`); and how slow the machine is at present (`slowdown`). The last
    is separate because machines are shared: a size that is measured only while the machine is slow
    must not seem slower than other sizes.

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
        """Return how many steps ago a step with about this number of rows was measured."""
        measured = self._ratios.get(_size_class(num_rows))
        return self.num_steps - (0 if measured is None else measured.step)

    def with_drafts(self, batch: BatchShape) -> Callable[[int, int], float]:
        """Return a function that predicts the seconds of a batch's step with drafts added.

        Its arguments are the number of drafts, and how many of them begin another branch. All
        drafts are taken to be at the longest request's position. A branch of drafts reads the keys
        and values once.
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
        """Predict a step's seconds from the times of memory traffic and arithmetic at the limits.

        The two times are added although they overlap: the sum grows with the number of rows as the
        time of real steps does.
        """
        return self.memory * memory_s + self.arithmetic * arithmetic_s

    def _fit(self, memory_s: float, arithmetic_s: float, elapsed_s: float) -> None:
        """Move the factors of memory traffic and arithmetic towards a measured step.

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
        """Return measured time divided by fitted time, for steps of a size class.

        The ratio is near 1; old measurements fade into the ratio of the neighbouring sizes.
        """
        measured = self._ratios.get(size)
        if measured is None:
            return self._neighbours_ratio(size)
        age = self.num_steps - measured.step
        trust = math.exp(-age / (_TRUST_STEPS * min(1.0, measured.count / _NUM_TRUSTED_STEPS)))
        return measured.value + (1 - trust) * (self._neighbours_ratio(size) - measured.value)

    def _neighbours_ratio(self, size: int) -> float:
        """Return the geometric mean of the ratios of the two nearest measured size classes.

        1 if no near size was measured.
        """
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
        """Update a size class's ratio with the measured ratio of a step; return the new ratio."""
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
        """Return a step's seconds of memory traffic and of arithmetic at the machine's limits.

        Rows are counted as kernels compute them, padded to a power of two.
        """
        memory_s, arithmetic_s = self._min_s(batch)
        num_rows = batch.num_rows
        return memory_s, arithmetic_s * num_padded(num_rows, self.rows_together) / max(1, num_rows)

    def _min_s(self, batch: BatchShape) -> tuple[float, float]:
        """Return a step's seconds of memory traffic and of arithmetic at the machine's limits.

        Rows are counted without padding.
        """
        cost, hardware = self.cost.of(batch), self.hardware
        if hardware is None:  # any limits do, because the learned factors correct them
            return cost.bytes / 10e9, cost.flops / 100e9
        return cost.bytes / hardware.bandwidth, cost.flops / hardware.peak


def num_padded(num_rows: int, rows_together: int) -> int:
    """Return how many rows kernels compute for a step of `num_rows` rows.

    Up to `rows_together`, the number is rounded up to a power of two.
    """
    return 1 << (num_rows - 1).bit_length() if 0 < num_rows <= rows_together else num_rows


def _size_class(num_rows: int) -> int:
    """Return the class of a step's size, for measured times.

    Each number of rows up to 8 is a class; then there are four classes for each doubling.
    """
    if num_rows <= 8:
        return num_rows
    return math.ceil(4 * math.log2(num_rows / 8)) + 8
