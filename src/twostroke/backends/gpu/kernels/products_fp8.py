"""Products of many rows with E4M3 matrices on E4M3 tensor cores: sm_89 and newer.

Rows of x are rounded to E4M3, with their inputs in the order of packed matrices. A row has one
scale, or a scale for each 128 inputs if the matrix has such scales. Tensor cores add 128 inputs,
some with only 14 bits of precision; these sums are added in float32. With very many rows, a matrix
with one scale for each output is unpacked to rows, and cuBLAS multiplies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.bytes import e4m3_codes
from twostroke.backends.gpu.kernels.common import overlap_kernels
from twostroke.backends.gpu.kernels.product import FEW_ROWS
from twostroke.backends.gpu.weight_layout import TILE_INPUTS, TILE_OUTPUTS
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.kernels.common import Parts
    from twostroke.backends.gpu.kernels.packed import PackedMatrix
    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.weight_layout import Matrix, PackedLayout

LIBRARY_ROWS: Final = 1024  # from this many rows on, cuBLAS multiplies (ADR 0059)
_MIN_ARCHITECTURE: Final = 89
_GROUP: Final = 128
_BLOCK_M: Final = 128
_WIDE_ROWS: Final = 256  # with more rows, programs have 128 outputs
_BLOCKS_TOGETHER: Final = 8  # blocks of rows that run together, to read the same weights


class RoundedRows(Frozen, eq=False):
    """A product's input rows rounded to E4M3, in scratch memory, for FP8 tensor cores.

    `codes` (rows, depth) are padded; `scales` are (groups, rows). Scales are divided by 256,
    because scales of packed matrices are multiplied by 256. `room` is the rest of the scratch
    memory, in bytes.
    """

    codes: Tensor
    scales: Tensor
    has_row_scales: bool
    room: Tensor


def is_supported(gpu: Gpu, num_rows: int, weight: PackedMatrix, output: Parts) -> bool:
    """Return whether FP8 tensor cores compute this product.

    They never do for float32 output, such as logits.
    """
    is_many = num_rows > FEW_ROWS and output.count == 1 and output.values.dtype == gpu.element
    return is_many and is_layout_supported(gpu, weight.layout)


def is_layout_supported(gpu: Gpu, layout: PackedLayout) -> bool:
    """Return whether FP8 tensor cores can multiply many rows by matrices of a packed layout."""
    has_scales = layout.has_row_scales or layout.group == _GROUP
    has_tensor_cores = gpu.architecture >= _MIN_ARCHITECTURE and not gpu.same_tokens
    return has_tensor_cores and layout.table == "e4m3" and has_scales


def scratch_bytes(gpu: Gpu, num_rows: int, matrix: Matrix) -> int:
    """Return the scratch bytes of an FP8 product: its rounded rows, and the unpacked matrix."""
    layout, width, depth = matrix
    if num_rows <= FEW_ROWS:
        return 0
    size = rounded_bytes(num_rows, depth, layout)
    if _suits_library(gpu, num_rows, layout, width):
        size += (
            -(-width // TILE_OUTPUTS) * TILE_OUTPUTS * _padded_shape(num_rows, depth, layout)[0][1]
        )
    return size


def _suits_library(gpu: Gpu, num_rows: int, layout: PackedLayout, width: int) -> bool:
    """Return whether PyTorch multiplies E4M3 by E4M3 with cuBLAS, with a scale for each row.

    On other GPUs, and with older CUDA, PyTorch uses kernels that may ignore the output's stride;
    these are not used.
    """
    if num_rows < LIBRARY_ROWS or not layout.has_row_scales or width % 16:
        return False
    if gpu.is_interpreted:
        return bool(torch.__version__ >= (2, 14))  # older versions support one scale per matrix
    cuda = tuple(map(int, (torch.version.cuda or "0").split(".")))
    return gpu.architecture == 90 and gpu.element == torch.bfloat16 and cuda >= (12, 9)


def rounded_bytes(num_rows: int, depth: int, layout: PackedLayout) -> int:
    """Return the bytes of a product's input rows after rounding to E4M3, with scales."""
    (rows, padded), groups = _padded_shape(num_rows, depth, layout)
    return rows * padded + 4 * groups * rows


