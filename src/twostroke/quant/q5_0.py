"""Q5_0: 32 values share a float16 scale; each is a 5-bit code minus 16, times the scale.

Layout of a block (GGUF specification; ggml `block_q5_0`): scale, then 4 bytes with the codes' fifth
bits, value i in bit i, then 16 bytes with the other four, values 0 to 15 in the low nibbles and 16
to 31 in the high ones.
"""

from __future__ import annotations

import numpy as np

from twostroke.quant.format import Bytes, Floats, Format, half_bytes, half_column
from twostroke.quant.planes import pack_fives, unpack_fives
from twostroke.quant.steps import around_zero


def decode(blocks: Bytes) -> Floats:
    """Bytes (n, 22) to float32 (n, 32)."""
    values = unpack_fives(blocks[:, 2:]).astype(np.float32)
    values -= np.float32(16)
    values *= half_column(blocks, 0)
    return values


def encode(values: Floats) -> Bytes:
    """float32 (n, 32) to bytes (n, 22): the value farthest from zero becomes code 0 exactly."""
    scale, codes = around_zero(values, 5)
    return np.concatenate([half_bytes(scale), pack_fives(codes)], axis=1)


Q5_0 = Format("Q5_0", gguf_id=6, block_size=32, block_bytes=22, decode=decode, encode=encode)
