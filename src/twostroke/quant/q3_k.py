"""Q3_K: 256 values in 16 groups with signed 6-bit scales; each value is a 3-bit code minus 4.

Layout of a block (ggml `block_q3_K`): 32 bytes with the codes' upper bits, eight planes of one bit;
64 bytes with the lower two, of which each run of 32 bytes holds 128 values in four planes; 12 bytes
of scales plus 32, the low nibbles of all 16 in two planes of 8 bytes and their upper two bits in
four planes of 4; then a float16, the scale of the scales.
"""

from __future__ import annotations

import numpy as np

from twostroke.quant.fit import fit_scale, nearest_scaled, whole_codes, whole_shares
from twostroke.quant.format import Bytes, Floats, Format, half_bytes, half_column
from twostroke.quant.planes import pack_planes, unpack_planes

_NEAREST = whole_codes(-4, 3)
_PEAKS = (-4.6, -4.3, -4.0, -3.7, -3.4, -3.1, 2.8, 3.0, 3.2, 3.4)


def decode(blocks: Bytes) -> Floats:
    """Bytes (n, 110) to float32 (n, 256)."""
    shares = unpack_planes(blocks[:, 96:104], 4, run=8)
    shares |= unpack_planes(blocks[:, 104:108], 2, run=4) << np.uint8(4)
    scales = half_column(blocks, 108) * (shares.astype(np.float32) - np.float32(32))
    codes = unpack_planes(blocks[:, 32:96], 2, run=32)
    codes |= unpack_planes(blocks[:, :32], 1, run=32) << np.uint8(2)
    values = codes.astype(np.float32).reshape(-1, 16, 16)
    values -= np.float32(4)
    values *= scales[:, :, None]
    return values.reshape(-1, 256)


def encode(values: Floats) -> Bytes:
    """float32 (n, 256) to bytes (n, 110): least squares for each group's scale."""
    groups = values.reshape(-1, 16, 16)
    scale, shares = whole_shares(fit_scale(groups, _NEAREST, _PEAKS)[:, :, 0], -32, 31)
    chosen = nearest_scaled(groups, scale * shares, _NEAREST)
    codes = (chosen + np.float32(4)).astype(np.uint8).reshape(-1, 256)
    lifted = (shares + np.float32(32)).astype(np.uint8)
    parts = [
        pack_planes(codes >> np.uint8(2), 1, run=32),
        pack_planes(codes & np.uint8(3), 2, run=32),
        pack_planes(lifted & np.uint8(15), 4, run=8),
        pack_planes(lifted >> np.uint8(4), 2, run=4),
        half_bytes(scale),
    ]
    return np.concatenate(parts, axis=1)


Q3_K = Format("Q3_K", gguf_id=11, block_size=256, block_bytes=110, decode=decode, encode=encode)