def _padded_shape(num_rows: int, depth: int, layout: PackedLayout) -> tuple[tuple[int, int], int]:
    """Return the padded shape of input rows rounded to E4M3, and the number of scales of a row."""
    padded = -(-depth // TILE_INPUTS) * TILE_INPUTS
    rows = -(-num_rows // _BLOCK_M) * _BLOCK_M
    return (rows, padded), 1 if layout.has_row_scales else padded // _GROUP


def round_rows(
    gpu: Gpu, header: Tensor, num_rows: int, x: Tensor, layout: PackedLayout, scratch: Tensor
) -> RoundedRows:
    """Launch the rounding of x (rows, depth) to E4M3 for matrices of a packed layout.

    The result is in `scratch`, memory in bytes.
    """
    depth = x.shape[1]
    (rows, padded), groups = _padded_shape(num_rows, depth, layout)
    end, size = rows * padded, rounded_bytes(num_rows, depth, layout)
    codes = scratch[:end].view(torch.float8_e4m3fn).view(rows, padded)
    scales = scratch[end:size].view(torch.float32).view(groups, rows)
    gpu.launch(
        _round_rows,
        (num_rows,),
        header=header,
        x=x,
        codes=codes.view(torch.int16),
        scales=scales,
        stride=rows,
        DEPTH=depth,
        PADDED=padded,
        HAS_ROW_SCALES=layout.has_row_scales,
        BLOCK=min(2048, triton.next_power_of_2(padded)),
    )
    return RoundedRows(codes, scales, layout.has_row_scales, scratch[size:])


def launch(
    gpu: Gpu, header: Tensor, num_rows: int, x: RoundedRows, weight: PackedMatrix, output: Parts
) -> None:
    """Launch an FP8 matrix product: write `x @ weight.T` to `output`.

    The matrix is (width, depth).
    """
    assert x.has_row_scales == weight.layout.has_row_scales
    is_aligned = not (output.row_stride % 8 or output.values.storage_offset() % 8)  # 16 bytes
    if is_aligned and _suits_library(gpu, num_rows, weight.layout, weight.width):
        _launch_library(gpu, num_rows, x, weight, output)
        return
    # With scales of groups, blocks of 128 outputs spill registers, except on sm_90.
    may_be_wide = x.has_row_scales or gpu.architecture == 90
    block_n = 128 if num_rows > _WIDE_ROWS and may_be_wide else 64
    has_room = gpu.architecture in {90, 100}  # three stages of both factors fit into shared memory
    gpu.launch(
        _product_fp8,
        (-(-num_rows // _BLOCK_M) * -(-weight.width // block_n),),
        header=header,
        x=x.codes,
        x_scales=x.scales,
        codes=weight.codes.view(torch.float8_e4m3fn),
        scales=weight.scales,
        output=output.values,
        stride=x.scales.shape[1],
        num_warps=8 if block_n == 128 else 4,
        num_stages=3 if has_room else 2,
        WIDTH=weight.width,
        PADDED=x.codes.shape[1],
        ROW_STRIDE=output.row_stride,
        HAS_ROW_SCALES=x.has_row_scales,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=block_n,
        TOGETHER=_BLOCKS_TOGETHER,
    )


def _launch_library(
    gpu: Gpu, num_rows: int, x: RoundedRows, weight: PackedMatrix, output: Parts
) -> None:
    width, padded = weight.width, x.codes.shape[1]
    matrix = x.room[: weight.codes.nbytes].view(torch.float8_e4m3fn).view(-1, padded)
    write_rows(gpu, weight, matrix)
    gpu.call(
        torch._scaled_mm,  # noqa: SLF001 - the public one of 2.10 makes its output itself
        x.codes[:num_rows],
        matrix[:width].T,
        scale_a=x.scales.view(-1, 1)[:num_rows],
        scale_b=weight.scales.view(1, -1)[:, :width],
        out_dtype=output.values.dtype,
        out=torch.as_strided(output.values, (num_rows, width), (output.row_stride, 1)),
        use_fast_accum=False,  # as in our kernel, sums of 128 inputs are added in float32
    )


def write_rows(gpu: Gpu, weight: PackedMatrix, output: Tensor) -> None:
    """Launch the unpacking of E4M3 codes to rows: `output` (width, depth), padded to whole tiles.

    The inputs of a row stay in the order of packed tiles.
    """
    blocks = output.shape[1] // TILE_INPUTS
    gpu.launch(
        _write_rows,
        (len(output) // TILE_OUTPUTS, blocks),
        codes=weight.codes,
        output=output.view(torch.int16),
        BLOCKS=blocks,
    )


@triton.jit(do_not_specialize=["stride"])
def _round_rows(
    header, x, codes, scales, stride,
    DEPTH: tl.constexpr, PADDED: tl.constexpr, HAS_ROW_SCALES: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
    GROUPS: tl.constexpr = BLOCK // 128
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(header):
        return
    groups = tl.arange(0, GROUPS)
    words = groups[:, None] * 64 + tl.arange(0, 64)[None, :]
    first = words // 32 * 64 + words % 32  # a word has this input and the one 32 later
    x += row * DEPTH + first
    scale = tl.zeros((GROUPS,), tl.float32)
    if HAS_ROW_SCALES:
        largest = tl.zeros((GROUPS, 64), tl.float32)
        for k in range(0, PADDED, BLOCK):
            a = tl.load(x + k, k + first < DEPTH, 0.0).to(tl.float32)
            b = tl.load(x + k + 32, k + first + 32 < DEPTH, 0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.maximum(tl.abs(a), tl.abs(b)))
        scale += tl.max(tl.max(largest, 1), 0) / 448.0
        tl.store(scales + row + groups, scale / 256.0, groups == 0)
    for k in range(0, PADDED, BLOCK):
        a = tl.load(x + k, k + first < DEPTH, 0.0).to(tl.float32)
        b = tl.load(x + k + 32, k + first + 32 < DEPTH, 0.0).to(tl.float32)
        if not HAS_ROW_SCALES:
            scale = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1) / 448.0
            at = k // 128 + groups
            tl.store(scales + at * stride + row, scale / 256.0, at < PADDED // 128)
        divisor = tl.where(scale == 0, 1.0, scale)[:, None]
        pair = _code(a / divisor) | _code(b / divisor) << 8
        tl.store(codes + row * (PADDED // 2) + k // 2 + words, pair.to(tl.int16),
            k // 2 + words < PADDED // 2)  # fmt: skip


@triton.jit
def _code(x):
    """Convert numbers to E4M3 codes, clamped to 448; NaN stays NaN."""
    codes = e4m3_codes(tl.minimum(tl.maximum(x, -448.0), 448.0))
    return tl.where(x == x, codes, 0x7F)  # noqa: PLR0124 - false for it


@triton.jit(do_not_specialize=["stride"])
def _product_fp8(
    header, x, x_scales, codes, scales, output, stride,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROW_STRIDE: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TOGETHER: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
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
    stored_outputs = (
        tl.minimum(outputs // 64, TILES - 1) * 64 + outputs % 64
    )  # the last block may be half
    inputs, is_row = tl.arange(0, 128), rows < count
    x_at = x + rows.to(tl.int64)[:, None] * PADDED + inputs[None, :]
    # A tile has the first 64 bytes of each output, then the next 64 bytes of each, and so on.
    tiles = codes + (stored_outputs // 64).to(tl.int64) * (64 * PADDED) + stored_outputs % 64 * 64
    codes_at = tiles[None, :] + (inputs // 64 * 4096 + inputs % 64)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(PADDED // 128):
        part = tl.dot(tl.load(x_at + step * 128), tl.load(codes_at + step * 8192))
        if HAS_ROW_SCALES:
            total += part
        else:
            x_scale = tl.load(x_scales + step * stride + rows, is_row, 0.0)
            scale = tl.load(scales + step * (TILES * 64) + stored_outputs)
            total += part * x_scale[:, None] * scale[None, :]
    if HAS_ROW_SCALES:
        total *= (
            tl.load(x_scales + rows, is_row, 0.0)[:, None]
            * tl.load(scales + stored_outputs)[None, :]
        )
    at = output + rows.to(tl.int64)[:, None] * ROW_STRIDE + outputs[None, :]
    is_output = is_row[:, None] & (outputs < WIDTH)[None, :]
    tl.store(at, total.to(output.dtype.element_ty), is_output)


@triton.jit
def _write_rows(codes, output, BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr):
    overlap_kernels(OVERLAPS)
    tile, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    outputs, words = tl.arange(0, 64)[:, None], tl.arange(0, 128)[None, :]
    # A tile has the first 32 words of each output, then the next 32 words of each, and so on.
    codes += (tile * BLOCKS + block) * 8192
    row_codes = tl.load(codes + words // 32 * 2048 + outputs * 32 + words % 32)
    tl.store(output + (tile * 64 + outputs) * (BLOCKS * 128) + block * 128 + words, row_codes)
