"""Converts weights of the gated delta rule and of gated attention as Programs read them."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec.structs import replace

from twostroke.core.errors import ModelFormatError
from twostroke.model.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from twostroke.model.families.spec import ModelSpec
    from twostroke.model.weights.file_names import FileNames

    RowOrders = dict[str, NDArray[np.int64]]

_LAYER_WEIGHT = re.compile(r"(blk\.(\d{1,4})\.)(.+)")
_QUERIES_AND_GATES: Final = "attn_q.weight"
_PROJECTIONS: Final = "ssm_in.weight"
_STRENGTHS_AND_DECAYS: Final = "ssm_ba.weight"
_LOG_DECAY: Final = ".A_log"  # the end of the name of the decay's rates in folders


def cut_recurrent(
    file: str, tensors: Mapping[str, QuantTensor], spec: ModelSpec, names: FileNames
) -> dict[str, QuantTensor]:
    """Return a file's weights as the Program of a model with the delta rule reads them.

    - `attn_q` has the rows of each head's queries and then of its gate. They become `attn_q` and
      `attn_gate`.
    - `ssm_in` and `ssm_ba` (Qwen3-Next) are arranged by key head. `ssm_in` has the rows of the
      head's queries, keys, values and gates, and `ssm_ba` of its strengths and decays. They are
      split into a matrix of queries, keys and values, one of gates, one of strengths and one of
      decays.
    - `ssm_conv1d` is (channels, 1, kernel) in safetensors files, and becomes (channels, kernel).
      Kimi Linear has three: `ssm_conv1d_q`, `ssm_conv1d_k` and `ssm_conv1d_v`, which become one.
    - The gate of a shared expert is a vector in GGUF files, and becomes a matrix with one row.
    - Safetensors files have the logarithm of the decay's rates: `ssm_a` becomes `-exp` of it.

    Rows are copied as they are stored, so quantized weights stay exact. Other tensors are returned
    unchanged.

    Raises:
        ModelFormatError: a matrix has the wrong size, or the file has a weight twice.
    """
    separate: dict[str, QuantTensor] = {}
    for name, tensor in tensors.items():
        parts = {name: tensor}
        match = _LAYER_WEIGHT.fullmatch(name)
        if match and int(match[2]) < spec.num_layers:
            prefix, weight = match[1], match[3]
            num_rows = _num_stacked_rows(spec, int(match[2]), weight)
            expected = num_rows, spec.hidden_size
            if num_rows and tensor.shape != expected:
                raise ModelFormatError(
                    f"{file!r} has tensor {names.quoted(name)} with shape {tensor.shape}; its "
                    f"heads have {expected}."
                )
            if num_rows:
                orders = _row_orders(spec, weight)
                parts = {prefix + part: _take(tensor, rows) for part, rows in orders.items()}
            else:
                is_logarithm = names.published.get(name, "").endswith(_LOG_DECAY)
                parts = {name: _reshaped(weight, tensor, is_logarithm=is_logarithm)}
        if duplicates := separate.keys() & parts:
            raise ModelFormatError(
                f"{file!r} has {names.quoted(min(duplicates))} twice: {names.quoted(name)} has "
                "it, too."
            )
        separate |= parts
    if spec.delta is not None and spec.delta.gates_channels:
        _join_convolutions(file, separate, spec, names)
    return separate


def _join_convolutions(
    file: str, tensors: dict[str, QuantTensor], spec: ModelSpec, names: FileNames
) -> None:
    """Join the convolution kernels of a layer's queries, keys and values in `tensors`, in place."""
    delta = spec.delta
    assert delta is not None
    shape = delta.width, delta.kernel
    for layer in spec.recurrent_layers:
        kernels = []
        for part in "qkv":
            name = f"blk.{layer}.ssm_conv1d_{part}.weight"
            tensor = tensors.pop(name, None)
            if tensor is None:
                raise ModelFormatError(
                    f"{file!r} lacks tensor {names.quoted(name)} with shape {shape}, which the "
                    f"family {spec.architecture!r} reads."
                )
            if [size for size in tensor.shape if size != 1] != [n for n in shape if n != 1]:
                raise ModelFormatError(
                    f"{file!r} has tensor {names.quoted(name)} with shape {tensor.shape}; the "
                    f"family {spec.architecture!r} reads {shape}."
                )
            kernels.append(tensor.dequantize().reshape(shape))
        joined = QuantTensor.from_floats(np.concatenate(kernels), FORMATS["F32"])
        tensors[f"blk.{layer}.ssm_conv1d.weight"] = joined


def _num_stacked_rows(spec: ModelSpec, layer: int, weight: str) -> int:
    """Return how many rows a layer's stacked matrix must have; 0 if the weight is no stack."""
    delta = spec.delta
    assert delta is not None
    if delta.attends[layer]:
        has_gates = spec.gates_attention and weight == _QUERIES_AND_GATES
        return 2 * spec.num_heads * spec.head_dim if has_gates else 0
    num_rows = {
        _PROJECTIONS: 2 * (delta.num_key_heads * delta.key_dim + delta.width),
        _STRENGTHS_AND_DECAYS: 2 * delta.num_value_heads,
    }
    return num_rows.get(weight, 0)


def _row_orders(spec: ModelSpec, weight: str) -> RowOrders:
    """Return, for each weight of the Program in a stacked matrix, the rows that belong to it."""
    delta = spec.delta
    assert delta is not None
    if weight == _QUERIES_AND_GATES:
        queries, gates = _by_head(spec.num_heads, (spec.head_dim, spec.head_dim))
        return {"attn_q.weight": queries, "attn_gate.weight": gates}
    num_values = delta.num_value_heads // delta.num_key_heads  # value heads of a key head
    if weight == _STRENGTHS_AND_DECAYS:
        strengths, decays = _by_head(delta.num_key_heads, (num_values, num_values))
        return {"ssm_beta.weight": strengths, "ssm_alpha.weight": decays}
    values = num_values * delta.value_dim
    *mixed, gates = _by_head(delta.num_key_heads, (delta.key_dim, delta.key_dim, values, values))
    return {"attn_qkv.weight": np.concatenate(mixed), "attn_gate.weight": gates}


def _by_head(num_heads: int, heights: tuple[int, ...]) -> list[NDArray[np.int64]]:
    """Return the row numbers of each part of a matrix whose rows are arranged by head.

    The rows of a head are its parts, one after the other; `heights` are their numbers of rows.
    """
    rows = np.arange(num_heads * sum(heights)).reshape(num_heads, -1)
    ends = list(accumulate(heights))[:-1]
    return [part.ravel() for part in np.split(rows, ends, axis=1)]


def _take(tensor: QuantTensor, rows: NDArray[np.int64]) -> QuantTensor:
    return replace(tensor, shape=(rows.size, tensor.shape[1]), data=tensor.data[rows])


def _reshaped(weight: str, tensor: QuantTensor, *, is_logarithm: bool) -> QuantTensor:
    """Return a layer's weight with the shape and values that the Program reads.

    It is the same object if nothing changes. `is_logarithm`: `ssm_a` has logarithms of decay rates.
    """
    shape = tensor.shape
    if weight == "ssm_conv1d.weight" and len(shape) == 3 and shape[1] == 1:
        return replace(tensor, shape=(shape[0], shape[2]))
    if weight == "ffn_gate_inp_shexp.weight" and len(shape) == 1:
        return replace(tensor, shape=(1, *shape))
    if weight == "ssm_a" and is_logarithm:
        return QuantTensor.from_floats(-np.exp(tensor.dequantize()), FORMATS["F32"])
    return tensor
