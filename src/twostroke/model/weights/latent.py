"""Cuts the matrices of latent attention into those of heads, as Programs read them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.errors import ModelFormatError
from twostroke.model.families.fields import MAX_EXPERTS
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights.stacks import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_STACK = re.compile(r"(blk\.\d{1,4}\.attn_)(k_b|v_b)\.weight")
_BOTH = re.compile(r"(blk\.\d{1,4}\.attn_)kv_b\.weight")
_FLOATS = frozenset({"F32", "F16", "BF16"})


def cut_latent(
    file: str,
    tensors: Mapping[str, QuantTensor],
    shapes: Mapping[str, tuple[int, ...]],
    quote: Callable[[str], str] = repr,
) -> dict[str, QuantTensor]:
    """Return `tensors` with the matrices that heads share cut into those of each head.

    `shapes` are the shapes that the Program reads. A file has stacks `attn_k_b` (heads, rank, key)
    and `attn_v_b` (heads, value, rank), or `attn_kv_b`, whose rows are the keys and then the values
    of one head after another. Keys must then be transposed, which numbers in blocks do not survive:
    they become float32. A tensor that does not fit stays as it is. `quote` is how errors call a
    tensor.

    Raises:
        ModelFormatError: `attn_kv_b` of another size than its model's, or beside stacks.
    """
    cut: dict[str, QuantTensor] = {}
    for name, tensor in tensors.items():
        stack = _STACK.fullmatch(name)
        if stack and len(tensor.shape) == 3 and tensor.shape[0] <= MAX_EXPERTS:
            parts = _stacked(tensor, f"{stack[1]}{stack[2]}")
        elif both := _BOTH.fullmatch(name):
            parts = _keys_and_values(file, tensor, both[1], shapes, quote)
        else:
            parts = {name: tensor}
        if twice := cut.keys() & parts:
            raise ModelFormatError(
                f"{file!r} has {quote(min(twice))} twice: {quote(name)} has it, too."
            )
        cut |= parts
    return cut


def _stacked(tensor: QuantTensor, name: str) -> dict[str, QuantTensor]:
    heads, height, _ = tensor.shape
    return {
        f"{name}.{head}.weight": rows_of(tensor, head * height, (head + 1) * height)
        for head in range(heads)
    }


def _keys_and_values(
    file: str,
    tensor: QuantTensor,
    start: str,
    shapes: Mapping[str, tuple[int, ...]],
    quote: Callable[[str], str],
) -> dict[str, QuantTensor]:
    name = f"{start}kv_b.weight"
    if f"{start}k_b.0.weight" not in shapes:  # of a layer that the model does not have
        return {name: tensor}
    rank, key = shapes[f"{start}k_b.0.weight"]
    value, _ = shapes[f"{start}v_b.0.weight"]
    heads = sum(f"{start}k_b.{head}.weight" in shapes for head in range(MAX_EXPERTS))
    expected = heads * (key + value), rank
    if tensor.shape != expected:
        message = f"{file!r} has tensor {quote(name)} with shape {tensor.shape}"
        raise ModelFormatError(f"{message}; its heads have {expected}.")
    fmt = FORMATS[tensor.format.name if tensor.format.name in _FLOATS else "F32"]
    cut: dict[str, QuantTensor] = {}
    for head in range(heads):
        first = head * (key + value)
        keys = rows_of(tensor, first, first + key).dequantize()
        turned = np.ascontiguousarray(keys.T)
        cut[f"{start}k_b.{head}.weight"] = QuantTensor.from_floats(turned, fmt)
        cut[f"{start}v_b.{head}.weight"] = rows_of(tensor, first + key, first + key + value)
    return cut
