"""F16: IEEE half precision."""

from __future__ import annotations

import numpy as np

from twostroke.quant.format import Bytes, Floats, Format, half_bytes


def decode(blocks: Bytes) -> Floats:
    """Bytes (n, 2) to float32 (n, 1)."""
    return blocks.view(np.float16).astype(np.float32)


def encode(values: Floats) -> Bytes:
    """float32 (n, 1) to bytes (n, 2), rounded to nearest even; too large becomes infinite."""
    return half_bytes(values)


F16 = Format("F16", gguf_id=1, block_size=1, block_bytes=2, decode=decode, encode=encode)
