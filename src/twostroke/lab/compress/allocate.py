"""Chooses the format of each matrix: the least divergence for a size, or the least size for one.

Divergences of matrices add up. The knapsack is solved by dynamic programming, as for activations
(ADR 0030).
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

_BINS: Final = 20_000  # of a budget: rounding up hundreds of matrices then loses 1% of it at most


class Goal(Frozen):
    """What a file must reach; one of these is given.

    `bits` is the average of a weight of the layers, `num_bytes` the size of the file, `kl` the
    mean divergence in nats.
    """

    bits: float | None = None
    num_bytes: int | None = None
    kl: float | None = None

    def describe(self) -> str:
        """Return the goal in words."""
        if self.kl is not None:
            return f"KL {self.kl:g}"
        if self.bits is not None:
            return f"{self.bits:g} bits"
        return megabytes(self.num_bytes or 0)


def within_size(
    kl: Measure, num_values: Mapping[str, int], goal: Goal, other_bytes: int
) -> dict[str, str]:
    """Return the formats with the least divergence; `other_bytes` of the file are not matrices.

    Raises:
        UsageError: no choice is that small.
    """
    limit = size_limit(kl, num_values, goal, other_bytes)
    return _chosen(kl, _sizes(kl, num_values), limit)


def size_limit(
    formats: Mapping[str, Iterable[str]],
    num_values: Mapping[str, int],
    goal: Goal,
    other_bytes: int,
) -> float:
    """Return the bytes that matrices may have, each of which can have one of its formats.

    Raises:
        UsageError: no choice is that small.
    """
    total = sum(num_values[name] for name in formats)
    limit = goal.bits * total / 8 if goal.bits else (goal.num_bytes or 0) - other_bytes
    least = sum(min(each.values()) for each in _sizes(formats, num_values).values())
    if least > limit and goal.bits is not None:
        message = f"is less than any mix of formats has: the smallest has {8 * least / total:.2f}."
        raise UsageError(message, field="bits")
    if least > limit:
        shown = megabytes(int(least) + other_bytes)
        message = f"is less than any mix of formats takes: the smallest takes {shown}."
        raise UsageError(message, field="size")
    return limit


def within_kl(kl: Measure, num_values: Mapping[str, int], limit: float) -> dict[str, str]:
    """Return the smallest formats whose divergences sum to at most `limit`.

    Raises:
        UsageError: no choice is that good.
    """
    least = sum(min(each.values()) for each in kl.values())
    if least > limit:
        message = f"is less than any mix of formats has: the nearest has some {least:.1g}."
        raise UsageError(message, field="kl")
    return _chosen(_sizes(kl, num_values), kl, limit)


def _sizes(formats: Mapping[str, Iterable[str]], num_values: Mapping[str, int]) -> Measure:
    return {
        name: {fmt: float(FORMATS[fmt].num_bytes(num_values[name])) for fmt in each}
        for name, each in formats.items()
    }


def _chosen(minimized: Measure, limited: Measure, limit: float) -> dict[str, str]:
    """Return the formats that make one measure least, with the other one within the limit."""
    parts: list[list[KnapsackItem]] = []
    floors = 0.0
    for name, each in limited.items():
        floor = min(each.values())
        floors += floor
        parts.append([KnapsackItem(minimized[name][fmt], each[fmt] - floor) for fmt in each])
    numbers = allocate(parts, max(limit - floors, limit * 1e-9), _BINS)
    return {
        name: list(each)[number]
        for (name, each), number in zip(limited.items(), numbers, strict=True)
    }
