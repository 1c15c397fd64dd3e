"""Splits the matrices of latent attention by head, as Programs read them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.errors import ModelFormatError
from twostroke.model.families.fields import MAX_EXPERTS
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights.stacks import slice_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_STACK = re.compile(r"(blk\.\d{1,4}\.attn_)(k_b|v_b)\.weight")
_JOINED = re.compile(r"(blk\.\d{1,4}\.attn_)kv_b\.weight")
_FLOATS = frozenset({"F32", "F16", "BF16"})


def cut_latent(
    file: str,
    tensors: Mapping[str, QuantTensor],
    shapes: Mapping[str, tuple[int, ...]],
    quote: Callable[[str], str] = repr,
) -> dict[str, QuantTensor]:
    """Split the key and value matrices of latent attention (MLA) into one matrix for each head.

    `shapes` are the shapes that the Program reads. A file has stacks `attn_k_b` (heads, rank, key)
    and `attn_v_b` (heads, value, rank), or one matrix `attn_kv_b`, which has for each head the rows
    of its keys and then of its values. The keys of `attn_kv_b` must be transposed, which block
    formats do not allow: they become float32. A tensor with other shapes is returned unchanged.
    `quote` formats a tensor's name for errors.

    Raises:
        ModelFormatError: `attn_kv_b` has the wrong size, or the file also has stacks.
    """
    separate: dict[str, QuantTensor] = {}
    for name, tensor in tensors.items():
        stack = _STACK.fullmatch(name)
        if stack and len(tensor.shape) == 3 and tensor.shape[0] <= MAX_EXPERTS:
            parts = _split_stack(tensor, f"{stack[1]}{stack[2]}")
        elif joined := _JOINED.fullmatch(name):
            parts = _split_joined(file, tensor, joined[1], shapes, quote)
        else:
            parts = {name: tensor}
        if duplicates := separate.keys() & parts:
            raise ModelFormatError(
                f"{file!r} has {quote(min(duplicates))} twice: {quote(name)} has it, too."
            )
        separate |= parts
    return separate


def _split_stack(tensor: QuantTensor, name: str) -> dict[str, QuantTensor]:
    heads, height, _ = tensor.shape
    return {
        f"{name}.{head}.weight": slice_rows(tensor, head * height, (head + 1) * height)
        for head in range(heads)
    }


def _split_joined(
    file: str,
    tensor: QuantTensor,
    prefix: str,
    shapes: Mapping[str, tuple[int, ...]],
    quote: Callable[[str], str],
) -> dict[str, QuantTensor]:
    name = f"{prefix}kv_b.weight"
    if f"{prefix}k_b.0.weight" not in shapes:  # a layer that the model does not have
        return {name: tensor}
    rank, key = shapes[f"{prefix}k_b.0.weight"]
    value, _ = shapes[f"{prefix}v_b.0.weight"]
    heads = sum(f"{prefix}k_b.{head}.weight" in shapes for head in range(MAX_EXPERTS))
    expected = heads * (key + value), rank
    if tensor.shape != expected:
        message = f"{file!r} has tensor {quote(name)} with shape {tensor.shape}"
        raise ModelFormatError(f"{message}; its heads have {expected}.")
    fmt = FORMATS[tensor.format.name if tensor.format.name in _FLOATS else "F32"]
    cut: dict[str, QuantTensor] = {}
    for head in range(heads):
        first = head * (key + value)
        keys = slice_rows(tensor, first, first + key).dequantize()
        transposed = np.ascontiguousarray(keys.T)
        cut[f"{prefix}k_b.{head}.weight"] = QuantTensor.from_floats(transposed, fmt)
        cut[f"{prefix}v_b.{head}.weight"] = slice_rows(tensor, first + key, first + key + value)
    return cut
