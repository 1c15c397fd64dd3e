"""E4M3 in groups of a row that share a scale: matrices of published FP8 folders.

A block is a group. Its layout is ours: the scale, float32 or bfloat16, then a byte for each value.
A value is the E4M3 number times the scale, in float32. Kernels of the cpu backend read these values
as BF16, where scales have so few bits that they are exact, else as F32.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Final

import numpy as np

from twostroke.model.quant.floats import BF16, E4M3, F32, decode_bfloat, encode_bfloat, nearest_e4m3
from twostroke.model.quant.format import Bytes, Floats, Format
from twostroke.model.quant.tensor import QuantTensor

LARGEST: Final = np.float32(448)  # of E4M3
_LOW_BITS: Final = np.uint32(0x000F_FFFF)  # of a float32 scale; E4M3 times four bits has eight
_LEAST_SCALE: Final = np.float32(2.0**-100)  # below, products are subnormal in bfloat16


@cache
def e4m3(group: int, scale: str = "f32") -> Format:
    """Return the format of E4M3 in groups of `group` values; `scale` is "f32" or "bf16".

    That with bfloat16 is for scales of four significant bits, and is read, not written.
    """
    kernels = F32 if scale == "f32" else BF16
    size = kernels.block_bytes
    return Format(
        f"E4M3_G{group}_{scale.upper()}",
        kernels.kernel_id,
        group,
        group,
        size + group,
        partial(_decode, size),
        _encode if scale == "f32" else None,
        to_kernel=partial(_to_kernel, size, group),
        packed_bits=8 * size,
    )


def e4m3_tensor(codes: Bytes, scales: Floats) -> QuantTensor:
    """Return E4M3 codes (outputs, inputs) with scales (outputs, groups) as one tensor."""
    outputs, inputs = codes.shape
    groups = scales.shape[1]
    scales = np.ascontiguousarray(scales, np.float32).reshape(-1, 1)
    is_short = not (scales.view(np.uint32) & _LOW_BITS).any()
    is_exact = is_short and ((scales == 0) | (np.abs(scales) >= _LEAST_SCALE)).all()
    stored = encode_bfloat(scales) if is_exact else scales.view(np.uint8)
    data = np.concatenate([stored.reshape(outputs * groups, -1), codes.reshape(len(scales), -1)], 1)
    fmt = e4m3(inputs // groups, "bf16" if is_exact else "f32")
    return QuantTensor(fmt, (outputs, inputs), data.reshape(outputs, -1))


def _decode(size: int, blocks: Bytes) -> Floats:
    raw = np.ascontiguousarray(blocks[:, :size])
    scales = raw.view(np.float32) if size == F32.block_bytes else decode_bfloat(raw)
    with np.errstate(over="ignore", invalid="ignore"):
        values: Floats = E4M3[blocks[:, size:]] * scales
    return values


def _encode(values: Floats) -> Bytes:
    scales = np.abs(values).max(axis=1, keepdims=True) / LARGEST
    divisors: Floats = np.where(scales == 0, np.float32(1), scales).astype(np.float32)
    codes = nearest_e4m3(values / divisors)
    return np.concatenate([scales.view(np.uint8), codes], axis=1)


def _to_kernel(size: int, group: int, data: Bytes) -> Bytes:
    """Bring rows of blocks, uint8 (rows, row_bytes), into F32 or BF16."""
    values = _decode(size, np.ascontiguousarray(data).reshape(-1, size + group))
    raw = values.view(np.uint8) if size == F32.block_bytes else encode_bfloat(values)
    return raw.reshape(len(data), -1)
