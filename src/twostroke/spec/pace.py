"""How long a step will take, from what it must do and how long others took."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twostroke.spec.learned import Fit, Ratios, Spell

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.core.hardware import Hardware
    from twostroke.program import BatchShape
    from twostroke.program.cost import StepCost

_MOST_LIKED = 8  # rows: no kernel takes more at once


@dataclass(slots=True)
class Pace:
    """Predicts the seconds of a step by its cost, corrected by what steps of its size took.

    How much longer memory and arithmetic take than the machine's limits say is learned from all
    steps (`Fit`): prompts tell of the one, single rows of the other, and so a step of some rows is
    known about before one was tried. What steps of a size take beside that is learned for each
    (`Ratios`), and how slow the machine is at the moment from those just before (`Spell`). Up to
    `rows_together` rows take as long as the next power of two of them.
    """

    cost: StepCost
    hardware: Hardware | None
    rows_together: int = 1
    _fit: Fit = field(default_factory=Fit)
    _ratios: Ratios = field(default_factory=Ratios)
    _spell: Spell = field(default_factory=Spell)

    @property
    def num_steps(self) -> int:
        """How many were measured."""
        return self._fit.num_steps

    def seconds(self, batch: BatchShape) -> float:
        """Return about how long a step takes."""
        fitted_s = self._fit.seconds(*self._padded_s(batch))
        return fitted_s * self._ratios.of(_size(batch.num_rows)) * self._spell.factor

    def age(self, num_rows: int) -> int:
        """Return how many steps ago one of about as many rows was measured."""
        return self._ratios.age(_size(num_rows))

    def outlook(self, batch: BatchShape) -> Outlook:
        """Return how to predict steps with guesses beside those of `batch`."""
        start = max(batch.starts)
        plain_s, one_s, two_s = (
            self._fit.seconds(*self._least_s(shape)) * self._spell.factor
            for shape in (batch, batch.with_request(start, 1), batch.with_request(start, 2))
        )
        return Outlook(
            batch.num_rows,
            self.rows_together,
            plain_s,
            one_s - plain_s,
            two_s - one_s,
            self._ratios.of,
        )

    def learn(self, batch: BatchShape, elapsed_s: float) -> None:
        """Hear how long a step took."""
        parts, size = self._padded_s(batch), _size(batch.num_rows)
        if not sum(parts) or not elapsed_s:
            return
        usual_s = elapsed_s / self._spell.factor
        wrong = usual_s / (self._fit.seconds(*parts) * self._ratios.next_step().of(size))
        self._fit.learn(*parts, usual_s)
        count = self._ratios.learn(size, usual_s / self._fit.seconds(*parts))
        self._spell.learn(wrong, count)

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

        They are the powers of two, and those with which the rows are one: kernels like these best.
        """
        powers = [1 << exponent for exponent in range(most.bit_length())]
        full = [1 << exponent for exponent in range(_MOST_LIKED.bit_length())]
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
