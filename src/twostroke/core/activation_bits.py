"""`ActivationBits`: how precise the inputs of each product of one model are."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeAlias

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

# Bits of activations: the same for all products, or by the name of the product's matrix.
Bits: TypeAlias = "int | Mapping[str, int]"


class ActivationBits(Frozen):
    """A choice of bits that was made for one model.

    Attributes:
        model_id: the `weights_identity` of the model's file.
        version: of the method that chose.
        bits: by the name of a product's matrix; those that are missing have 15 bits.
        divergence: the mean KL in nats that was measured on the text of the choice.
        num_products: how many matrices could have fewer bits.
    """

    model_id: str
    version: int
    bits: dict[str, int]
    divergence: float
    num_products: int

    def __str__(self) -> str:
        """Return a short name: equal choices have the same one, wherever they were made."""
        lines = "".join(f"{name} {bits}\n" for name, bits in sorted(self.bits.items()))
        return f"chosen-{hashlib.sha256(lines.encode()).hexdigest()[:12]}"

    def describe(self) -> str:
        """Return in a few words how many products have how many bits."""
        counts = {number: list(self.bits.values()).count(number) for number in (8, 9)}
        counts[15] = self.num_products - len(self.bits)
        few = ", ".join(f"{count} of {number}" for number, count in counts.items() if count)
        return f"products by bits of activations: {few}" if few else "15-bit activations"


def bits_by_name(bits: int | ActivationBits) -> Bits:
    """Return what a Program is lowered with."""
    return bits.bits if isinstance(bits, ActivationBits) else bits
