"""F32: IEEE single precision, as it is."""

from __future__ import annotations

import numpy as np

from twostroke.quant.format import Bytes, Floats, Format


def decode(blocks: Bytes) -> Floats:
    """Bytes (n, 4) to float32 (n, 1)."""
    return blocks.view(np.float32)


def encode(values: Floats) -> Bytes:
    """float32 (n, 1) to bytes (n, 4)."""
    return values.view(np.uint8)


F32 = Format("F32", gguf_id=0, block_size=1, block_bytes=4, decode=decode, encode=encode)
