"""Products with a separate matrix for each head, before and after latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.common import Parts, overlap_kernels, sum_parts

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu

_MAX_ROWS: Final = 64
_BLOCK_N: Final = 64


def launch(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    x: Parts,
    x_head: int,
    matrices: Tensor,
    output: Tensor,
) -> None:
    """Launch products with one matrix for each head: write `x[h] @ matrices[h].T` to `output`.

    `output` is (rows, heads * head_width). `matrices` are (heads, head_width, depth). Head h of x
    begins at value `h * x_head`, and has `depth` values.
    """
    num_heads, width, depth = matrices.shape
    fitting = _MAX_ROWS if gpu.same_tokens else triton.next_power_of_2(num_rows)
    block_m = max(16, min(_MAX_ROWS, fitting))
    gpu.launch(
        _product,
        (-(-width // _BLOCK_N), num_heads, -(-num_rows // block_m)),
        header=header,
        x=x.values,
        matrices=matrices,
        output=output,
        count=x.count,
        part_stride=x.part_stride,
        num_warps=4,
        num_stages=3,
        X_STRIDE=x.row_stride,
        X_HEAD=x_head,
        HEADS=num_heads,
        WIDTH=width,
        DEPTH=depth,
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=64,
    )


@triton.jit(do_not_specialize=["count", "part_stride"])
def _product(
    header, x, matrices, output, count, part_stride,
    X_STRIDE: tl.constexpr, X_HEAD: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
    num_rows = tl.load(header)
    first = tl.program_id(2) * BLOCK_M
    if first >= num_rows:
        return
    head = tl.program_id(1)
    rows = (first + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    is_row, is_column = rows < num_rows, columns < WIDTH
    x_at = x + rows * X_STRIDE + head * X_HEAD + inputs[None, :]
    matrix = matrices + head.to(tl.int64) * (WIDTH * DEPTH)
    matrix_at = matrix + columns[None, :] * DEPTH + inputs[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        is_input = k + inputs < DEPTH
        a = sum_parts(x_at + k, is_row & is_input[None, :], count, part_stride)
        b = tl.load(matrix_at + k, is_input[:, None] & is_column[None, :], 0.0)
        total = tl.dot(a.to(b.dtype), b, total, input_precision="ieee")
    at = output + rows * (HEADS * WIDTH) + head * WIDTH + columns[None, :]
    tl.store(at, total.to(output.dtype.element_ty), is_row & is_column[None, :])
