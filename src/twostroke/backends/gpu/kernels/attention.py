"""Attention over pages: tiles of rows against pieces of their contexts, and the pieces' merge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.bytes import assembly, numbers_of, scales_at
from twostroke.backends.gpu.kernels.common import begin
from twostroke.backends.gpu.kernels.token_blocks import (
    LEAST,
    LOG2_E,
    as_pages,
    index_of,
    nothing_seen,
    pages_of,
    scales_alone,
    turns_of,
    updated,
    within_seen,
    write,
)
from twostroke.backends.gpu.tiles import BLOCK
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu

ITEM = (
    8  # numbers: row, rows, table, position, first and last token + 1, slot or -1, slots of a row
)
MERGE = 4  # numbers: row, first slot, slots, 0
# Elsewhere, with mma.sync, operands are in registers.
_WITH_OPERANDS_IN_MEMORY = 90, 100


class HeadLayout(Frozen):
    """The shape of attention, and where a layer's keys and values lie.

    Query head h reads key-value head `h // group`. Tokens of a page are `page_size`; a page's keys
    of this layer begin `keys_at` values into it, as (kv_heads, page_size, head_dim), and its values
    `values_at`. Pages are `page_stride` values apart. A table of pages has `table_stride` numbers,
    those of the layer's cache group from `group_at` on. `window` 0 means that all is seen.

    Of latent attention, keys alone are stored, whose first values are the `rotated` ones.

    In a `kv_format` "int8" or "fp8" scales of keys begin `scales_at` numbers of two bytes into a
    page, (kv_heads, page_size), and those of values after them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    soft_cap: float
    page_size: int
    page_stride: int
    keys_at: int
    values_at: int
    table_stride: int
    group_at: int
    kv_format: str = ""
    scales_at: int = 0
    rotated: int = 0

    def scales(self, cache: Tensor) -> Tensor:
        """Return the `layer` of a cache as its scales are read."""
        return self.layer(cache).view(torch.float16) if self.kv_format else cache

    @property
    def group(self) -> int:
        """How many query heads read one key-value head."""
        return self.num_heads // self.num_kv_heads

    def layer(self, cache: Tensor) -> Tensor:
        """Return the cache from the layer's first key on, so that a kernel is for all layers."""
        return cache.view(-1)[self.keys_at :]

    @property
    def constants(self) -> dict[str, Any]:
        """The shapes and places, in a `layer`, as kernels' constants."""
        return {
            "HEADS": self.num_heads,
            "KV_HEADS": self.num_kv_heads,
            "DIM": self.head_dim,
            "PAGE_SIZE": self.page_size,
            "PAGE_STRIDE": self.page_stride,
            "KEYS_AT": 0,
            "VALUES_AT": self.values_at - self.keys_at,
            "TABLE_STRIDE": self.table_stride,
            "GROUP_AT": self.group_at,
            "KV": self.kv_format,
            "SCALES_AT": self.scales_at - self.keys_at // 2 if self.kv_format else 0,
        }


class AttentionItems(Frozen, eq=False):
    """What a step's attention is to do: places in the frame's header of (offset, count) pairs.

    `frame` has the items and merges at these offsets. Sums of pieces go to `sums` (slots, heads,
    head_dim) and `tops` (slots, heads, 2), both float32.
    """

    header: Tensor
    frame: Tensor
    tables: Tensor
    sums: Tensor
    tops: Tensor


