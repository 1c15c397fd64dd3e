"""Splits stacked weights of a file into the weights that a Program reads, as views."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.model.families.fields import MAX_EXPERTS
from twostroke.model.quant import QuantTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

_LAYER_WEIGHT = re.compile(r"(blk\.\d{1,4}\.)(\w+)\.(weight|bias)")

# Stacks of all experts of a layer, (experts, outputs, inputs), and the matrices of each expert.
# Their biases are (experts, outputs).
_EXPERTS = {
    "ffn_gate_exps": ("ffn_gate",),
    "ffn_up_exps": ("ffn_up",),
    "ffn_gate_up_exps": ("ffn_gate", "ffn_up"),
    "ffn_down_exps": ("ffn_down",),
}


def cut_stacks(
    tensors: Mapping[str, QuantTensor],
    shapes: Mapping[str, tuple[int, ...]],
    fused: Mapping[str, tuple[str, ...]],
) -> dict[str, QuantTensor]:
    """Split stacked weights, such as fused QKV or all experts, into the weights of the Program.

    `shapes` are the shapes that the Program reads, by canonical name. `fused` maps a stacked weight
    of a layer to its parts ({"attn_qkv": ("attn_q", "attn_k", "attn_v")}); stacks of experts have
    known names. A tensor whose shape does not fit is returned unchanged.
    """
    separate: dict[str, QuantTensor] = {}
    for name, tensor in tensors.items():
        parts = _parts(name, tensor, fused)
        heights = [shapes[part][0] for part in parts if part in shapes]
        if not parts or len(heights) < len(parts) or sum(heights) != _height(name, tensor):
            separate[name] = tensor
            continue
        stack = _as_vector(tensor) if _is_bias_stack(name, tensor) else tensor
        start = 0
        for part, height in zip(parts, heights, strict=True):
            separate[part] = slice_rows(stack, start, start + height)
            start += height
    return separate


def uncut_stack(
    tensors: Mapping[str, QuantTensor],
    shapes: Mapping[str, tuple[int, ...]],
    fused: Mapping[str, tuple[str, ...]],
) -> tuple[str, tuple[int, ...]] | None:
    """Return a stacked weight that `cut_stacks` could not split, for the error message.

    Returns (name, the shape that it should have), or None if all were split.
    """
    for name, tensor in tensors.items():
        parts = _parts(name, tensor, fused)
        if parts and name not in shapes and all(part in shapes for part in parts):
            if _is_bias_stack(name, tensor):
                return name, (len(parts), *shapes[parts[0]])
            height = sum(shapes[part][0] for part in parts)
            return name, (height, *shapes[parts[0]][1:])
    return None


def _parts(name: str, tensor: QuantTensor, fused: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the names of the weights in a stacked tensor, in the order of their rows.

    Empty if the tensor is not a stack.
    """
    weight = _LAYER_WEIGHT.fullmatch(name)
    if weight is None:
        return []
    layer, stack, kind = weight.groups()
    num_dimensions = 2 if kind == "bias" else 3
    if stack in _EXPERTS and len(tensor.shape) == num_dimensions and tensor.shape[0] <= MAX_EXPERTS:
        experts = range(tensor.shape[0])
        return [f"{layer}{part}.{expert}.{kind}" for expert in experts for part in _EXPERTS[stack]]
    is_vector = len(tensor.shape) == 1 and tensor.format.block_size == 1
    if stack in fused and (is_vector or len(tensor.shape) == 2):
        return [f"{layer}{part}.{kind}" for part in fused[stack]]
    return []


def _height(name: str, tensor: QuantTensor) -> int:
    """Return a tensor's number of output rows; each value of a vector counts as a row."""
    if len(tensor.shape) == 1 or _is_bias_stack(name, tensor):
        return tensor.num_values
    return tensor.num_rows


def _is_bias_stack(name: str, tensor: QuantTensor) -> bool:
    """Return whether a tensor has the bias of a matrix for each of several experts."""
    return name.endswith("_exps.bias") and tensor.format.block_size == 1


def _as_vector(tensor: QuantTensor) -> QuantTensor:
    """Flatten a stack of biases: the values of all experts become one row."""
    return replace(tensor, shape=(tensor.num_values,), data=tensor.data.reshape(1, -1))


def slice_rows(tensor: QuantTensor, start: int, end: int) -> QuantTensor:
    """Return rows `start` to `end` of a stack as a matrix, or values of a vector, as views."""
    if len(tensor.shape) > 1:
        shape = (end - start, tensor.shape[-1])
        return replace(tensor, shape=shape, data=tensor.data[start:end])
    size = tensor.format.block_bytes
    return QuantTensor(tensor.format, (end - start,), tensor.data[:, start * size : end * size])
