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

# A half has at least this share of its group's error, because differences of errors are imprecise.
_MIN_ERROR_RATIO: Final = 0.02


class ProductGroup(Frozen):
    """Matrix products that get the same number of activation bits, and the error of each number."""

    products: tuple[Product, ...]
    errors: dict[int, float]

    def items(self) -> list[tuple[int, KnapsackItem]]:
        """Return each possible number of activation bits, with its cost and error."""
        costs = {
            bits: sum(product.costs.get(bits, product.costs[15]) for product in self.products)
            for bits in (15, *self.errors)
        }
        return [
            (bits, KnapsackItem(cost, self.errors.get(bits, 0.0))) for bits, cost in costs.items()
        ]


def measure_kinds(
    products: Sequence[Product], measure: Callable[[dict[str, int]], float]
) -> list[ProductGroup]:
    """Group a model's products by kind, and measure each group's error with 9 and 8 bits."""
    kinds: dict[str, list[Product]] = {}
    for product in products:
        kinds.setdefault(product.kind, []).append(product)
    groups = []
    for same_kind in kinds.values():
        numbers = {bits for product in same_kind for bits in product.costs} - {15}
        errors = {bits: measure(bits_of(same_kind, bits)) for bits in sorted(numbers)}
        groups.append(ProductGroup(tuple(same_kind), errors))
    return groups


def split_groups(
    groups: list[ProductGroup], measure: Callable[[dict[str, int]], float], num_splits: int
) -> list[ProductGroup]:
    """Split the product group with the largest error by layers in two, `num_splits` times.

    The errors of groups nearly add up, so only one half is measured, with 8 bits; the other half
    gets the rest of the group's error.
    """
    groups = list(groups)
    for _ in range(num_splits):
        divisible = [group for group in groups if len(group.products) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda group: group.errors[8])
        index = groups.index(largest)
        middle = len(largest.products) // 2
        halves = largest.products[:middle], largest.products[middle:]
        group_error = largest.errors[8]
        min_error = _MIN_ERROR_RATIO * group_error
        first_error = max(measure(bits_of(halves[0], 8)), min_error)
        shares = first_error / group_error, max(group_error - first_error, min_error) / group_error
        groups[index : index + 1] = [
            ProductGroup(half, {bits: error * share for bits, error in largest.errors.items()})
            for half, share in zip(halves, shares, strict=True)
        ]
    return groups


def cheapest(groups: Sequence[ProductGroup], budget: float) -> dict[str, int]:
    """Return the cheapest activation bits, by matrix, whose errors sum to at most `budget`.

    Matrices with 15 bits are left out.
    """
    items = [group.items() for group in groups]
    choices = [[item for _, item in group_items] for group_items in items]
    item_indices = allocate(choices, budget)
    bits: dict[str, int] = {}
    for group, group_items, index in zip(groups, items, item_indices, strict=True):
        if group_items[index][0] != 15:
            bits |= bits_of(group.products, group_items[index][0])
    return bits


def bits_of(products: Iterable[Product], bits: int) -> dict[str, int]:
    """Return a choice of activation bits: `bits` for each matrix that supports this number."""
    return {
        name: bits for product in products if bits in product.costs for name in product.matrices
    }


_NUM_BINS: Final = 4000  # the budget is divided into these; errors are rounded up to whole bins


class KnapsackItem(Frozen):
    """An alternative for one part of a knapsack problem: its cost and its error."""

    cost: float
    error: float


def allocate(
    parts: Sequence[Sequence[KnapsackItem]], budget: float, num_bins: int = _NUM_BINS
) -> list[int]:
    """Solve a multiple-choice knapsack problem: return the index of each part's chosen item.

    The sum of costs is minimal among all choices whose errors sum to at most `budget`. Each part
    needs an item without error. The budget is divided into `num_bins` bins, and errors are rounded
    up to whole bins, so that dynamic programming is exact: `min_costs[e]` is the minimal cost of
    the parts so far with a total error of `e` bins.
    """
    min_costs = np.zeros(num_bins + 1)
    best_items: list[np.ndarray] = []
    sizes: list[list[int]] = []
    for items in parts:
        bins = [_bins(item.error, budget, num_bins) for item in items]
        costs = np.full((len(items), num_bins + 1), np.inf)
        for row, item, size in zip(costs, items, bins, strict=True):
            if size <= num_bins:
                row[size:] = min_costs[: num_bins + 1 - size] + item.cost
        best_items.append(costs.argmin(axis=0))
        min_costs = costs.min(axis=0)
        sizes.append(bins)
    item_indices: list[int] = []
    remaining_bins = num_bins
    for choices, bins in zip(reversed(best_items), reversed(sizes), strict=True):
        item_indices.append(int(choices[remaining_bins]))
        remaining_bins -= bins[item_indices[-1]]
    return item_indices[::-1]


def _bins(error: float, budget: float, num_bins: int) -> int:
    """Return a knapsack item's error in bins of the error budget, rounded up.

    The result is `num_bins` + 1 if the error exceeds the budget or is not a number.
    """
    if error <= 0:
        return 0
    return int(np.ceil(error / budget * num_bins)) if error <= budget else num_bins + 1
