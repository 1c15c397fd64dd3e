"""Rounding with calibration by its definition, in NumPy: the plain twin of native/compress."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from twostroke.lab.compress.round import inverse_factors
from twostroke.model.quant.fit import code_rounder, fit_scale
from twostroke.model.quant.iq_quants import nearest_level

if TYPE_CHECKING:
    from twostroke.lab.compress.grids import BlockGrid
    from twostroke.lab.compress.round import Moments
    from twostroke.model.quant import Floats

STRETCHES = np.linspace(0.7, 1.05, 15, dtype=np.float32)
TRIALS = (-1, 0, 1)  # of a scale: steps of 4%, or shares
LEAST_GAIN = np.float32(1e-5)


class Line(NamedTuple):
    """The scale and the smallest value of a group, each (outputs,)."""

    scale: Floats
    smallest: Floats


def plain_rounding(weight: Floats, moments: Moments, grid: BlockGrid) -> Floats:
    """Return the rounded matrix (outputs, inputs), as float32."""
    right = np.ascontiguousarray(weight.T)
    levels, lines, units = compensated(right, moments.factor, grid)
    starts = range(0, len(right), grid.group)
    blocks = [slice(start, start + grid.group) for start in starts]
    values = np.concatenate(
        [levels[b] * line.scale + line.smallest for b, line in zip(blocks, lines, strict=True)]
    )
    wide = moments.damped
    slopes = wide @ (right - values)
    for i, block in enumerate(blocks):
        block_moments, inner = wide[block, block], inverse_factors(moments.damped[block, block])
        held_values = values[block].copy()
        targets = held_values + (inner @ inner.T) @ slopes[block]
        error = targets - held_values
        required_loss = np.einsum("io,io->o", error, block_moments @ error) * (1 - LEAST_GAIN)
        line = refit(targets, levels[block], block_moments, grid)
        for trial in TRIALS:
            tried = stored(line, trial, units[i // grid.num_groups], grid)
            coded, _, loss = code(targets, inner, tried, grid)
            better = loss < required_loss
            required_loss = np.where(better, loss, required_loss)
            values[block] = np.where(better, coded * tried.scale + tried.smallest, values[block])
        slopes -= wide[:, block] @ (values[block] - held_values)
    return values.T


def compensated(
    right: Floats, factor: Floats, grid: BlockGrid
) -> tuple[Floats, list[Line], list[tuple[Floats, Floats]]]:
    """Round `right` (inputs, outputs) group after group; later groups compensate earlier errors.

    Returns levels, each group's scale and smallest value, and each super-block's units.
    """
    left, levels = right.copy(), np.empty_like(right)
    weights = np.diag(factor) ** -2
    lines: list[Line] = []
    units: list[tuple[Floats, Floats]] = []
    for i, start in enumerate(range(0, len(right), grid.group)):
        block, rest = slice(start, start + grid.group), slice(start + grid.group, None)
        if i % grid.num_groups == 0:
            parts = [
                slice(start + k * grid.group, start + (k + 1) * grid.group)
                for k in range(grid.num_groups)
            ]
            units.append(units_of([fitted(left[p], weights[p], grid) for p in parts], grid))
        lines.append(stored(fitted(left[block], weights[block], grid), 0, units[-1], grid))
        levels[block], errors, _ = code(left[block], factor[block, block], lines[-1], grid)
        left[rest] -= factor[rest, block] @ errors
    return levels, lines, units


def nearest(values: Floats, grid: BlockGrid) -> Floats:
    """Round values to the nearest levels."""
    return nearest_level(values) if grid.table else code_rounder(grid.low, grid.high)(values)


def code(
    targets: Floats, inner: Floats, line: Line, grid: BlockGrid
) -> tuple[Floats, Floats, Floats]:
    """Return levels and errors of a group (group, outputs), and the loss of each output."""
    levels, errors = np.empty_like(targets), np.empty_like(targets)
    for i in range(len(targets)):
        value = targets[i] - line.smallest - inner[i, :i] @ errors[:i]
        levels[i] = nearest(value * inverse(line.scale), grid)
        errors[i] = (value - levels[i] * line.scale) / inner[i, i]
    return levels, errors, np.square(errors).sum(axis=0)


def stored(line: Line, trial: int, units: tuple[Floats, Floats], grid: BlockGrid) -> Line:
    """Return a group's scale and smallest value as the format stores them.

    The middle of the levels does not move.
    """
    half = np.float32(0 if grid.peaks else grid.high / 2)
    if grid.num_groups == 1:
        scale = halved(line.scale * np.float32(1 + 0.04 * trial))
        smallest = line.smallest + half * (line.scale - scale)
        if grid.has_whole_zeros:
            smallest = -np.rint(np.clip(-smallest * inverse(scale), 0, grid.high)) * scale
        else:
            smallest = halved(smallest)
    else:
        (top, bottom), (min_share, max_share) = units, grid.shares
        share = np.rint(np.clip(line.scale * inverse(top), min_share, max_share))
        scale = top * np.clip(share + trial, min_share, max_share)
        target = line.smallest + half * (line.scale - scale)
        smallest = -bottom * np.rint(np.clip(-target * inverse(bottom), 0, max_share))
    return Line(scale, np.zeros_like(scale) if grid.peaks else smallest)


def units_of(lines: list[Line], grid: BlockGrid) -> tuple[Floats, Floats]:
    """Return the units of scales and of smallest values of a super-block."""
    scales, lows = np.array([x.scale for x in lines]), np.array([x.smallest for x in lines])
    farthest = np.take_along_axis(scales, np.abs(scales).argmax(axis=0)[None], axis=0)[0]
    min_share, max_share = grid.shares
    end = min_share if -min_share > max_share else max_share
    lowest = np.minimum(lows.min(axis=0), 0)
    return halved(farthest / np.float32(end or 1)), halved(-lowest / np.float32(max_share or 1))


def fitted(values: Floats, weights: Floats, grid: BlockGrid) -> Line:
    """Return the scale and smallest value that fit a group (group, outputs) best.

    The fit is by weighted squares.
    """
    if grid.peaks:
        groups = np.ascontiguousarray(values.T)
        scale = fit_scale(groups, lambda v: nearest(v, grid), grid.peaks, weights)[:, 0]
        return Line(scale, np.zeros_like(scale))
    shares = (weights / weights.sum())[:, None]
    low, top, center = values.min(axis=0), values.max(axis=0), (shares * values).sum(axis=0)
    if grid.num_groups > 1 or grid.has_whole_zeros:
        low = np.minimum(low, 0)
    if grid.has_whole_zeros:
        top = np.maximum(top, 0)
    best, least_error = Line(np.zeros_like(low), low), np.full_like(low, np.inf)
    high = np.float32(grid.high)
    for stretch in STRETCHES:
        steps = (values - (low + (top - low) / 2)) * inverse((top - low) * stretch / high)
        codes = np.rint(np.clip(steps + high / 2, 0, high))
        mean = (shares * codes).sum(axis=0)
        along = (shares * (codes - mean) * (values - center)).sum(axis=0)
        spread = (shares * np.square(codes - mean)).sum(axis=0)
        scale = np.where(spread > 1e-12, along / np.maximum(spread, 1e-12), 0)
        smallest = center - scale * mean
        if grid.num_groups > 1 or grid.has_whole_zeros:
            through_zero = (along + mean * center) / np.maximum(spread + mean * mean, 1e-12)
            scale = np.where(smallest > 0, through_zero, scale).astype(np.float32)
            smallest = np.minimum(smallest, 0)
        if grid.has_whole_zeros:
            below = mean - high
            down = (along + below * center) / np.maximum(spread + below * below, 1e-12)
            is_below = smallest + high * scale < 0
            scale = np.where(is_below, down, scale).astype(np.float32)
            smallest = np.where(is_below, -high * down, smallest)
        error = (shares * np.square(values - scale * codes - smallest)).sum(axis=0)
        is_better = error < least_error
        least_error = np.where(is_better, error, least_error)
        best = Line(*(np.where(is_better, new, old) for new, old in zip((scale, smallest), best)))  # noqa: B905
    return best


def refit(targets: Floats, levels: Floats, block_moments: Floats, grid: BlockGrid) -> Line:
    """Return the best scale and smallest value for given levels."""
    seen = block_moments @ levels
    along, size = (np.einsum("io,io->o", seen, each) for each in (targets, levels))
    if grid.peaks:
        return Line(along * inverse(size), np.zeros_like(along))
    mean, shift, total = seen.sum(axis=0), block_moments.sum(axis=0) @ targets, block_moments.sum()
    spread = size * total - mean * mean
    is_clear = spread > 1e-5 * size * total
    scale = np.where(is_clear, along * total - shift * mean, 0) / np.where(is_clear, spread, 1)
    return Line(scale.astype(np.float32), (shift - scale * mean) / total)


def halved(values: Floats) -> Floats:
    """Round to float16."""
    return values.astype(np.float16).astype(np.float32)


def inverse(values: Floats) -> Floats:
    """Return 1 / values, and 0 for tiny ones."""
    tiny = np.abs(values) < 1e-30
    return np.where(tiny, 0, 1 / np.where(tiny, 1, values)).astype(np.float32)
