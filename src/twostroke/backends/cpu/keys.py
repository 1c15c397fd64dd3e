"""The mean of rotated key biases: what keys can lose before they become int8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.backends.reference.operations import rotate
from twostroke.program import ops

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from twostroke.program import Program
    from twostroke.quant import QuantTensor

    Array = NDArray[np.float32]

_POSITIONS = np.arange(4096)
_UNIT = np.float32(2**-8)  # means are rounded, so that they do not depend on a machine's cosine


def mean_keys(program: Program, tensors: Mapping[str, QuantTensor]) -> dict[int, Array]:
    """Return the mean over positions of each layer's rotated key bias, (kv_heads * head_dim,).

    Layers without such a bias are left out. `tensors` are the whole weights, also for a rank's
    part of a Program.
    """
    found = {}
    for op in program.ops:
        if not isinstance(op, ops.Attention | ops.AttentionPieces) or op.key_bias is None:
            continue
        first, count = op.key_bias.first, op.num_kv_heads * op.head_dim
        bias = tensors[op.key_bias.weight].dequantize()[first : first + count]
        rope = op.key_bias.rope.part(0, count)
        keys = rotate(rope, np.tile(bias, (len(_POSITIONS), 1)), _POSITIONS)
        mean = keys.mean(axis=0, dtype=np.float64).astype(np.float32)
        found[op.layer] = np.round(mean / _UNIT) * _UNIT
    return found
