"""Cuts the matrices of latent attention into those of heads, as Programs read them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from twostroke.models.fields import MAX_EXPERTS
from twostroke.quant import FORMATS, QuantTensor
from twostroke.weights.stacks import rows_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_STACK = re.compile(r"(blk\.\d{1,4}\.attn_)(k_b|v_b)\.weight")
_BOTH = re.compile(r"(blk\.\d{1,4}\.attn_)kv_b\.weight")
_FLOATS = frozenset({"F32", "F16", "BF16"})


def cut_latent(
    tensors: Mapping[str, QuantTensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, QuantTensor]:
    """Return `tensors` with the matrices that heads share cut into those of each head.

    `shapes` are the shapes that the Program reads. A file has stacks `attn_k_b` (heads, rank, key)
    and `attn_v_b` (heads, value, rank), or `attn_kv_b`, whose rows are the keys and then the values
    of one head after another. Keys must then be transposed, which numbers in blocks do not survive:
    they become float32. A tensor that does not fit stays as it is.
    """
    cut: dict[str, QuantTensor] = {}
    for name, tensor in tensors.items():
        stack = _STACK.fullmatch(name)
        if stack and len(tensor.shape) == 3 and tensor.shape[0] <= MAX_EXPERTS:
            parts = _stacked(tensor, f"{stack[1]}{stack[2]}")
        elif (both := _BOTH.fullmatch(name)) and len(tensor.shape) == 2:
            parts = _keys_and_values(tensor, both[1], shapes)
        else:
            parts = {name: tensor}
        cut |= parts
    return cut


def _stacked(tensor: QuantTensor, name: str) -> dict[str, QuantTensor]:
    heads, height, _ = tensor.shape
    return {
        f"{name}.{head}.weight": rows_of(tensor, head * height, (head + 1) * height)
        for head in range(heads)
    }


def _keys_and_values(
    tensor: QuantTensor, start: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, QuantTensor]:
    key = shapes.get(f"{start}k_b.0.weight", (0, 0))[1]
    value = shapes.get(f"{start}v_b.0.weight", (0, 0))[0]
    heads, rest = divmod(tensor.shape[0], key + value) if key + value else (0, 1)
    if rest or f"{start}k_b.{heads - 1}.weight" not in shapes:
        return {f"{start}kv_b.weight": tensor}
    fmt = FORMATS[tensor.format.name if tensor.format.name in _FLOATS else "F32"]
    cut: dict[str, QuantTensor] = {}
    for head in range(heads):
        first = head * (key + value)
        keys = rows_of(tensor, first, first + key).dequantize()
        turned = np.ascontiguousarray(keys.T)
        cut[f"{start}k_b.{head}.weight"] = QuantTensor.from_floats(turned, fmt)
        cut[f"{start}v_b.{head}.weight"] = rows_of(tensor, first + key, first + key + value)
    return cut
