"""IQ4_NL and IQ4_XS: each value is one of 16 unevenly spaced levels, scaled.

Codes are indexes into LEVELS (ggml `kvalues_iq4nl`); 16 bytes hold those of 32 values, 0 to 15 in
the low nibbles and 16 to 31 in the high ones.

Layout of a block of IQ4_NL (ggml `block_iq4_nl`), 32 values: a float16, the scale, then the codes.

Layout of a block of IQ4_XS (ggml `block_iq4_xs`), 256 values in 8 groups with signed 6-bit scales:
a float16, the scale of the scales; 2 bytes with the upper two bits of the scales plus 32,
neighbours side by side; 4 bytes with their low nibbles, as ordered; 128 bytes of codes.
"""

from __future__ import annotations

import numpy as np

from twostroke.model.quant.fit import fit_scale, nearest_scaled, whole_shares
from twostroke.model.quant.format import Bytes, Floats, ggml_format, half_bytes, half_column
from twostroke.model.quant.planes import pack_planes, unpack_planes

LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)
_PEAKS = (-151, -143, -135, -127, -119, -111, -104, -97, 97, 105, 113, 121, 129, 137)

# The code of each half step from -128: all middles between levels are half steps.
_MIDDLES = (LEVELS[1:] + LEVELS[:-1]) / 2
_CODES = np.searchsorted(_MIDDLES, np.arange(-256, 256) / 2, side="right").astype(np.uint8)


def decode_nl(blocks: Bytes) -> Floats:
    """Bytes (n, 18) to float32 (n, 32)."""
    values = LEVELS[unpack_planes(blocks[:, 2:], 4, run=16)]
    values *= half_column(blocks, 0)
    return values


def encode_nl(values: Floats) -> Bytes:
    """float32 (n, 32) to bytes (n, 18): least squares for the scale."""
    scale = half_bytes(fit_scale(values, nearest_level, _PEAKS))
    levels = nearest_scaled(values[:, None], half_column(scale, 0), nearest_level)
    codes = level_codes(levels.reshape(-1, 32))
    return np.concatenate([scale, pack_planes(codes, 4, run=16)], axis=1)


def decode_xs(blocks: Bytes) -> Floats:
    """Bytes (n, 136) to float32 (n, 256)."""
    shares = unpack_planes(blocks[:, 4:8], 4, run=1)
    shares |= unpack_planes(blocks[:, 2:4], 2, run=1) << np.uint8(4)
    scales = half_column(blocks, 0) * (shares.astype(np.float32) - np.float32(32))
    values = LEVELS[unpack_planes(blocks[:, 8:], 4, run=16)].reshape(-1, 8, 32)
    values *= scales[:, :, None]
    return values.reshape(-1, 256)


def encode_xs(values: Floats) -> Bytes:
    """float32 (n, 256) to bytes (n, 136): least squares for each group's scale."""
    groups = values.reshape(-1, 8, 32)
    scale, shares = whole_shares(fit_scale(groups, nearest_level, _PEAKS)[:, :, 0], -32, 31)
    codes = level_codes(nearest_scaled(groups, scale * shares, nearest_level)).reshape(-1, 256)
    return pack_xs(scale, shares, codes)


def pack_xs(scale: Floats, shares: Floats, codes: Bytes) -> Bytes:
    """Pack the scale of the scales (n, 1), the scales (n, 8) and codes (n, 256)."""
    lifted = (shares + np.float32(32)).astype(np.uint8)
    parts = [
        half_bytes(scale),
        pack_planes(lifted >> np.uint8(4), 2, run=1),
        pack_planes(lifted & np.uint8(15), 4, run=1),
        pack_planes(codes, 4, run=16),
    ]
    return np.concatenate(parts, axis=1)


def nearest_level(values: Floats) -> Floats:
    """Map each value to the nearest level."""
    return LEVELS[level_codes(values)]


def level_codes(values: Floats) -> Bytes:
    """Return the index of the level nearest to each value."""
    half_steps = np.clip(np.floor(values * np.float32(2)), np.float32(-256), np.float32(255))
    codes: Bytes = _CODES[half_steps.astype(np.int16) + np.int16(256)]
    return codes


IQ4_NL = ggml_format("IQ4_NL", 20, (32, 32, 18), decode_nl, encode_nl)
IQ4_XS = ggml_format("IQ4_XS", 23, (32, 256, 136), decode_xs, encode_xs)
