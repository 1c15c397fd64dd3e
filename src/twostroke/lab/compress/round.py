"""Rounds a matrix to a block format so that its products change least.

Columns are rounded one after another. The error of each is made up for by the columns after it, as
far as the inputs are correlated (GPTQ, arXiv:2210.17323); scales are fitted when a block is
reached. Then a sweep codes each block again, with scales about the best for its codes, for what all
others leave to make up for (block coordinate descent, as QuantEase, arXiv:2309.01885). Shares of a
super-block's scale are fitted in the same way; the scale itself when the super-block is reached.

`native/compress` does it; tests/support/plain_rounding.py is its definition in NumPy.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int8, c_int32, c_int64
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from twostroke.backends.cpu.library import choose_level, load_library
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import resolve_num_threads
from twostroke.lab.compress.grids import GRIDS, Rounded
from twostroke.model.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twostroke.lab.compress.grids import BlockGrid
    from twostroke.model.quant import Floats, Format

    Run = Callable[..., Iterable[Any]]  # as map, or a pool's

_SHRINKAGE = 0.3  # of products of two inputs: few rows show them larger than they are
_DAMPING = 0.001  # of the mean second moment, added to each
_LEAST = np.float32(1e-12)  # where all inputs are 0

_FACTORED_AT_ONCE = 128
_NUM_BANDS = 4

_FLOATS = ctypes.POINTER(c_float)


class Moments(Frozen, eq=False):
    """Second moments of a product's inputs (width, width), damped; `factor` as of `factors_of`."""

    damped: Floats
    factor: Floats


def squares_of(inputs: Floats) -> Floats:
    """Return the sum over inputs (rows, width) of the products of each two, (width, width)."""
    return inputs.T @ inputs


def moments_of(parts: Iterable[Floats], run: Run = map) -> Moments:
    """Return the moments for products of inputs (width, width), summed by parts of the text.

    They are shrunk towards their diagonal and damped, so that errors are not made up for by what
    inputs share in these few rows alone. `run` may use threads.
    """
    rest = iter(parts)
    damped = next(rest).copy()
    for part in rest:
        damped += part
    diagonal = np.diag(damped).copy()
    damped *= 1 - _SHRINKAGE
    np.fill_diagonal(damped, diagonal + _DAMPING * diagonal.mean() + _LEAST)
    return Moments(damped, factors_of(damped, run))


def factors_of(moments: Floats, run: Run = map) -> Floats:
    """Return the lower triangles F with F @ F.T the inverse of moments (..., width, width).

    float32 is enough: shrinking keeps moments far from singular. `run` may use threads; the result
    does not depend on their number.
    """
    if moments.ndim == 2 and len(moments) > _FACTORED_AT_ONCE:
        return _factor_by_halves(moments, run)
    turned = moments.swapaxes(-1, -2)[..., ::-1, ::-1]
    upper = np.linalg.cholesky(turned)[..., ::-1, ::-1]
    return np.ascontiguousarray(np.linalg.inv(upper).swapaxes(-1, -2))


def _factor_by_halves(moments: Floats, run: Run) -> Floats:
    """Return the factor of moments [[A, B.T], [B, D]], of which the lower triangle is read.

    It is [[V, 0], [-W @ X @ V, W]] with W that of D, X = W.T @ B, and V that of A - X.T @ X. Zeros
    of triangles are left out, band by band.
    """
    half = len(moments) // 2
    factor = np.zeros_like(moments)
    first, cross, last = factor[:half, :half], factor[half:, :half], factor[half:, half:]
    last[:] = factors_of(moments[half:, half:], run)
    between, product = np.empty_like(cross), np.empty_like(cross)
    rest = moments[:half, :half].copy()

    def turn(band: slice) -> None:
        np.matmul(last[band.start :, band].T, moments[half + band.start :, :half], between[band])

    def reduce(band: slice) -> None:
        rest[band, : band.stop] -= between[:, band].T @ between[:, : band.stop]

    def spread(band: slice) -> None:
        np.matmul(between[:, band.start :], first[band.start :, band], product[:, band])

    def join(band: slice) -> None:
        np.matmul(last[band, : band.stop], product[: band.stop], cross[band])

    upper, lower = _bands(half), _bands(len(last))
    list(run(turn, lower))
    list(run(reduce, reversed(upper)))
    first[:] = factors_of(rest, run)
    np.negative(between, out=between)
    list(run(spread, upper))
    list(run(join, reversed(lower)))
    return factor


