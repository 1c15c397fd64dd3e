"""Q6_K: 256 values in 16 groups with 8-bit scales; each value is a 6-bit code minus 32.

Layout of a block (ggml `block_q6_K`): 128 bytes with the codes' low nibbles, of which each run of
64 bytes holds 128 values in two planes; 64 bytes with their upper two bits, of which each run of 32
bytes holds 128 values in four planes; 16 signed bytes, the groups' scales; then a float16, the
scale of the scales.
"""

from __future__ import annotations

import numpy as np

from twostroke.quant.fit import fit_scale, nearest_scaled, whole_codes, whole_shares
from twostroke.quant.format import Bytes, Floats, Format, half_bytes, half_column
from twostroke.quant.planes import pack_planes, unpack_planes

_NEAREST = whole_codes(-32, 31)
_PEAKS = (-33.0, -32.5, -32.0, -31.5, -31.0, -30.5, -30.0, 31.0)


def decode(blocks: Bytes) -> Floats:
    """Bytes (n, 210) to float32 (n, 256)."""
    scales = half_column(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    codes = unpack_planes(blocks[:, :128], 4, run=64)
    codes |= unpack_planes(blocks[:, 128:192], 2, run=32) << np.uint8(4)
    values = codes.astype(np.float32).reshape(-1, 16, 16)
    values -= np.float32(32)
    values *= scales[:, :, None]
    return values.reshape(-1, 256)


def encode(values: Floats) -> Bytes:
    """float32 (n, 256) to bytes (n, 210): least squares for each group's scale."""
    groups = values.reshape(-1, 16, 16)
    scale, shares = whole_shares(fit_scale(groups, _NEAREST, _PEAKS)[:, :, 0], -128, 127)
    chosen = nearest_scaled(groups, scale * shares, _NEAREST)
    codes = (chosen + np.float32(32)).astype(np.uint8).reshape(-1, 256)
    parts = [
        pack_planes(codes & np.uint8(15), 4, run=64),
        pack_planes(codes >> np.uint8(4), 2, run=32),
        shares.astype(np.int8).view(np.uint8),
        half_bytes(scale),
    ]
    return np.concatenate(parts, axis=1)


Q6_K = Format("Q6_K", gguf_id=14, block_size=256, block_bytes=210, decode=decode, encode=encode)
