"""`ActivationBits`: the bits of the inputs of each matrix product of one model."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeAlias

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

# Bits of activations: one number for all products, or a number for each matrix by its name.
Bits: TypeAlias = "int | Mapping[str, int]"


class ActivationBits(Frozen):
    """The bits of activations that were chosen for the products of one model.

    Attributes:
        model_id: the `weights_identity` of the model's file.
        version: the version of the method that made the choice.
        bits: the bits for each matrix with fewer than 15 bits, by the name of the matrix.
        divergence: the mean KL divergence in nats from the answers with 15 bits, measured on the
            text for which the bits were chosen.
        num_products: how many matrices the method could give fewer bits.
    """

    model_id: str
    version: int
    bits: dict[str, int]
    divergence: float
    num_products: int

    def __str__(self) -> str:
        """Return a short name, which equal choices share on every machine."""
        lines = "".join(f"{name} {bits}\n" for name, bits in sorted(self.bits.items()))
        return f"chosen-{hashlib.sha256(lines.encode()).hexdigest()[:12]}"

    def describe(self) -> str:
        """Return a text with the number of products for each number of bits."""
        product_bits = list(self.bits.values())
        counts = {
            8: product_bits.count(8),
            9: product_bits.count(9),
            15: self.num_products - len(self.bits),
        }
        text = ", ".join(f"{count} of {bits}" for bits, count in counts.items() if count)
        return f"products by bits of activations: {text}" if text else "15-bit activations"


def bits_by_name(bits: int | ActivationBits) -> Bits:
    """Return the bits as a backend takes them: a number for all products, or one for each."""
    return bits.bits if isinstance(bits, ActivationBits) else bits
