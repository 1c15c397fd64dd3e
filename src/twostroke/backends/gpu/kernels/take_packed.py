"""Gathers rows of a packed matrix: an embedding table that is also used for logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.common import overlap_kernels
from twostroke.backends.gpu.kernels.packed_codes import (
    code_constants,
    load_headers,
    load_upper_bits,
    scale_and_offset,
    unpack_codes,
    without_assembly,
)
from twostroke.backends.gpu.weight_layout import TILE_INPUTS

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.kernels.packed import PackedMatrix
    from twostroke.backends.gpu.launch import Gpu


def launch(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    table: PackedMatrix,
    row_ids: Tensor,
    output: Tensor,
    *,
    factor: float,
    results: Tensor,
) -> None:
    """Launch a gather of embeddings from a packed table: `output[r] = table[row_ids[r]] * factor`.

    A negative id -1 - i stands for the token that the last step drew: the first number of row i of
    the sampler's `results`.
    """
    layout = table.layout
    gpu.launch(
        _take_packed,
        (num_rows, -(-table.depth // TILE_INPUTS)),
        header=header,
        row_ids=row_ids,
        results=results,
        **table.pointers,
        output=output,
        num_warps=1,
        WIDTH=table.width,
        DEPTH=table.depth,
        FACTOR=factor,
        RESULT_STRIDE=results.shape[1],
        **code_constants(gpu, layout, is_centered=True) | {"ASSEMBLY": without_assembly(layout)},
    )


@triton.jit
def _take_packed(
    header, row_ids, results, codes, high, scales, offsets, output,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, FACTOR: tl.constexpr, RESULT_STRIDE: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr,
    STEPS: tl.constexpr, SCALES: tl.constexpr, OFFSET: tl.constexpr, SHIFT: tl.constexpr,
    ASSEMBLY: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
    BLOCKS: tl.constexpr = (DEPTH + 255) // 256
    OUTPUTS: tl.constexpr = (WIDTH + 63) // 64 * 64
    STEP: tl.constexpr = 64 * COLUMNS
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row >= tl.load(header):
        return
    line = tl.load(row_ids + row)
    token = tl.load(results + (-1 - line) * RESULT_STRIDE, line < 0, 0)
    line = tl.where(line < 0, tl.maximum(token, 0), line).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    tile = line // 64 * BLOCKS + block
    within = line % 64 * COLUMNS + columns
    scales += line
    offsets += line
    headers = load_headers(scales + block * (4 * OUTPUTS), SCALES, OUTPUTS)
    for index in tl.static_range(STEPS * PLANES):
        if index % PLANES == 0:
            word = tl.load(codes + (tile * STEPS + index // PLANES) * STEP + within)
            upper = load_upper_bits(high + within, tile, index // PLANES, BITS, STEP)
            values = unpack_codes(
                word, upper, element=tl.float32, step=index // PLANES, BITS=BITS, PLANES=PLANES,
                SHIFT=SHIFT, ASSEMBLY=ASSEMBLY,
            )  # fmt: skip
        scale, offset = scale_and_offset(
            headers, scales, offsets=offsets, block=block, index=index * COLUMNS // GROUP,
            GROUP=GROUP, SCALES=SCALES, OFFSET=OFFSET, OUTPUTS=OUTPUTS,
        )  # fmt: skip
        value = (values[index % PLANES] * scale + offset) * FACTOR
        inputs = block * 256 + index * COLUMNS + columns
        at = output + row * DEPTH + inputs
        tl.store(at, value.to(output.dtype.element_ty), inputs < DEPTH)
