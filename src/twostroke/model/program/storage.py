"""How a plan may store the weights of a model."""

from __future__ import annotations

from typing import Final

from twostroke.core.frozen import Frozen


class StoredAs(Frozen):
    """How matrices of layers are stored: bits for each weight, and the arithmetic on them.

    Other weights have 16 bits.
    """

    bits: float
    arithmetic: str


_GROUP: Final = 128  # weights that share a float16 scale
WEIGHTS: Final = {
    "bf16": StoredAs(16, "bf16"),
    "fp8": StoredAs(8, "fp8"),
    "int8": StoredAs(8, "int8"),
    "w4a16": StoredAs(4 + 16 / _GROUP, "bf16"),
    "nvfp4": StoredAs(4.5, "fp4"),  # a scale of 8 bits for 16 weights
}
