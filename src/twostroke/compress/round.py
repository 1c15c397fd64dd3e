"""Rounds a matrix to a block format so that its products change least (GPTQ, arXiv:2210.17323).

Columns are rounded one after another. The error of each is made up for by the columns after it, as
far as the inputs are correlated. Scales are fitted when a block is reached, with errors weighted by
how little later columns can make up for them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.quant import FORMATS, QuantTensor
from twostroke.quant.fit import fit_scale, whole_codes
from twostroke.quant.format import half_bytes, half_column
from twostroke.quant.iq4 import level_codes, nearest_level
from twostroke.quant.planes import pack_planes
from twostroke.quant.steps import pack_codes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from twostroke.quant import Bytes, Floats

_DAMPING = 0.01  # of the mean second moment, added to each
_BLOCK = 32  # values that share a scale, in all formats here
_STRETCHES = np.linspace(0.7, 1.05, 15, dtype=np.float32)


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

    def fit(self, values: Floats, weights: Floats) -> Bytes:
        """Return the heads, bytes (n, 2 or 4), of blocks: float32 (n, 32), weights (32,)."""
        if self.peaks:
            return half_bytes(fit_scale(values, self.nearest, self.peaks, weights))
        return np.concatenate(list(map(half_bytes, _line(values, weights, self.high))), axis=1)

    def scale_and_smallest(self, heads: Bytes) -> tuple[Floats, Floats]:
        """Return both as the format stores them, float32 (n,)."""
        scale = half_column(heads, 0)[:, 0]
        return scale, np.zeros_like(scale) if self.peaks else half_column(heads, 2)[:, 0]


def round_matrix(weight: Floats, factor: NDArray[np.float64], name: str) -> QuantTensor:
    """Return a matrix (outputs, inputs) in the format `name`, one of GRIDS.

    `factor` is what `inverse_factor` returns for its inputs. Rows must fill whole blocks.
    """
    grid, fmt = GRIDS[name], FORMATS[name]
    left = np.ascontiguousarray(weight.T)  # (inputs, outputs): what remains to be stored
    upper = factor.astype(np.float32)
    data = np.empty((len(weight), fmt.num_bytes(weight.shape[1])), np.uint8)
    for start in range(0, len(left), _BLOCK):
        block, rest = slice(start, start + _BLOCK), slice(start + _BLOCK, None)
        now, inner = left[block], upper[block, block]
        heads = grid.fit(np.ascontiguousarray(now.T), np.diag(inner) ** -2)
        scale, smallest = grid.scale_and_smallest(heads)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=np.abs(scale) > 1e-30)
        levels, errors = np.empty_like(now), np.empty_like(now)
        for i in range(_BLOCK):
            levels[i] = grid.nearest((now[i] - smallest) * inverse)
            errors[i] = (now[i] - levels[i] * scale - smallest) / inner[i, i]
            now[i + 1 :] -= inner[i, i + 1 :, None] * errors[i]
        left[rest] -= upper[block, rest].T @ errors
        packed = grid.pack(np.ascontiguousarray(levels.T))
        place = start // _BLOCK * fmt.block_bytes
        data[:, place : place + fmt.block_bytes] = np.concatenate([heads, packed], axis=1)
    return QuantTensor(fmt, weight.shape, data)


def inverse_factor(inputs: Floats) -> NDArray[np.float64]:
    """Return the upper triangle U with U.T @ U the inverse second moments of inputs (rows, width).

    Moments are damped, so that inputs which are always zero, or few rows, do no harm.
    """
    moments = (inputs.T @ inputs).astype(np.float64)
    diagonal = np.einsum("ii->i", moments)
    diagonal += _DAMPING * diagonal.mean() + np.finfo(np.float32).tiny
    return np.linalg.cholesky(np.linalg.inv(moments)).T


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
