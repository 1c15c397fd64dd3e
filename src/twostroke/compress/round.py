"""Rounds a matrix to a block format so that its products change least.

Columns are rounded one after another. The error of each is made up for by the columns after it, as
far as the inputs are correlated (GPTQ, arXiv:2210.17323); scales are fitted when a block is
reached. Then a sweep codes each block again, with scales about the best for its codes, for what all
others leave to make up for (block coordinate descent, as QuantEase, arXiv:2309.01885).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.quant import FORMATS, QuantTensor
from twostroke.quant.fit import fit_scale, whole_codes
from twostroke.quant.format import half_bytes
from twostroke.quant.iq4 import level_codes, nearest_level
from twostroke.quant.planes import pack_planes
from twostroke.quant.steps import pack_codes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from twostroke.quant import Bytes, Floats

_SHRINKAGE = 0.3  # of products of two inputs: few rows show them larger than they are
_DAMPING = 0.001  # of the mean second moment, added to each
_BLOCK = 32  # values that share a scale, in all formats here
_STRETCHES = np.linspace(0.7, 1.05, 15, dtype=np.float32)
_AS_FITTED = np.ones(1, np.float32)
_TRIALS = np.linspace(0.96, 1.04, 3, dtype=np.float32)  # of a scale, in a sweep
_SWEEPS = 1
_CHUNK = 512  # outputs that are coded at a time: trials of a block stay in the cache


class Grid(Frozen):
    """A block format as steps: a value is a scale times one of some levels, plus a smallest.

    `nearest` maps values in units of the scale to levels, `pack` levels (n, 32) to bytes. Trials
    of a scale make the value farthest from zero as large as one of `peaks`; without them the
    format has a smallest value, and levels from 0 to `high`.
    """

    nearest: Callable[[Floats], Floats]
    pack: Callable[[Floats], Bytes]
    peaks: tuple[float, ...] = ()
    high: int = 0


class Moments(Frozen):
    """Second moments of a product's inputs (width, width), damped; `factor` as of `_factor`."""

    damped: NDArray[np.float64]
    factor: Floats


def moments_of(inputs: Floats) -> Moments:
    """Return the moments of inputs (rows, width).

    They are shrunk towards their diagonal and damped, so that errors are not made up for by what
    inputs share in these few rows alone.
    """
    damped = (inputs.T @ inputs).astype(np.float64)
    diagonal = np.einsum("ii->i", damped)
    squares = diagonal.copy()
    damped *= 1 - _SHRINKAGE
    diagonal[:] = squares + _DAMPING * squares.mean() + np.finfo(np.float32).tiny
    return Moments(damped, _factor(damped))


def round_matrix(weight: Floats, moments: Moments, name: str) -> QuantTensor:
    """Return a matrix (outputs, inputs) in the format `name`, one of GRIDS.

    Rows must fill whole blocks.
    """
    grid, fmt = GRIDS[name], FORMATS[name]
    blocks = range(0, weight.shape[1], _BLOCK)
    data = np.empty((len(weight), len(blocks), fmt.block_bytes), np.uint8)
    right = np.ascontiguousarray(weight.T)
    coded = _compensated(right, moments.factor, grid)
    for _ in range(_SWEEPS):
        _sweep(coded, right, moments.damped, grid)
    for i, start in enumerate(blocks):
        heads = [half_bytes(coded.scales[i, :, None])]
        if not grid.peaks:
            heads.append(half_bytes(coded.smallest[i, :, None]))
        levels = np.ascontiguousarray(coded.levels[start : start + _BLOCK].T)
        data[:, i] = np.concatenate([*heads, grid.pack(levels)], axis=1)
    return QuantTensor(fmt, weight.shape, data.reshape(len(weight), -1))


