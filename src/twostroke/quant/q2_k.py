"""Q2_K: 256 values in 16 groups with 4-bit scales and minimums; each value is a 2-bit code.

Layout of a block (ggml `block_q2_K`): 16 bytes, a group's scale in the low nibble and its minimum
in the high one; 64 bytes of codes, of which each run of 32 bytes holds 128 values in four planes of
two bits; then two float16, the scale of the scales and the scale of the minimums. A value is
scale * code - minimum.
"""

from __future__ import annotations

import numpy as np

from twostroke.quant.fit import fit_scale_and_minimum, nearest_codes, whole_shares
from twostroke.quant.format import Bytes, Floats, Format, half_bytes, half_column
from twostroke.quant.planes import pack_planes, unpack_planes


def decode(blocks: Bytes) -> Floats:
    """Bytes (n, 84) to float32 (n, 256)."""
    scales = half_column(blocks, 80) * (blocks[:, :16] & np.uint8(15)).astype(np.float32)
    minimums = half_column(blocks, 82) * (blocks[:, :16] >> np.uint8(4)).astype(np.float32)
    values = unpack_planes(blocks[:, 16:80], 2, run=32).astype(np.float32).reshape(-1, 16, 16)
    values *= scales[:, :, None]
    values -= minimums[:, :, None]
    return values.reshape(-1, 256)


def encode(values: Floats) -> Bytes:
    """float32 (n, 256) to bytes (n, 84): least squares for each group's scale and minimum."""
    groups = values.reshape(-1, 16, 16)
    scales, minimums = fit_scale_and_minimum(groups, 3)
    scale, scale_shares = whole_shares(scales[:, :, 0], 0, 15)
    minimum, minimum_shares = whole_shares(minimums[:, :, 0], 0, 15)
    codes = nearest_codes(groups, scale * scale_shares, minimum * minimum_shares, 3)
    shares = scale_shares.astype(np.uint8) | minimum_shares.astype(np.uint8) << np.uint8(4)
    packed = pack_planes(codes.reshape(-1, 256), 2, run=32)
    return np.concatenate([shares, packed, half_bytes(scale), half_bytes(minimum)], axis=1)


Q2_K = Format("Q2_K", gguf_id=10, block_size=256, block_bytes=84, decode=decode, encode=encode)
