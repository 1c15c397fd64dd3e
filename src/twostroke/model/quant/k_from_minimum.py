"""Q2_K, Q4_K and Q5_K: 256 values in groups with a scale and a minimum each.

A value is scale * code - minimum.

Layout of a block of Q2_K (ggml `block_q2_K`), which has 16 groups: 16 bytes, a group's scale in the
low nibble and its minimum in the high one; 64 bytes of codes, of which each run of 32 bytes holds
128 values in four planes of two bits; then two float16, the scale of the scales and the scale of
the minimums.

Layout of a block of the others, which have 8 groups (ggml `block_q4_K`, `block_q5_K`): two float16,
the scale of the scales and the scale of the minimums; 12 bytes for eight scales and eight minimums;
in Q5_K 32 bytes with the codes' fifth bits, group i in bit i; 128 bytes with the codes' lower four
bits, of which each run of 32 bytes holds one group in the low nibbles and the next in the high
ones.

Of the 12 bytes (ggml `get_scale_min_k4`), bytes 0 to 3 hold scales 0 to 3 in their low six bits and
bytes 4 to 7 minimums 0 to 3; bytes 8 to 11 hold the low four bits of scales 4 to 7 and, above them,
of minimums 4 to 7, whose upper two bits are the upper two of bytes 0 to 3 and of bytes 4 to 7.
"""

from __future__ import annotations

import numpy as np

from twostroke.model.quant.fit import fit_scale_and_minimum, nearest_codes, whole_shares
from twostroke.model.quant.format import Bytes, Floats, ggml_format, half_bytes, half_column
from twostroke.model.quant.planes import pack_planes, unpack_planes

_LOW_SIX = np.uint8(0x3F)
_HIGH_TWO = np.uint8(0xC0)


def decode_q2_k(blocks: Bytes) -> Floats:
    """Bytes (n, 84) to float32 (n, 256)."""
    scales = half_column(blocks, 80) * (blocks[:, :16] & np.uint8(15)).astype(np.float32)
    minimums = half_column(blocks, 82) * (blocks[:, :16] >> np.uint8(4)).astype(np.float32)
    return _scaled(unpack_planes(blocks[:, 16:80], 2, run=32), scales, minimums)


def encode_q2_k(values: Floats) -> Bytes:
    """float32 (n, 256) to bytes (n, 84): least squares for each group's scale and minimum."""
    (scale, minimum), (scales, minimums), codes = _fitted(values.reshape(-1, 16, 16), 3, 15)
    packed = pack_planes(codes, 2, run=32)
    shares = scales | minimums << np.uint8(4)
    return np.concatenate([shares, packed, half_bytes(scale), half_bytes(minimum)], axis=1)


def decode_q4_k(blocks: Bytes) -> Floats:
    """Bytes (n, 144) to float32 (n, 256)."""
    return _scaled(unpack_planes(blocks[:, 16:], 4, run=32), *_scales_and_minimums(blocks))


def encode_q4_k(values: Floats) -> Bytes:
    """float32 (n, 256) to bytes (n, 144): least squares for each group's scale and minimum."""
    return pack_super_blocks(*_fitted(values.reshape(-1, 8, 32), 15, 63), 4)


def decode_q5_k(blocks: Bytes) -> Floats:
    """Bytes (n, 176) to float32 (n, 256)."""
    codes = unpack_planes(blocks[:, 48:], 4, run=32)
    codes |= unpack_planes(blocks[:, 16:48], 1, run=32) << np.uint8(4)
    return _scaled(codes, *_scales_and_minimums(blocks))


def encode_q5_k(values: Floats) -> Bytes:
    """float32 (n, 256) to bytes (n, 176): least squares for each group's scale and minimum."""
    return pack_super_blocks(*_fitted(values.reshape(-1, 8, 32), 31, 63), 5)


def pack_super_blocks(
    units: tuple[Floats, Floats], shares: tuple[Bytes, Bytes], codes: Bytes, bits: int
) -> Bytes:
    """Pack blocks of Q4_K (4 bits) or Q5_K (5) into bytes (n, 144 or 176).

    `units` are the scales of scales and of minimums (n, 1), `shares` both, below 64 (n, 8), and
    `codes` uint8 (n, 256).
    """
    parts = [half_bytes(units[0]), half_bytes(units[1]), pack_scales(*shares)]
    if bits == 5:
        parts.append(pack_planes(codes >> np.uint8(4), 1, run=32))
    parts.append(pack_planes(codes & np.uint8(15), 4, run=32))
    return np.concatenate(parts, axis=1)


def unpack_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Bytes (n, 12) to scales and minimums, each uint8 (n, 8) below 64."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & _LOW_SIX, rest & 15 | (first & _HIGH_TWO) >> 2], axis=1)
    minimums = np.concatenate([second & _LOW_SIX, rest >> 4 | (second & _HIGH_TWO) >> 2], axis=1)
    return scales, minimums


def pack_scales(scales: Bytes, minimums: Bytes) -> Bytes:
    """Pack scales and minimums, each uint8 (n, 8) below 64, into bytes (n, 12)."""
    first = scales[:, :4] | (scales[:, 4:] & 0x30) << 2
    second = minimums[:, :4] | (minimums[:, 4:] & 0x30) << 2
    rest = scales[:, 4:] & 15 | minimums[:, 4:] << 4
    return np.concatenate([first, second, rest], axis=1)


def _scales_and_minimums(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return those of Q4_K and Q5_K, each float32 (n, 8)."""
    scales, minimums = unpack_scales(blocks[:, 4:16])
    return (
        half_column(blocks, 0) * scales.astype(np.float32),
        half_column(blocks, 2) * minimums.astype(np.float32),
    )


def _scaled(codes: Bytes, scales: Floats, minimums: Floats) -> Floats:
    """Scale and shift codes (n, 256) by those of their groups (n, groups); float32 (n, 256)."""
    values = codes.astype(np.float32).reshape(*scales.shape, -1)
    values *= scales[:, :, None]
    values -= minimums[:, :, None]
    return values.reshape(-1, 256)


def _fitted(
    groups: Floats, high: int, most: int
) -> tuple[tuple[Floats, Floats], tuple[Bytes, Bytes], Bytes]:
    """Fit groups (n, k, size) with codes from 0 to `high`, scales and minimums up to `most`.

    Returns the scale of the scales and of the minimums (n, 1), both (n, k), and codes (n, 256).
    """
    scales, minimums = fit_scale_and_minimum(groups, high)
    scale, scale_shares = whole_shares(scales[:, :, 0], 0, most)
    minimum, minimum_shares = whole_shares(minimums[:, :, 0], 0, most)
    codes = nearest_codes(groups, scale * scale_shares, minimum * minimum_shares, high)
    shares = scale_shares.astype(np.uint8), minimum_shares.astype(np.uint8)
    return (scale, minimum), shares, codes.reshape(-1, 256)


Q2_K = ggml_format("Q2_K", 10, (16, 256, 84), decode_q2_k, encode_q2_k)
Q4_K = ggml_format("Q4_K", 12, (32, 256, 144), decode_q4_k, encode_q4_k)
Q5_K = ggml_format("Q5_K", 13, (32, 256, 176), decode_q5_k, encode_q5_k)
