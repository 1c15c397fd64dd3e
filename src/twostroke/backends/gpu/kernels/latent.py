"""Latent attention: each token stores one rotated key and one latent vector for all heads.

A token's entry in a KV page is the rotated key, then the latent vector, which is both key and
value.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.attention import ITEM
from twostroke.backends.gpu.kernels.bytes import (
    assembly,
    clamp_to_float16,
    codes_to_numbers,
    hadamard_transform,
    load_scales,
    quantize,
)
from twostroke.backends.gpu.kernels.common import Parts, overlap_kernels, sum_parts
from twostroke.backends.gpu.kernels.rope import norm_and_rotate
from twostroke.backends.gpu.kernels.token_blocks import (
    LOG2_E,
    add_block,
    clamp_position,
    empty_sums,
    item_index,
    num_items_of,
    pages_of,
    scales_alone,
    write_result,
)
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.kernels.attention import AttentionItems, HeadLayout
    from twostroke.backends.gpu.kernels.norm import Norm
    from twostroke.backends.gpu.kernels.rope import Rotation, SlotMapping
    from twostroke.backends.gpu.launch import Gpu

_MIN_PAIRS = 16
_MAX_PAIRS = 32  # (row, head) pairs of a tile; the sums of more would not fit into registers


class Sources(Frozen, eq=False):
    """The projections from which latent attention's queries and stored keys are made.

    `queries`: heads of `query_head` values; the values to rotate begin at value `first` of a head.
    `query_latents`: (rows, heads, latent), the remaining values of queries, already multiplied by
    the head's matrix. `keys`: the keys to rotate. `latents`: the latent vectors, before `norm`.
    """

    queries: Parts
    first: int
    query_head: int
    query_latents: Parts
    keys: Parts
    latents: Parts
    norm: Norm


def block_of(gpu: Gpu, num_heads: int, *, is_few: bool) -> int:
    """Return the number of (row, head) pairs of a latent attention tile.

    `is_few`: for slices of few rows, as in decode. If a row has more heads, it takes several tiles.
    """
    if gpu.same_tokens or not is_few:
        return _MAX_PAIRS
    return _MIN_PAIRS if num_heads <= _MIN_PAIRS else _MAX_PAIRS


def levels_of(heads: HeadLayout) -> int:
    """Return log2 of the size of the Hadamard matrix that transforms int8 keys and latents.

    The size divides the widths of both. 0, which means no transform, for other formats.
    """
    if heads.kv_format != "int8":
        return 0
    both = math.gcd(heads.rotated, heads.head_dim)
    return (both & -both).bit_length() - 1


def store(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    slots: SlotMapping,
    sources: Sources,
    rotation: Rotation,
    heads: HeadLayout,
    cache: Tensor,
    output: Tensor,
    balance: Tensor | None = None,
) -> None:
    """Launch the kernel that prepares queries and stores keys and latent vectors in KV pages.

    Queries are written to `output` (rows, heads * head_dim). `balance`: see `rope.launch`; the
    factors of latent vectors are 1.
    """
    unused = header
    latent = heads.head_dim - heads.rotated
    block_h = 16 if gpu.is_interpreted else 2
    q_tiles = -(-num_rows * heads.num_heads // block_h)
    kv_tiles = -(-num_rows // block_h)

    gpu.launch(
        _store,
        (q_tiles + kv_tiles,),
        header=header,
        **slots.arguments,
        **_source_arguments(sources),
        rotation=rotation.table,
        cache=heads.layer(cache),
        scales=heads.scales(cache),
        balance=unused if balance is None else balance,
        output=output,
        q_tiles=q_tiles,
        num_warps=4,
        **_constants_of(sources),
        PAIRS=rotation.num_pairs,
        IS_INTERLEAVED=rotation.is_interleaved,
        HAS_BALANCE=balance is not None,
        **_constants(heads),
        LEVELS=levels_of(heads),
        BLOCK_H=block_h,
        BLOCK_R=triton.next_power_of_2(heads.rotated),
        BLOCK_L=triton.next_power_of_2(latent),
    )


def _source_arguments(sources: Sources) -> dict[str, Any]:
    """Return the tensors of queries, keys and latent vectors as arguments of the store kernel."""
    return {
        "q": sources.queries.values,
        "q_count": sources.queries.count,
        "q_part_stride": sources.queries.part_stride,
        "ql": sources.query_latents.values,
        "ql_count": sources.query_latents.count,
        "ql_part_stride": sources.query_latents.part_stride,
        "k": sources.keys.values,
        "k_count": sources.keys.count,
        "k_part_stride": sources.keys.part_stride,
        "latents": sources.latents.values,
        "l_count": sources.latents.count,
        "l_part_stride": sources.latents.part_stride,
        "weight": sources.norm.weight,
    }


def _constants_of(sources: Sources) -> dict[str, Any]:
    return {
        "Q_STRIDE": sources.queries.row_stride,
        "QL_STRIDE": sources.query_latents.row_stride,
        "K_STRIDE": sources.keys.row_stride,
        "L_STRIDE": sources.latents.row_stride,
        "FIRST": sources.first,
        "Q_HEAD": sources.query_head,
        "EPSILON": sources.norm.epsilon,
    }


def _constants(heads: HeadLayout) -> dict[str, Any]:
    constants = heads.constants
    for name in ("KV_HEADS", "DIM", "KEYS_AT", "VALUES_AT"):
        del constants[name]
    return {**constants, "ROTATED": heads.rotated, "LATENT": heads.head_dim - heads.rotated}


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
    """Launch latent attention for one of a step's lists of work items.

    The list's (offset, count) pair is at `header_index` of the header. Tiles have `block_m` pairs
    (`block_of`). q and output are (rows, heads * head_dim); the rotated values of a head's output
    are not written. `attention.merge` merges contexts with several pieces.
    """
    latent = heads.head_dim - heads.rotated
    num_programs = gpu.programs(2)
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
        num_warps=8,
        num_stages=2,
        HEADER_INDEX=header_index,
        SCALE=heads.scale,
        **_constants(heads),
        LEVELS=levels_of(heads),
        ASSEMBLY=assembly(gpu, heads.kv_format),
        ALONE=scales_alone(gpu, heads.kv_format),
        BLOCK_M=block_m,
        BLOCK_N=block_m,
        BLOCK_R=max(16, triton.next_power_of_2(heads.rotated)),
        BLOCK_L=max(16, triton.next_power_of_2(latent)),
        NUM_PROGRAMS=num_programs,
        ITEM=ITEM,
    )


@triton.jit
def _quantize_together(x, y, KV: tl.constexpr):
    """Quantize rotated keys x and latent vectors y with a common scale; return codes and scale."""
    if KV == "":
        return x, y, tl.zeros((x.shape[0],), tl.float16)
    else:
        x, y = clamp_to_float16(x), clamp_to_float16(y)
        largest = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
        x, scale = quantize(x, largest, KV)
        y, scale = quantize(y, largest, KV)
        return x, y, scale


@triton.jit
def _store_rows(
    cache, scales, x, y, tables, tables_of, first_extra, extra, rows, is_row, position, is_dim,
    is_latent_dim, ROTATED: tl.constexpr, LATENT: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr, GROUP_AT: tl.constexpr,
    KV: tl.constexpr, SCALES_AT: tl.constexpr,
):  # fmt: skip
    """Store rotated keys x and latent vectors y in the KV pages of their rows.

    A row may be stored in several page tables, for draft branches.
    """
    dims, latent_dims = tl.arange(0, x.shape[1])[None, :], tl.arange(0, y.shape[1])[None, :]
    x, y, scale = _quantize_together(x, y, KV)
    x, y = x.to(cache.dtype.element_ty), y.to(cache.dtype.element_ty)
    within, page_index = position % PAGE_SIZE, position // PAGE_SIZE + GROUP_AT
    first = tl.load(first_extra + rows, is_row, 0)
    count = tl.load(first_extra + rows + 1, is_row, 0) - first
    for index in range(-1, tl.max(count, 0)):  # -1: the row's own table, then extra tables
        stores_row = is_row & (index < count)
        table = tl.load(extra + first + index, stores_row & (index >= 0), 0)
        table = tl.where(index < 0, tl.load(tables_of + rows, stores_row, 0), table)
        page_at = tables + table.to(tl.int64) * TABLE_STRIDE + page_index
        page = tl.load(page_at, stores_row, 0).to(tl.int64)
        line = cache + (page * PAGE_STRIDE + within * (ROTATED + LATENT))[:, None]
        tl.store(line + dims, x, stores_row[:, None] & is_dim)
        tl.store(line + ROTATED + latent_dims, y, stores_row[:, None] & is_latent_dim)
        if KV != "":
            tl.store(scales + page * (PAGE_STRIDE // 2) + SCALES_AT + within, scale, stores_row)


@triton.jit(
    do_not_specialize=[f"{x}_{y}" for x in ("q", "ql", "k", "l") for y in ("count", "part_stride")]
    + ["q_tiles"]
)
def _store(
    header, positions, tables_of, first_extra, extra, tables, q, ql, k, latents, weight, rotation,
    cache, scales, balance, output, q_count, q_part_stride, ql_count, ql_part_stride, k_count,
    k_part_stride, l_count, l_part_stride, q_tiles,
    Q_STRIDE: tl.constexpr, QL_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr,
    L_STRIDE: tl.constexpr, FIRST: tl.constexpr, Q_HEAD: tl.constexpr, EPSILON: tl.constexpr,
    PAIRS: tl.constexpr, IS_INTERLEAVED: tl.constexpr, HAS_BALANCE: tl.constexpr,
    HEADS: tl.constexpr, ROTATED: tl.constexpr, LATENT: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr, GROUP_AT: tl.constexpr,
    KV: tl.constexpr, SCALES_AT: tl.constexpr, LEVELS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
    num_rows = tl.load(header)
    is_query = tl.program_id(0) < q_tiles
    dims, latent_dims = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_L)[None, :]
    is_dim, is_latent_dim = dims < ROTATED, latent_dims < LATENT
    factors = balance + (ROTATED + LATENT) + dims
    tile = tl.program_id(0) - tl.where(is_query, 0, q_tiles)
    pairs = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    heads = tl.where(is_query, pairs % HEADS, 0)
    rows = tl.where(is_query, pairs // HEADS, pairs).to(tl.int64)
    is_row = rows < num_rows
    position = tl.load(positions + rows, is_row, 0)
    inside, inside_latent = is_row[:, None] & is_dim, is_row[:, None] & is_latent_dim
    if is_query:
        x = norm_and_rotate(
            q + (heads * Q_HEAD + FIRST)[:, None], q, weight=q, rotation=rotation, count=q_count,
            part_stride=q_part_stride, rows=rows, heads=heads * 0, position=position,
            inside=inside, STRIDE=Q_STRIDE, HAS_BIAS=False, HAS_NORM=False, EPSILON=0.0,
            PAIRS=PAIRS, IS_INTERLEAVED=IS_INTERLEAVED, DIM=ROTATED, BLOCK_D=BLOCK_R,
        )  # fmt: skip
        if HAS_BALANCE:
            x *= tl.load(factors + (ROTATED + LATENT), is_dim, 0.0)
        query = (ql + rows * QL_STRIDE + heads * LATENT)[:, None] + latent_dims
        y = sum_parts(query, inside_latent, ql_count, ql_part_stride)
        x = hadamard_transform(x, BLOCK_H, BLOCK_R, LEVELS)
        y = hadamard_transform(y, BLOCK_H, BLOCK_L, LEVELS)
        to = output + ((rows * HEADS + heads) * (ROTATED + LATENT))[:, None]
        tl.store(to + dims, x.to(output.dtype.element_ty), inside)
        tl.store(to + ROTATED + latent_dims, y.to(output.dtype.element_ty), inside_latent)
    else:
        x = norm_and_rotate(
            k, k, weight=k, rotation=rotation, count=k_count, part_stride=k_part_stride, rows=rows,
            heads=heads, position=position, inside=inside, STRIDE=K_STRIDE, HAS_BIAS=False,
            HAS_NORM=False, EPSILON=0.0, PAIRS=PAIRS, IS_INTERLEAVED=IS_INTERLEAVED, DIM=ROTATED,
            BLOCK_D=BLOCK_R,
        )  # fmt: skip
        if HAS_BALANCE:
            x *= tl.load(factors, is_dim, 0.0)
        latent = (latents + rows * L_STRIDE)[:, None] + latent_dims
        y = sum_parts(latent, inside_latent, l_count, l_part_stride)
        y *= 1 / tl.sqrt(tl.sum(y * y, 1) / LATENT + EPSILON)[:, None]
        y *= tl.load(weight + latent_dims, is_latent_dim, 0.0)
        _store_rows(
            cache, scales, x=hadamard_transform(x, BLOCK_H, BLOCK_R, LEVELS) * (1 / (1 << LEVELS)),
            y=hadamard_transform(y, BLOCK_H, BLOCK_L, LEVELS) * (1 / (1 << LEVELS)), tables=tables,
            tables_of=tables_of, first_extra=first_extra, extra=extra, rows=rows, is_row=is_row,
            position=position, is_dim=is_dim, is_latent_dim=is_latent_dim, ROTATED=ROTATED,
            LATENT=LATENT,
            PAGE_SIZE=PAGE_SIZE, PAGE_STRIDE=PAGE_STRIDE, TABLE_STRIDE=TABLE_STRIDE,
            GROUP_AT=GROUP_AT, KV=KV, SCALES_AT=SCALES_AT,
        )  # fmt: skip


@triton.jit
def _stored(
    cache, scales, page, within, element: tl.constexpr, ROTATED: tl.constexpr,
    LATENT: tl.constexpr, PAGE_STRIDE: tl.constexpr, KV: tl.constexpr, SCALES_AT: tl.constexpr,
    ASSEMBLY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Load rotated keys and latent vectors (tokens, dims) from KV pages.

    Also loads their scales if the pages have 8 bits.
    """
    page = page.to(tl.int64)
    stored = (cache + page * PAGE_STRIDE + within * (ROTATED + LATENT))[:, None]
    dims, latent_dims = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_L)[None, :]
    keys = tl.load(stored + dims, dims < ROTATED, 0)
    values = tl.load(stored + ROTATED + latent_dims, latent_dims < LATENT, 0)
    keys = codes_to_numbers(keys, element, KV, ASSEMBLY)
    values = codes_to_numbers(values, element, KV, ASSEMBLY)
    if KV == "":
        return keys, values, within
    else:
        scale = scales + page * (PAGE_STRIDE // 2) + SCALES_AT + within
        return keys, values, load_scales(scale, KV)


@triton.jit
def _attention(
    header, frame, tables, q, cache, scales, output, sums, tops, HEADER_INDEX: tl.constexpr,
    HEADS: tl.constexpr, ROTATED: tl.constexpr, LATENT: tl.constexpr, SCALE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr,
    GROUP_AT: tl.constexpr, KV: tl.constexpr, SCALES_AT: tl.constexpr, LEVELS: tl.constexpr,
    ASSEMBLY: tl.constexpr, ALONE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr, NUM_PROGRAMS: tl.constexpr, ITEM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
    DIM: tl.constexpr = ROTATED + LATENT
    # The heads of a row in a tile. Triton 3.5 has no `min` of constants.
    OF_ROW: tl.constexpr = HEADS if HEADS < BLOCK_M else BLOCK_M  # noqa: FURB136
    TILES: tl.constexpr = (HEADS + OF_ROW - 1) // OF_ROW
    element: tl.constexpr = (
        tl.float16 if cache.dtype.element_ty == tl.float16 else q.dtype.element_ty
    )
    items = frame + tl.load(header + HEADER_INDEX)
    pairs, tokens = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    dims, latent_dims = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_L)
    is_dim, is_latent_dim = dims < ROTATED, latent_dims < LATENT
    for turn in range(num_items_of(tl.load(header + HEADER_INDEX + 1) * TILES, NUM_PROGRAMS)):
        index = item_index(turn, NUM_PROGRAMS)
        item = items + index // TILES * ITEM
        table = tables + tl.load(item + 2).to(tl.int64) * TABLE_STRIDE + GROUP_AT
        position, start, end = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
        slot = tl.load(item + 6)
        within = pairs // OF_ROW
        head = index % TILES * OF_ROW + pairs % OF_ROW
        is_pair = (within < tl.load(item + 1)) & (head < HEADS)
        inside = is_pair[:, None] & is_latent_dim[None, :]
        at = ((tl.load(item) + within).to(tl.int64) * (HEADS * DIM) + head * DIM)[:, None]
        to_turned = q + at + dims[None, :]
        turned_queries = tl.load(to_turned, is_pair[:, None] & is_dim[None, :], 0.0).to(element)
        queries = tl.load(q + at + ROTATED + latent_dims[None, :], inside, 0.0).to(element)
        until = tl.minimum(position + within + 1, end)
        top, total, mixed, unit = empty_sums(BLOCK_M, BLOCK_L)
        page = pages_of(table, clamp_position(start + tokens, 0, end), PAGE_SIZE)
        for block in range(start, end, BLOCK_N):
            keys, values, scale = _stored(
                cache, scales, page=page,
                within=clamp_position(block + tokens, 0, end) & (PAGE_SIZE - 1), element=element,
                ROTATED=ROTATED, LATENT=LATENT, PAGE_STRIDE=PAGE_STRIDE, KV=KV,
                SCALES_AT=SCALES_AT, ASSEMBLY=ASSEMBLY, BLOCK_R=BLOCK_R, BLOCK_L=BLOCK_L,
            )  # fmt: skip
            page = pages_of(table, clamp_position(block + BLOCK_N + tokens, 0, end), PAGE_SIZE)
            scores = tl.dot(turned_queries, tl.trans(keys), input_precision="ieee")
            scores = tl.dot(queries, tl.trans(values), scores, input_precision="ieee")
            if KV != "":
                scores *= scale[None, :]
            is_seen = (block + tokens)[None, :] < until[:, None]
            scores = tl.where(is_seen, scores, -float("inf"))
            top, total, mixed, unit = add_block(
                scores, values, value_scales=scale, top=top, total=total, mixed=mixed, unit=unit,
                FACTOR=SCALE * LOG2_E, KV=KV, ALONE=ALONE,
            )  # fmt: skip
        mixed = hadamard_transform(mixed * unit, BLOCK_M, BLOCK_L, LEVELS)
        sum_slots = (slot + within * tl.load(item + 7)).to(tl.int64) * HEADS + head
        write_result(
            slot, output + at + ROTATED + latent_dims[None, :],
            sums=sums + sum_slots[:, None] * DIM + ROTATED + latent_dims[None, :],
            tops=tops + sum_slots * 2,
            inside=inside, is_pair=is_pair, top=top * (SCALE * LOG2_E), total=total, mixed=mixed,
        )  # fmt: skip
