"""Products with packed matrices, whose codes are converted to values in registers.

Weights are the left factor of each `dot`, so that eight rows of x fill an instruction. With few
rows, this module's kernel multiplies unscaled codes, which every element type represents exactly,
and scales the sum of each group in float32. With more rows, `products_tiles` scales the codes
before it multiplies. With very many rows, the matrix is unpacked to the element type, and cuBLAS
multiplies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from twostroke.backends.gpu.kernels import products_tiles
from twostroke.backends.gpu.kernels.common import overlap_kernels
from twostroke.backends.gpu.kernels.packed_codes import (
    code_constants,
    fetch_codes,
    has_offset,
    load_headers,
    load_upper_bits,
    number_constants,
    scale_and_offset,
    unpack_codes,
    unpack_number,
)
from twostroke.backends.gpu.kernels.routing import reload_rows, rows_of
from twostroke.backends.gpu.weight_layout import TILE_INPUTS, TILE_OUTPUTS

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.kernels.common import Parts
    from twostroke.backends.gpu.kernels.packed import PackedMatrix
    from twostroke.backends.gpu.kernels.routing import Grouped
    from twostroke.backends.gpu.launch import Gpu

FEW_ROWS: Final = 16  # up to this many rows, sums are scaled, not weights
_GROUPED_STAGES: Final = {5: 1, 6: 3}  # by bits of codes


def is_unpacked(gpu: Gpu, num_rows: int, output: Parts) -> bool:
    """Return whether a packed matrix is unpacked to 16 bits before it is multiplied.

    It is with many rows, but never for float32 output, such as logits.
    """
    is_plain = output.values.dtype == gpu.element and output.count == 1
    return num_rows > products_tiles.max_rows(gpu) and is_plain and not gpu.same_tokens


def launch(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    x: Tensor,
    weight: PackedMatrix,
    output: Parts,
    scratch: Tensor | None = None,
) -> None:
    """Launch a product with a packed matrix: write `x @ weight.T` to `output`.

    x is (rows, depth), weight is (width, depth). `scratch`: memory for an unpacked matrix, in
    bytes.
    """
    if is_unpacked(gpu, num_rows, output):
        assert scratch is not None, "many rows need room"
        size = gpu.element.itemsize * weight.width * weight.depth
        matrix = scratch[:size].view(gpu.element).view(weight.width, weight.depth)
        unpack_matrix(gpu, weight, matrix)
        shape = (num_rows, weight.width)
        out = torch.as_strided(output.values, shape, (output.row_stride, 1))
        gpu.call(torch.mm, x[:num_rows], matrix.T, out=out)
        return
    if num_rows <= FEW_ROWS and not gpu.same_tokens:
        block_m = 8 if num_rows <= 8 else FEW_ROWS
        _start(gpu, header, x=x, weight=weight, output=output, block_m=block_m, rows=None)
        return
    tile = products_tiles.tile_of(gpu, num_rows, weight.layout, weight.depth)
    products_tiles.launch(gpu, header, num_rows, x=x, weight=weight, output=output, tile=tile)


def launch_grouped(gpu: Gpu, x: Tensor, weight: PackedMatrix, output: Parts, rows: Grouped) -> None:
    """Launch a mixture's products with packed matrices: each row with each of its experts.

    `weight` is a stack of the experts' matrices. The result of each (row, expert) pair is one row
    of the output.
    """
    routes = rows.routes
    if routes.block <= FEW_ROWS:
        _start(
            gpu,
            routes.header,
            x=x,
            weight=weight,
            output=output,
            block_m=routes.block,
            rows=rows,
        )
        return
    tile = products_tiles.tile_of(gpu, routes.block, weight.layout, weight.depth, in_groups=True)
    products_tiles.launch(
        gpu,
        routes.header,
        num_rows=0,
        x=x,
        weight=weight,
        output=output,
        tile=tile,
        rows=rows,
    )


def max_block_rows(gpu: Gpu, stack: PackedMatrix) -> int:
    """Return the largest number of rows that a program multiplies by an expert's packed matrix."""
    return products_tiles.tile_of(gpu, 128, stack.layout, stack.depth, in_groups=True).rows


