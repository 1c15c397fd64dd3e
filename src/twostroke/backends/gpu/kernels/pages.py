"""Kernels that apply changes of page tables, and copy pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.common import overlap_kernels

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu

_BLOCK: Final = 1024


def change(gpu: Gpu, header: Tensor, header_index: int, frame: Tensor, tables: Tensor) -> None:
    """Launch the kernel that writes a step's changes to the page tables on the GPU.

    A change is (index in the tables, page). The (offset, count) pair of the list of changes is at
    `header_index` of the header.
    """
    count = gpu.programs(1)
    gpu.launch(
        _change,
        (count,),
        header=header,
        frame=frame,
        tables=tables,
        HEADER_INDEX=header_index,
        BLOCK=_BLOCK,
        NUM_PROGRAMS=count,
    )


def copy(
    gpu: Gpu, header: Tensor, header_index: int, frame: Tensor, cache: Tensor, page_bytes: int
) -> None:
    """Launch the kernel that copies KV pages before a step, for draft branches.

    The list of (source, target) pages is at `header_index` of the header. `cache` has `page_bytes`
    for each page.
    """
    assert page_bytes % 4 == 0
    count = gpu.programs(1)
    gpu.launch(
        _copy,
        (count,),
        header=header,
        frame=frame,
        cache=cache,
        HEADER_INDEX=header_index,
        PAGE_WORDS=page_bytes // 4,
        BLOCK=_BLOCK,
        NUM_PROGRAMS=count,
    )


@triton.jit
def _change(
    header, frame, tables,
    HEADER_INDEX: tl.constexpr, BLOCK: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
    pairs = frame + tl.load(header + HEADER_INDEX)
    count = tl.load(header + HEADER_INDEX + 1)
    for first in range(tl.program_id(0) * BLOCK, count, NUM_PROGRAMS * BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < count
        to = tl.load(pairs + 2 * index, inside, 0)
        tl.store(tables + to, tl.load(pairs + 2 * index + 1, inside, 0), inside)


@triton.jit
def _copy(
    header, frame, cache,
    HEADER_INDEX: tl.constexpr, PAGE_WORDS: tl.constexpr, BLOCK: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
    pairs = frame + tl.load(header + HEADER_INDEX)
    blocks: tl.constexpr = (PAGE_WORDS + BLOCK - 1) // BLOCK
    count = tl.load(header + HEADER_INDEX + 1) * blocks
    for work in range(tl.program_id(0), count, NUM_PROGRAMS):
        pair = pairs + work // blocks * 2
        words = work % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = words < PAGE_WORDS
        source = cache + tl.load(pair).to(tl.int64) * PAGE_WORDS + words
        target = cache + tl.load(pair + 1).to(tl.int64) * PAGE_WORDS + words
        tl.store(target, tl.load(source, inside, 0), inside)
