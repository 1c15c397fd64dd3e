"""Chooses the format of each matrix: lowest divergence for a size, or smallest size.

Divergences of matrices add up. Dynamic programming solves this knapsack problem, as for the bits of
activations (ADR 0030).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.backends.activation_bits.tree import KnapsackItem, allocate
from twostroke.core.errors import UsageError
from twostroke.core.files import megabytes
from twostroke.core.frozen import Frozen
from twostroke.model.quant import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Measure = Mapping[str, Mapping[str, float]]  # by matrix and format

_NUM_BINS: Final = 20_000  # of a budget; rounding up of hundreds of matrices loses at most 1%


class Goal(Frozen):
    """The goal of a file; one field is set.

    `bits` is the average per weight of the layers, `num_bytes` the size of the file, and `kl` the
    mean KL divergence in nats.
    """

    bits: float | None = None
    num_bytes: int | None = None
    kl: float | None = None

    def describe(self) -> str:
        """Return the goal as text."""
        if self.kl is not None:
            return f"KL {self.kl:g}"
        if self.bits is not None:
            return f"{self.bits:g} bits"
        return megabytes(self.num_bytes or 0)


def within_size(
    kl: Measure, num_values: Mapping[str, int], goal: Goal, other_bytes: int
) -> dict[str, str]:
    """Return the formats with the lowest divergence; `other_bytes` of the file are not matrices.

    Raises:
        UsageError: no choice of formats is small enough.
    """
    limit = size_limit(kl, num_values, goal, other_bytes)
    return _solve(kl, _sizes(kl, num_values), limit)


def size_limit(
    formats: Mapping[str, Iterable[str]],
    num_values: Mapping[str, int],
    goal: Goal,
    other_bytes: int,
) -> float:
    """Return the bytes that all matrices together may have; `formats` are allowed by matrix.

    Raises:
        UsageError: no choice of formats is small enough.
    """
    total = sum(num_values[name] for name in formats)
    limit = goal.bits * total / 8 if goal.bits else (goal.num_bytes or 0) - other_bytes
    min_bytes = sum(min(sizes.values()) for sizes in _sizes(formats, num_values).values())
    if min_bytes > limit and goal.bits is not None:
        min_bits = 8 * min_bytes / total
        message = f"is less than any mix of formats has: the smallest has {min_bits:.2f}."
        raise UsageError(message, field="bits")
    if min_bytes > limit:
        smallest = megabytes(int(min_bytes) + other_bytes)
        message = f"is less than any mix of formats takes: the smallest takes {smallest}."
        raise UsageError(message, field="size")
    return limit


def within_kl(kl: Measure, num_values: Mapping[str, int], limit: float) -> dict[str, str]:
    """Return the formats of smallest size whose divergences sum to at most `limit`.

    Raises:
        UsageError: no choice of formats has so low a divergence.
    """
    min_kl = sum(min(divergences.values()) for divergences in kl.values())
    if min_kl > limit:
        message = f"is less than any mix of formats has: the nearest has some {min_kl:.1g}."
        raise UsageError(message, field="kl")
    return _solve(_sizes(kl, num_values), kl, limit)


def _sizes(formats: Mapping[str, Iterable[str]], num_values: Mapping[str, int]) -> Measure:
    return {
        name: {fmt: float(FORMATS[fmt].num_bytes(num_values[name])) for fmt in names}
        for name, names in formats.items()
    }


def _solve(minimized: Measure, limited: Measure, limit: float) -> dict[str, str]:
    """Return the formats that minimize one measure, while the other sums to at most `limit`."""
    items: list[list[KnapsackItem]] = []
    floors = 0.0
    for name, values in limited.items():
        floor = min(values.values())
        floors += floor
        items.append([KnapsackItem(minimized[name][fmt], values[fmt] - floor) for fmt in values])
    choices = allocate(items, max(limit - floors, limit * 1e-9), _NUM_BINS)
    return {
        name: list(values)[choice]
        for (name, values), choice in zip(limited.items(), choices, strict=True)
    }
