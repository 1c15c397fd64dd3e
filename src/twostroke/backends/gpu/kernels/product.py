"""Products with dense matrices: few rows in Triton, many rows by cuBLAS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.common import overlap_kernels, prefetch
from twostroke.backends.gpu.kernels.routing import rows_of

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.kernels.common import Parts
    from twostroke.backends.gpu.kernels.routing import Grouped
    from twostroke.backends.gpu.launch import Gpu

FEW_ROWS: Final = 64  # up to this many rows, a product is limited by reading its weights
_BLOCK_N: Final = 64
_MIN_DEPTH: Final = 512  # inputs of a part


def num_parts(gpu: Gpu, num_rows: int, width: int, depth: int) -> int:
    """Return into how many partial sums a product of few rows is split, to use the whole GPU.

    `width`: the total width of all products that write to the same `Parts`; they share the number.
    With `same_tokens` the number depends only on the shape. It is then small, because products of
    many rows must be split into the same number of partial sums.
    """
    max_parts, per_unit = 8, 8 if num_rows <= 16 else 4
    if gpu.same_tokens:
        num_rows, max_parts, per_unit = 1, 2, 4
    blocks = -(-width // _BLOCK_N) * -(-num_rows // FEW_ROWS)
    parts = 1
    while (
        parts < max_parts
        and 2 * parts * blocks <= per_unit * gpu.num_units
        and depth // (2 * parts) >= _MIN_DEPTH
    ):
        parts *= 2
    return parts


def launch(
    gpu: Gpu, header: Tensor, num_rows: int, x: Tensor, weight: Tensor, output: Parts
) -> None:
    """Launch a dense matrix product: write `x @ weight.T` to `output`.

    x is (rows, depth), weight is (width, depth).
    """
    width = len(weight)
    if num_rows > FEW_ROWS and output.values.dtype == gpu.element and not gpu.same_tokens:
        out = torch.as_strided(output.values, (num_rows, width), (output.row_stride, 1))
        gpu.call(torch.mm, x[:num_rows], weight.T, out=out)
        return
    fitting = FEW_ROWS if gpu.same_tokens else triton.next_power_of_2(num_rows)
    block_m = max(16, min(FEW_ROWS, fitting))
    grid = -(-num_rows // block_m), output.count, -(-width // _BLOCK_N)
    _start(
        gpu,
        grid,
        header=header,
        x=x,
        weight=weight,
        output=output,
        blocks=(block_m, _BLOCK_N),
        rows=None,
    )


def launch_grouped(gpu: Gpu, x: Tensor, weight: Tensor, output: Parts, rows: Grouped) -> None:
    """Launch the dense products of a mixture of experts: each row with each of its experts.

    `weight` is (experts, width, depth). The result of each (row, expert) pair is one row of the
    output.
    """
    routes = rows.routes
    is_wide = routes.block >= 64 and gpu.architecture == 90  # others would spill registers
    block_n = 128 if is_wide else _BLOCK_N
    grid = routes.max_items, output.count, -(-weight.shape[1] // block_n)
    _start(
        gpu,
        grid,
        header=routes.header,
        x=x,
        weight=weight,
        output=output,
        blocks=(routes.block, block_n),
        rows=rows,
    )


def _start(
    gpu: Gpu,
    grid: tuple[int, int, int],
    header: Tensor,
    x: Tensor,
    weight: Tensor,
    output: Parts,
    blocks: tuple[int, int],
    rows: Grouped | None,
) -> None:
    width, depth = weight.shape[-2:]
    block_m, block_n = blocks
    most_deep = 32 if gpu.architecture >= 120 else FEW_ROWS  # others would spill registers
    gpu.launch(
        _product,
        grid,
        header=header,
        x=x,
        weight=weight,
        output=output.values,
        items=header if rows is None else rows.routes.items,
        order=header if rows is None else rows.routes.order,
        shares=header if rows is None else rows.routes.shares,
        part_stride=output.part_stride,
        num_warps=8 if block_m > FEW_ROWS else 4,
        num_stages=3 if block_m > FEW_ROWS else 4 if rows else 6,
        WIDTH=width,
        DEPTH=depth,
        PART_DEPTH=-(-depth // output.count // 64) * 64,
        ROW_STRIDE=output.row_stride,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=128 if depth >= 128 and block_m <= most_deep and rows else 64,
        LINES=rows.lines if rows else 0,
        IS_SHARED=rows is not None and rows.is_shared,
    )


@triton.jit(do_not_specialize=["part_stride"])
def _product(
    header, x, weight, output, items, order, shares, part_stride,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, PART_DEPTH: tl.constexpr, ROW_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr,
    IS_SHARED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    start = part * PART_DEPTH
    if OVERLAPS and LINES == 0:
        outputs = tl.minimum(tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N), WIDTH - 1)
        first = tl.minimum(start + tl.arange(0, 4) * 64, DEPTH - 1)
        prefetch(weight + outputs.to(tl.int64)[:, None] * DEPTH + first[None, :])
    overlap_kernels(OVERLAPS)
    count, rows, x_rows, expert, block = rows_of(header, items, order, BLOCK_M, LINES)
    if count <= 0:
        return
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    is_row, is_column = tl.arange(0, BLOCK_M) < count, columns < WIDTH
    x_at = x + x_rows[:, None] * DEPTH + inputs[None, :]
    weight_at = weight + (expert * WIDTH + columns)[None, :] * DEPTH + inputs[:, None]
    end = tl.minimum(start + PART_DEPTH, DEPTH)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(start, end, BLOCK_K):
        is_input = k + inputs < end
        a = tl.load(x_at + k, is_row[:, None] & is_input[None, :], 0.0)
        b = tl.load(weight_at + k, is_input[:, None] & is_column[None, :], 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if IS_SHARED:
        total *= tl.load(shares + rows, is_row, 0.0)[:, None]
    at = output + part * part_stride + rows[:, None] * ROW_STRIDE + columns[None, :]
    tl.store(at, total.to(output.dtype.element_ty), is_row[:, None] & is_column[None, :])
