"""Q4_1: 32 values share a float16 scale and minimum; each is a 4-bit code, scaled and shifted.

Layout of a block (GGUF specification; ggml `block_q4_1`): scale, minimum, then 16 bytes of codes,
values 0 to 15 in the low nibbles and 16 to 31 in the high ones.
"""

from __future__ import annotations

import numpy as np

from twostroke.quant.format import (
    Bytes,
    Floats,
    Format,
    half_bytes,
    half_column,
    pack_nibbles,
    unpack_nibbles,
)
from twostroke.quant.steps import from_smallest


def decode(blocks: Bytes) -> Floats:
    """Bytes (n, 20) to float32 (n, 32)."""
    values = unpack_nibbles(blocks[:, 4:])
    values *= half_column(blocks, 0)
    values += half_column(blocks, 2)
    return values


def encode(values: Floats) -> Bytes:
    """float32 (n, 32) to bytes (n, 20): 16 even steps from the smallest value to the largest."""
    scale, low, codes = from_smallest(values, 4)
    return np.concatenate([half_bytes(scale), half_bytes(low), pack_nibbles(codes)], axis=1)


Q4_1 = Format("Q4_1", gguf_id=3, block_size=32, block_bytes=20, decode=decode, encode=encode)
