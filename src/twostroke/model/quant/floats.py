"""F32, F16 and BF16: single values, without blocks or scales."""

from __future__ import annotations

import numpy as np

from twostroke.model.quant.format import Bytes, Floats, ggml_format, half_bytes

_INFINITY = np.uint32(0x7F80_0000)
_QUIET_NAN = np.uint32(0x0040_0000)


def decode_single(blocks: Bytes) -> Floats:
    """Bytes (n, 4) to float32 (n, 1)."""
    return blocks.view(np.float32)


def encode_single(values: Floats) -> Bytes:
    """float32 (n, 1) to bytes (n, 4)."""
    return values.view(np.uint8)


def decode_half(blocks: Bytes) -> Floats:
    """Bytes (n, 2) of IEEE half precision to float32 (n, 1)."""
    return blocks.view(np.float16).astype(np.float32)


def decode_bfloat(blocks: Bytes) -> Floats:
    """Bytes (n, 2), the upper halves of single-precision floats, to float32 (n, 1)."""
    upper = blocks.view(np.uint16).astype(np.uint32)
    return (upper << np.uint32(16)).view(np.float32)


def encode_bfloat(values: Floats) -> Bytes:
    """float32 (n, 1) to bytes (n, 2), rounded to nearest even; a NaN stays one, made quiet."""
    bits = values.view(np.uint32)
    is_nan = (bits & np.uint32(0x7FFF_FFFF)) > _INFINITY
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    # Adding to a NaN's bits could wrap around; its rounded value is not used.
    rounded = bits + (np.uint32(0x7FFF) + odd)
    upper = np.where(is_nan, bits | _QUIET_NAN, rounded) >> np.uint32(16)
    return upper.astype(np.uint16).view(np.uint8)


F32 = ggml_format("F32", 0, (1, 1, 4), decode_single, encode_single)
F16 = ggml_format("F16", 1, (1, 1, 2), decode_half, half_bytes)
BF16 = ggml_format("BF16", 30, (1, 1, 2), decode_bfloat, encode_bfloat)
