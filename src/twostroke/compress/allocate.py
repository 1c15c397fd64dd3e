"""Chooses the format of each matrix: the least divergence for a size, or the least size for one.

Divergences of matrices add up. The knapsack is solved by dynamic programming, as for activations
(docs/adr/0030-bits-for-each-product.md).
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Final

from twostroke.compress.mixes import formats_for
from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.fetch.disk import megabytes
from twostroke.precision.allocate import Item, allocate
from twostroke.quant import FORMATS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.quant import QuantTensor

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


class Menu(Frozen):
    """The formats of each matrix, with the bytes that it then has.

    The matrices have `num_values` together; a file has `other_bytes` besides them.
    """

    sizes: dict[str, dict[str, float]]
    num_values: int
    other_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, QuantTensor], other_bytes: int) -> Menu:
        """Return the menu of these matrices."""
        sizes = {
            name: {
                fmt: float(FORMATS[fmt].num_bytes(tensor.num_values))
                for fmt in formats_for(tensor.shape[-1])
            }
            for name, tensor in tensors.items()
        }
        return cls(sizes, sum(tensor.num_values for tensor in tensors.values()), other_bytes)

    def limit(self, goal: Goal) -> float:
        """Return how many bytes the matrices may have together; for a KL, how many they must have.

        Raises:
            UsageError: no mix is that small.
        """
        sizes = [each.values() for each in self.sizes.values()]
        least, most = sum(map(min, sizes)), sum(map(max, sizes))
        if goal.bits is not None:
            limit, bits = goal.bits * self.num_values / 8, 8 / self.num_values
            if limit < least:
                raise UsageError(
                    f"must be at least {ceil(least * bits * 100) / 100:g}: mixes of formats for "
                    f"this model have from {least * bits:.2f} to {most * bits:.2f} bits for each "
                    "weight of a layer.",
                    field="bits",
                )
            return min(limit, most)
        if goal.num_bytes is None:
            return least
        limit = goal.num_bytes - self.other_bytes
        if limit < least:
            smallest, largest = (_rounded_up(size + self.other_bytes) for size in (least, most))
            raise UsageError(
                f"must be at least {smallest}: files of this model have from {smallest} to "
                f"{largest}, {megabytes(self.other_bytes)} of it for what is not chosen.",
                field="size",
            )
        return min(limit, most)


def _rounded_up(num_bytes: float) -> str:
    """Return a size as people read it that is no smaller."""
    unit = 10**8 if num_bytes >= 10**10 else 10**6 if num_bytes >= 10**6 else 10**3
    return megabytes(ceil(num_bytes / unit) * unit)


def within_size(kl: Measure, menu: Menu, limit: float) -> dict[str, str]:
    """Return the formats of at most `limit` bytes with the least divergence; see `Menu.limit`."""
    return _chosen(kl, menu.sizes, limit)


def within_kl(kl: Measure, menu: Menu, limit: float) -> dict[str, str]:
    """Return the smallest formats whose divergences sum to at most `limit`.

    Raises:
        UsageError: no choice is that good.
    """
    least = sum(min(each.values()) for each in kl.values())
    if least > limit:
        message = f"must be higher: the nearest mix of formats has a KL of some {least:.1g}."
        raise UsageError(message, field="kl")
    return _chosen(menu.sizes, kl, limit)


def _chosen(minimized: Measure, limited: Measure, limit: float) -> dict[str, str]:
    """Return the formats that make one measure least, with the other one within the limit."""
    parts: list[list[Item]] = []
    floors = 0.0
    for name, each in limited.items():
        floor = min(each.values())
        floors += floor
        parts.append([Item(minimized[name][fmt], each[fmt] - floor) for fmt in each])
    numbers = allocate(parts, max(limit - floors, limit * 1e-9), _BINS)
    return {
        name: list(each)[number]
        for (name, each), number in zip(limited.items(), numbers, strict=True)
    }
