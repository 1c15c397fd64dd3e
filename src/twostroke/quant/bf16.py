"""BF16: the upper half of a single-precision float."""

from __future__ import annotations

import numpy as np

from twostroke.quant.format import Bytes, Floats, Format

_INFINITY = np.uint32(0x7F80_0000)
_QUIET_NAN = np.uint32(0x0040_0000)


def decode(blocks: Bytes) -> Floats:
    """Bytes (n, 2) to float32 (n, 1)."""
    upper = blocks.view(np.uint16).astype(np.uint32)
    return (upper << np.uint32(16)).view(np.float32)


def encode(values: Floats) -> Bytes:
    """float32 (n, 1) to bytes (n, 2), rounded to nearest even; a NaN stays one, made quiet."""
    bits = values.view(np.uint32)
    is_nan = (bits & np.uint32(0x7FFF_FFFF)) > _INFINITY
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    # Adding to a NaN's bits could wrap around; its rounded value is not used.
    rounded = bits + (np.uint32(0x7FFF) + odd)
    upper = np.where(is_nan, bits | _QUIET_NAN, rounded) >> np.uint32(16)
    return upper.astype(np.uint16).view(np.uint8)


BF16 = Format("BF16", gguf_id=30, block_size=1, block_bytes=2, decode=decode, encode=encode)
