"""Searches the cheapest numbers of bits whose error stays within a budget.

The errors of groups of products are measured: first one group for each kind of product, then the
groups with the largest errors are split into halves of the depth. `allocate` solves the knapsack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from twostroke.backends.activation_bits.products import Product

_NUM_SPLITS: Final = 10  # the same for every model: a choice must not depend on speed
_LEAST_SHARE: Final = 0.02  # of its parent's error that a part has at least: differences are rough


class ProductGroup(Frozen):
    """Products with the same bits, and the error of each number of bits."""

    products: tuple[Product, ...]
    errors: dict[int, float]

    def items(self) -> list[tuple[int, KnapsackItem]]:
        """Return each number of bits with its cost and its error."""
        costs = {
            bits: sum(product.costs.get(bits, product.costs[15]) for product in self.products)
            for bits in (15, *self.errors)
        }
        return [
            (bits, KnapsackItem(cost, self.errors.get(bits, 0.0))) for bits, cost in costs.items()
        ]


def measured_kinds(
    products: Sequence[Product], measure: Callable[[dict[str, int]], float]
) -> list[ProductGroup]:
    """Return a part for each kind of product, its errors with 9 and 8 bits measured."""
    kinds: dict[str, list[Product]] = {}
    for product in products:
        kinds.setdefault(product.kind, []).append(product)
    parts = []
    for members in kinds.values():
        numbers = {bits for product in members for bits in product.costs} - {15}
        errors = {bits: measure(bits_of(members, bits)) for bits in sorted(numbers)}
        parts.append(ProductGroup(tuple(members), errors))
    return parts


def split_parts(
    parts: list[ProductGroup], measure: Callable[[dict[str, int]], float]
) -> list[ProductGroup]:
    """Return the parts with those that err most cut into halves of the depth, again and again.

    Errors of parts add up nearly, so one half is measured, with 8 bits, and the other one has the
    rest.
    """
    parts = list(parts)
    for _ in range(_NUM_SPLITS):
        divisible = [part for part in parts if len(part.products) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda part: part.errors[8])
        place, middle = parts.index(largest), len(largest.products) // 2
        halves = largest.products[:middle], largest.products[middle:]
        whole = largest.errors[8]
        least = _LEAST_SHARE * whole
        first = max(measure(bits_of(halves[0], 8)), least)
        shares = first / whole, max(whole - first, least) / whole
        parts[place : place + 1] = [
            ProductGroup(half, {bits: error * share for bits, error in largest.errors.items()})
            for half, share in zip(halves, shares, strict=True)
        ]
    return parts


def cheapest(parts: Sequence[ProductGroup], budget: float) -> dict[str, int]:
    """Return the bits of each matrix, 15 left out, whose errors sum to at most `budget`."""
    items = [part.items() for part in parts]
    chosen = allocate([[item for _, item in each] for each in items], budget)
    bits: dict[str, int] = {}
    for part, each, number in zip(parts, items, chosen, strict=True):
        if each[number][0] != 15:
            bits |= bits_of(part.products, each[number][0])
    return bits


def bits_of(products: Iterable[Product], bits: int) -> dict[str, int]:
    """Return these bits for the matrices of the products that can have them."""
    return {
        name: bits for product in products if bits in product.costs for name in product.matrices
    }


_BINS: Final = 4000  # of the budget: an error counts as the next whole bin


class KnapsackItem(Frozen):
    """One way to do a part of the work: what it costs, and the error that it makes."""

    cost: float
    error: float


def allocate(
    parts: Sequence[Sequence[KnapsackItem]], budget: float, num_bins: int = _BINS
) -> list[int]:
    """Return for each part the number of the item to take.

    The sum of costs is the least of all choices whose errors sum to at most `budget`; each part
    needs one item without an error. Errors are rounded up to whole bins, of which the budget has
    `num_bins`; this makes dynamic programming exact: `least[e]` is the least cost of the parts so
    far with error `e`.
    """
    least = np.zeros(num_bins + 1)
    taken: list[np.ndarray] = []
    sizes: list[list[int]] = []
    for items in parts:
        bins = [_bins(item.error, budget, num_bins) for item in items]
        costs = np.full((len(items), num_bins + 1), np.inf)
        for row, item, size in zip(costs, items, bins, strict=True):
            if size <= num_bins:
                row[size:] = least[: num_bins + 1 - size] + item.cost
        taken.append(costs.argmin(axis=0))
        least = costs.min(axis=0)
        sizes.append(bins)
    chosen: list[int] = []
    rest = num_bins
    for choices, bins in zip(reversed(taken), reversed(sizes), strict=True):
        chosen.append(int(choices[rest]))
        rest -= bins[chosen[-1]]
    return chosen[::-1]


def _bins(error: float, budget: float, num_bins: int) -> int:
    """Return an error in bins; num_bins + 1 if it is more than the budget, or not a number."""
    if error <= 0:
        return 0
    return int(np.ceil(error / budget * num_bins)) if error <= budget else num_bins + 1
