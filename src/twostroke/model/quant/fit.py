"""Scales and minimums that fit a group of values best: least squares over a few trial codings.

Rounding to the nearest code is the best coding for a given scale, and least squares the best scale
for a given coding. The fits below try several scales, code the values with each, solve for the
scale that suits those codes, and keep what leaves the smallest squared error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.model.quant.format import Bytes, Floats

    Nearest = Callable[[Floats], Floats]

# By how many codes a trial's grid is finer than the one that spans smallest to largest value:
# clipping the ends, or not using them, is often the better choice.
_STRETCHES = np.linspace(-1.0, 1.0, 21, dtype=np.float32)


def whole_codes(low: int, high: int) -> Nearest:
    """Return the function that maps values to the nearest whole number from `low` to `high`."""

    def nearest(values: Floats) -> Floats:
        return np.clip(np.rint(values), np.float32(low), np.float32(high))

    return nearest


def fit_scale(
    groups: Floats, nearest: Nearest, peaks: Sequence[float], weights: Floats | None = None
) -> Floats:
    """Return the scale of each group, float32 (..., 1), for groups (..., size).

    `nearest` maps scaled values to codes; each trial makes the value farthest from zero as large
    as one of `peaks`, in codes, which may be negative. Squared errors count as `weights` say.
    """
    weighed = groups if weights is None else groups * weights
    farthest = np.abs(groups).argmax(axis=-1, keepdims=True)
    extreme = np.take_along_axis(groups, farthest, axis=-1)
    best_gain = np.zeros_like(extreme)
    best = np.zeros_like(extreme)
    inverse = _inverse(extreme)
    for peak in peaks:
        codes = nearest(groups * (np.float32(peak) * inverse))
        along = (weighed * codes).sum(axis=-1, keepdims=True)
        squares = codes * codes if weights is None else codes * codes * weights
        size = squares.sum(axis=-1, keepdims=True)
        # With scale along / size the squared error is the values' own less this gain.
        scale = along * _inverse(size)
        better = along * scale > best_gain
        best_gain = np.where(better, along * scale, best_gain)
        best = np.where(better, scale, best)
    return best


def fit_scale_and_minimum(groups: Floats, high: int) -> tuple[Floats, Floats]:
    """Return scale and minimum, each float32 (..., 1) and not negative, for groups (..., size).

    A value is near to scale * code - minimum, its code being a whole number from 0 to `high`.
    """
    low = np.minimum(groups.min(axis=-1, keepdims=True), np.float32(0))
    span = groups.max(axis=-1, keepdims=True) - low
    inverse = _inverse(span)
    best_scale, best_low = np.zeros_like(span), low
    best_error = np.full_like(span, np.inf)
    for stretch in _STRETCHES:
        trial = (groups - low) * (inverse * (np.float32(high) + stretch))
        codes = np.clip(np.rint(trial), np.float32(0), np.float32(high))
        scale, shift = _line(groups, codes)
        squares = np.square(groups - (scale * codes + shift)).sum(axis=-1, keepdims=True)
        better = squares < best_error
        best_error = np.where(better, squares, best_error)
        best_scale = np.where(better, scale, best_scale)
        best_low = np.where(better, shift, best_low)
    return best_scale, -best_low


def nearest_scaled(groups: Floats, scales: Floats, nearest: Nearest) -> Floats:
    """Code groups (n, k, size) with the scales (n, k) that they got in the end."""
    return nearest(groups * _inverse(scales)[:, :, None])


def nearest_codes(groups: Floats, scales: Floats, minimums: Floats, high: int) -> Bytes:
    """Code groups (n, k, size), from 0 to `high`, with the scales and minimums (n, k) they got."""
    codes = (groups + minimums[:, :, None]) * _inverse(scales)[:, :, None]
    nearest: Bytes = np.clip(np.rint(codes), 0, high).astype(np.uint8)
    return nearest


def whole_shares(parts: Floats, low: int, high: int) -> tuple[Floats, Floats]:
    """Express each row of `parts` (n, k) as whole numbers times one float16 scale.

    Returns the scale as float32 (n, 1), already rounded to float16, and the numbers, float32
    (n, k) from `low` to `high`; the part farthest from zero becomes the end farther from zero.
    """
    end = low if -low > high else high
    farthest = np.abs(parts).argmax(axis=-1, keepdims=True)
    exact = np.take_along_axis(parts, farthest, axis=-1) / np.float32(end)
    scale = exact.astype(np.float16).astype(np.float32)
    shares = np.rint(parts * _inverse(scale))
    return scale, np.clip(shares, np.float32(low), np.float32(high))


def _line(groups: Floats, codes: Floats) -> tuple[Floats, Floats]:
    """Least squares for groups = scale * codes + shift, with no shift above zero."""
    size = np.float32(groups.shape[-1])
    sum_values = groups.sum(axis=-1, keepdims=True)
    sum_codes = codes.sum(axis=-1, keepdims=True)
    along = (groups * codes).sum(axis=-1, keepdims=True)
    squares = (codes * codes).sum(axis=-1, keepdims=True)
    inverse = _inverse(size * squares - sum_codes * sum_codes)
    scale = (size * along - sum_codes * sum_values) * inverse
    shift = (squares * sum_values - sum_codes * along) * inverse
    # Where all codes are equal the line is not determined: it is level, at the mean if below zero.
    shift = np.where(inverse == 0, sum_values / size, shift)
    above = shift > 0
    scale = np.where(above, along * _inverse(squares), scale)
    return np.maximum(scale, np.float32(0)), np.where(above, np.float32(0), shift)


def _inverse(values: Floats) -> Floats:
    """Return 1 / values, and 0 where that would be too large for a float."""
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.float32(0), np.float32(1) / np.where(tiny, np.float32(1), values))
