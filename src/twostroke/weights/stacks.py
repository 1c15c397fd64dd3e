"""Cuts stacked matrices of a file into those that a Program reads, as views."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from twostroke.models.fields import MAX_EXPERTS
from twostroke.quant import QuantTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_EXPERTS = re.compile(r"(blk\.\d{1,4}\.ffn_)(gate|up|down|gate_up)_exps\.weight")
_LAYER_WEIGHT = re.compile(r"(blk\.\d{1,4}\.)(\w+)\.(weight|bias)")


def cut_stacks(
    tensors: Mapping[str, QuantTensor],
    shapes: Mapping[str, tuple[int, ...]],
    fused: Mapping[str, tuple[str, ...]],
) -> dict[str, QuantTensor]:
    """Return `tensors` with every stack replaced by its parts.

    `shapes` are the shapes that the Program reads, by canonical name. `fused` maps a stacked matrix
    of a layer to its parts ({"attn_qkv": ("attn_q", "attn_k", "attn_v")}). Stacks of experts,
    (experts, outputs, inputs), are known by name. A tensor that does not fit stays as it is.
    """
    cut: dict[str, QuantTensor] = {}
    for name, tensor in tensors.items():
        parts = _parts(name, tensor, fused)
        if parts and all(part in shapes for part in parts):
            heights = [shapes[part][0] for part in parts]
            if sum(heights) == _height(tensor):
                cut |= zip(parts, _cut(tensor, heights), strict=True)
                continue
        cut[name] = tensor
    return cut


def _parts(name: str, tensor: QuantTensor, fused: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the names of the parts of `tensor`, from its first row to its last."""
    experts = _EXPERTS.fullmatch(name)
    if experts and len(tensor.shape) == 3 and tensor.shape[0] <= MAX_EXPERTS:
        kinds = experts[2].split("_")
        return [
            f"{experts[1]}{kind}.{index}.weight"
            for index in range(tensor.shape[0])
            for kind in kinds
        ]
    weight = _LAYER_WEIGHT.fullmatch(name)
    cuttable = len(tensor.shape) == 2 or (len(tensor.shape) == 1 and tensor.format.block_size == 1)
    if weight and weight[2] in fused and cuttable:
        return [f"{weight[1]}{part}.{weight[3]}" for part in fused[weight[2]]]
    return []


def _height(tensor: QuantTensor) -> int:
    """Return the number of output rows; each value of a vector counts as a row."""
    return tensor.shape[0] if len(tensor.shape) == 1 else tensor.num_rows


def _cut(tensor: QuantTensor, heights: list[int]) -> Iterator[QuantTensor]:
    start = 0
    for height in heights:
        rows = slice(start, start + height)
        if len(tensor.shape) == 1:
            size = tensor.format.num_bytes(1)
            data = tensor.data[:, start * size : (start + height) * size]
            yield QuantTensor(tensor.format, (height,), data)
        else:
            yield QuantTensor(tensor.format, (height, tensor.shape[-1]), tensor.data[rows])
        start += height
