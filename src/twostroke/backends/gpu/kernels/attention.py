"""Attention over KV pages: tiles of rows attend to pieces of their contexts, which are merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.bytes import assembly, codes_to_numbers, load_scales
from twostroke.backends.gpu.kernels.common import overlap_kernels
from twostroke.backends.gpu.kernels.token_blocks import (
    LOG2_E,
    MIN_TOP,
    add_block,
    cast_to_pages,
    clamp_position,
    empty_sums,
    item_index,
    num_items_of,
    pages_of,
    scales_alone,
    write_result,
)
from twostroke.backends.gpu.tiles import BLOCK
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu

# Numbers of an item: row, number of rows, table, position, first token, end token, slot or -1, and
# slots of a row.
ITEM = 8
MERGE = 4  # numbers of a merge: row, first slot, number of slots, 0
# Other architectures use mma.sync, whose operands are in registers.
_WITH_OPERANDS_IN_MEMORY = 90, 100


class HeadLayout(Frozen):
    """The shape of an attention layer, and the layout of its keys and values in KV pages.

    Query head h reads KV head `h // group`. `window` 0 means no window.

    Pages have `page_size` tokens and are `page_stride` values apart. In a page, keys (kv_heads,
    page_size, head_dim) begin at value `keys_at`, and values at `values_at`. A page table has
    `table_stride` numbers; the page ids of the layer's cache group begin at `group_at`.

    Latent attention stores keys only; the first `rotated` values of a key are its rotary part.

    With `kv_format` "int8" or "fp8", scales are float16: the scales of keys (kv_heads, page_size)
    begin `scales_at` float16 numbers into a page, followed by the scales of values.
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
        """Return the KV cache as float16 from the layer's first key on, to read 8-bit scales."""
        return self.layer(cache).view(torch.float16) if self.kv_format else cache

    @property
    def group(self) -> int:
        """Return the number of query heads that read one KV head."""
        return self.num_heads // self.num_kv_heads

    def layer(self, cache: Tensor) -> Tensor:
        """Return the KV cache from the layer's first key on.

        With this view, one compiled kernel serves all layers.
        """
        return cache.view(-1)[self.keys_at :]

    @property
    def constants(self) -> dict[str, Any]:
        """Return the layer's shape and page layout as compile-time constants of attention kernels.

        Offsets are relative to the result of `layer`.
        """
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
    """A step's attention divided into work items, with memory for partial sums.

    A long context is divided into pieces, whose sums are merged. The lists of items and of merges
    are in `frame`; `header` has the (offset, count) pair of each list. Sums of pieces are written
    to `sums` (slots, heads, head_dim). The largest score of each piece and the total of its softmax
    weights are written to `tops` (slots, heads, 2). Both arrays are float32.
    """

    header: Tensor
    frame: Tensor
    tables: Tensor
    sums: Tensor
    tops: Tensor


