"""Activation bits that differ from product to product."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

from twostroke.backends.activation_bits import METHOD, products_of
from twostroke.core.options import ActivationBits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.program import Program
    from twostroke.model.quant import QuantTensor


def mixed_bits(program: Program, tensors: Mapping[str, QuantTensor]) -> ActivationBits:
    """Return activation bits of 8, 15 and 9 in turn for a Program's products."""
    products = products_of(program, tensors)
    product_bits = zip(products, cycle((8, 15, 9)), strict=False)
    bits = {name: bits for product, bits in product_bits if bits != 15 for name in product.matrices}
    return ActivationBits("", METHOD, bits, 0.0, sum(len(p.matrices) for p in products))
