"""Q2_K to Q6_K, TQ1_0 and TQ2_0 of GGUF files: quantized blocks of 256 values."""

from __future__ import annotations

import numpy as np

from twostroke.model.quant.fit import (
    code_rounder,
    fit_scale,
    fit_scale_and_minimum,
    nearest_codes,
    nearest_scaled,
    quantize_scales,
)
from twostroke.model.quant.format import (
    Bytes,
    Floats,
    Format,
    ggml_format,
    half_bytes,
    half_column,
    pack_planes,
    unpack_planes,
)

_Q3_TRIAL_PEAKS = (-4.6, -4.3, -4.0, -3.7, -3.4, -3.1, 2.8, 3.0, 3.2, 3.4)
_Q6_TRIAL_PEAKS = (-33.0, -32.5, -32.0, -31.5, -31.0, -30.5, -30.0, 31.0)


def decode_q3_k(blocks: Bytes) -> Floats:
    """Decode Q3_K blocks, bytes (n, 110), to float32 (n, 256)."""
    scale_codes = unpack_planes(blocks[:, 96:104], 4, run=8)
    scale_codes |= unpack_planes(blocks[:, 104:108], 2, run=4) << np.uint8(4)
    scales = half_column(blocks, 108) * (scale_codes.astype(np.float32) - np.float32(32))
    codes = unpack_planes(blocks[:, 32:96], 2, run=32)
    codes |= unpack_planes(blocks[:, :32], 1, run=32) << np.uint8(2)
    return _scale_around_zero(codes, 4, scales)


def encode_q3_k(values: Floats) -> Bytes:
    """Encode float32 (n, 256) as Q3_K blocks, bytes (n, 110).

    The groups' scales are fitted by least squares.
    """
    return pack_q3_k(*_fit_around_zero(values, 4, _Q3_TRIAL_PEAKS, 32))


def pack_q3_k(scale: Floats, scale_codes: Floats, codes: Bytes) -> Bytes:
    """Pack block scales (n, 1), group scales (n, 16) and codes (n, 256) into Q3_K blocks."""
    unsigned_codes = (scale_codes + np.float32(32)).astype(np.uint8)
    parts = [
        pack_planes(codes >> np.uint8(2), 1, run=32),
        pack_planes(codes & np.uint8(3), 2, run=32),
        pack_planes(unsigned_codes & np.uint8(15), 4, run=8),
        pack_planes(unsigned_codes >> np.uint8(4), 2, run=4),
        half_bytes(scale),
    ]
    return np.concatenate(parts, axis=1)