def unpack_matrix(gpu: Gpu, weight: PackedMatrix, output: Tensor) -> None:
    """Launch the unpacking of a packed matrix to 16-bit numbers: `output` is (width, depth)."""
    gpu.launch(
        _unpack_matrix,
        (-(-weight.width // TILE_OUTPUTS), -(-weight.depth // TILE_INPUTS)),
        **weight.pointers,
        output=output,
        num_warps=4,
        WIDTH=weight.width,
        DEPTH=weight.depth,
        **number_constants(gpu, weight.layout),
    )


def _start(
    gpu: Gpu,
    header: Tensor,
    x: Tensor,
    weight: PackedMatrix,
    output: Parts,
    block_m: int,
    rows: Grouped | None,
) -> None:
    layout, architecture = weight.layout, gpu.architecture
    # For mixtures, any other number of stages spills registers on some architecture. The compiler
    # may choose too few registers, too, so the maximum is set here.
    num_stages = 3 if rows is None else _GROUPED_STAGES.get(layout.bits, 2)
    is_bounded = block_m == 8 or layout.bits == 8 or architecture // 10 == 10
    max_registers = 168 if is_bounded and architecture != 90 else 0
    tile = products_tiles.Tile(block_m, TILE_OUTPUTS, 4, num_stages, max_registers)
    codes = code_constants(gpu, layout, is_centered=not has_offset(layout))
    products_tiles.start(
        gpu,
        _product_packed,
        header=header,
        num_rows=block_m,
        x=x,
        weight=weight,
        output=output,
        tile=tile,
        rows=rows,
        code_constants=codes,
    )


@triton.jit
def _inputs(x_at, k, columns, is_row, DEPTH: tl.constexpr):
    if DEPTH % 256 == 0:
        return tl.load(x_at + k, is_row[None, :], 0.0)
    else:
        return tl.load(x_at + k, is_row[None, :] & (k + columns < DEPTH)[:, None], 0.0)


@triton.jit(do_not_specialize=["part_stride"])
def _product_packed(
    header, x, codes, high, scales, offsets, output, items, order, shares, part_stride,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, PART_BLOCKS: tl.constexpr, ROW_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LINES: tl.constexpr, IS_SHARED: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, OFFSET_STRIDE: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr,
    STEPS: tl.constexpr, SCALES: tl.constexpr, OFFSET: tl.constexpr, SHIFT: tl.constexpr,
    ASSEMBLY: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (DEPTH + 255) // 256
    TILES: tl.constexpr = (WIDTH + 63) // 64
    HAS_OFFSET: tl.constexpr = OFFSET != "" or SCALES == "k"
    PER_GROUP: tl.constexpr = GROUP // COLUMNS
    STEP: tl.constexpr = 64 * COLUMNS
    element: tl.constexpr = x.dtype.element_ty
    fetch_codes(
        codes, STEPS * STEP, PART_BLOCKS=PART_BLOCKS, BLOCKS=BLOCKS, TILES=TILES, COUNT=1,
        ENABLED=OVERLAPS and LINES == 0,
    )  # fmt: skip
    overlap_kernels(OVERLAPS)
    count, rows, x_rows, expert, column = rows_of(header, items, order, BLOCK_M, LINES)
    if count <= 0:
        return
    is_row, part, columns = tl.arange(0, BLOCK_M) < count, tl.program_id(1), tl.arange(0, COLUMNS)
    within = tl.arange(0, BLOCK_N)[:, None] * COLUMNS + columns[None, :]
    outputs = column * BLOCK_N + tl.arange(0, BLOCK_N)
    x_at = x + x_rows[None, :] * DEPTH + columns[:, None]
    tile = (expert * TILES + column) * BLOCKS
    codes_at = codes + tile * (STEPS * STEP) + within
    high_at = high + tile * (STEP * (BITS - 4)) + within
    scales_at = scales + expert * SCALE_STRIDE + outputs
    offsets_at = offsets + expert * OFFSET_STRIDE + outputs
    ones_matrix = tl.full((BLOCK_N, COLUMNS), 1, element)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in range(part * PART_BLOCKS, tl.minimum((part + 1) * PART_BLOCKS, BLOCKS)):
        headers = load_headers(scales_at + block * (4 * TILES * 64), SCALES, TILES * 64)
        for index in tl.static_range(STEPS * PLANES):
            if index % PLANES == 0:
                word = tl.load(codes_at + (block * STEPS + index // PLANES) * STEP)
                upper = load_upper_bits(high_at, block, index // PLANES, BITS, STEP)
                values = unpack_codes(
                    word, upper, element=element, step=index // PLANES, BITS=BITS, PLANES=PLANES,
                    SHIFT=SHIFT, ASSEMBLY=ASSEMBLY,
                )  # fmt: skip
            inputs = _inputs(x_at, block * 256 + index * COLUMNS, columns, is_row, DEPTH)
            scale, offset = scale_and_offset(
                headers, scales_at, offsets=offsets_at, block=block, index=index // PER_GROUP,
                GROUP=GROUP, SCALES=SCALES, OFFSET=OFFSET, OUTPUTS=TILES * 64,
            )  # fmt: skip
            if index % PER_GROUP == 0:
                group, x_sum = tl.zeros_like(total), tl.zeros_like(total)
            group = tl.dot(values[index % PLANES], inputs, group, input_precision="ieee")
            if HAS_OFFSET:
                x_sum = tl.dot(ones_matrix, inputs, x_sum, input_precision="ieee")
            if (index + 1) % PER_GROUP == 0:
                total += scale[:, None] * group
                if HAS_OFFSET:
                    total += (offset - SHIFT * scale)[:, None] * x_sum
    rows = reload_rows(rows, items, order, BLOCK_M, LINES)
    if IS_SHARED:
        total *= tl.load(shares + rows, is_row, 0.0)[None, :]
    at = output + part * part_stride + rows[None, :] * ROW_STRIDE + outputs[:, None]
    tl.store(at, total.to(output.dtype.element_ty), is_row[None, :] & (outputs < WIDTH)[:, None])


@triton.jit
def _unpack_matrix(
    codes, high, scales, offsets, output,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr,
    STEPS: tl.constexpr, SCALES: tl.constexpr, OFFSET: tl.constexpr, SHIFT: tl.constexpr,
    ASSEMBLY: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
    BLOCKS: tl.constexpr = (DEPTH + 255) // 256
    OUTPUTS: tl.constexpr = (WIDTH + 63) // 64 * 64
    element: tl.constexpr = output.dtype.element_ty
    tile, block = tl.program_id(0), tl.program_id(1)
    tile_outputs = tl.arange(0, 64)
    columns = tl.arange(0, COLUMNS)
    within = tile_outputs[:, None] * COLUMNS + columns[None, :]
    first = (tile * BLOCKS + block).to(tl.int64)
    scales += tile * 64 + tile_outputs
    offsets += tile * 64 + tile_outputs
    outputs = tile * 64 + tile_outputs
    is_output = (outputs < WIDTH)[:, None]
    headers = load_headers(scales + block * (4 * OUTPUTS), SCALES, OUTPUTS)
    for index in tl.static_range(STEPS * PLANES):
        if index % PLANES == 0:
            word = tl.load(codes + (first * STEPS + index // PLANES) * (64 * COLUMNS) + within)
            upper = load_upper_bits(high + within, first, index // PLANES, BITS, 64 * COLUMNS)
        scale, offset = scale_and_offset(
            headers, scales, offsets=offsets, block=block, index=index * COLUMNS // GROUP,
            GROUP=GROUP, SCALES=SCALES, OFFSET=OFFSET, OUTPUTS=OUTPUTS,
        )  # fmt: skip
        offset -= SHIFT * scale
        number = unpack_number(
            word, upper, index=index, BITS=BITS, PLANES=PLANES, ASSEMBLY=ASSEMBLY
        )
        weight = number * scale[:, None] + offset[:, None]
        inputs = block * 256 + index * COLUMNS + columns
        at = output + outputs[:, None].to(tl.int64) * DEPTH + inputs[None, :]
        tl.store(at, weight.to(element), is_output & (inputs < DEPTH)[None, :])
