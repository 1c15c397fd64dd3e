"""IQ4_XS: 256 values in 8 groups with signed 6-bit scales; each value is one of IQ4_NL's levels.

Layout of a block (ggml `block_iq4_xs`): a float16, the scale of the scales; 2 bytes with the upper
two bits of the scales plus 32, neighbours side by side; 4 bytes with their low nibbles, as ordered;
128 bytes of codes, of which each run of 16 bytes holds a group, values 0 to 15 in the low nibbles
and 16 to 31 in the high ones.
"""

from __future__ import annotations

import numpy as np

from twostroke.quant.fit import fit_scale, nearest_scaled, whole_shares
from twostroke.quant.format import Bytes, Floats, Format, half_bytes, half_column
from twostroke.quant.iq4_nl import LEVELS, PEAKS, level_codes, nearest_level
from twostroke.quant.planes import pack_planes, unpack_planes


def decode(blocks: Bytes) -> Floats:
    """Bytes (n, 136) to float32 (n, 256)."""
    shares = unpack_planes(blocks[:, 4:8], 4, run=1)
    shares |= unpack_planes(blocks[:, 2:4], 2, run=1) << np.uint8(4)
    scales = half_column(blocks, 0) * (shares.astype(np.float32) - np.float32(32))
    values = LEVELS[unpack_planes(blocks[:, 8:], 4, run=16)].reshape(-1, 8, 32)
    values *= scales[:, :, None]
    return values.reshape(-1, 256)


def encode(values: Floats) -> Bytes:
    """float32 (n, 256) to bytes (n, 136): least squares for each group's scale."""
    groups = values.reshape(-1, 8, 32)
    scale, shares = whole_shares(fit_scale(groups, nearest_level, PEAKS)[:, :, 0], -32, 31)
    codes = level_codes(nearest_scaled(groups, scale * shares, nearest_level)).reshape(-1, 256)
    lifted = (shares + np.float32(32)).astype(np.uint8)
    parts = [
        half_bytes(scale),
        pack_planes(lifted >> np.uint8(4), 2, run=1),
        pack_planes(lifted & np.uint8(15), 4, run=1),
        pack_planes(codes, 4, run=16),
    ]
    return np.concatenate(parts, axis=1)


IQ4_XS = Format("IQ4_XS", gguf_id=23, block_size=256, block_bytes=136, decode=decode, encode=encode)
