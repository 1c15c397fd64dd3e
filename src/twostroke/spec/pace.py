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

_STEP = 0.03  # of a new measurement's way into what is believed
_STEP_IF_NEW = 0.12  # if the step before had another size: that tells them apart
_MOST_CHANGE = 1.5  # of one measurement: others may have had the processor
_NEAR = 4  # classes of sizes
_FIT_STEP = 0.02  # of a step's way into what is believed of all
_LEAST = 0.05
_FEW = 10  # times that a size was met before what is unexpected is put down to the moment
_SPELL_STEP = 0.4  # of what a step took longer than expected that is put down to the moment
_SPELL_KEPT = 0.98  # a step
_MOST_WRONG = 2.0
_TRUST = 1000  # steps after which what was measured of other sizes says as much,
_MANY = 10  # if what is known comes from so many steps; sooner if from fewer


@dataclass(slots=True)
class _Ratio:
    """Measured over fitted time, from so many steps, of which the last was that one."""

    value: float
    count: int
    step: int


@dataclass(slots=True)
class Pace:
    """Predicts the seconds of a step by its cost, corrected by what steps of its size took.

    How much longer memory and arithmetic take than the machine's limits say is learned from all
    steps: prompts tell of the one, single rows of the other, and so a step of some rows is known
    about before one was tried. Sizes are numbers of rows, in classes that grow with them: kernels
    take rows by fours and eights. A size of which nothing is known, or nothing new for long, is
    thought to be like its neighbours. Kernels take up to `rows_together` rows at once, and fewer
    for as long as the next power of two.

    Machines are shared, and slow for a while now and then. The best of several sizes must not be
    the one that had the better moments: so a step is held against those just before it, and what
    all of them took longer is put down to a `spell`, which is soon forgotten.
    """

    cost: StepCost
    hardware: Hardware | None
    rows_together: int = 1
    _memory: float = 1.0  # times as long as at the limits
    _arithmetic: float = 1.0
    _ratios: dict[int, _Ratio] = field(default_factory=dict)
    _num_steps: int = 0
    _last_size: int = 0
    _spell: float = 1.0  # times as long as steps take otherwise

    def seconds(self, batch: BatchShape) -> float:
        """Return about how long a step takes."""
        return self._fitted_s(batch) * self._ratio(_size(batch.num_rows)) * self._spell

    def age(self, num_rows: int) -> int:
        """Return how many steps ago one of about as many rows was measured."""
        known = self._ratios.get(_size(num_rows))
        return self._num_steps - known.step if known is not None else self._num_steps

    def outlook(self, batch: BatchShape) -> Outlook:
        """Return how to predict steps with guesses beside those of `batch`."""
        start = max(start for start, _ in batch.spans)
        fitted_s, one_s, two_s = (
            self._together_s(
                *self._least_s(BatchShape((*batch.spans, *more), batch.num_sampled + count))
            )
            * self._spell
            for count, more in enumerate(((), ((start, 1),), ((start, 2),)))
        )
        return Outlook(
            batch.num_rows,
            self.rows_together,
            fitted_s,
            one_s - fitted_s,
            two_s - one_s,
            self._ratio,
        )

    def learn(self, batch: BatchShape, elapsed_s: float) -> None:
        """Hear how long a step took."""
        parts, size = self._padded_s(batch), _size(batch.num_rows)
        if not sum(parts) or not elapsed_s:
            return
        self._num_steps += 1
        usual_s = elapsed_s / self._spell
        wrong = usual_s / (self._together_s(*parts) * self._ratio(size))
        self._fit(*parts, usual_s)
        self._learn_ratio(size, usual_s / self._together_s(*parts))
        self._last_size = size
        if self._ratios[size].count > _FEW:
            wrong = min(max(wrong, 1 / _MOST_WRONG), _MOST_WRONG)
            self._spell = (self._spell * wrong**_SPELL_STEP) ** _SPELL_KEPT

    def _learn_ratio(self, size: int, measured: float) -> None:
        known = self._ratios.get(size)
        if known is None:  # one measurement may be far off
            measured = math.sqrt(measured * self._beside(size))
            self._ratios[size] = _Ratio(measured, 1, self._num_steps)
            return
        measured = min(max(measured, known.value / _MOST_CHANGE), known.value * _MOST_CHANGE)
        known.count += 1
        step = _STEP_IF_NEW if size != self._last_size else _STEP
        known.value += max(step, 1 / known.count) * (measured - known.value)
        known.step = self._num_steps

    def _fit(self, memory_s: float, arithmetic_s: float, elapsed_s: float) -> None:
        """Move what is believed of both towards a step (normalized least mean squares)."""
        fitted_s = self._together_s(memory_s, arithmetic_s)
        wrong_s = elapsed_s - fitted_s
        if self._num_steps > _MANY:
            wrong_s = min(max(wrong_s, -fitted_s / 2), fitted_s / 2)
        share = max(_FIT_STEP, 1 / self._num_steps)
        step = share * wrong_s / (memory_s**2 + arithmetic_s**2)
        self._memory = max(_LEAST, self._memory + step * memory_s)
        self._arithmetic = max(_LEAST, self._arithmetic + step * arithmetic_s)

    def _fitted_s(self, batch: BatchShape) -> float:
        """Return about how long a step takes, whatever is known of steps of its size."""
        return self._together_s(*self._padded_s(batch))

    def _together_s(self, memory_s: float, arithmetic_s: float) -> float:
        """Return the time of memory traffic and arithmetic, one after the other.

        They overlap, but their sum grows with the rows as real steps do, without a corner.
        """
        return self._memory * memory_s + self._arithmetic * arithmetic_s

    def _padded_s(self, batch: BatchShape) -> tuple[float, float]:
        """Return both at the machine's limits, for as many rows as kernels compute."""
        memory_s, arithmetic_s = self._least_s(batch)
        num_rows = batch.num_rows
        return memory_s, arithmetic_s * num_padded(num_rows, self.rows_together) / max(1, num_rows)

    def _least_s(self, batch: BatchShape) -> tuple[float, float]:
        """Return the time of memory traffic and that of arithmetic, at the machine's limits."""
        cost, hardware = self.cost.of(batch), self.hardware
        if hardware is None:  # the rates of some machine: what is learned makes up for it
            return cost.bytes / 10e9, cost.flops / 100e9
        return cost.bytes / hardware.bandwidth, cost.flops / hardware.peak

    def _ratio(self, size: int) -> float:
        """Return measured over fitted time, for steps of a size."""
        known = self._ratios.get(size)
        if known is None:
            return self._beside(size)
        age = self._num_steps - known.step
        trust = math.exp(-age / (_TRUST * min(1.0, known.count / _MANY)))
        return known.value + (1 - trust) * (self._beside(size) - known.value)

    def _beside(self, size: int) -> float:
        """Return what the next sizes, if they are near, let expect of one."""
        below = max((other for other in self._ratios if other < size), default=None)
        above = min((other for other in self._ratios if other > size), default=None)
        near = [s for s in (below, above) if s is not None and abs(s - size) <= _NEAR]
        return math.prod(self._ratios[s].value for s in near) ** (1 / max(1, len(near)))


