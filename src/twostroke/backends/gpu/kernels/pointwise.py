"""Elementwise operations: gated activations, sums, factors, soft caps; also gathers of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.common import Parts, overlap_kernels, sum_parts
from twostroke.model.program import Activation

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu

_BLOCK: Final = 1024
_FUNCTIONS: Final = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.SIGMOID: 2}


def activate(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    gate: tuple[Parts, Tensor | None],
    up: tuple[Parts, Tensor | None],
    activation: Activation,
    output: Tensor,
) -> None:
    """Launch a gated activation: write `activation(gate) * up` to output (rows, width).

    Both inputs are a product's partial sums with an optional bias.
    """
    width, unused = output.shape[1], header
    grid, sizes = _blocks(gpu, num_rows, width)
    gpu.launch(
        _activate,
        grid,
        header=header,
        gate=gate[0].values,
        up=up[0].values,
        gate_bias=unused if gate[1] is None else gate[1],
        up_bias=unused if up[1] is None else up[1],
        output=output,
        gate_count=gate[0].count,
        gate_part_stride=gate[0].part_stride,
        up_count=up[0].count,
        up_part_stride=up[0].part_stride,
        GATE_STRIDE=gate[0].row_stride,
        UP_STRIDE=up[0].row_stride,
        HAS_GATE_BIAS=gate[1] is not None,
        HAS_UP_BIAS=up[1] is not None,
        FUNCTION=_FUNCTIONS[activation],
        **sizes,
    )


def combine(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    a: Parts,
    output: Tensor,
    *,
    bias: Tensor | None = None,
    factor: float = 1.0,
    weight: Tensor | None = None,
    b: Parts | None = None,
    soft_cap: float = 0.0,
) -> None:
    """Launch an elementwise sum: write `cap((a + bias) * factor * weight + b)` to output.

    `output` is (rows, width), of any floating type. The `weight` is one number. `cap` is the soft
    cap: with `soft_cap` c it is `c * tanh(x / c)`.
    """
    width, unused = output.shape[1], header
    grid, sizes = _blocks(gpu, num_rows, width)
    gpu.launch(
        _combine,
        grid,
        header=header,
        a=a.values,
        bias=unused if bias is None else bias,
        weight=unused if weight is None else weight,
        b=unused if b is None else b.values,
        output=output,
        a_count=a.count,
        a_part_stride=a.part_stride,
        b_count=b.count if b else 0,
        b_part_stride=b.part_stride if b else 0,
        A_STRIDE=a.row_stride,
        B_STRIDE=b.row_stride if b else 0,
        FACTOR=factor,
        SOFT_CAP=soft_cap,
        HAS_BIAS=bias is not None,
        HAS_WEIGHT=weight is not None,
        HAS_B=b is not None,
        **sizes,
    )


def take_rows(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    x: Tensor,
    row_ids: Tensor,
    output: Tensor,
    *,
    factor: float = 1.0,
    results: Tensor | None = None,
) -> None:
    """Launch a gather: `output[r] = x[row_ids[r]] * factor`, for embeddings or rows with logits.

    A negative id -1 - i stands for the token that the last step drew: the first number of row i of
    the sampler's `results`.
    """
    width, unused = output.shape[1], header
    grid, sizes = _blocks(gpu, num_rows, width)
    gpu.launch(
        _take_rows,
        grid,
        header=header,
        x=x,
        row_ids=row_ids,
        results=unused if results is None else results,
        output=output,
        FACTOR=factor,
        RESULT_STRIDE=0 if results is None else results.shape[1],
        **sizes,
    )


def _blocks(gpu: Gpu, num_rows: int, width: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the launch grid of an elementwise kernel over rows, and its block constants."""
    block = min(_BLOCK, triton.next_power_of_2(width))
    grid = -(-num_rows // gpu.row_block), -(-width // block)
    return grid, {"WIDTH": width, "BLOCK": block, "ROWS": gpu.row_block}


@triton.jit
def _block(num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return the rows and columns of a program's block, and the mask of valid values."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, columns, (row < num_rows) & (columns < WIDTH)


@triton.jit(do_not_specialize=["gate_count", "gate_part_stride", "up_count", "up_part_stride"])
def _activate(
    header, gate, up, gate_bias, up_bias, output, gate_count, gate_part_stride, up_count,
    up_part_stride,
    GATE_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr, WIDTH: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr, FUNCTION: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
    num_rows = tl.load(header)
    if tl.program_id(0) * ROWS >= num_rows:
        return
    row, columns, inside = _block(num_rows, WIDTH, BLOCK, ROWS)
    x = sum_parts(gate + row * GATE_STRIDE + columns, inside, gate_count, gate_part_stride)
    y = sum_parts(up + row * UP_STRIDE + columns, inside, up_count, up_part_stride)
    if HAS_GATE_BIAS:
        x += tl.load(gate_bias + columns, columns < WIDTH, 0.0)
    if HAS_UP_BIAS:
        y += tl.load(up_bias + columns, columns < WIDTH, 0.0)
    if FUNCTION == 0:
        x = x / (1 + tl.exp(-x))
    elif FUNCTION == 2:
        x = 1 / (1 + tl.exp(-x))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1 + tl.exp(-2 * inner))  # x / 2 * (1 + tanh(inner))
    at = output + row * WIDTH + columns
    tl.store(at, (x * y).to(output.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["a_count", "a_part_stride", "b_count", "b_part_stride"])
def _combine(
    header, a, bias, weight, b, output, a_count, a_part_stride, b_count, b_part_stride,
    A_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr, WIDTH: tl.constexpr, FACTOR: tl.constexpr,
    SOFT_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_B: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
    num_rows = tl.load(header)
    if tl.program_id(0) * ROWS >= num_rows:
        return
    row, columns, inside = _block(num_rows, WIDTH, BLOCK, ROWS)
    x = sum_parts(a + row * A_STRIDE + columns, inside, a_count, a_part_stride)
    if HAS_BIAS:
        x += tl.load(bias + columns, columns < WIDTH, 0.0)
    x *= FACTOR
    if HAS_WEIGHT:
        x *= tl.load(weight)
    if HAS_B:
        x += sum_parts(b + row * B_STRIDE + columns, inside, b_count, b_part_stride)
    if SOFT_CAP > 0:
        x = SOFT_CAP * (2 / (1 + tl.exp(-2 * x / SOFT_CAP)) - 1)
    tl.store(output + row * WIDTH + columns, x.to(output.dtype.element_ty), inside)


@triton.jit
def _take_rows(
    header, x, row_ids, results, output,
    WIDTH: tl.constexpr, FACTOR: tl.constexpr, RESULT_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
    num_rows = tl.load(header)
    if tl.program_id(0) * ROWS >= num_rows:
        return
    row, columns, inside = _block(num_rows, WIDTH, BLOCK, ROWS)
    line = tl.load(row_ids + row, row < num_rows, 0)
    if RESULT_STRIDE > 0:
        token = tl.load(results + (-1 - line) * RESULT_STRIDE, line < 0, 0)
        line = tl.where(
            line < 0, tl.maximum(token, 0), line
        )  # without a token, the request has failed
    line = line.to(tl.int64) * WIDTH
    values = tl.load(x + line + columns, inside, 0.0)
    values = values.to(tl.float32) * FACTOR
    tl.store(output + row * WIDTH + columns, values.to(output.dtype.element_ty), inside)
