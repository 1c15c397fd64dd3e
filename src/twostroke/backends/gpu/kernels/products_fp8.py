"""Products of many rows with E4M3 matrices on tensor cores that multiply E4M3: sm_89 and newer.

Rows of x are rounded to E4M3 in the order in which packed matrices have their inputs, with a scale
for each row, or for each 128 inputs of it where the matrix has such scales. Sums of 128 inputs come
from the tensor cores, some of which keep 14 bits; their sums are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.bytes import e4m3_codes
from twostroke.backends.gpu.kernels.overlap import begin
from twostroke.backends.gpu.kernels.product import FEW_ROWS
from twostroke.backends.gpu.stored import TILE_INPUTS
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.kernels.packed import Packed
    from twostroke.backends.gpu.kernels.parts import Parts
    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.stored import Layout

_OLDEST: Final = 89
_GROUP: Final = 128
_BLOCK_M: Final = 128
_WIDE_ROWS: Final = 256  # beyond which programs have 128 outputs
_TOGETHER: Final = 8  # blocks of rows whose programs read the same weights


class RoundedRows(Frozen, eq=False):
    """Rows of E4M3 codes (rows, depth), padded, and scales (groups, rows)."""

    codes: Tensor
    scales: Tensor
    has_row_scales: bool


def is_for(gpu: Gpu, num_rows: int, weight: Packed, output: Parts) -> bool:
    """Whether a product takes this way; those into float32, such as logits, never do."""
    is_many = num_rows > FEW_ROWS and output.count == 1 and output.values.dtype == gpu.element
    return is_many and are_known(gpu, weight.layout)


def are_known(gpu: Gpu, layout: Layout) -> bool:
    """Whether products of many rows with matrices of a layout take this way."""
    has_scales = layout.has_row_scales or layout.group == _GROUP
    is_known = gpu.architecture >= _OLDEST and not gpu.same_tokens
    return is_known and layout.table == "e4m3" and has_scales


def rounded_bytes(num_rows: int, depth: int, layout: Layout) -> int:
    """Return how many bytes rounded rows take."""
    (rows, padded), groups = _shape(num_rows, depth, layout)
    return rows * padded + 4 * groups * rows


def _shape(num_rows: int, depth: int, layout: Layout) -> tuple[tuple[int, int], int]:
    """Return the shape of codes, and the groups of scales."""
    padded = -(-depth // TILE_INPUTS) * TILE_INPUTS
    rows = -(-num_rows // _BLOCK_M) * _BLOCK_M
    return (rows, padded), 1 if layout.has_row_scales else padded // _GROUP


def round_rows(
    gpu: Gpu, header: Tensor, num_rows: int, x: Tensor, layout: Layout, scratch: Tensor
) -> RoundedRows:
    """Round x (rows, depth) for products with matrices of a layout, into the `scratch`, bytes."""
    depth = x.shape[1]
    (rows, padded), groups = _shape(num_rows, depth, layout)
    end, size = rows * padded, rounded_bytes(num_rows, depth, layout)
    codes = scratch[:end].view(torch.float8_e4m3fn).view(rows, padded)
    scales = scratch[end:size].view(torch.float32).view(groups, rows)
    gpu.launch(
        _round_rows,
        (num_rows,),
        header,
        x,
        codes.view(torch.int16),
        scales,
        rows,
        DEPTH=depth,
        PADDED=padded,
        HAS_ROW_SCALES=layout.has_row_scales,
        BLOCK=min(2048, triton.next_power_of_2(padded)),
    )
    return RoundedRows(codes, scales, layout.has_row_scales)


def launch(
    gpu: Gpu, header: Tensor, num_rows: int, x: RoundedRows, weight: Packed, output: Parts
) -> None:
    """Write `x @ weight.T` into `output`, for a matrix (width, depth)."""
    assert x.has_row_scales == weight.layout.has_row_scales
    # With scales of groups, blocks of 128 spill registers but on sm_90.
    may_be_wide = x.has_row_scales or gpu.architecture == 90
    block_n = 128 if num_rows > _WIDE_ROWS and may_be_wide else 64
    has_room = gpu.architecture in {90, 100}  # for three stages of both factors
    gpu.launch(
        _product_fp8,
        (-(-num_rows // _BLOCK_M) * -(-weight.width // block_n),),
        header,
        x.codes,
        x.scales,
        weight.codes.view(torch.float8_e4m3fn),
        weight.scales,
        output.values,
        x.scales.shape[1],
        num_warps=8 if block_n == 128 else 4,
        num_stages=3 if has_room else 2,
        WIDTH=weight.width,
        PADDED=x.codes.shape[1],
        ROW_STRIDE=output.row_stride,
        HAS_ROW_SCALES=x.has_row_scales,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=block_n,
        TOGETHER=_TOGETHER,
    )


@triton.jit(do_not_specialize=["stride"])
def _round_rows(
    header, x, codes, scales, stride,
    DEPTH: tl.constexpr, PADDED: tl.constexpr, HAS_ROW_SCALES: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    GROUPS: tl.constexpr = BLOCK // 128
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(header):
        return
    groups = tl.arange(0, GROUPS)
    words = groups[:, None] * 64 + tl.arange(0, 64)[None, :]
    first = words // 32 * 64 + words % 32  # and 32 further: the two inputs of a word
    x += row * DEPTH + first
    scale = tl.zeros((GROUPS,), tl.float32)
    if HAS_ROW_SCALES:
        most = tl.zeros((GROUPS, 64), tl.float32)
        for k in range(0, PADDED, BLOCK):
            a = tl.load(x + k, k + first < DEPTH, 0.0).to(tl.float32)
            b = tl.load(x + k + 32, k + first + 32 < DEPTH, 0.0).to(tl.float32)
            most = tl.maximum(most, tl.maximum(tl.abs(a), tl.abs(b)))
        scale += tl.max(tl.max(most, 1), 0) / 448.0
        tl.store(scales + row + groups, scale, groups == 0)
    for k in range(0, PADDED, BLOCK):
        a = tl.load(x + k, k + first < DEPTH, 0.0).to(tl.float32)
        b = tl.load(x + k + 32, k + first + 32 < DEPTH, 0.0).to(tl.float32)
        if not HAS_ROW_SCALES:
            scale = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1) / 448.0
            at = k // 128 + groups
            tl.store(scales + at * stride + row, scale, at < PADDED // 128)
        divisor = tl.where(scale == 0, 1.0, scale)[:, None]
        pair = _code(a / divisor) | _code(b / divisor) << 8
        tl.store(codes + row * (PADDED // 2) + k // 2 + words, pair.to(tl.int16),
            k // 2 + words < PADDED // 2)  # fmt: skip


@triton.jit
def _code(x):
    """Return codes; what is not a number stays so."""
    found = e4m3_codes(tl.minimum(tl.maximum(x, -448.0), 448.0))
    return tl.where(x == x, found, 0x7F)  # noqa: PLR0124 - false for it


@triton.jit(do_not_specialize=["stride"])
def _product_fp8(
    header, x, x_scales, codes, scales, output, stride,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROW_STRIDE: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TOGETHER: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    TILES: tl.constexpr = (WIDTH + 63) // 64
    BLOCKS_N: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    program, count = tl.program_id(0), tl.load(header)
    band = program // (TOGETHER * BLOCKS_N) * TOGETHER
    height = tl.minimum(tl.num_programs(0) // BLOCKS_N - band, TOGETHER)
    within = program % (TOGETHER * BLOCKS_N)
    first = (band + within % height) * BLOCK_M
    if first >= count:
        return
    rows = first + tl.arange(0, BLOCK_M)
    outputs = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(outputs // 64, TILES - 1) * 64 + outputs % 64  # the last block may be half
    inputs, is_row = tl.arange(0, 128), rows < count
    x_at = x + rows.to(tl.int64)[:, None] * PADDED + inputs[None, :]
    # A tile has 64 bytes of each of its outputs, then the next 64.
    tiles = codes + (own // 64).to(tl.int64) * (64 * PADDED) + own % 64 * 64
    codes_at = tiles[None, :] + (inputs // 64 * 4096 + inputs % 64)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(PADDED // 128):
        part = tl.dot(tl.load(x_at + step * 128), tl.load(codes_at + step * 8192))
        if HAS_ROW_SCALES:
            total += part
        else:
            x_scale = tl.load(x_scales + step * stride + rows, is_row, 0.0)
            scale = tl.load(scales + step * (TILES * 64) + own)
            total += part * x_scale[:, None] * scale[None, :]
    if HAS_ROW_SCALES:
        total *= tl.load(x_scales + rows, is_row, 0.0)[:, None] * tl.load(scales + own)[None, :]
    total *= 1 / 256  # those of the matrix are as large
    at = output + rows.to(tl.int64)[:, None] * ROW_STRIDE + outputs[None, :]
    is_output = is_row[:, None] & (outputs < WIDTH)[None, :]
    tl.store(at, total.to(output.dtype.element_ty), is_output)
