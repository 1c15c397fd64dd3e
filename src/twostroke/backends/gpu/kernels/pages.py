"""Changes of page tables, and copies of pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.common import begin

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu

_BLOCK: Final = 1024


def change(gpu: Gpu, header: Tensor, place: int, frame: Tensor, tables: Tensor) -> None:
    """Write the step's (index in the tables, page) pairs; the header has (offset, count)."""
    count = gpu.programs(1)
    gpu.launch(
        _change, (count,), header, frame, tables, PLACE=place, BLOCK=_BLOCK, NUM_PROGRAMS=count
    )


def copy(
    gpu: Gpu, header: Tensor, place: int, frame: Tensor, cache: Tensor, page_bytes: int
) -> None:
    """Copy the step's (source, target) pages of a `cache` of bytes."""
    assert page_bytes % 4 == 0
    count = gpu.programs(1)
    gpu.launch(
        _copy,
        (count,),
        header,
        frame,
        cache,
        PLACE=place,
        PAGE_WORDS=page_bytes // 4,
        BLOCK=_BLOCK,
        NUM_PROGRAMS=count,
    )


@triton.jit
def _change(
    header, frame, tables,
    PLACE: tl.constexpr, BLOCK: tl.constexpr, NUM_PROGRAMS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    pairs = frame + tl.load(header + PLACE)
    count = tl.load(header + PLACE + 1)
    for first in range(tl.program_id(0) * BLOCK, count, NUM_PROGRAMS * BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < count
        to = tl.load(pairs + 2 * index, inside, 0)
        tl.store(tables + to, tl.load(pairs + 2 * index + 1, inside, 0), inside)


@triton.jit
def _copy(
    header, frame, cache,
    PLACE: tl.constexpr, PAGE_WORDS: tl.constexpr, BLOCK: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    pairs = frame + tl.load(header + PLACE)
    blocks: tl.constexpr = (PAGE_WORDS + BLOCK - 1) // BLOCK
    count = tl.load(header + PLACE + 1) * blocks
    for work in range(tl.program_id(0), count, NUM_PROGRAMS):
        pair = pairs + work // blocks * 2
        words = work % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = words < PAGE_WORDS
        source = cache + tl.load(pair).to(tl.int64) * PAGE_WORDS + words
        target = cache + tl.load(pair + 1).to(tl.int64) * PAGE_WORDS + words
        tl.store(target, tl.load(source, inside, 0), inside)
