"""Converts transposed stacks of experts, of gpt-oss and Llama 4, to the layout of GGUF files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec.structs import replace

from twostroke.core.errors import ModelFormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.quant import QuantTensor
    from twostroke.model.weights.file_names import FileNames

_GATE_UP: Final = "ffn_gate_up_exps"
_DOWN: Final = "ffn_down_exps"
_NUM_DIMENSIONS: Final = {"weight": 3, "bias": 2}  # of a stack


def transpose_experts(
    file: str, tensors: Mapping[str, QuantTensor], names: FileNames, *, alternate: bool
) -> dict[str, QuantTensor]:
    """Return a file's weights with the experts' matrices laid out as in GGUF files.

    Safetensors files join gate and up projections. If their rows `alternate` (gpt-oss), they become
    two stacks. Stacks of floats are (experts, inputs, outputs) in the file, and are transposed in a
    copy. Stacks in MXFP4 already have outputs before inputs. Other tensors are returned unchanged.

    Raises:
        ModelFormatError: gate and up projections have an odd number of rows together.
    """
    separate: dict[str, QuantTensor] = {}
    for name, tensor in tensors.items():
        stack, _, kind = name.rpartition(".")
        is_stack = stack.endswith((_GATE_UP, _DOWN))
        if not (names.published and is_stack and len(tensor.shape) == _NUM_DIMENSIONS.get(kind)):
            separate[name] = tensor
            continue
        is_transposed = kind == "weight" and tensor.format.block_size == 1
        rows = _transposed(tensor) if is_transposed else tensor
        if stack.endswith(_DOWN) or not alternate:
            separate[name] = rows
            continue
        if rows.shape[1] % 2:
            raise ModelFormatError(
                f"{file!r} has tensor {names.quoted(name)} with the shape {tensor.shape}; gate and "
                "up projections have an even number of outputs together."
            )
        for first, part in enumerate(("ffn_gate_exps", "ffn_up_exps")):
            half = _every_second_value if kind == "bias" else _every_second_row
            separate[f"{stack.removesuffix(_GATE_UP)}{part}.{kind}"] = half(rows, first)
    return separate


def _transposed(tensor: QuantTensor) -> QuantTensor:
    """Return a stack of float matrices with the last two dimensions exchanged, as a copy."""
    count, inputs, outputs = tensor.shape
    unit = np.dtype(f"u{tensor.format.block_bytes}")
    values = np.ascontiguousarray(tensor.data).view(unit).reshape(count, inputs, outputs)
    data = np.ascontiguousarray(values.swapaxes(1, 2)).view(np.uint8)
    return replace(tensor, shape=(count, outputs, inputs), data=data.reshape(count * outputs, -1))


def _every_second_row(tensor: QuantTensor, first: int) -> QuantTensor:
    """Return every second row of each matrix of a stack, from row `first` on, as a view."""
    count, rows, width = tensor.shape
    return replace(tensor, shape=(count, rows // 2, width), data=tensor.data[first::2])


def _every_second_value(tensor: QuantTensor, first: int) -> QuantTensor:
    """Return every second value of each row of a stack of biases, from value `first` on."""
    count, width = tensor.shape
    values = np.ascontiguousarray(tensor.data).reshape(count * width, -1)[first::2]
    return replace(tensor, shape=(count, width // 2), data=values.reshape(count, -1))
