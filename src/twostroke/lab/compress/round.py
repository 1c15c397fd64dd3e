"""Rounds a matrix to a block format so that its products with typical inputs change least."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int8, c_int32, c_int64
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from twostroke.backends.cpu.library import choose_level, load_library
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import resolve_num_threads
from twostroke.lab.compress.grids import GRIDS, RoundedGroups
from twostroke.model.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twostroke.lab.compress.grids import BlockGrid
    from twostroke.model.quant import Floats, Format

    Run = Callable[..., Iterable[Any]]  # like `map`, or a pool's `map`

_SHRINKAGE_SHARE = 0.3  # of correlations between inputs, which few rows overestimate
_DAMPING_SHARE = 0.001  # of the mean second moment, added to each
_MIN_MOMENT = np.float32(1e-12)  # if all inputs are 0

_MAX_DIRECT_WIDTH = 128
_NUM_BANDS = 4

_FLOATS = ctypes.POINTER(c_float)


class Moments(Frozen, eq=False):
    """Second moments of a matrix product's inputs, as GPTQ uses them (its Hessian).

    `damped` is (width, width), with a damped diagonal. `factor` is the triangular factor of the
    inverse of `damped`, of the same shape.
    """

    damped: Floats
    factor: Floats


def outer_products(inputs: Floats) -> Floats:
    """Return the sum of the outer products of a matrix product's input rows: (width, width).

    `inputs` is (rows, width).
    """
    return inputs.T @ inputs


def damped_moments(parts: Iterable[Floats], run: Run = map) -> Moments:
    """Return the second moments of a matrix product's inputs on a calibration text.

    `parts` are sums of outer products (width, width), one for each part of the text. Moments are
    shrunk towards their diagonal and damped, so that rounding does not rely on correlations that
    only these few rows have. `run` maps a function over items, like `map`, and may use threads.
    """
    rest = iter(parts)
    damped = next(rest).copy()
    for part in rest:
        damped += part
    diagonal = np.diag(damped).copy()
    damped *= 1 - _SHRINKAGE_SHARE
    np.fill_diagonal(damped, diagonal + _DAMPING_SHARE * diagonal.mean() + _MIN_MOMENT)
    return Moments(damped, inverse_factors(damped, run))


def inverse_factors(moments: Floats, run: Run = map) -> Floats:
    """Return triangular factors of the inverse of moments, which rounding uses (GPTQ).

    The factors are lower triangular matrices F with F @ F.T the inverse of the moments (..., width,
    width). float32 is precise enough, because shrinkage keeps moments far from singular. `run` may
    use threads; the result does not depend on their number.
    """
    if moments.ndim == 2 and len(moments) > _MAX_DIRECT_WIDTH:
        return _factor_by_halves(moments, run)
    turned = moments.swapaxes(-1, -2)[..., ::-1, ::-1]
    upper = np.linalg.cholesky(turned)[..., ::-1, ::-1]
    return np.ascontiguousarray(np.linalg.inv(upper).swapaxes(-1, -2))


def _factor_by_halves(moments: Floats, run: Run) -> Floats:
    """Return the factor of a matrix of moments, [[A, B.T], [B, D]], by dividing it into halves.

    Only the lower triangle is read. The factor is [[V, 0], [-W @ X @ V, W]], where W is the factor
    of D, X = W.T @ B, and V is the factor of A - X.T @ X. Products with the zeros of triangles are
    skipped, band by band.
    """
    half = len(moments) // 2
    factor = np.zeros_like(moments)
    first, cross, last = factor[:half, :half], factor[half:, :half], factor[half:, half:]
    last[:] = inverse_factors(moments[half:, half:], run)
    between, product = np.empty_like(cross), np.empty_like(cross)
    rest = moments[:half, :half].copy()

    def compute_x(band: slice) -> None:
        np.matmul(last[band.start :, band].T, moments[half + band.start :, :half], between[band])

    def subtract_x_product(band: slice) -> None:
        rest[band, : band.stop] -= between[:, band].T @ between[:, : band.stop]

    def multiply_by_v(band: slice) -> None:
        np.matmul(between[:, band.start :], first[band.start :, band], product[:, band])

    def compute_cross(band: slice) -> None:
        np.matmul(last[band, : band.stop], product[: band.stop], cross[band])

    upper, lower = _bands(half), _bands(len(last))
    list(run(compute_x, lower))
    list(run(subtract_x_product, reversed(upper)))
    first[:] = inverse_factors(rest, run)
    np.negative(between, out=between)
    list(run(multiply_by_v, upper))
    list(run(compute_cross, reversed(lower)))
    return factor


def _bands(count: int) -> list[slice]:
    ends = [count * i // _NUM_BANDS for i in range(_NUM_BANDS + 1)]
    return [slice(*band) for band in pairwise(ends)]


def round_matrix(
    weight: Floats, moments: Moments, name: str, num_threads: int | None = None
) -> QuantTensor:
    """Return a matrix (outputs, inputs) rounded to the block format `name`, one of GRIDS.

    `moments` are the second moments of its inputs. Rows must fill whole blocks. The result does not
    depend on the number of threads.
    """
    return round_to(weight, moments, GRIDS[name], FORMATS[name], num_threads)


def round_to(
    weight: Floats, moments: Moments, grid: BlockGrid, fmt: Format, num_threads: int | None = None
) -> QuantTensor:
    """Return a matrix (outputs, inputs) rounded to the values of `grid`, in the format `fmt`.

    `moments` are the second moments of its inputs. `grid` has the values that the format can store.
    """
    data = grid.pack(round_groups(weight, moments, grid, num_threads))
    return QuantTensor(fmt, weight.shape, data.reshape(len(weight), -1))


def round_groups(
    weight: Floats, moments: Moments, grid: BlockGrid, num_threads: int | None = None
) -> RoundedGroups:
    """Round a matrix (outputs, inputs) to a grid; return its groups in the order of its rows.

    `moments` are the second moments of the matrix's inputs.
    """
    num_outputs, num_inputs = weight.shape
    num_groups = num_inputs // grid.group
    blocks = moments.damped.reshape(num_groups, grid.group, num_groups, grid.group)
    diagonal_blocks = np.einsum("iaib->iab", blocks)
    factors = inverse_factors(diagonal_blocks)
    inverses = factors @ factors.swapaxes(1, 2)
    levels = np.empty((num_outputs * num_groups, grid.group), np.int8)
    scales, smallest = (np.empty((len(levels), 1), np.float32) for _ in range(2))
    tops, bottoms = (np.empty((len(levels) // grid.num_groups, 1), np.float32) for _ in range(2))
    inputs = [
        np.ascontiguousarray(array, dtype=np.float32)
        for array in (weight, moments.damped, moments.factor, factors, inverses)
    ]
    record = _RoundRecord(
        *(array.ctypes.data_as(_FLOATS) for array in inputs),
        levels.ctypes.data_as(ctypes.POINTER(c_int8)),
        *(array.ctypes.data_as(_FLOATS) for array in (scales, smallest, tops, bottoms)),
        num_outputs,
        num_inputs,
    )
    library = load_library(choose_level(None).level)
    shape = _grid_record(grid)
    threads = resolve_num_threads(num_threads)
    library.ts_round(ctypes.byref(shape), ctypes.byref(record), threads)
    return RoundedGroups(levels, scales, smallest, tops, bottoms)


class _GridRecord(ctypes.Structure):
    """The C struct of a grid, as in native/compress/round.h."""

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
    """The C struct of the inputs and outputs of rounding, as in native/compress/round.h."""

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
    least_share, most_share = grid.shares
    return _GridRecord(
        peaks=peaks,
        table=table,
        low=grid.low,
        high=grid.high,
        num_peaks=len(grid.peaks),
        group=grid.group,
        num_groups=grid.num_groups,
        least_share=least_share,
        most_share=most_share,
        bfloat_scales=grid.has_bfloat_scales,
        whole_zeros=grid.has_whole_zeros,
    )
