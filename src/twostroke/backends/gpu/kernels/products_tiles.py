"""Products of many rows with packed matrices: codes are scaled in registers, tile by tile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.common import overlap_kernels
from twostroke.backends.gpu.kernels.packed_codes import (
    fetch_codes,
    load_headers,
    load_upper_bits,
    number_constants,
    scale_and_offset,
    unpack_number,
)
from twostroke.backends.gpu.kernels.routing import reload_rows, rows_of
from twostroke.backends.gpu.weight_layout import TILE_INPUTS, PackedLayout
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from twostroke.backends.gpu.kernels.common import Parts
    from twostroke.backends.gpu.kernels.packed import PackedMatrix
    from twostroke.backends.gpu.kernels.routing import Grouped
    from twostroke.backends.gpu.launch import Gpu

SAME_ROWS: Final = 32  # rows of each tile in the mode `same_tokens`
MAX_PARTS: Final = 8
_PLAIN: Final = PackedLayout(4, 32)  # the layout of most weights, by which parts are chosen
_SUM_COST: Final = 6  # a float32 written and read by all units costs as many multiplications of one


class Tile(Frozen):
    """The tile of a matrix product kernel: its rows and outputs, warps, and pipeline stages.

    `max_registers`: the limit of registers for a thread; 0: the compiler chooses.
    """

    rows: int
    outputs: int
    warps: int
    stages: int
    max_registers: int = 0


def max_rows(gpu: Gpu) -> int:
    """Return the number of rows up to which multiplying packed tiles is faster than unpacking."""
    return 128 if gpu.architecture // 10 == 10 else 512


def tile_of(
    gpu: Gpu,
    num_rows: int,
    layout: PackedLayout,
    depth: int = TILE_INPUTS,
    *,
    in_groups: bool = False,
) -> Tile:
    """Return the tile for multiplying `num_rows` rows by a matrix of a packed layout.

    `in_groups`: for a mixture of experts.

    The largest tile without these problems is chosen: stages of x or of float32 scales do not fit
    into shared memory; on sm_80 masks of x, and on sm_90 codes of 5 bits and mixtures, spill
    registers; for sm_100, Triton up to 3.8 generates a trap. Two programs of up to 64 rows share a
    multiprocessor of sm_90.
    """
    if gpu.same_tokens:  # rows are often few, so small tiles make enough programs
        return Tile(SAME_ROWS, 64, 4, 4)
    rows, bits, architecture = (
        max(16, triton.next_power_of_2(num_rows)),
        layout.bits,
        gpu.architecture,
    )
    has_wide_scales = bits == 8 and layout.scales == "f32"
    if architecture // 10 == 10:
        return Tile(min(rows, 32 if bits == 6 else 64), 128, 8, 4)
    if architecture not in {80, 90}:
        return Tile(min(rows, 64), 64, 4, 3, 168 if in_groups else 0)
    if architecture == 80:
        rows = min(rows, 64 if has_wide_scales or depth % TILE_INPUTS else 128)
        few = rows <= 64
        return Tile(rows, 128, 8, 4 if few else 3, 168 if few and in_groups else 0)
    if rows <= 64:
        return Tile(rows, 128, 8, 3 if (rows, bits) == (64, 8) else 4, 128 if bits != 5 else 0)
    if bits == 5 or in_groups or (has_wide_scales and layout.group == 32):
        return Tile(128, 128, 8, 4)
    is_even = -(-num_rows // 128) % 2 == 0  # so that no block of 256 rows is half empty
    return Tile(256, 128, 8, 3) if is_even else Tile(128, 256, 8, 3)


def num_parts(gpu: Gpu, num_rows: int, width: int, depth: int) -> int:
    """Return into how many partial sums a product of many rows is split.

    More parts keep more multiprocessors busy, but cause more memory traffic for the sums.
    """
    tile = tile_of(gpu, num_rows, _PLAIN)
    programs = -(-width // tile.outputs) * -(-num_rows // tile.rows)
    blocks = -(-depth // TILE_INPUTS)

    def cost(parts: int) -> int:
        turns = -(-programs * parts // gpu.num_units) * -(-blocks // parts)
        sums = num_rows * width * parts * (parts > 1)
        return turns * tile.rows * tile.outputs * TILE_INPUTS + sums * _SUM_COST

    return min((1, 2, 4, MAX_PARTS), key=cost)


def launch(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    x: Tensor,
    weight: PackedMatrix,
    output: Parts,
    tile: Tile,
    rows: Grouped | None = None,
) -> None:
    """Launch a product of many rows with a packed matrix: write `x @ weight.T` to `output`.

    x is (rows, depth), weight is (width, depth). With `rows`, `weight` is a stack of experts'
    matrices, and the result of each (row, expert) pair is one row of the output.
    """
    code_constants = number_constants(gpu, weight.layout)
    start(
        gpu,
        _product_tiles,
        header=header,
        num_rows=num_rows,
        x=x,
        weight=weight,
        output=output,
        tile=tile,
        rows=rows,
        code_constants=code_constants,
    )


def start(
    gpu: Gpu,
    kernel: Any,
    header: Tensor,
    num_rows: int,
    x: Tensor,
    weight: PackedMatrix,
    output: Parts,
    tile: Tile,
    rows: Grouped | None,
    code_constants: Mapping[str, Any],
) -> None:
    """Launch the kernel of a product with a packed matrix.

    `code_constants`: the compile-time constants that `packed_codes` returns.
    """
    blocks, blocks_n = -(-weight.depth // TILE_INPUTS), -(-weight.width // tile.outputs)
    blocks_m = -(-num_rows // tile.rows) if rows is None else rows.routes.max_items
    gpu.launch(
        kernel,
        (blocks_m, output.count, blocks_n),
        header=header,
        x=x,
        **weight.pointers,
        output=output.values,
        items=header if rows is None else rows.routes.items,
        order=header if rows is None else rows.routes.order,
        shares=header if rows is None else rows.routes.shares,
        part_stride=output.part_stride,
        num_warps=tile.warps,
        num_stages=tile.stages,
        max_registers=tile.max_registers,
        WIDTH=weight.width,
        DEPTH=weight.depth,
        PART_BLOCKS=-(-blocks // output.count),
        ROW_STRIDE=output.row_stride,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        LINES=rows.lines if rows else 0,
        IS_SHARED=rows is not None and rows.is_shared,
        SCALE_STRIDE=weight.scales[0].numel(),
        OFFSET_STRIDE=0 if weight.offsets is None else weight.offsets[0].numel(),
        **code_constants,
    )


@triton.jit
def _inputs(x_at, k, columns, DEPTH: tl.constexpr):
    if DEPTH % 256 == 0:
        return tl.load(x_at + k)
    else:
        return tl.load(x_at + k, (k + columns < DEPTH)[:, None], 0.0)


@triton.jit(do_not_specialize=["part_stride"])
def _product_tiles(
    header, x, codes, high, scales, offsets, output, items, order, shares, part_stride,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, PART_BLOCKS: tl.constexpr, ROW_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LINES: tl.constexpr, IS_SHARED: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, OFFSET_STRIDE: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr,
    STEPS: tl.constexpr, SCALES: tl.constexpr, OFFSET: tl.constexpr, SHIFT: tl.constexpr,
    ASSEMBLY: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DEPTH + 255) // 256
    OUTPUTS: tl.constexpr = (WIDTH + 63) // 64 * 64
    STEP: tl.constexpr = 64 * COLUMNS
    HALF: tl.constexpr = STEPS * PLANES // 2
    fetch_codes(
        codes, STEPS * STEP, PART_BLOCKS=PART_BLOCKS, BLOCKS=BLOCKS, TILES=OUTPUTS // 64,
        COUNT=BLOCK_N // 64, ENABLED=OVERLAPS and LINES == 0,
    )  # fmt: skip
    overlap_kernels(OVERLAPS)
    count, rows, x_rows, expert, column = rows_of(header, items, order, BLOCK_M, LINES)
    if count <= 0:
        return
    part, columns, row_offsets = tl.program_id(1), tl.arange(0, COLUMNS), tl.arange(0, BLOCK_M)
    outputs = column * BLOCK_N + tl.arange(0, BLOCK_N)
    stored_outputs = (
        tl.minimum(outputs // 64, OUTPUTS // 64 - 1) * 64 + outputs % 64
    )  # the last may be less
    if LINES == 0:  # row numbers beyond the last row repeat it
        x_rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.minimum(row_offsets, count - 1)
    x_at = x + (x_rows * DEPTH)[None, :] + columns[:, None]
    tiles = (expert * (OUTPUTS // 64) + stored_outputs // 64) * BLOCKS
    within = (stored_outputs % 64 * COLUMNS)[:, None] + columns[None, :]
    codes_at = codes + (tiles * (STEPS * STEP))[:, None] + within
    high_at = high + (tiles * (STEP * (BITS - 4)))[:, None] + within
    scales_at = scales + expert * SCALE_STRIDE + stored_outputs
    offsets_at = offsets + expert * OFFSET_STRIDE + stored_outputs
    first = part * PART_BLOCKS
    end = tl.minimum(first + PART_BLOCKS, BLOCKS)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # Half a block at a time, because stages with more of x do not fit into shared memory.
    for half in tl.static_range(2):
        for block in range(first, end):
            headers = load_headers(scales_at + block * (4 * OUTPUTS), SCALES, OUTPUTS)
            for index in tl.static_range(half * HALF, (half + 1) * HALF):
                if index % PLANES == 0:
                    word = tl.load(codes_at + (block * STEPS + index // PLANES) * STEP)
                    upper = load_upper_bits(high_at, block, index // PLANES, BITS, STEP)
                inputs = _inputs(x_at, block * 256 + index * COLUMNS, columns, DEPTH)
                scale, offset = scale_and_offset(
                    headers, scales_at, offsets=offsets_at, block=block,
                    index=index * COLUMNS // GROUP, GROUP=GROUP, SCALES=SCALES, OFFSET=OFFSET,
                    OUTPUTS=OUTPUTS,
                )  # fmt: skip
                offset -= SHIFT * scale
                number = unpack_number(
                    word, upper, index=index, BITS=BITS, PLANES=PLANES, ASSEMBLY=ASSEMBLY,
                )  # fmt: skip
                weight = (number * scale[:, None] + offset[:, None]).to(x.dtype.element_ty)
                total = tl.dot(weight, inputs, total, input_precision="ieee")
    rows = reload_rows(rows, items, order, BLOCK_M, LINES)
    is_row = tl.arange(0, BLOCK_M) < count
    if IS_SHARED:
        total *= tl.load(shares + rows, is_row, 0.0)[None, :]
    if LINES == 0:  # 32-bit offsets take fewer registers
        output += tl.program_id(0).to(tl.int64) * (BLOCK_M * ROW_STRIDE)
        rows = tl.arange(0, BLOCK_M)
    at = output + part * part_stride + (rows[None, :] * ROW_STRIDE + outputs[:, None])
    tl.store(at, total.to(output.dtype.element_ty), is_row[None, :] & (outputs < WIDTH)[:, None])