def _bands(count: int) -> list[slice]:
    ends = [count * i // _NUM_BANDS for i in range(_NUM_BANDS + 1)]
    return [slice(*band) for band in pairwise(ends)]


def round_matrix(
    weight: Floats, moments: Moments, name: str, num_threads: int | None = None
) -> QuantTensor:
    """Return a matrix (outputs, inputs) in the format `name`, one of GRIDS.

    Rows must fill whole blocks. The result does not depend on the number of threads.
    """
    return round_to(weight, moments, GRIDS[name], FORMATS[name], num_threads)


def round_to(
    weight: Floats, moments: Moments, grid: BlockGrid, fmt: Format, num_threads: int | None = None
) -> QuantTensor:
    """Return a matrix (outputs, inputs) in a format whose grid is `grid`."""
    data = grid.pack(round_groups(weight, moments, grid, num_threads))
    return QuantTensor(fmt, weight.shape, data.reshape(len(weight), -1))


def round_groups(
    weight: Floats, moments: Moments, grid: BlockGrid, num_threads: int | None = None
) -> Rounded:
    """Return a matrix (outputs, inputs) as groups, row by row."""
    num_outputs, num_inputs = weight.shape
    num_groups = num_inputs // grid.group
    blocks = moments.damped.reshape(num_groups, grid.group, num_groups, grid.group)
    own = np.einsum("iaib->iab", blocks)
    factors = factors_of(own)
    inverses = factors @ factors.swapaxes(1, 2)
    levels = np.empty((num_outputs * num_groups, grid.group), np.int8)
    scales, smallest = (np.empty((len(levels), 1), np.float32) for _ in range(2))
    tops, bottoms = (np.empty((len(levels) // grid.num_groups, 1), np.float32) for _ in range(2))
    given = (weight, moments.damped, moments.factor, factors, inverses)
    read = [np.ascontiguousarray(array, dtype=np.float32) for array in given]
    record = _RoundRecord(
        *(array.ctypes.data_as(_FLOATS) for array in read),
        levels.ctypes.data_as(ctypes.POINTER(c_int8)),
        *(array.ctypes.data_as(_FLOATS) for array in (scales, smallest, tops, bottoms)),
        num_outputs,
        num_inputs,
    )
    library = load_library(choose_level(None).level)
    shape = _grid_record(grid)
    threads = resolve_num_threads(num_threads)
    library.ts_round(ctypes.byref(shape), ctypes.byref(record), threads)
    return Rounded(levels, scales, smallest, tops, bottoms)


class _GridRecord(ctypes.Structure):
    """As in native/compress/round.h."""

    _fields_ = (
        ("peaks", _FLOATS),
        ("table", _FLOATS),
        ("low", c_float),
        ("high", c_float),
        ("num_peaks", c_int32),
        ("group", c_int32),
        ("num_groups", c_int32),
        ("least_share", c_int32),
        ("most_share", c_int32),
        ("bfloat_scales", c_int32),
        ("whole_zeros", c_int32),
    )


class _RoundRecord(ctypes.Structure):
    """As in native/compress/round.h."""

    _fields_ = (
        *((name, _FLOATS) for name in ("weight", "moments", "factor")),
        *((name, _FLOATS) for name in ("own_factors", "own_inverses")),
        ("levels", ctypes.POINTER(c_int8)),
        *((name, _FLOATS) for name in ("scales", "smallest", "tops", "bottoms")),
        ("num_outputs", c_int64),
        ("num_inputs", c_int64),
    )


def _grid_record(grid: BlockGrid) -> _GridRecord:
    peaks = (c_float * len(grid.peaks))(*grid.peaks)
    table = (c_float * len(grid.table))(*grid.table) if grid.table else None
    return _GridRecord(
        peaks,
        table,
        grid.low,
        grid.high,
        len(grid.peaks),
        grid.group,
        grid.num_groups,
        *grid.shares,
        grid.has_bfloat_scales,
        grid.has_whole_zeros,
    )
