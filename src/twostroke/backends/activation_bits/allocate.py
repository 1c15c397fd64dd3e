"""Solves the knapsack: the cheapest choice whose errors together stay within a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

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