def rows_of(heads_in_group: int, block: int) -> int:
    """Return how many rows of a step an attention tile of `block` (row, head) pairs has.

    `heads_in_group`: query heads that read one KV head.
    """
    return max(1, block // heads_in_group)


def small_block(group: int) -> int:
    """Return the number of (row, head) pairs in a decode tile; `group` heads read one KV head."""
    return max(16, 1 << (group - 1).bit_length())


def same_block(group: int) -> int:
    """Return the number of (row, head) pairs in every tile of the mode `same_tokens`.

    In this mode a row's result does not depend on the other rows of a step, so prefill and decode
    have the same tiles and round in the same way. `group`: query heads that read one KV head.
    """
    return max(32, small_block(group))


def large_block(group: int, head_dim: int) -> int:
    """Return the number of (row, head) pairs in a prefill tile; `group` heads read one KV head."""
    block = 128 if head_dim <= 128 else 64 if head_dim <= 256 else 32
    return max(block, small_block(group))


def launch(
    gpu: Gpu,
    work: AttentionItems,
    header_index: int,
    block_m: int,
    q: Tensor,
    cache: Tensor,
    output: Tensor,
    heads: HeadLayout,
) -> None:
    """Launch attention for one of a step's lists of work items.

    The list's (offset, count) pair is at `header_index` of the header. q and output are (rows,
    heads * head_dim). If a context is a single piece, its result is written to the output, else the
    results of its pieces are written to the sums of `work`.
    """
    is_small = block_m <= same_block(heads.group)
    block_d = max(16, triton.next_power_of_2(heads.head_dim))
    num_programs = gpu.programs(4 if is_small else 1)
    is_narrow = not is_small and gpu.architecture not in _WITH_OPERANDS_IN_MEMORY
    block_n = BLOCK if block_d <= 128 and not is_narrow else BLOCK // 2
    if heads.kv_format and not is_small:
        block_n = BLOCK // 4 if is_narrow else BLOCK // 2
    if block_d > 256 and gpu.architecture not in {80, *_WITH_OPERANDS_IN_MEMORY}:
        block_n = BLOCK // 4  # other architectures have less shared memory
    # With few rows, several programs share a multiprocessor, which hides their waits for memory.
    is_ahead = not is_small and block_d <= (128 if is_narrow else 256)
    gpu.launch(
        _attention,
        (num_programs,),
        header=work.header,
        frame=work.frame,
        tables=work.tables,
        q=q,
        cache=heads.layer(cache),
        scales=heads.scales(cache),
        output=output,
        sums=work.sums,
        tops=work.tops,
        num_warps=4 if block_d <= 256 and block_m * block_d <= 8192 else 8,
        num_stages=3 if is_ahead else 2,
        HEADER_INDEX=header_index,
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


def merge(
    gpu: Gpu, work: AttentionItems, header_index: int, output: Tensor, heads: HeadLayout
) -> None:
    """Launch the merge of partial attention: add up the pieces of each row's context, in order."""
    num_programs = gpu.programs(16)
    gpu.launch(
        _merge,
        (num_programs,),
        header=work.header,
        frame=work.frame,
        sums=work.sums,
        tops=work.tops,
        output=output,
        num_warps=1,
        HEADER_INDEX=header_index,
        HEADS=heads.num_heads,
        DIM=heads.head_dim,
        BLOCK_D=triton.next_power_of_2(heads.head_dim),
        NUM_PROGRAMS=num_programs,
        MERGE=MERGE,
    )


@triton.jit
def _stored(
    cache, scales, page, line,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    KEYS_AT: tl.constexpr, VALUES_AT: tl.constexpr, KV: tl.constexpr, SCALES_AT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load keys and values (tokens, dims) from KV pages, with scales if the pages have 8 bits.

    `line`: KV head * PAGE_SIZE + offset of the token in its page.
    """
    dims = tl.arange(0, BLOCK_D)
    page = page.to(tl.int64)
    stored = (cache + dims)[None, :] + (page * PAGE_STRIDE + line * DIM)[:, None]
    if DIM == BLOCK_D:
        keys, values = tl.load(stored + KEYS_AT), tl.load(stored + VALUES_AT)
    else:
        is_dim = (dims < DIM)[None, :]
        keys = tl.load(stored + KEYS_AT, is_dim, 0)
        values = tl.load(stored + VALUES_AT, is_dim, 0)
    if KV == "":
        return keys, values, line, line
    else:
        scale = scales + page * (PAGE_STRIDE // 2) + SCALES_AT + line
        key_scales = load_scales(scale, KV)
        return keys, values, key_scales, load_scales(scale + KV_HEADS * PAGE_SIZE, KV)


@triton.jit
def _pairs_of(item, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the row and the head of each (row, head) pair of an attention tile.

    The row is relative to the work item. The computation uses the item's first row, so that the
    compiler does not keep the quotients of all items in registers.
    """
    row = tl.load(item)
    pairs = tl.arange(0, BLOCK_M) + row * GROUP
    return pairs // GROUP - row, kv_head * GROUP + pairs % GROUP


@triton.jit
def _queries_at(
    item, kv_head, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return the memory offsets of a work item's queries (pairs, dims), and a validity mask."""
    dims = tl.arange(0, BLOCK_D)
    within, head = _pairs_of(item, kv_head, GROUP, BLOCK_M)
    at = (tl.load(item) + within) * (HEADS * DIM) + head * DIM
    is_pair = tl.arange(0, BLOCK_M) < tl.load(item + 1) * GROUP
    return at[:, None] + dims[None, :], is_pair[:, None] & (dims < DIM)[None, :]


@triton.jit
def _masked(scores, seen_at, since, until, WINDOW: tl.constexpr):
    """Return attention scores with minus infinity for tokens outside a row's context or window."""
    is_seen = seen_at[None, :] < until[:, None]
    if WINDOW:
        is_seen &= seen_at[None, :] >= since[:, None]
    return tl.where(is_seen, scores, -float("inf"))


@triton.jit
def _attention(
    header, frame, tables, q, cache, scales, output, sums, tops, HEADER_INDEX: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, KEYS_AT: tl.constexpr, VALUES_AT: tl.constexpr,
    TABLE_STRIDE: tl.constexpr, GROUP_AT: tl.constexpr, KV: tl.constexpr, SCALES_AT: tl.constexpr,
    ASSEMBLY: tl.constexpr, SKIPS_MASKS: tl.constexpr, ALONE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, NUM_PROGRAMS: tl.constexpr, ITEM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
    FACTOR: tl.constexpr = LOG2_E * (2 * SOFT_CAP if SOFT_CAP > 0 else SCALE)
    pairs, tokens = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    num_turns = num_items_of(tl.load(header + HEADER_INDEX + 1) * KV_HEADS, NUM_PROGRAMS)
    for turn in tl.range(num_turns, disable_licm=True):
        index = item_index(turn, NUM_PROGRAMS)
        kv_head = index % KV_HEADS
        item = frame + tl.load(header + HEADER_INDEX) + index // KV_HEADS * ITEM
        table = tables + tl.load(item + 2).to(tl.int64) * TABLE_STRIDE + GROUP_AT
        position, start, end = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
        at, is_query = _queries_at(
            item, kv_head, HEADS=HEADS, GROUP=GROUP, DIM=DIM, BLOCK_M=BLOCK_M, BLOCK_D=BLOCK_D,
        )  # fmt: skip
        queries = cast_to_pages(tl.load(q + at, is_query, 0.0), cache)  # (pairs, dims)
        within, head = _pairs_of(item, kv_head, GROUP, BLOCK_M)
        first = position - WINDOW + 1 if WINDOW else 0
        # Blocks from all_from to all_until are visible to all rows; row r sees tokens before until.
        all_from = first + tl.load(item + 1) - 1 if WINDOW else 0
        all_until = tl.minimum(position + 1, end) - BLOCK_N
        until = tl.minimum(position + within + 1, end)
        top, total, mixed, unit = empty_sums(BLOCK_M, BLOCK_D)
        page = pages_of(table, clamp_position(start + tokens, first, end), PAGE_SIZE)
        for block in range(start, end, BLOCK_N):
            token_offset = clamp_position(block + tokens, first, end) & (PAGE_SIZE - 1)
            keys, values, key_scales, value_scales = _stored(
                cache, scales, page=page, line=kv_head * PAGE_SIZE + token_offset,
                KV_HEADS=KV_HEADS, DIM=DIM, PAGE_SIZE=PAGE_SIZE, PAGE_STRIDE=PAGE_STRIDE,
                KEYS_AT=KEYS_AT,
                VALUES_AT=VALUES_AT, KV=KV, SCALES_AT=SCALES_AT, BLOCK_D=BLOCK_D,
            )  # fmt: skip
            page = pages_of(table, clamp_position(block + BLOCK_N + tokens, first, end), PAGE_SIZE)
            keys = codes_to_numbers(keys, queries.dtype, KV, ASSEMBLY)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            if KV != "":
                scores *= key_scales[None, :]
            if SOFT_CAP > 0:  # tanh(x) = 2 / (1 + exp(-2x)) - 1; the -1 changes no weight
                scores = 1 / (1 + tl.exp2(scores * (-2 * LOG2_E * SCALE / SOFT_CAP)))
            if not SKIPS_MASKS:  # noqa: SIM114 - a constant chooses; `or` would make a branch
                scores = _masked(scores, block + tokens, first + within, until, WINDOW)
            elif (block > all_until) | (block < all_from):
                scores = _masked(scores, block + tokens, first + within, until, WINDOW)
            values = codes_to_numbers(values, queries.dtype, KV, ASSEMBLY)
            top, total, mixed, unit = add_block(
                scores, values, value_scales=value_scales, top=top, total=total, mixed=mixed,
                unit=unit, FACTOR=FACTOR, KV=KV, ALONE=ALONE,
            )  # fmt: skip
        slot = tl.load(item + 6)
        at, is_query = _queries_at(
            item, kv_head, HEADS=HEADS, GROUP=GROUP, DIM=DIM, BLOCK_M=BLOCK_M, BLOCK_D=BLOCK_D,
        )  # again  # fmt: skip
        sum_slots = (slot + within * tl.load(item + 7)).to(tl.int64) * HEADS + head
        write_result(
            slot, output + at, sums=sums + sum_slots[:, None] * DIM + tl.arange(0, BLOCK_D)[None,
            :],
            tops=tops + sum_slots * 2, inside=is_query, is_pair=pairs < tl.load(item + 1) * GROUP,
            top=top * FACTOR, total=total, mixed=mixed * unit,
        )  # fmt: skip


@triton.jit
def _merge(
    header, frame, sums, tops, output,
    HEADER_INDEX: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, MERGE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
    merges = frame + tl.load(header + HEADER_INDEX)
    num_work = tl.load(header + HEADER_INDEX + 1) * HEADS
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < DIM
    for index in range(tl.program_id(0), num_work, NUM_PROGRAMS):
        head = index % HEADS
        entry = merges + index // HEADS * MERGE
        row = tl.load(entry).to(tl.int64)
        first = tl.load(entry + 1).to(tl.int64)
        count = tl.load(entry + 2)
        top = MIN_TOP + 0.0
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
