"""Q4_0: 32 values share a float16 scale; each is a 4-bit code minus 8, times the scale.

Layout of a block (GGUF specification; ggml `block_q4_0`): scale, then 16 bytes of codes, values
0 to 15 in the low nibbles and 16 to 31 in the high ones.
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
from twostroke.quant.steps import around_zero


def decode(blocks: Bytes) -> Floats:
    """Bytes (n, 18) to float32 (n, 32)."""
    values = unpack_nibbles(blocks[:, 2:])
    values -= np.float32(8)
    values *= half_column(blocks, 0)
    return values


def encode(values: Floats) -> Bytes:
    """float32 (n, 32) to bytes (n, 18): the value farthest from zero becomes code 0 exactly."""
    scale, codes = around_zero(values, 4)
    return np.concatenate([half_bytes(scale), pack_nibbles(codes)], axis=1)


Q4_0 = Format("Q4_0", gguf_id=2, block_size=32, block_bytes=18, decode=decode, encode=encode)
