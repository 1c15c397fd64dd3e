"""FP8 weights of quantized safetensors models: E4M3 numbers in groups that share a scale."""

from __future__ import annotations

from functools import cache, partial
from typing import Final

import numpy as np

from twostroke.model.quant.floats import BF16, E4M3, F32, decode_bfloat, encode_bfloat, nearest_e4m3
from twostroke.model.quant.format import Bytes, Floats, Format
from twostroke.model.quant.tensor import QuantTensor

MAX_E4M3: Final = np.float32(448)  # of E4M3
_LOW_BITS: Final = np.uint32(0x000F_FFFF)  # zero in a float32 of 4 significant bits
_MIN_BF16_SCALE: Final = np.float32(2.0**-100)  # products of smaller scales are subnormal


@cache
def e4m3(group: int, scale: str = "f32") -> Format:
    """Return the number format of E4M3 weights in which `group` values of a row share a scale.

    `scale` is the scales' type, "f32" or "bf16". The format with bfloat16 scales is only read.
    """
    float_format = F32 if scale == "f32" else BF16
    scale_bytes = float_format.block_bytes
    return Format(
        f"E4M3_G{group}_{scale.upper()}",
        kernel_id=float_format.kernel_id,
        group_size=group,
        block_size=group,
        block_bytes=scale_bytes + group,
        decode=partial(_decode, scale_bytes),
        encode=_encode if scale == "f32" else None,
        to_kernel=partial(_to_kernel, scale_bytes, group),
        packed_bits=8 * scale_bytes,
    )


def e4m3_tensor(codes: Bytes, scales: Floats) -> QuantTensor:
    """Return E4M3 codes (outputs, inputs) and their scales (outputs, groups) as one tensor."""
    outputs, inputs = codes.shape
    groups = scales.shape[1]
    scales = np.ascontiguousarray(scales, np.float32).reshape(-1, 1)
    has_few_bits = not (scales.view(np.uint32) & _LOW_BITS).any()
    is_exact = has_few_bits and ((scales == 0) | (np.abs(scales) >= _MIN_BF16_SCALE)).all()
    stored = encode_bfloat(scales) if is_exact else scales.view(np.uint8)
    data = np.concatenate([stored.reshape(outputs * groups, -1), codes.reshape(len(scales), -1)], 1)
    fmt = e4m3(inputs // groups, "bf16" if is_exact else "f32")
    return QuantTensor(fmt, (outputs, inputs), data.reshape(outputs, -1))


def _decode(scale_bytes: int, blocks: Bytes) -> Floats:
    raw = np.ascontiguousarray(blocks[:, :scale_bytes])
    scales = raw.view(np.float32) if scale_bytes == F32.block_bytes else decode_bfloat(raw)
    with np.errstate(over="ignore", invalid="ignore"):
        values: Floats = E4M3[blocks[:, scale_bytes:]] * scales
    return values


def _encode(values: Floats) -> Bytes:
    scales = np.abs(values).max(axis=1, keepdims=True) / MAX_E4M3
    divisors: Floats = np.where(scales == 0, np.float32(1), scales).astype(np.float32)
    codes = nearest_e4m3(values / divisors)
    return np.concatenate([scales.view(np.uint8), codes], axis=1)


def _to_kernel(scale_bytes: int, group: int, data: Bytes) -> Bytes:
    """Convert rows of E4M3 blocks, uint8 (rows, row_bytes), to F32 or BF16 for the kernels."""
    values = _decode(scale_bytes, np.ascontiguousarray(data).reshape(-1, scale_bytes + group))
    raw = values.view(np.uint8) if scale_bytes == F32.block_bytes else encode_bfloat(values)
    return raw.reshape(len(data), -1)
