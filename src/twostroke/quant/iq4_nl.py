"""IQ4_NL: 32 values share a float16 scale; each is one of 16 unevenly spaced levels, scaled.

Layout of a block (ggml `block_iq4_nl`): scale, then 16 bytes of codes, values 0 to 15 in the low
nibbles and 16 to 31 in the high ones. A code is an index into LEVELS (ggml `kvalues_iq4nl`).
"""

from __future__ import annotations

import numpy as np

from twostroke.quant.fit import fit_scale, nearest_scaled
from twostroke.quant.format import Bytes, Floats, Format, half_bytes, half_column
from twostroke.quant.planes import pack_planes, unpack_planes

LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)
PEAKS = (-151, -143, -135, -127, -119, -111, -104, -97, 97, 105, 113, 121, 129, 137)

# The code of each half step from -128: all middles between levels are half steps.
_MIDDLES = (LEVELS[1:] + LEVELS[:-1]) / 2
_CODES = np.searchsorted(_MIDDLES, np.arange(-256, 256) / 2, side="right").astype(np.uint8)


def decode(blocks: Bytes) -> Floats:
    """Bytes (n, 18) to float32 (n, 32)."""
    values = LEVELS[unpack_planes(blocks[:, 2:], 4, run=16)]
    values *= half_column(blocks, 0)
    return values


def encode(values: Floats) -> Bytes:
    """float32 (n, 32) to bytes (n, 18): least squares for the scale."""
    scale = half_bytes(fit_scale(values, nearest_level, PEAKS))
    levels = nearest_scaled(values[:, None], half_column(scale, 0), nearest_level)
    codes = level_codes(levels.reshape(-1, 32))
    return np.concatenate([scale, pack_planes(codes, 4, run=16)], axis=1)


def nearest_level(values: Floats) -> Floats:
    """Map each value to the nearest level."""
    return LEVELS[level_codes(values)]


def level_codes(values: Floats) -> Bytes:
    """Return the index of the level nearest to each value."""
    half_steps = np.clip(np.floor(values * np.float32(2)), np.float32(-256), np.float32(255))
    codes: Bytes = _CODES[half_steps.astype(np.int16) + np.int16(256)]
    return codes


IQ4_NL = Format("IQ4_NL", gguf_id=20, block_size=32, block_bytes=18, decode=decode, encode=encode)
