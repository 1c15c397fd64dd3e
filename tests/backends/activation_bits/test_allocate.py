"""The knapsack solver returns the cheapest choice within the budget."""

from __future__ import annotations

import random
from itertools import product

import pytest

from twostroke.backends.activation_bits.tree import KnapsackItem, allocate


@pytest.mark.seeds(20)
def test_no_other_choice_within_the_budget_is_cheaper(seed: int):
    rng = random.Random(seed)
    parts = [
        [KnapsackItem(10 * (1 + rng.random()), 0.0)]
        + [KnapsackItem(10 * rng.random(), rng.randint(1, 50) / 100) for _ in range(2)]
        for _ in range(5)
    ]
    choice = allocate(parts, 1.0)
    chosen_items = [items[number] for items, number in zip(parts, choice, strict=True)]
    every = [c for c in product(*parts) if sum(item.error for item in c) <= 1 + 1e-9]
    lowest_cost = min(sum(item.cost for item in c) for c in every)
    assert sum(item.error for item in chosen_items) <= 1 + 1e-9
    assert sum(item.cost for item in chosen_items) == pytest.approx(lowest_cost)


def test_an_error_that_is_not_finite_is_never_taken():
    items = [KnapsackItem(2, 0.0), KnapsackItem(1, float("nan")), KnapsackItem(1, float("inf"))]
    assert allocate([items], 1.0) == [0]
