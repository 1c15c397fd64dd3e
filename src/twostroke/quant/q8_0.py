"""Q8_0: 32 values share a float16 scale; each is a signed byte times the scale.

Layout of a block (GGUF specification; ggml `block_q8_0`): scale, then 32 signed bytes.
"""

from __future__ import annotations

import numpy as np

from twostroke.quant.format import (
    Bytes,
    Floats,
    Format,
    half_bytes,
    half_column,
    inverse_or_zero,
)


def decode(blocks: Bytes) -> Floats:
    """Bytes (n, 34) to float32 (n, 32)."""
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= half_column(blocks, 0)
    return values


def encode(values: Floats) -> Bytes:
    """float32 (n, 32) to bytes (n, 34): halves are rounded away from zero."""
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    scaled = values * inverse_or_zero(scale)
    size = np.abs(scaled)
    whole = np.floor(size)
    # floor(size + 0.5) would round 0.49999997 up: the sum itself is rounded.
    whole += np.floor(np.float32(2) * (size - whole))
    codes = np.copysign(whole, scaled).astype(np.int8).view(np.uint8)
    return np.concatenate([half_bytes(scale), codes], axis=1)


Q8_0 = Format("Q8_0", gguf_id=8, block_size=32, block_bytes=34, decode=decode, encode=encode)