@dataclass(slots=True)
class Outlook:
    """Predicts a step to which guesses are added, each behind as much as the longest request sees.

    A chain of guesses, whoever's they are, reads the keys and values once, and each that leaves the
    path of others reads them anew.
    """

    num_rows: int  # without guesses
    rows_together: int
    fitted_s: float
    fork_s: float  # what the first guess of a path adds
    row_s: float  # and what another one does
    ratio: Callable[[int], float]
    _ratios: dict[int, float] = field(default_factory=dict)

    def probes(self, most: int) -> set[int]:
        """Return numbers of guesses up to `most`, of which one costs least a guess, or nearly.

        They are the powers of two, and those that leave no row of a kernel idle.
        """
        powers = [1 << exponent for exponent in range(most.bit_length())]
        full = [1 << exponent for exponent in range(self.rows_together.bit_length())]
        return {n for n in (*powers, *[rows - self.num_rows for rows in full]) if 0 < n <= most}

    def seconds(self, num_guesses: int, num_forks: int = 0) -> float:
        """Return about how long the step takes with guesses, of which some fork."""
        num_rows = self.num_rows + num_guesses
        size = _size(num_rows)
        ratio = self._ratios.get(size)
        if ratio is None:
            ratio = self._ratios[size] = self.ratio(size)
        num_idle = num_padded(num_rows, self.rows_together) - num_rows
        fitted_s = self.fitted_s + num_idle * self.row_s
        if num_guesses:
            num_paths = num_forks + (num_guesses > num_forks)
            fitted_s += num_paths * self.fork_s + (num_guesses - num_paths) * self.row_s
        return fitted_s * ratio


def num_padded(num_rows: int, together: int) -> int:
    """Return how many rows kernels compute, which fill up to `together` to a power of two."""
    return 1 << (num_rows - 1).bit_length() if 0 < num_rows <= together else num_rows


def _size(num_rows: int) -> int:
    """Return a class of numbers of rows: each to 8, then four to a doubling."""
    if num_rows <= 8:
        return num_rows
    return math.ceil(4 * math.log2(num_rows / 8)) + 8
