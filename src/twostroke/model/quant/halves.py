"""The float16 scales of GGUF blocks; a block's values are linear in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.model.quant.format import half_bytes, half_column
from twostroke.model.quant.tensor import QuantTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.quant.format import Floats

# Bytes of a block at which its scale and, where it has one, its smallest value begin.
HALVES: Final[Mapping[str, tuple[int, ...]]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def parts_by_half(tensor: QuantTensor) -> tuple[Floats, ...]:
    """Return what each half adds to a matrix: float32 (rows, blocks, block_size), its terms."""
    fmt = tensor.format
    blocks = np.ascontiguousarray(tensor.data).reshape(-1, fmt.block_bytes)
    parts = []
    for own in HALVES[fmt.name]:
        alone = blocks.copy()
        for other in HALVES[fmt.name]:
            if other != own:
                alone[:, other : other + 2] = 0
        parts.append(fmt.decode(alone).reshape(tensor.shape[0], -1, fmt.block_size))
    return tuple(parts)


def with_halves(tensor: QuantTensor, factors: tuple[Floats, ...]) -> QuantTensor:
    """Return a matrix whose halves are multiplied by `factors` (rows, blocks), and rounded."""
    fmt = tensor.format
    blocks = np.ascontiguousarray(tensor.data).reshape(-1, fmt.block_bytes).copy()
    for start, factor in zip(HALVES[fmt.name], factors, strict=True):
        changed = half_column(blocks, start) * factor.reshape(-1, 1)
        blocks[:, start : start + 2] = half_bytes(changed)
    return QuantTensor(fmt, tensor.shape, blocks.reshape(tensor.shape[0], -1))
