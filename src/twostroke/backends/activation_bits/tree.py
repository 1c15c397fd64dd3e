"""Measures the errors of a model's parts by a tree: kinds, then halves of the depth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.backends.activation_bits.allocate import KnapsackItem, allocate
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