def decode_q6_k(blocks: Bytes) -> Floats:
    """Decode Q6_K blocks, bytes (n, 210), to float32 (n, 256)."""
    scales = half_column(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    codes = unpack_planes(blocks[:, :128], 4, run=64)
    codes |= unpack_planes(blocks[:, 128:192], 2, run=32) << np.uint8(4)
    return _scale_around_zero(codes, 32, scales)


def encode_q6_k(values: Floats) -> Bytes:
    """Encode float32 (n, 256) as Q6_K blocks, bytes (n, 210).

    The groups' scales are fitted by least squares.
    """
    return pack_q6_k(*_fit_around_zero(values, 32, _Q6_TRIAL_PEAKS, 128))


def pack_q6_k(scale: Floats, scale_codes: Floats, codes: Bytes) -> Bytes:
    """Pack block scales (n, 1), group scales (n, 16) and codes (n, 256) into Q6_K blocks."""
    parts = [
        pack_planes(codes & np.uint8(15), 4, run=64),
        pack_planes(codes >> np.uint8(4), 2, run=32),
        scale_codes.astype(np.int8).view(np.uint8),
        half_bytes(scale),
    ]
    return np.concatenate(parts, axis=1)


def _scale_around_zero(codes: Bytes, half: int, scales: Floats) -> Floats:
    """Dequantize blocks whose values are (code - half) * scale.

    Codes are (n, 256), scales (n, 16), values float32 (n, 256).
    """
    values = codes.astype(np.float32).reshape(-1, 16, 16)
    values -= np.float32(half)
    values *= scales[:, :, None]
    return values.reshape(-1, 256)


def _fit_around_zero(
    values: Floats, half: int, peaks: tuple[float, ...], max_scale_code: int
) -> tuple[Floats, Floats, Bytes]:
    """Quantize float32 (n, 256) to codes below 2 * `half`, with signed integer group scales.

    Returns (block scales (n, 1), group scales (n, 16), codes (n, 256)). Group scales are from
    -`max_scale_code` to `max_scale_code - 1`. `peaks`: as in `fit_scale`.
    """
    groups = values.reshape(-1, 16, 16)
    nearest = code_rounder(-half, half - 1)
    scale, scale_codes = quantize_scales(
        fit_scale(groups, nearest, peaks)[:, :, 0], -max_scale_code, max_scale_code - 1
    )
    signed_codes = nearest_scaled(groups, scale * scale_codes, nearest)
    return scale, scale_codes, (signed_codes + np.float32(half)).astype(np.uint8).reshape(-1, 256)


Q3_K = ggml_format("Q3_K", 11, (16, 256, 110), decode_q3_k, encode_q3_k)
Q6_K = ggml_format("Q6_K", 14, (16, 256, 210), decode_q6_k, encode_q6_k)

_LOW_SIX = np.uint8(0x3F)
_HIGH_TWO = np.uint8(0xC0)


def decode_q2_k(blocks: Bytes) -> Floats:
    """Decode Q2_K blocks, bytes (n, 84), to float32 (n, 256)."""
    scales = half_column(blocks, 80) * (blocks[:, :16] & np.uint8(15)).astype(np.float32)
    minimums = half_column(blocks, 82) * (blocks[:, :16] >> np.uint8(4)).astype(np.float32)
    return _scale_from_minimum(unpack_planes(blocks[:, 16:80], 2, run=32), scales, minimums)


def encode_q2_k(values: Floats) -> Bytes:
    """Encode float32 (n, 256) as Q2_K blocks, bytes (n, 84).

    The groups' scales and minimums are fitted by least squares.
    """
    (scale, minimum), (scales, minimums), codes = _fit_from_minimum(
        values.reshape(-1, 16, 16), 3, 15
    )
    packed = pack_planes(codes, 2, run=32)
    packed_scales = scales | minimums << np.uint8(4)
    return np.concatenate([packed_scales, packed, half_bytes(scale), half_bytes(minimum)], axis=1)


def decode_q4_k(blocks: Bytes) -> Floats:
    """Decode Q4_K blocks, bytes (n, 144), to float32 (n, 256)."""
    return _scale_from_minimum(
        unpack_planes(blocks[:, 16:], 4, run=32), *_scales_and_minimums(blocks)
    )


def encode_q4_k(values: Floats) -> Bytes:
    """Encode float32 (n, 256) as Q4_K blocks, bytes (n, 144).

    The groups' scales and minimums are fitted by least squares.
    """
    return pack_super_blocks(*_fit_from_minimum(values.reshape(-1, 8, 32), 15, 63), 4)


def decode_q5_k(blocks: Bytes) -> Floats:
    """Decode Q5_K blocks, bytes (n, 176), to float32 (n, 256)."""
    codes = unpack_planes(blocks[:, 48:], 4, run=32)
    codes |= unpack_planes(blocks[:, 16:48], 1, run=32) << np.uint8(4)
    return _scale_from_minimum(codes, *_scales_and_minimums(blocks))


def encode_q5_k(values: Floats) -> Bytes:
    """Encode float32 (n, 256) as Q5_K blocks, bytes (n, 176).

    The groups' scales and minimums are fitted by least squares.
    """
    return pack_super_blocks(*_fit_from_minimum(values.reshape(-1, 8, 32), 31, 63), 5)


def pack_super_blocks(
    super_scales: tuple[Floats, Floats], scale_codes: tuple[Bytes, Bytes], codes: Bytes, bits: int
) -> Bytes:
    """Pack blocks of Q4_K (4 bits) or Q5_K (5 bits) into bytes (n, 144 or 176).

    `super_scales` are the block scales (n, 1) that multiply the groups' scales and minimums;
    `scale_codes` are the groups' scales and minimums, below 64 (n, 8); `codes` are uint8 (n, 256).
    """
    parts = [half_bytes(super_scales[0]), half_bytes(super_scales[1]), pack_scales(*scale_codes)]
    if bits == 5:
        parts.append(pack_planes(codes >> np.uint8(4), 1, run=32))
    parts.append(pack_planes(codes & np.uint8(15), 4, run=32))
    return np.concatenate(parts, axis=1)


def unpack_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpack the scales and minimums of Q4_K or Q5_K blocks, bytes (n, 12).

    Both are uint8 (n, 8) below 64.
    """
    first, second, low_nibbles = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & _LOW_SIX, low_nibbles & 15 | (first & _HIGH_TWO) >> 2], axis=1)
    minimums = np.concatenate(
        [second & _LOW_SIX, low_nibbles >> 4 | (second & _HIGH_TWO) >> 2], axis=1
    )
    return scales, minimums


def pack_scales(scales: Bytes, minimums: Bytes) -> Bytes:
    """Pack the scales and minimums of Q4_K or Q5_K blocks into bytes (n, 12).

    Both are uint8 (n, 8) below 64.
    """
    first = scales[:, :4] | (scales[:, 4:] & 0x30) << 2
    second = minimums[:, :4] | (minimums[:, 4:] & 0x30) << 2
    low_nibbles = scales[:, 4:] & 15 | minimums[:, 4:] << 4
    return np.concatenate([first, second, low_nibbles], axis=1)


def _scales_and_minimums(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return the groups' scales and minimums of Q4_K or Q5_K, each float32 (n, 8)."""
    scales, minimums = unpack_scales(blocks[:, 4:16])
    return (
        half_column(blocks, 0) * scales.astype(np.float32),
        half_column(blocks, 2) * minimums.astype(np.float32),
    )


def _scale_from_minimum(codes: Bytes, scales: Floats, minimums: Floats) -> Floats:
    """Dequantize blocks whose values are code * scale - minimum, to float32 (n, 256).

    Scales and minimums are (n, groups).
    """
    values = codes.astype(np.float32).reshape(*scales.shape, -1)
    values *= scales[:, :, None]
    values -= minimums[:, :, None]
    return values.reshape(-1, 256)


def _fit_from_minimum(
    groups: Floats, max_code: int, max_scale_code: int
) -> tuple[tuple[Floats, Floats], tuple[Bytes, Bytes], Bytes]:
    """Quantize groups (n, k, size) to codes up to `max_code`, with integer scales and minimums.

    Returns ((block scale of the group scales, block scale of the group minimums), each (n, 1);
    (group scales, group minimums), each (n, k) up to `max_scale_code`; the codes (n, 256)).
    """
    scales, minimums = fit_scale_and_minimum(groups, max_code)
    scale, scale_codes = quantize_scales(scales[:, :, 0], 0, max_scale_code)
    minimum, minimum_codes = quantize_scales(minimums[:, :, 0], 0, max_scale_code)
    codes = nearest_codes(groups, scale * scale_codes, minimum * minimum_codes, max_code)
    shares = scale_codes.astype(np.uint8), minimum_codes.astype(np.uint8)
    return (scale, minimum), shares, codes.reshape(-1, 256)


Q2_K = ggml_format("Q2_K", 10, (16, 256, 84), decode_q2_k, encode_q2_k)
Q4_K = ggml_format("Q4_K", 12, (32, 256, 144), decode_q4_k, encode_q4_k)
Q5_K = ggml_format("Q5_K", 13, (32, 256, 176), decode_q5_k, encode_q5_k)


def decode_tq2_0(blocks: Bytes) -> Floats:
    """Decode TQ2_0 blocks, bytes (n, 66), to float32 (n, 256)."""
    values = unpack_planes(blocks[:, :64], 2, run=32).astype(np.float32)
    values -= np.float32(1)
    values *= half_column(blocks, 64)
    return values


def decode_tq1_0(blocks: Bytes) -> Floats:
    """Decode TQ1_0 blocks, bytes (n, 54), to float32 (n, 256)."""
    return decode_tq2_0(_to_tq2_0(blocks))


def _to_tq2_0(data: Bytes) -> Bytes:
    """Convert rows of TQ1_0 blocks, uint8 (rows, row_bytes), to the kernels' TQ2_0 blocks."""
    blocks = data.reshape(-1, 54)
    parts = []
    for first, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = np.array([3**i for i in range(count)], np.uint8)
        fractions = blocks[:, None, first:end] * powers[:, None]
        codes = fractions.astype(np.uint16) * np.uint16(3) >> np.uint16(8)
        parts.append(codes.astype(np.uint8).reshape(len(blocks), -1))
    packed = pack_planes(np.concatenate(parts, axis=1), 2, run=32)
    return np.concatenate([packed, blocks[:, 52:]], axis=1).reshape(len(data), -1)


TQ1_0 = Format(
    "TQ1_0",
    kernel_id=35,
    group_size=256,
    block_size=256,
    block_bytes=54,
    decode=decode_tq1_0,
    gguf_id=34,
    to_kernel=_to_tq2_0,
    packed_bits=2.125,
)
TQ2_0 = Format(
    "TQ2_0",
    kernel_id=35,
    group_size=256,
    block_size=256,
    block_bytes=66,
    decode=decode_tq2_0,
    gguf_id=35,
    packed_bits=2.125,
)
