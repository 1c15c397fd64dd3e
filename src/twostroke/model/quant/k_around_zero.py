"""Q3_K and Q6_K: 256 values in 16 groups with signed scales; a value is (code - half) * scale.

Layout of a block of Q3_K (ggml `block_q3_K`), half = 4: 32 bytes with the codes' upper bits, eight
planes of one bit; 64 bytes with the lower two, of which each run of 32 bytes holds 128 values in
four planes; 12 bytes of 6-bit scales plus 32, the low nibbles of all 16 in two planes of 8 bytes
and their upper two bits in four planes of 4; then a float16, the scale of the scales.

Layout of a block of Q6_K (ggml `block_q6_K`), half = 32: 128 bytes with the codes' low nibbles, of
which each run of 64 bytes holds 128 values in two planes; 64 bytes with their upper two bits, of
which each run of 32 bytes holds 128 values in four planes; 16 signed bytes, the groups' scales;
then a float16, the scale of the scales.
"""

from __future__ import annotations

import numpy as np

from twostroke.model.quant.fit import fit_scale, nearest_scaled, whole_codes, whole_shares
from twostroke.model.quant.format import Bytes, Floats, ggml_format, half_bytes, half_column
from twostroke.model.quant.planes import pack_planes, unpack_planes

_Q3_PEAKS = (-4.6, -4.3, -4.0, -3.7, -3.4, -3.1, 2.8, 3.0, 3.2, 3.4)
_Q6_PEAKS = (-33.0, -32.5, -32.0, -31.5, -31.0, -30.5, -30.0, 31.0)


def decode_q3_k(blocks: Bytes) -> Floats:
    """Bytes (n, 110) to float32 (n, 256)."""
    shares = unpack_planes(blocks[:, 96:104], 4, run=8)
    shares |= unpack_planes(blocks[:, 104:108], 2, run=4) << np.uint8(4)
    scales = half_column(blocks, 108) * (shares.astype(np.float32) - np.float32(32))
    codes = unpack_planes(blocks[:, 32:96], 2, run=32)
    codes |= unpack_planes(blocks[:, :32], 1, run=32) << np.uint8(2)
    return _scaled(codes, 4, scales)


def encode_q3_k(values: Floats) -> Bytes:
    """float32 (n, 256) to bytes (n, 110): least squares for each group's scale."""
    return pack_q3_k(*_fitted(values, 4, _Q3_PEAKS, 32))


def pack_q3_k(scale: Floats, shares: Floats, codes: Bytes) -> Bytes:
    """Pack the scale of the scales (n, 1), the scales (n, 16) and codes (n, 256)."""
    lifted = (shares + np.float32(32)).astype(np.uint8)
    parts = [
        pack_planes(codes >> np.uint8(2), 1, run=32),
        pack_planes(codes & np.uint8(3), 2, run=32),
        pack_planes(lifted & np.uint8(15), 4, run=8),
        pack_planes(lifted >> np.uint8(4), 2, run=4),
        half_bytes(scale),
    ]
    return np.concatenate(parts, axis=1)


def decode_q6_k(blocks: Bytes) -> Floats:
    """Bytes (n, 210) to float32 (n, 256)."""
    scales = half_column(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    codes = unpack_planes(blocks[:, :128], 4, run=64)
    codes |= unpack_planes(blocks[:, 128:192], 2, run=32) << np.uint8(4)
    return _scaled(codes, 32, scales)


def encode_q6_k(values: Floats) -> Bytes:
    """float32 (n, 256) to bytes (n, 210): least squares for each group's scale."""
    return pack_q6_k(*_fitted(values, 32, _Q6_PEAKS, 128))


def pack_q6_k(scale: Floats, shares: Floats, codes: Bytes) -> Bytes:
    """Pack the scale of the scales (n, 1), the scales (n, 16) and codes (n, 256)."""
    parts = [
        pack_planes(codes & np.uint8(15), 4, run=64),
        pack_planes(codes >> np.uint8(4), 2, run=32),
        shares.astype(np.int8).view(np.uint8),
        half_bytes(scale),
    ]
    return np.concatenate(parts, axis=1)


def _scaled(codes: Bytes, half: int, scales: Floats) -> Floats:
    """Scale codes (n, 256) by their groups' scales (n, 16); float32 (n, 256)."""
    values = codes.astype(np.float32).reshape(-1, 16, 16)
    values -= np.float32(half)
    values *= scales[:, :, None]
    return values.reshape(-1, 256)


def _fitted(
    values: Floats, half: int, peaks: tuple[float, ...], most: int
) -> tuple[Floats, Floats, Bytes]:
    """Fit float32 (n, 256) with codes up to 2 * `half` and scales from -`most` to `most` - 1.

    Returns the scale of the scales (n, 1), the scales (n, 16), and the codes (n, 256).
    """
    groups, nearest = values.reshape(-1, 16, 16), whole_codes(-half, half - 1)
    scale, shares = whole_shares(fit_scale(groups, nearest, peaks)[:, :, 0], -most, most - 1)
    chosen = nearest_scaled(groups, scale * shares, nearest)
    return scale, shares, (chosen + np.float32(half)).astype(np.uint8).reshape(-1, 256)


Q3_K = ggml_format("Q3_K", 11, (16, 256, 110), decode_q3_k, encode_q3_k)
Q6_K = ggml_format("Q6_K", 14, (16, 256, 210), decode_q6_k, encode_q6_k)
