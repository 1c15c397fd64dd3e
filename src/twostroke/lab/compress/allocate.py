"""Chooses the format of each matrix: lowest divergence for a size, or smallest size.

Divergences of matrices add up. Dynamic programming solves this knapsack problem, as for the bits of
activations (ADR 0030).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.backends.activation_bits.tree import KnapsackItem, allocate
from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import format_bytes
from twostroke.model.quant import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Measure = Mapping[str, Mapping[str, float]]  # by matrix and format

_NUM_BINS: Final = 20_000  # of a budget; rounding up of hundreds of matrices loses at most 1%


class QuantizationGoal(Frozen):
    """The goal of a quantized file: a number of bits, a size, or a divergence; one field is set.

    `bits` is the average number of bits per weight of the layers, `num_bytes` the size of the file,
    and `kl` the mean KL divergence from the source model in nats.
    """

    bits: float | None = None
    num_bytes: int | None = None
    kl: float | None = None

    def describe(self) -> str:
        """Return the goal of a quantized file as text, such as "KL 0.01" or "4.5 bits"."""
        if self.kl is not None:
            return f"KL {self.kl:g}"
        if self.bits is not None:
            return f"{self.bits:g} bits"
        return format_bytes(self.num_bytes or 0)


def formats_within_size(
    kl: Measure, num_values: Mapping[str, int], goal: QuantizationGoal, other_bytes: int
) -> dict[str, str]:
    """Choose the format of each matrix so that a file of the goal's size diverges least.

    Args:
        kl: by matrix and format, the KL divergence that the format adds.
        num_values: number of values of each matrix.
        goal: the average number of bits, or the size of the file.
        other_bytes: the size of the file without its matrices.

    Raises:
        UsageError: no choice of formats is small enough.
    """
    limit = size_limit(kl, num_values, goal, other_bytes)
    return _solve(kl, _sizes(kl, num_values), limit)


def size_limit(
    formats: Mapping[str, Iterable[str]],
    num_values: Mapping[str, int],
    goal: QuantizationGoal,
    other_bytes: int,
) -> float:
    """Return the number of bytes that all matrices of a file may have together to reach a goal.

    `formats` are the allowed formats of each matrix; `other_bytes` is the size of the file without
    its matrices.

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
        smallest = format_bytes(int(min_bytes) + other_bytes)
        message = f"is less than any mix of formats takes: the smallest takes {smallest}."
        raise UsageError(message, field="size")
    return limit


def formats_within_kl(kl: Measure, num_values: Mapping[str, int], limit: float) -> dict[str, str]:
    """Choose the format of each matrix so that the file is smallest within a KL divergence.

    The divergences that the formats add (`kl`, by matrix and format) sum to at most `limit`.

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
    """Choose the format of each matrix so that the sum of `minimized` is lowest.

    The sum of `limited` is at most `limit`. The result has the format of each matrix. The two
    measures are bytes and divergences, by matrix and format.
    """
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
