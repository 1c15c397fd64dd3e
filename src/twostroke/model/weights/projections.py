"""Splits the joined projections of recurrent layers into the weights that a Program reads."""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from twostroke.core.errors import ModelFormatError
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights.stacks import slice_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.families.spec import ModelSpec
    from twostroke.model.weights.file_names import FileNames

_LAYER_WEIGHT = re.compile(r"(blk\.\d{1,4}\.)(.+)\.(weight|bias)")


def cut_projections(
    file: str, tensors: Mapping[str, QuantTensor], spec: ModelSpec, names: FileNames
) -> dict[str, QuantTensor]:
    """Return a file's weights, in which joined projections of recurrent layers are separate.

    `shortconv.in_proj` (LFM2) has the rows of three products. `ssm_in` (Mamba-2) has the rows of
    gates, then of values, keys and queries, then of time steps. The parts are views of the tensor.

    Two other weights of Mamba-2 are converted: the logarithms of decay rates that safetensors files
    have, and the norms with a row for each group that GGUF files have. Other tensors are returned
    unchanged.

    Raises:
        ModelFormatError: a joined projection is missing, or has the wrong shape.
    """
    stacks = _stacks(spec)
    separate: dict[str, QuantTensor] = {}
    for name, tensor in tensors.items():
        match = _LAYER_WEIGHT.fullmatch(name)
        parts = stacks.get(match[2]) if match else None
        if match is None or parts is None:
            separate[name] = _reshaped(name, tensor, spec, names)
            continue
        num_rows = sum(parts.values())
        expected = (num_rows,) if match[3] == "bias" else (num_rows, spec.hidden_size)
        if tensor.shape != expected:
            raise ModelFormatError(
                f"{file!r} has tensor {names.quoted(name)} with shape {tensor.shape}; the family "
                f"{spec.architecture!r} reads {expected}."
            )
        start = 0
        for part, height in parts.items():
            end = start + height
            separate[f"{match[1]}{part}.{match[3]}"] = slice_rows(tensor, start, end)
            start = end
    _check_complete(file, tensors, spec, names)
    return separate


def _stacks(spec: ModelSpec) -> dict[str, dict[str, int]]:
    """Return the joined projections of a layer by name: the number of rows of each part."""
    if spec.convolution is not None:
        parts = ("shortconv.in_b", "shortconv.in_c", "shortconv.in_v")
        return {"shortconv.in_proj": dict.fromkeys(parts, spec.hidden_size)}
    if spec.mamba is not None:
        sizes = spec.mamba
        heights = sizes.width, sizes.mixed_width, sizes.num_heads
        parts = ("ssm_in_z", "ssm_in_x", "ssm_in_dt")
        return {"ssm_in": dict(zip(parts, heights, strict=True))}
    return {}


def _reshaped(name: str, tensor: QuantTensor, spec: ModelSpec, names: FileNames) -> QuantTensor:
    """Return a weight with the shape and values that the Program reads.

    It is the same object if nothing changes.
    """
    if spec.mamba is None:
        return tensor
    if name.endswith(".ssm_a") and names.published.get(name, "").endswith(".A_log"):
        return QuantTensor.from_floats(-np.exp(tensor.dequantize()), FORMATS["F32"])
    width, num_groups = spec.mamba.width, spec.mamba.num_groups
    if name.endswith(".ssm_norm.weight") and tensor.shape == (num_groups, width // num_groups):
        return replace(tensor, shape=(width,), data=tensor.data.reshape(1, -1))
    return tensor


def _check_complete(
    file: str, tensors: Mapping[str, QuantTensor], spec: ModelSpec, names: FileNames
) -> None:
    """Raise ModelFormatError if a recurrent layer lacks its joined projection."""
    mixer = spec.convolution or spec.mamba
    kinds = ("weight", "bias") if mixer is not None and mixer.has_bias else ("weight",)
    for stack, parts in _stacks(spec).items():
        num_rows = sum(parts.values())
        for layer, kind in product(spec.recurrent_layers, kinds):
            name = f"blk.{layer}.{stack}.{kind}"
            if name not in tensors:
                shape = (num_rows, spec.hidden_size) if kind == "weight" else (num_rows,)
                raise ModelFormatError(
                    f"{file!r} lacks tensor {names.quoted(name)} with shape {shape}, which the "
                    f"family {spec.architecture!r} reads."
                )
