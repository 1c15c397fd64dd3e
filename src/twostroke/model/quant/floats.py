"""F32, F16 and BF16, the float16 scales of GGUF blocks, and tables of 8-bit and 4-bit floats.

E4M3 is the variant without infinities (OCP 8-bit floating point specification, E4M3: 0x7F and 0xFF
are NaN, the largest value is 448). E8M0 and E2M1 are from the OCP microscaling formats: a power of
two from 2**-127 to 2**127 (0xFF is NaN), and 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.model.quant.format import Bytes, Floats, ggml_format, half_bytes, half_column
from twostroke.model.quant.tensor import QuantTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

_INFINITY = np.uint32(0x7F80_0000)
_QUIET_NAN = np.uint32(0x0040_0000)


def decode_single(blocks: Bytes) -> Floats:
    """Decode F32 weights, bytes (n, 4), to float32 (n, 1)."""
    return blocks.view(np.float32)


def encode_single(values: Floats) -> Bytes:
    """Encode float32 (n, 1) as F32 weights, bytes (n, 4)."""
    return values.view(np.uint8)


def decode_half(blocks: Bytes) -> Floats:
    """Decode F16 weights (IEEE half precision), bytes (n, 2), to float32 (n, 1)."""
    return blocks.view(np.float16).astype(np.float32)


def decode_bfloat(blocks: Bytes) -> Floats:
    """Decode BF16 weights, bytes (n, 2), to float32 (n, 1)."""
    upper = blocks.view(np.uint16).astype(np.uint32)
    return (upper << np.uint32(16)).view(np.float32)


def encode_bfloat(values: Floats) -> Bytes:
    """Encode float32 (n, 1) as BF16, bytes (n, 2), rounded to nearest even; NaN stays NaN."""
    bits = values.view(np.uint32)
    is_nan = (bits & np.uint32(0x7FFF_FFFF)) > _INFINITY
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    # For a NaN this addition could overflow; its rounded value is not used.
    rounded = bits + (np.uint32(0x7FFF) + odd)
    upper = np.where(is_nan, bits | _QUIET_NAN, rounded) >> np.uint32(16)
    return upper.astype(np.uint16).view(np.uint8)


F32 = ggml_format("F32", 0, (1, 1, 4), decode_single, encode_single)
F16 = ggml_format("F16", 1, (1, 1, 2), decode_half, half_bytes)
BF16 = ggml_format("BF16", 30, (1, 1, 2), decode_bfloat, encode_bfloat)

# Byte offsets in a block of its float16 scale and, if it has one, of the second float16.
SCALE_OFFSETS: Final[Mapping[str, tuple[int, ...]]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def terms_by_scale(tensor: QuantTensor) -> tuple[Floats, ...]:
    """Split a quantized matrix into terms that add up to it: one for each float16 scale of a block.

    For example, a block of Q4_K has a scale, and a scale of its minimums. Training multiplies each
    term by a learned factor (`multiply_scales` stores the factors). A term is float32 (rows,
    blocks, block_size).
    """
    fmt = tensor.format
    blocks = np.ascontiguousarray(tensor.data).reshape(-1, fmt.block_bytes)
    terms = []
    for offset in SCALE_OFFSETS[fmt.name]:
        single = blocks.copy()
        for other_offset in SCALE_OFFSETS[fmt.name]:
            if other_offset != offset:
                single[:, other_offset : other_offset + 2] = 0
        terms.append(fmt.decode(single).reshape(tensor.shape[0], -1, fmt.block_size))
    return tuple(terms)


def multiply_scales(tensor: QuantTensor, factors: tuple[Floats, ...]) -> QuantTensor:
    """Return a quantized matrix whose float16 scales are multiplied by factors and rounded.

    `factors` has an array (rows, blocks) for each scale of a block.
    """
    fmt = tensor.format
    blocks = np.ascontiguousarray(tensor.data).reshape(-1, fmt.block_bytes).copy()
    for offset, factor in zip(SCALE_OFFSETS[fmt.name], factors, strict=True):
        changed = half_column(blocks, offset) * factor.reshape(-1, 1)
        blocks[:, offset : offset + 2] = half_bytes(changed)
    return QuantTensor(fmt, tensor.shape, blocks.reshape(tensor.shape[0], -1))


def _e4m3_values() -> Floats:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values[[0x7F, 0xFF]] = np.nan
    return np.where(codes & 0x80, -values, values).astype(np.float32)


def _e8m0_values() -> Floats:
    values = np.ldexp(1.0, np.arange(256) - 127)
    values[0xFF] = np.nan
    return values.astype(np.float32)


_E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)

E4M3 = _e4m3_values()  # float32 (256,)
E8M0 = _e8m0_values()  # float32 (256,)
E2M1 = np.concatenate(
    [_E2M1_MAGNITUDES, np.float32(0) - _E2M1_MAGNITUDES]
)  # float32 (16,), without a -0

_POSITIVE_E4M3 = E4M3[:0x7F]


def nearest_e4m3(values: Floats) -> Bytes:
    """Return the codes of the E4M3 (8-bit float) numbers that are nearest to values.

    Values above 448, the largest number, become 448.
    """
    codes = _nearest(np.abs(values), _POSITIVE_E4M3)
    return codes | (np.signbit(values).astype(np.uint8) << np.uint8(7))


def nearest_e8m0(values: Floats) -> Bytes:
    """Return the E8M0 codes (powers of two) of positive values, rounded down."""
    _, exponent = np.frexp(values)
    codes: Bytes = np.clip(exponent + 126, 0, 254).astype(np.uint8)
    return codes


def nearest_e2m1(values: Floats) -> Bytes:
    """Return the codes of the E2M1 (4-bit float) numbers that are nearest to values.

    Values above 6, the largest number, become 6.
    """
    codes = _nearest(np.abs(values), _E2M1_MAGNITUDES)
    return codes | (np.signbit(values).astype(np.uint8) << np.uint8(3))


def _nearest(values: Floats, ascending: Floats) -> Bytes:
    """Return the index of the number in `ascending` that is nearest to each value.

    If two numbers are equally near, the even index is returned.
    """
    middles = (ascending[1:] + ascending[:-1]) / np.float32(2)
    up = np.searchsorted(middles, values, side="right")
    down = np.searchsorted(middles, values, side="left")
    nearest: Bytes = np.where(up % 2 == 0, up, down).astype(np.uint8)
    return nearest
