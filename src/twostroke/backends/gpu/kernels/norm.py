"""Adds the output of a layer to the residual stream, and norms the sum for the next products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.common import Parts, overlap_kernels, sum_parts
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu


class Norm(Frozen, eq=False):
    """The weight of an RMS norm on the GPU, for a row or for each group of a row's values.

    `weight`: float32, as wide as a row or group, with the offset added.
    """

    weight: Tensor
    epsilon: float
    groups: int = 1


def launch(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    *,
    residual: Tensor | None,
    delta: Parts | None = None,
    bias: Tensor | None = None,
    post: Norm | None = None,
    factor: Tensor | None = None,
    norm: Norm | None = None,
    output: Tensor | None = None,
) -> None:
    """Add a layer's output to the residual stream, and norm the sum, in one kernel.

    Computes `residual = (residual + post(delta + bias)) * factor`, `output = norm(residual)`.
    Missing arguments are left out of the formula. `residual` (rows, width) is float32; without it,
    `output` is the norm of the delta. `norm` may have groups only without residual and bias.
    """
    stream = next(x for x in (residual, output) if x is not None)
    groups = norm.groups if norm else 1
    width = stream.shape[1] // groups
    block = triton.next_power_of_2(width)
    unused = header
    gpu.launch(
        _add_norm,
        (-(-num_rows * groups // gpu.row_block),),
        header=header,
        residual=unused if residual is None else residual,
        delta=unused if delta is None else delta.values,
        bias=unused if bias is None else bias,
        post_weight=unused if post is None else post.weight,
        factor=unused if factor is None else factor,
        weight=unused if norm is None else norm.weight,
        output=unused if output is None else output,
        num_parts=delta.count if delta else 0,
        part_stride=delta.part_stride if delta else 0,
        num_warps=min(16, max(1, block // 512)),
        DELTA_STRIDE=delta.row_stride if delta else 0,
        POST_EPSILON=post.epsilon if post else 0.0,
        EPSILON=norm.epsilon if norm else 0.0,
        GROUPS=groups,
        WIDTH=width,
        BLOCK=block,
        ROWS=gpu.row_block,
        HAS_RESIDUAL=residual is not None,
        HAS_DELTA=delta is not None,
        HAS_BIAS=bias is not None,
        HAS_POST=post is not None,
        HAS_FACTOR=factor is not None,
        HAS_NORM=norm is not None,
        HAS_OUTPUT=output is not None,
    )


@triton.jit(do_not_specialize=["num_parts", "part_stride"])
def _add_norm(
    header, residual, delta, bias, post_weight, factor, weight, output, num_parts, part_stride,
    DELTA_STRIDE: tl.constexpr, POST_EPSILON: tl.constexpr, EPSILON: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_POST: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_OUTPUT: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
    num_rows = tl.load(header) * GROUPS
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    if tl.program_id(0) * ROWS >= num_rows:
        return
    columns = tl.arange(0, BLOCK)[None, :]
    is_column = columns < WIDTH
    inside = (rows < num_rows) & is_column
    x = tl.zeros((ROWS, BLOCK), tl.float32)
    if HAS_DELTA:
        at = delta + rows // GROUPS * DELTA_STRIDE + rows % GROUPS * WIDTH + columns
        x = sum_parts(at, inside, num_parts, part_stride)
        if HAS_BIAS:
            x += tl.load(bias + columns, is_column, 0.0)
        if HAS_POST:
            x = x / tl.sqrt(tl.sum(x * x, 1) / WIDTH + POST_EPSILON)[:, None]
            x *= tl.load(post_weight + columns, is_column, 0.0)
    if HAS_RESIDUAL:
        at = residual + rows * WIDTH + columns
        x += tl.load(at, inside, 0.0)
        if HAS_FACTOR:
            x *= tl.load(factor)
        if HAS_DELTA:
            tl.store(at, x, inside)
    if HAS_OUTPUT:
        if HAS_NORM:
            x = x / tl.sqrt(tl.sum(x * x, 1) / WIDTH + EPSILON)[:, None]
            x *= tl.load(weight + columns, is_column, 0.0)
        tl.store(output + rows * WIDTH + columns, x.to(output.dtype.element_ty), inside)
