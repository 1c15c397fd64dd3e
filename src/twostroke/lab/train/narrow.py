"""A model with fewer heads and a narrower feed-forward: those stay that say most."""

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
    """By layer, ascending: the groups of heads that share keys, and the channels, that stay."""

    groups: tuple[tuple[int, ...], ...]
    channels: tuple[tuple[int, ...], ...]

    def narrowed(self, spec: ModelSpec) -> ModelSpec:
        """Return the facts of the narrower model."""
        num_kv_heads = len(self.groups[0])
        return replace(
            spec,
            num_heads=num_kv_heads * (spec.num_heads // spec.num_kv_heads),
            num_kv_heads=num_kv_heads,
            ffn_size=len(self.channels[0]),
        )

    def cut(self, spec: ModelSpec, tensors: Mapping[str, QuantTensor]) -> dict[str, QuantTensor]:
        """Return the weights of the narrower model, of which those that change become float32."""
        return {name: self._cut(spec, name, tensor) for name, tensor in tensors.items()}

    def _cut(self, spec: ModelSpec, name: str, tensor: QuantTensor) -> QuantTensor:
        block, layer, part, *_ = [*name.split("."), "", ""]
        if block != "blk":
            return tensor
        groups, dim = self.groups[int(layer)], spec.head_dim
        kept = {
            "attn_k": _places(groups, dim),
            "attn_q": _places(groups, dim * (spec.num_heads // spec.num_kv_heads)),
            "ffn_up": self.channels[int(layer)],
        }
        kept["attn_v"] = kept["attn_k"]
        kept["ffn_gate"] = kept["ffn_up"]
        for norm, heads in (("attn_q", spec.num_heads), ("attn_k", spec.num_kv_heads)):
            if tensor.shape == (heads * dim,):  # of a whole row, not of each head
                kept[f"{norm}_norm"] = kept[norm]
        columns = {"attn_output": kept["attn_q"], "ffn_down": kept["ffn_up"]}
        if part in kept:
            return _floats(tensor.dequantize()[list(kept[part])])
        if part in columns and len(tensor.shape) == 2:
            return _floats(tensor.dequantize()[:, list(columns[part])])
        return tensor


def choose_widths(
    spec: ModelSpec,
    tensors: Mapping[str, QuantTensor],
    sequences: Sequence[Sequence[int]],
    num_kv_heads: int,
    ffn_size: int,
) -> Widths:
    """Return the groups of heads and the channels that add most to the states, in each layer.

    What one adds is the sum of squares over the tokens of `sequences`: for a group that of its
    part of the attention's output, for a channel that of its values times its column's.
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
    return Widths(_most(groups, num_kv_heads), _most(channels, ffn_size))


def _most(scores: Tensor, count: int) -> tuple[tuple[int, ...], ...]:
    kept = scores.topk(count).indices.sort().values
    return tuple(map(tuple, kept.tolist()))


def _places(parts: Sequence[int], width: int) -> tuple[int, ...]:
    return tuple([part * width + place for part in parts for place in range(width)])


def _floats(values: NDArray[np.float32]) -> QuantTensor:
    return QuantTensor.from_floats(np.ascontiguousarray(values), FORMATS["F32"])