class _Coded:
    """A matrix in the making: levels (inputs, outputs), scale and smallest (blocks, outputs)."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.levels = np.empty((num_inputs, num_outputs), np.float32)
        self.scales = np.empty((num_inputs // _BLOCK, num_outputs), np.float32)
        self.smallest = np.empty_like(self.scales)

    def values(self) -> Floats:
        levels = self.levels.reshape(len(self.scales), _BLOCK, -1)
        values: Floats = levels * self.scales[:, None] + self.smallest[:, None]
        return values.reshape(self.levels.shape)


def _compensated(right: Floats, factor: Floats, grid: Grid) -> _Coded:
    """Code `right` (inputs, outputs) block after block; later blocks make up for errors."""
    left = right.copy()
    coded = _Coded(*right.shape)
    for i, start in enumerate(range(0, len(right), _BLOCK)):
        block, rest = slice(start, start + _BLOCK), slice(start + _BLOCK, None)
        inner, now = factor[block, block], left[block]
        errors = np.empty_like(now)
        for part in _parts(now.shape[1]):
            wanted = now[:, part]
            fitted = _fitted(wanted, np.diag(inner) ** -2, grid)
            best = _best(wanted, inner, *_around(*fitted, _AS_FITTED, grid), grid)
            coded.levels[block, part], errors[:, part] = best.levels, best.errors
            coded.scales[i, part], coded.smallest[i, part] = best.scale, best.smallest
        left[rest] -= factor[block, rest].T @ errors
    return coded


def _sweep(coded: _Coded, right: Floats, moments: NDArray[np.float64], grid: Grid) -> None:
    """Code each block again for what the others leave; a block that gets no better stays."""
    wide = moments.astype(np.float32)
    values = coded.values()
    slopes = wide @ (right - values)
    for i, start in enumerate(range(0, len(right), _BLOCK)):
        block = slice(start, start + _BLOCK)
        own, inner = wide[block, block], _factor(moments[block, block])
        wanted = values[block] + (inner.T @ inner) @ slopes[block]
        changes = np.zeros_like(wanted)
        for part in _parts(wanted.shape[1]):
            target, held = wanted[:, part], values[block, part]
            error = target - held
            before = np.einsum("io,io->o", error, own @ error)
            refit = _refit(target, coded.levels[block, part], own, grid)
            best = _best(target, inner, *_around(*refit, _TRIALS, grid), grid)
            better = best.loss < before * np.float32(1 - 1e-5)
            for stored, new in (
                (coded.levels[block, part], best.levels),
                (coded.scales[i, part], best.scale),
                (coded.smallest[i, part], best.smallest),
            ):
                np.copyto(stored, new, where=better)
            made = best.levels * best.scale + best.smallest
            changes[:, part] = np.where(better, made - held, 0)
        values[block] += changes
        slopes -= wide[:, block] @ changes


class _Block(Frozen):
    """The best of some trials of a block: levels and errors (32, n), the others (n,)."""

    levels: Floats
    errors: Floats
    scale: Floats
    smallest: Floats
    loss: Floats


def _best(wanted: Floats, inner: Floats, scales: Floats, smallest: Floats, grid: Grid) -> _Block:
    """Code a block (32, n) with each of its trial scales (trials, n), and return the best."""
    trials, count = scales.shape
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=np.abs(scales) > 1e-30)
    levels = np.empty((_BLOCK, trials, count), np.float32)
    errors = np.empty_like(levels)
    loss = np.zeros_like(scales)
    for i in range(_BLOCK):
        made_up = inner[:i, i] @ errors[:i].reshape(i, trials * count)
        value = wanted[i] - made_up.reshape(trials, count) - smallest
        levels[i] = grid.nearest(value * inverse)
        errors[i] = (value - levels[i] * scales) / inner[i, i]
        loss += errors[i] * errors[i]
    least = loss.argmin(axis=0)[None]

    def chosen(trial: Floats) -> Floats:
        best: Floats = np.take_along_axis(trial, least, axis=0)[0]
        return best

    own = np.broadcast_to(least, (_BLOCK, 1, count))
    levels, errors = (np.take_along_axis(each, own, axis=1)[:, 0] for each in (levels, errors))
    return _Block(levels, errors, chosen(scales), chosen(smallest), chosen(loss))


def _around(scale: Floats, smallest: Floats, trials: Floats, grid: Grid) -> tuple[Floats, Floats]:
    """Return trial scales and smallest values (trials, n) about fitted ones, both as float16 has.

    The middle of the levels stays.
    """
    scales = _halved(scale * trials[:, None])
    middle = smallest + scale * np.float32(grid.high / 2)
    return scales, _halved(middle - scales * np.float32(grid.high / 2))


def _halved(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _fitted(values: Floats, weights: Floats, grid: Grid) -> tuple[Floats, Floats]:
    """Return scale and smallest value, each (n,), of blocks (32, n) by their weighted errors."""
    blocks = np.ascontiguousarray(values.T)
    if grid.peaks:
        scale = fit_scale(blocks, grid.nearest, grid.peaks, weights)[:, 0]
        return scale, np.zeros_like(scale)
    scale, smallest = _line(blocks, weights, grid.high)
    return scale[:, 0], smallest[:, 0]


def _refit(values: Floats, levels: Floats, own: Floats, grid: Grid) -> tuple[Floats, Floats]:
    """Return the scale and smallest value, each (n,), that are best for given levels (32, n)."""
    seen = own @ levels
    along, size = (np.einsum("io,io->o", seen, each) for each in (values, levels))
    if grid.peaks:
        return along / np.maximum(size, 1e-30), np.zeros_like(along)
    mean, shift, total = seen.sum(axis=0), own.sum(axis=0) @ values, own.sum()
    spread = size * total - mean * mean
    inverse = np.divide(1, spread, out=np.zeros_like(spread), where=spread > 1e-6 * size * total)
    scale = (along * total - shift * mean) * inverse
    return scale, (shift - scale * mean) / total


def _factor(moments: NDArray[np.float64]) -> Floats:
    """Return the upper triangle U with U.T @ U the inverse of moments."""
    return np.linalg.cholesky(np.linalg.inv(moments)).T.astype(np.float32)


def _parts(count: int) -> list[slice]:
    return [slice(start, start + _CHUNK) for start in range(0, count, _CHUNK)]


def _line(values: Floats, weights: Floats, high: int) -> tuple[Floats, Floats]:
    """Return scale and smallest value of blocks (n, 32), each (n, 1), by weighted least squares."""
    weights = weights / weights.sum()
    low, top = values.min(axis=1, keepdims=True), values.max(axis=1, keepdims=True)
    middle, span = (low + top) / 2, top - low
    best_error = np.full_like(low, np.inf)
    best_scale, best_low = np.zeros_like(low), low
    center = (values @ weights)[:, None]
    for stretch in _STRETCHES:
        scale = span * (stretch / np.float32(high))
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 1e-30)
        codes = np.clip(np.rint((values - middle) * inverse + np.float32(high / 2)), 0, high)
        mean = (codes @ weights)[:, None]
        along = (((values - center) * (codes - mean)) @ weights)[:, None]
        spread = (np.square(codes - mean) @ weights)[:, None]
        scale = np.divide(along, spread, out=np.zeros_like(along), where=spread > 1e-12)
        shift = center - scale * mean
        error = (np.square(values - scale * codes - shift) @ weights)[:, None]
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale, best_low = (
            np.where(better, scale, best_scale),
            np.where(better, shift, best_low),
        )
    return best_scale, best_low


def _pack_levels(levels: Floats) -> Bytes:
    return pack_planes(level_codes(levels), 4, run=16)


def _pack_around_zero(levels: Floats, bits: int) -> Bytes:
    return pack_codes(levels + np.float32(1 << (bits - 1)), bits)


def _around_zero(bits: int) -> Grid:
    half = 1 << (bits - 1)
    peaks = tuple(-half * factor for factor in np.linspace(0.8, 1.25, 13).tolist())
    peaks += tuple(half * factor for factor in np.linspace(0.8, 1.1, 7).tolist())
    pack = partial(_pack_around_zero, bits=bits)
    return Grid(whole_codes(-half, half - 1), pack, peaks)


def _from_smallest(bits: int) -> Grid:
    high = (1 << bits) - 1
    return Grid(whole_codes(0, high), partial(pack_codes, bits=bits), high=high)


def _signed_bytes(levels: Floats) -> Bytes:
    return levels.astype(np.int8).view(np.uint8)


_IQ4_PEAKS = tuple(np.linspace(-165, -95, 15).tolist() + np.linspace(95, 145, 9).tolist())

GRIDS = {
    "Q4_0": _around_zero(4),
    "Q4_1": _from_smallest(4),
    "Q5_0": _around_zero(5),
    "Q5_1": _from_smallest(5),
    "Q8_0": Grid(whole_codes(-127, 127), _signed_bytes, (127.0, 126.0, 125.0)),
    "IQ4_NL": Grid(nearest_level, _pack_levels, _IQ4_PEAKS),
}