def rows_of(heads_in_group: int, block: int) -> int:
    """Return how many rows a tile of `block` pairs of row and head has."""
    return max(1, block // heads_in_group)


def small_block(group: int) -> int:
    """Return the pairs of row and head in a tile of decode."""
    return max(16, 1 << (group - 1).bit_length())


def same_block(group: int) -> int:
    """Return the pairs of row and head in every tile, for the same tokens."""
    return max(32, small_block(group))


def large_block(group: int, head_dim: int) -> int:
    """Return the pairs of row and head in a tile of prefill."""
    most = 128 if head_dim <= 128 else 64 if head_dim <= 256 else 32
    return max(most, small_block(group))


def launch(
    gpu: Gpu,
    work: AttentionItems,
    place: int,
    block_m: int,
    q: Tensor,
    cache: Tensor,
    output: Tensor,
    heads: HeadLayout,
) -> None:
    """Compute the items at `place` of the header.

    q and output are (rows, heads * head_dim); what has one piece is written to the output.
    """
    is_small = block_m <= same_block(heads.group)
    block_d = max(16, triton.next_power_of_2(heads.head_dim))
    num_programs = gpu.programs(4 if is_small else 1)
    is_narrow = not is_small and gpu.architecture not in _WITH_OPERANDS_IN_MEMORY
    block_n = BLOCK if block_d <= 128 and not is_narrow else BLOCK // 2
    if heads.kv_format and not is_small:
        block_n = BLOCK // 4 if is_narrow else BLOCK // 2
    if block_d > 256 and gpu.architecture not in {80, *_WITH_OPERANDS_IN_MEMORY}:
        block_n = BLOCK // 4  # others have less shared memory
    # Few rows: several programs share a multiprocessor and hide that each waits for its block.
    is_ahead = not is_small and block_d <= (128 if is_narrow else 256)
    gpu.launch(
        _attention,
        (num_programs,),
        work.header,
        work.frame,
        work.tables,
        q,
        heads.layer(cache),
        heads.scales(cache),
        output,
        work.sums,
        work.tops,
        num_warps=4 if block_d <= 256 and block_m * block_d <= 8192 else 8,
        num_stages=3 if is_ahead else 2,
        PLACE=place,
        GROUP=heads.group,
        SCALE=heads.scale,
        WINDOW=heads.window,
        SOFT_CAP=heads.soft_cap,
        **heads.constants,
        ASSEMBLY=assembly(gpu, heads.kv_format),
        SKIPS_MASKS=not is_small and not is_narrow,
        ALONE=scales_alone(gpu, heads.kv_format),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        NUM_PROGRAMS=num_programs,
        ITEM=ITEM,
    )


def merge(gpu: Gpu, work: AttentionItems, place: int, output: Tensor, heads: HeadLayout) -> None:
    """Add up the pieces of rows that have several, in their order."""
    num_programs = gpu.programs(16)
    gpu.launch(
        _merge,
        (num_programs,),
        work.header,
        work.frame,
        work.sums,
        work.tops,
        output,
        num_warps=1,
        PLACE=place,
        HEADS=heads.num_heads,
        DIM=heads.head_dim,
        BLOCK_D=triton.next_power_of_2(heads.head_dim),
        NUM_PROGRAMS=num_programs,
        MERGE=MERGE,
    )


@triton.jit
def _stored(
    cache, scales, page, place,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    KEYS_AT: tl.constexpr, VALUES_AT: tl.constexpr, KV: tl.constexpr, SCALES_AT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return keys and values (tokens, dims) at places of a page's heads, and scales if any."""
    dims = tl.arange(0, BLOCK_D)
    page = page.to(tl.int64)
    stored = (cache + dims)[None, :] + (page * PAGE_STRIDE + place * DIM)[:, None]
    if DIM == BLOCK_D:
        keys, values = tl.load(stored + KEYS_AT), tl.load(stored + VALUES_AT)
    else:
        is_dim = (dims < DIM)[None, :]
        keys = tl.load(stored + KEYS_AT, is_dim, 0)
        values = tl.load(stored + VALUES_AT, is_dim, 0)
    if KV == "":
        return keys, values, place, place
    else:
        scale = scales + page * (PAGE_STRIDE // 2) + SCALES_AT + place
        of_keys = scales_at(scale, KV)
        return keys, values, of_keys, scales_at(scale + KV_HEADS * PAGE_SIZE, KV)


@triton.jit
def _pairs_of(item, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the row within an item, and the head, of each of its pairs.

    They are computed from the item's row, or quotients would keep registers for all items.
    """
    row = tl.load(item)
    pairs = tl.arange(0, BLOCK_M) + row * GROUP
    return pairs // GROUP - row, kv_head * GROUP + pairs % GROUP


@triton.jit
def _queries_at(
    item, kv_head, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return where an item's queries are, (pairs, dims), and which there are."""
    dims = tl.arange(0, BLOCK_D)
    within, head = _pairs_of(item, kv_head, GROUP, BLOCK_M)
    at = (tl.load(item) + within) * (HEADS * DIM) + head * DIM
    is_pair = tl.arange(0, BLOCK_M) < tl.load(item + 1) * GROUP
    return at[:, None] + dims[None, :], is_pair[:, None] & (dims < DIM)[None, :]


@triton.jit
def _masked(scores, seen_at, since, until, WINDOW: tl.constexpr):
    """Return scores without those of tokens that a row does not see."""
    is_seen = seen_at[None, :] < until[:, None]
    if WINDOW:
        is_seen &= seen_at[None, :] >= since[:, None]
    return tl.where(is_seen, scores, -float("inf"))


@triton.jit
def _attention(
    header, frame, tables, q, cache, scales, output, sums, tops, PLACE: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, KEYS_AT: tl.constexpr, VALUES_AT: tl.constexpr,
    TABLE_STRIDE: tl.constexpr, GROUP_AT: tl.constexpr, KV: tl.constexpr, SCALES_AT: tl.constexpr,
    ASSEMBLY: tl.constexpr, SKIPS_MASKS: tl.constexpr, ALONE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, NUM_PROGRAMS: tl.constexpr, ITEM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    FACTOR: tl.constexpr = LOG2_E * (2 * SOFT_CAP if SOFT_CAP > 0 else SCALE)
    pairs, tokens = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    num_turns = turns_of(tl.load(header + PLACE + 1) * KV_HEADS, NUM_PROGRAMS)
    for turn in tl.range(num_turns, disable_licm=True):
        index = index_of(turn, NUM_PROGRAMS)
        kv_head = index % KV_HEADS
        item = frame + tl.load(header + PLACE) + index // KV_HEADS * ITEM
        table = tables + tl.load(item + 2).to(tl.int64) * TABLE_STRIDE + GROUP_AT
        position, start, end = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
        at, is_query = _queries_at(item, kv_head, HEADS, GROUP, DIM, BLOCK_M, BLOCK_D)
        queries = as_pages(tl.load(q + at, is_query, 0.0), cache)  # (pairs, dims)
        within, head = _pairs_of(item, kv_head, GROUP, BLOCK_M)
        first = position - WINDOW + 1 if WINDOW else 0
        # From where to where all rows see everything, and until where each does.
        all_from = first + tl.load(item + 1) - 1 if WINDOW else 0
        all_until = tl.minimum(position + 1, end) - BLOCK_N
        until = tl.minimum(position + within + 1, end)
        top, total, mixed, unit = nothing_seen(BLOCK_M, BLOCK_D)
        page = pages_of(table, within_seen(start + tokens, first, end), PAGE_SIZE)
        for block in range(start, end, BLOCK_N):
            place = within_seen(block + tokens, first, end) & (PAGE_SIZE - 1)
            keys, values, key_scales, value_scales = _stored(
                cache, scales, page, kv_head * PAGE_SIZE + place, KV_HEADS, DIM, PAGE_SIZE,
                PAGE_STRIDE, KEYS_AT, VALUES_AT, KV, SCALES_AT, BLOCK_D,
            )  # fmt: skip
            page = pages_of(table, within_seen(block + BLOCK_N + tokens, first, end), PAGE_SIZE)
            keys = numbers_of(keys, queries.dtype, KV, ASSEMBLY)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            if KV != "":
                scores *= key_scales[None, :]
            if SOFT_CAP > 0:  # tanh(x) is 2 / (1 + exp(-2x)), less 1, which changes no share
                scores = 1 / (1 + tl.exp2(scores * (-2 * LOG2_E * SCALE / SOFT_CAP)))
            if not SKIPS_MASKS:  # noqa: SIM114 - a constant chooses; `or` would make a branch
                scores = _masked(scores, block + tokens, first + within, until, WINDOW)
            elif (block > all_until) | (block < all_from):
                scores = _masked(scores, block + tokens, first + within, until, WINDOW)
            values = numbers_of(values, queries.dtype, KV, ASSEMBLY)
            top, total, mixed, unit = updated(
                scores, values, value_scales, top, total, mixed, unit, FACTOR, KV, ALONE
            )  # fmt: skip
        slot = tl.load(item + 6)
        at, is_query = _queries_at(item, kv_head, HEADS, GROUP, DIM, BLOCK_M, BLOCK_D)  # again
        own = (slot + within * tl.load(item + 7)).to(tl.int64) * HEADS + head
        write(
            slot, output + at, sums + own[:, None] * DIM + tl.arange(0, BLOCK_D)[None, :],
            tops + own * 2, is_query, pairs < tl.load(item + 1) * GROUP, top * FACTOR, total,
            mixed * unit,
        )  # fmt: skip


@triton.jit
def _merge(
    header, frame, sums, tops, output,
    PLACE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, MERGE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    merges = frame + tl.load(header + PLACE)
    num_work = tl.load(header + PLACE + 1) * HEADS
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < DIM
    for index in range(tl.program_id(0), num_work, NUM_PROGRAMS):
        head = index % HEADS
        entry = merges + index // HEADS * MERGE
        row = tl.load(entry).to(tl.int64)
        first = tl.load(entry + 1).to(tl.int64)
        count = tl.load(entry + 2)
        top = LEAST + 0.0
        total = 0.0
        mixed = tl.zeros((BLOCK_D,), tl.float32)
        for piece in range(count):
            slot = (first + piece) * HEADS + head
            piece_top = tl.load(tops + slot * 2)
            piece_total = tl.load(tops + slot * 2 + 1)
            piece_mixed = tl.load(sums + slot * DIM + dims, is_dim, 0.0)
            new_top = tl.maximum(top, piece_top)
            ours = tl.exp2(top - new_top)
            theirs = tl.exp2(piece_top - new_top)
            total = total * ours + piece_total * theirs
            mixed = mixed * ours + piece_mixed * theirs
            top = new_top
        result = (mixed / total).to(output.dtype.element_ty)
        tl.store(output + row * (HEADS * DIM) + head * DIM + dims, result, is_dim)
