"""Converts a file's weights to the names and shapes that a Program reads."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.core.errors import ModelFormatError
from twostroke.model.families import ARCHITECTURES
from twostroke.model.weights.latent import cut_latent
from twostroke.model.weights.projections import cut_projections
from twostroke.model.weights.recurrent import cut_recurrent
from twostroke.model.weights.stacks import cut_stacks, uncut_stack
from twostroke.model.weights.transposed_experts import transpose_experts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.families import ModelSpec
    from twostroke.model.quant import QuantTensor
    from twostroke.model.weights.file_names import FileNames

_KEY_OR_VALUE = re.compile(r"blk\.(\d{1,4})\.attn_(?:k|v|k_norm)\.weight")


def in_program_form(
    file: str,
    tensors: Mapping[str, QuantTensor],
    spec: ModelSpec,
    shapes: Mapping[str, tuple[int, ...]],
    names: FileNames,
) -> dict[str, QuantTensor]:
    """Return a file's weights with the names and shapes that a Program reads.

    Stacked and joined matrices are separated. `shapes` are the shapes that the Program reads, by
    canonical name. Tensors that the Program does not read are returned, too, except empty biases,
    and keys and values that no layer uses.

    Raises:
        ModelFormatError: a stacked or joined matrix has the wrong shape.
    """
    tensors = {name: _reshaped(tensor, shapes.get(name)) for name, tensor in tensors.items()}
    family = ARCHITECTURES[spec.architecture]
    if spec.experts is not None and family.transposes_experts:
        alternate = spec.experts.has_biases
        tensors = transpose_experts(file, tensors, names, alternate=alternate)
    separate = cut_stacks(tensors, shapes, family.fused)
    if uncut := uncut_stack(separate, shapes, family.fused):
        name, shape = uncut
        raise ModelFormatError(
            f"{file!r} has tensor {names.quoted(name)} with shape {separate[name].shape}; the "
            f"family {spec.architecture!r} reads {shape}."
        )
    if spec.latent is not None:
        separate = cut_latent(file, separate, shapes, names.quoted)
    if spec.delta is not None:
        separate = cut_recurrent(file, separate, spec, names)
    separate = cut_projections(file, separate, spec, names)
    return {
        name: tensor
        for name, tensor in separate.items()
        if name in shapes
        or not (_is_empty_bias(name, tensor) or _is_of_shared_kv_layer(name, spec))
    }


def _reshaped(tensor: QuantTensor, shape: tuple[int, ...] | None) -> QuantTensor:
    """Return a tensor with the shape that the Program reads, if only dimensions of 1 differ.

    In safetensors files, ERNIE has a bias (1, experts), and convolutions have kernels (width, 1,
    kernel).
    """
    if shape is None or tensor.shape == shape:
        return tensor
    if [size for size in tensor.shape if size != 1] != [size for size in shape if size != 1]:
        return tensor
    return replace(tensor, shape=shape, data=tensor.data.reshape(prod(shape[:-1]), -1))


def _is_empty_bias(name: str, tensor: QuantTensor) -> bool:
    """Return whether a tensor is a bias of zeros, as some quantized models contain."""
    return name.endswith(".bias") and not tensor.data.any()


def _is_of_shared_kv_layer(name: str, spec: ModelSpec) -> bool:
    """Return whether a tensor computes keys or values for a layer that reads an earlier layer's.

    Files may contain such tensors; no layer uses them.
    """
    match = _KEY_OR_VALUE.fullmatch(name)
    layer = spec.num_layers if match is None else int(match[1])
    return layer < spec.num_layers and spec.kv_source_layer(layer) is not None
