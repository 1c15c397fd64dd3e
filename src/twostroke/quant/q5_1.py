"""Q5_1: 32 values share a float16 scale and minimum; each is a 5-bit code, scaled and shifted.

Layout of a block (GGUF specification; ggml `block_q5_1`): scale, minimum, then 4 bytes with the
codes' fifth bits, value i in bit i, then 16 bytes with the other four, values 0 to 15 in the low
nibbles and 16 to 31 in the high ones.
"""

from __future__ import annotations

import numpy as np

from twostroke.quant.format import Bytes, Floats, Format, half_bytes, half_column
from twostroke.quant.planes import pack_fives, unpack_fives
from twostroke.quant.steps import from_smallest


def decode(blocks: Bytes) -> Floats:
    """Bytes (n, 24) to float32 (n, 32)."""
    values = unpack_fives(blocks[:, 4:]).astype(np.float32)
    values *= half_column(blocks, 0)
    values += half_column(blocks, 2)
    return values


def encode(values: Floats) -> Bytes:
    """float32 (n, 32) to bytes (n, 24): 32 even steps from the smallest value to the largest."""
    scale, low, codes = from_smallest(values, 5)
    return np.concatenate([half_bytes(scale), half_bytes(low), pack_fives(codes)], axis=1)


Q5_1 = Format("Q5_1", gguf_id=7, block_size=32, block_bytes=24, decode=decode, encode=encode)
