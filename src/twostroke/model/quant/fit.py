"""Fits scales and minimums of quantized groups by least squares over several trial codings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.model.quant.format import Bytes, Floats

    Nearest = Callable[[Floats], Floats]

# Trials divide the span of the values into this many steps more than there are codes: clipping
# extreme values, or leaving extreme codes unused, is often better.
_GRID_STRETCHES = np.linspace(-1.0, 1.0, 21, dtype=np.float32)


def code_rounder(min_code: int, max_code: int) -> Nearest:
    """Return a function that rounds scaled values to codes from `min_code` to `max_code`."""

    def nearest(values: Floats) -> Floats:
        return np.clip(np.rint(values), np.float32(min_code), np.float32(max_code))

    return nearest


def fit_scale(
    groups: Floats, nearest: Nearest, peaks: Sequence[float], weights: Floats | None = None
) -> Floats:
    """Return the scale of each group that quantizes the group with the least squared error.

    Groups are (..., size), scales float32 (..., 1). `nearest` maps scaled values to codes. One
    scale is tried for each of `peaks`: the scale with which the value farthest from zero gets this
    code, which may be negative. `weights` multiply the squared errors.
    """
    weighted = groups if weights is None else groups * weights
    farthest = np.abs(groups).argmax(axis=-1, keepdims=True)
    extreme = np.take_along_axis(groups, farthest, axis=-1)
    best_gain = np.zeros_like(extreme)
    best_scale = np.zeros_like(extreme)
    inverse = _inverse(extreme)
    for peak in peaks:
        codes = nearest(groups * (np.float32(peak) * inverse))
        product_sum = (weighted * codes).sum(axis=-1, keepdims=True)
        squares = codes * codes if weights is None else codes * codes * weights
        square_sum = squares.sum(axis=-1, keepdims=True)
        # The scale product_sum / square_sum reduces the squared error by product_sum * scale.
        scale = product_sum * _inverse(square_sum)
        better = product_sum * scale > best_gain
        best_gain = np.where(better, product_sum * scale, best_gain)
        best_scale = np.where(better, scale, best_scale)
    return best_scale


def fit_scale_and_minimum(groups: Floats, max_code: int) -> tuple[Floats, Floats]:
    """Return the scale and minimum of each group that quantize it with the least squared error.

    Groups are (..., size); scales and minimums are float32 (..., 1) and not negative. A value is
    approximately scale * code - minimum, with a code from 0 to `max_code`.
    """
    low = np.minimum(groups.min(axis=-1, keepdims=True), np.float32(0))
    span = groups.max(axis=-1, keepdims=True) - low
    inverse = _inverse(span)
    best_scale = np.zeros_like(span)
    best_low = low
    best_error = np.full_like(span, np.inf)
    for stretch in _GRID_STRETCHES:
        scaled = (groups - low) * (inverse * (np.float32(max_code) + stretch))
        codes = np.clip(np.rint(scaled), np.float32(0), np.float32(max_code))
        scale, offset = _fit_line(groups, codes)
        squares = np.square(groups - (scale * codes + offset)).sum(axis=-1, keepdims=True)
        better = squares < best_error
        best_error = np.where(better, squares, best_error)
        best_scale = np.where(better, scale, best_scale)
        best_low = np.where(better, offset, best_low)
    return best_scale, -best_low


def nearest_scaled(groups: Floats, scales: Floats, nearest: Nearest) -> Floats:
    """Return the codes of groups (n, k, size) that are nearest for given scales (n, k).

    The scales are already rounded as the format stores them. `nearest` maps scaled values to codes.
    """
    return nearest(groups * _inverse(scales)[:, :, None])


def nearest_codes(groups: Floats, scales: Floats, minimums: Floats, max_code: int) -> Bytes:
    """Return the codes of groups (n, k, size), from 0 to `max_code`, for given scales and minimums.

    Scales and minimums are (n, k), already rounded as the format stores them.
    """
    codes = (groups + minimums[:, :, None]) * _inverse(scales)[:, :, None]
    nearest: Bytes = np.clip(np.rint(codes), 0, max_code).astype(np.uint8)
    return nearest


def quantize_scales(scales: Floats, min_code: int, max_code: int) -> tuple[Floats, Floats]:
    """Quantize the scales of a block's groups: a row (n, k) becomes integers times one scale.

    Returns (the scale of each row, the integers). The scales are float32 (n, 1), rounded to
    float16; the integers are float32 (n, k), from `min_code` to `max_code`. The group scale
    farthest from zero becomes whichever of these two limits is farther from zero.
    """
    extreme_code = min_code if -min_code > max_code else max_code
    farthest = np.abs(scales).argmax(axis=-1, keepdims=True)
    exact = np.take_along_axis(scales, farthest, axis=-1) / np.float32(extreme_code)
    scale = exact.astype(np.float16).astype(np.float32)
    codes = np.rint(scales * _inverse(scale))
    return scale, np.clip(codes, np.float32(min_code), np.float32(max_code))


def _fit_line(groups: Floats, codes: Floats) -> tuple[Floats, Floats]:
    """Fit groups = scale * codes + offset by least squares; return (scale, offset).

    The offset is at most zero.
    """
    size = np.float32(groups.shape[-1])
    sum_values = groups.sum(axis=-1, keepdims=True)
    sum_codes = codes.sum(axis=-1, keepdims=True)
    product_sum = (groups * codes).sum(axis=-1, keepdims=True)
    square_sum = (codes * codes).sum(axis=-1, keepdims=True)
    inverse = _inverse(size * square_sum - sum_codes * sum_codes)
    scale = (size * product_sum - sum_codes * sum_values) * inverse
    offset = (square_sum * sum_values - sum_codes * product_sum) * inverse
    # If all codes are equal the line is not determined: use the mean, if it is below zero.
    offset = np.where(inverse == 0, sum_values / size, offset)
    is_positive = offset > 0
    scale = np.where(is_positive, product_sum * _inverse(square_sum), scale)
    return np.maximum(scale, np.float32(0)), np.where(is_positive, np.float32(0), offset)


def _inverse(values: Floats) -> Floats:
    """Return 1 / values, or 0 where a value is so small that the quotient would overflow."""
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.float32(0), np.float32(1) / np.where(tiny, np.float32(1), values))
