"""Narrows a model: keeps the attention heads and feed-forward channels that contribute most."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace

from twostroke.backends.torch import TorchModel
from twostroke.core.frozen import Frozen
from twostroke.model.families import build_program
from twostroke.model.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from twostroke.model.families import ModelSpec


class Widths(Frozen):
    """The KV heads and feed-forward channels to keep in each layer of a narrowed model.

    The query heads of a KV head are kept with it. Indices are ascending.
    """

    groups: tuple[tuple[int, ...], ...]
    channels: tuple[tuple[int, ...], ...]

    def narrowed(self, spec: ModelSpec) -> ModelSpec:
        """Return the specification of the narrowed model, with only these heads and channels."""
        num_kv_heads = len(self.groups[0])
        return replace(
            spec,
            num_heads=num_kv_heads * (spec.num_heads // spec.num_kv_heads),
            num_kv_heads=num_kv_heads,
            ffn_size=len(self.channels[0]),
        )

    def cut(self, spec: ModelSpec, tensors: Mapping[str, QuantTensor]) -> dict[str, QuantTensor]:
        """Return the weights of the narrowed model; changed weights become float32."""
        return {name: self._cut(spec, name, tensor) for name, tensor in tensors.items()}

    def _cut(self, spec: ModelSpec, name: str, tensor: QuantTensor) -> QuantTensor:
        block, layer, matrix, *_ = [*name.split("."), "", ""]
        if block != "blk":
            return tensor
        groups, dim = self.groups[int(layer)], spec.head_dim
        rows = {
            "attn_k": _value_indices(groups, dim),
            "attn_q": _value_indices(groups, dim * (spec.num_heads // spec.num_kv_heads)),
            "ffn_up": self.channels[int(layer)],
        }
        rows["attn_v"] = rows["attn_k"]
        rows["ffn_gate"] = rows["ffn_up"]
        for norm, heads in (("attn_q", spec.num_heads), ("attn_k", spec.num_kv_heads)):
            if tensor.shape == (heads * dim,):  # a norm over all heads
                rows[f"{norm}_norm"] = rows[norm]
        columns = {"attn_output": rows["attn_q"], "ffn_down": rows["ffn_up"]}
        if matrix in rows:
            return _floats(tensor.dequantize()[list(rows[matrix])])
        if matrix in columns and len(tensor.shape) == 2:
            return _floats(tensor.dequantize()[:, list(columns[matrix])])
        return tensor


def choose_widths(
    spec: ModelSpec,
    tensors: Mapping[str, QuantTensor],
    sequences: Sequence[Sequence[int]],
    num_kv_heads: int,
    ffn_size: int,
) -> Widths:
    """Return the KV heads and channels that contribute most to each layer's output.

    A contribution is a sum of squares over the tokens of `sequences`. For a KV head, the squares
    are of its part of the attention's output; for a channel, of its value times its column of the
    down projection.
    """
    model = TorchModel(build_program(spec), tensors)
    layers = range(spec.num_layers)
    groups = torch.zeros(spec.num_layers, spec.num_kv_heads)
    channels = torch.zeros(spec.num_layers, spec.ffn_size)
    names = [f"blk.{layer}.{value}" for layer in layers for value in ("mixed", "gated")]
    with torch.no_grad():
        for tokens in sequences:
            values = model.values(torch.tensor(tokens), names)
            for layer in layers:
                down = model.weights[f"blk.{layer}.ffn_down.weight"]
                gated = values[f"blk.{layer}.gated"]
                channels[layer] += gated.square().sum(0) * down.square().sum(0)
                output = model.weights[f"blk.{layer}.attn_output.weight"]
                parts = zip(
                    values[f"blk.{layer}.mixed"].chunk(spec.num_kv_heads, 1),
                    output.chunk(spec.num_kv_heads, 1),
                    strict=True,
                )
                for group, (mixed, columns) in enumerate(parts):
                    groups[layer, group] += (mixed @ columns.T).square().sum()
    return Widths(_top_indices(groups, num_kv_heads), _top_indices(channels, ffn_size))


def _top_indices(scores: Tensor, count: int) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the `count` highest scores of each row, ascending."""
    indices = scores.topk(count).indices.sort().values
    return tuple(map(tuple, indices.tolist()))


def _value_indices(parts: Sequence[int], width: int) -> tuple[int, ...]:
    """Return the indices of all values in some parts of a vector, such as heads.

    All parts have `width` values.
    """
    return tuple([part * width + offset for part in parts for offset in range(width)])


def _floats(values: NDArray[np.float32]) -> QuantTensor:
    return QuantTensor.from_floats(np.ascontiguousarray(values), FORMATS["F32"])
