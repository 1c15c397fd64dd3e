"""Q4_K: 256 values in 8 groups with 6-bit scales and minimums; each value is a 4-bit code.

Layout of a block (ggml `block_q4_K`): two float16, the scale of the scales and the scale of the
minimums; 12 bytes of scales and minimums (k_scales.py); 128 bytes of codes, of which each run of 32
bytes holds one group in the low nibbles and the next in the high ones. A value is
scale * code - minimum.
"""

from __future__ import annotations

import numpy as np

from twostroke.quant.format import Bytes, Floats, Format
from twostroke.quant.k_scales import head_and_codes, scaled_groups
from twostroke.quant.planes import pack_planes, unpack_planes


def decode(blocks: Bytes) -> Floats:
    """Bytes (n, 144) to float32 (n, 256)."""
    return scaled_groups(blocks[:, :16], unpack_planes(blocks[:, 16:], 4, run=32))


def encode(values: Floats) -> Bytes:
    """float32 (n, 256) to bytes (n, 144): least squares for each group's scale and minimum."""
    head, codes = head_and_codes(values, 15)
    return np.concatenate([head, pack_planes(codes, 4, run=32)], axis=1)


Q4_K = Format("Q4_K", gguf_id=12, block_size=256, block_bytes=144, decode=decode, encode=encode)
