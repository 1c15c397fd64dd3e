"""Rounds a block to even steps: around zero with a scale, or up from the smallest value."""

from __future__ import annotations

import numpy as np

from twostroke.quant.format import Bytes, Floats, inverse_or_zero


def around_zero(values: Floats, bits: int) -> tuple[Floats, Bytes]:
    """Return scales (n, 1) and codes, uint8 (n, values), of which half stands for zero.

    The value farthest from zero becomes code 0 exactly.
    """
    half = 1 << (bits - 1)
    farthest = np.abs(values).argmax(axis=1)[:, None]
    scale = np.take_along_axis(values, farthest, axis=1) / np.float32(-half)
    codes = np.trunc(values * inverse_or_zero(scale) + np.float32(half + 0.5))
    return scale, np.clip(codes, 0, 2 * half - 1).astype(np.uint8)


def from_smallest(values: Floats, bits: int) -> tuple[Floats, Floats, Bytes]:
    """Return scales and minimums (n, 1), and codes, uint8 (n, values): the largest has all bits."""
    top = (1 << bits) - 1
    low = values.min(axis=1, keepdims=True)
    scale = (values.max(axis=1, keepdims=True) - low) / np.float32(top)
    codes = np.trunc((values - low) * inverse_or_zero(scale) + np.float32(0.5))
    return scale, low, np.clip(codes, 0, top).astype(np.uint8)
