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
from typing import TYPE_CHECKING, Any

import numpy as np

from twostroke.backends.cpu.library import choose_level, load_library
from twostroke.compress.grids import GRIDS, Rounded
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import resolve_num_threads
from twostroke.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from twostroke.compress.grids import Grid
    from twostroke.quant import Floats, Format

    Doubles = NDArray[np.floating[Any]]
    Run = Callable[..., Iterable[Floats]]  # as map, or a pool's

_SHRINKAGE = 0.3  # of products of two inputs: few rows show them larger than they are
_DAMPING = 0.001  # of the mean second moment, added to each

_INVERTED_AT_ONCE = 64

_FLOATS = ctypes.POINTER(c_float)


class Moments(Frozen, eq=False):
    """Second moments of a product's inputs (width, width), damped; `factor` as of `factors_of`."""

    damped: Doubles
    factor: Floats


def squares_of(inputs: Floats) -> Floats:
    """Return the sum over inputs (rows, width) of the products of each two, (width, width)."""
    return inputs.T @ inputs


def moments_of(parts: Iterable[Floats], run: Run = map) -> Moments:
    """Return the moments for products of inputs (width, width), summed by parts of the text.

    They are shrunk towards their diagonal and damped, so that errors are not made up for by what
    inputs share in these few rows alone. `run` may use threads.
    """
    damped = _sum_of(parts)
    diagonal = np.diag(damped).copy()
    damped *= 1 - _SHRINKAGE
    np.fill_diagonal(damped, diagonal + _DAMPING * diagonal.mean() + np.finfo(np.float32).tiny)
    return Moments(damped, factors_of(damped, run))


def _sum_of(parts: Iterable[Floats]) -> Doubles:
    rest = iter(parts)
    total = next(rest).astype(np.float64)
    for part in rest:
        total += part
    return total


def factors_of(moments: Doubles, run: Run = map) -> Floats:
    """Return the upper triangles U with U.T @ U the inverse of moments (..., width, width).

    Triangles are inverted in float32: damped moments are well conditioned.
    """
    turned = np.linalg.cholesky(moments[..., ::-1, ::-1]).astype(np.float32)
    return _upper_inverse(turned[..., ::-1, ::-1], run)


def _upper_inverse(upper: Floats, run: Run = map) -> Floats:
    """Return the inverses of upper triangles (..., width, width), half by half.

    `run` computes the first two halves. The result does not depend on the number of threads.
    """
    half = upper.shape[-1] // 2
    if half < _INVERTED_AT_ONCE:
        return np.linalg.inv(upper)
    inverse = np.zeros_like(upper)
    left, right = run(_upper_inverse, [upper[..., :half, :half], upper[..., half:, half:]])
    inverse[..., :half, :half], inverse[..., half:, half:] = left, right
    rows = slice(half // 2), slice(half // 2, half)
    between = upper[..., :half, half:]
    middle = np.concatenate([*run(lambda own: between[..., own, :] @ right, rows)], axis=-2)
    for own, part in zip(rows, run(lambda own: -left[..., own, :] @ middle, rows), strict=True):
        inverse[..., own, half:] = part
    return inverse


def round_matrix(
    weight: Floats, moments: Moments, name: str, num_threads: int | None = None
) -> QuantTensor:
    """Return a matrix (outputs, inputs) in the format `name`, one of GRIDS.

    Rows must fill whole blocks. The result does not depend on the number of threads.
    """
    return round_to(weight, moments, GRIDS[name], FORMATS[name], num_threads)


def round_to(
    weight: Floats, moments: Moments, grid: Grid, fmt: Format, num_threads: int | None = None
) -> QuantTensor:
    """Return a matrix (outputs, inputs) in a format whose grid is `grid`."""
    data = grid.pack(round_groups(weight, moments, grid, num_threads))
    return QuantTensor(fmt, weight.shape, data.reshape(len(weight), -1))


def round_groups(
    weight: Floats, moments: Moments, grid: Grid, num_threads: int | None = None
) -> Rounded:
    """Return a matrix (outputs, inputs) as groups, row by row."""
    num_outputs, num_inputs = weight.shape
    num_groups = num_inputs // grid.group
    blocks = moments.damped.reshape(num_groups, grid.group, num_groups, grid.group)
    own = np.einsum("iaib->iab", blocks)
    factors = np.ascontiguousarray(factors_of(own))
    inverses = factors.swapaxes(1, 2) @ factors
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


def _grid_record(grid: Grid) -> _GridRecord:
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
    )
