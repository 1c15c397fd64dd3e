"""Q5_K: 256 values in 8 groups with 6-bit scales and minimums; each value is a 5-bit code.

Layout of a block (ggml `block_q5_K`): two float16, the scale of the scales and the scale of the
minimums; 12 bytes of scales and minimums (k_scales.py); 32 bytes with the codes' fifth bits, group
i in bit i; 128 bytes with the other four, of which each run of 32 bytes holds one group in the low
nibbles and the next in the high ones. A value is scale * code - minimum.
"""

from __future__ import annotations

import numpy as np

from twostroke.quant.format import Bytes, Floats, Format
from twostroke.quant.k_scales import head_and_codes, scaled_groups
from twostroke.quant.planes import pack_planes, unpack_planes


def decode(blocks: Bytes) -> Floats:
    """Bytes (n, 176) to float32 (n, 256)."""
    codes = unpack_planes(blocks[:, 48:], 4, run=32)
    codes |= unpack_planes(blocks[:, 16:48], 1, run=32) << np.uint8(4)
    return scaled_groups(blocks[:, :16], codes)


def encode(values: Floats) -> Bytes:
    """float32 (n, 256) to bytes (n, 176): least squares for each group's scale and minimum."""
    head, codes = head_and_codes(values, 31)
    fifth = pack_planes(codes >> np.uint8(4), 1, run=32)
    return np.concatenate([head, fifth, pack_planes(codes & np.uint8(15), 4, run=32)], axis=1)


Q5_K = Format("Q5_K", gguf_id=13, block_size=256, block_bytes=176, decode=decode, encode=encode)
