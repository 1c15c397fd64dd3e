"""Latent attention: tokens store one vector and one rotated key, which all heads read.

A stored vector is the rotated key, then the latent vector, which is both key and value.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.attention import ITEM
from twostroke.backends.gpu.kernels.bytes import (
    assembly,
    bounded,
    numbers_of,
    rounded,
    scales_at,
    spread,
)
from twostroke.backends.gpu.kernels.common import Parts, begin, sum_parts
from twostroke.backends.gpu.kernels.rope import turned
from twostroke.backends.gpu.kernels.token_blocks import (
    LOG2_E,
    index_of,
    nothing_seen,
    pages_of,
    scales_alone,
    turns_of,
    updated,
    within_seen,
    write,
)
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.kernels.attention import AttentionItems, HeadLayout
    from twostroke.backends.gpu.kernels.norm import Norm
    from twostroke.backends.gpu.kernels.rope import Rotation, SlotMapping
    from twostroke.backends.gpu.launch import Gpu

_LEAST_PAIRS = 16
_MOST_PAIRS = 32  # of row and head, in a tile: sums of more would not fit in registers


class Sources(Frozen, eq=False):
    """What products left of a step's rows.

    Each head of `queries` has the values to be rotated from `first` of its `query_head` values on;
    `query_latents` (rows, heads, latent) are what its others became. Keys to be rotated are
    `keys`, and `latents`, normed by `norm`, follow them.
    """

    queries: Parts
    first: int
    query_head: int
    query_latents: Parts
    keys: Parts
    latents: Parts
    norm: Norm


def block_of(gpu: Gpu, num_heads: int, *, is_few: bool) -> int:
    """Return the pairs of row and head in a tile; of few rows, or of many.

    More heads than that take several tiles.
    """
    if gpu.same_tokens or not is_few:
        return _MOST_PAIRS
    return _LEAST_PAIRS if num_heads <= _LEAST_PAIRS else _MOST_PAIRS


def levels_of(heads: HeadLayout) -> int:
    """Return the power of two of neighbours that int8 spreads together, in both of its parts."""
    if heads.kv_format != "int8":
        return 0
    both = math.gcd(heads.rotated, heads.head_dim)
    return (both & -both).bit_length() - 1


def store(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    places: SlotMapping,
    sources: Sources,
    turn: Rotation,
    heads: HeadLayout,
    cache: Tensor,
    output: Tensor,
    balance: Tensor | None = None,
) -> None:
    """Write queries to `output` (rows, heads * head_dim), and what a token stores to the `cache`.

    `balance` is that of `rope.launch`; of latent vectors its factors are 1.
    """
    unused = header
    latent = heads.head_dim - heads.rotated
    block_h = 16 if gpu.is_interpreted else 2
    q_tiles = -(-num_rows * heads.num_heads // block_h)
    kv_tiles = -(-num_rows // block_h)
    parts = sources.queries, sources.query_latents, sources.keys, sources.latents
    gpu.launch(
        _store,
        (q_tiles + kv_tiles,),
        header,
        places.positions,
        places.tables_of,
        places.first_extra,
        places.extra,
        places.tables,
        *(part.values for part in parts),
        sources.norm.weight,
        turn.table,
        heads.layer(cache),
        heads.scales(cache),
        unused if balance is None else balance,
        output,
        *(number for part in parts for number in (part.count, part.part_stride)),
        q_tiles,
        num_warps=4,
        **_constants_of(sources),
        PAIRS=turn.num_pairs,
        IS_INTERLEAVED=turn.is_interleaved,
        HAS_BALANCE=balance is not None,
        **_constants(heads),
        LEVELS=levels_of(heads),
        BLOCK_H=block_h,
        BLOCK_R=triton.next_power_of_2(heads.rotated),
        BLOCK_L=triton.next_power_of_2(latent),
    )


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
    found = heads.constants
    for name in ("KV_HEADS", "DIM", "KEYS_AT", "VALUES_AT"):
        del found[name]
    return {**found, "ROTATED": heads.rotated, "LATENT": heads.head_dim - heads.rotated}


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
    """Compute the items at `place` of the header, in tiles of `block_m` pairs (`block_of`).

    q and output are (rows, heads * head_dim); of a head's output the rotated values are not
    written. What has several pieces is left to `attention.merge`.
    """
    latent = heads.head_dim - heads.rotated
    num_programs = gpu.programs(2)
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
        num_warps=8,
        num_stages=2,
        PLACE=place,
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
def _rounded_together(x, y, KV: tl.constexpr):
    """Return two parts of vectors as a format has them, and the scale of both."""
    if KV == "":
        return x, y, tl.zeros((x.shape[0],), tl.float16)
    else:
        x, y = bounded(x), bounded(y)
        most = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
        x, scale = rounded(x, most, KV)
        y, scale = rounded(y, most, KV)
        return x, y, scale


@triton.jit
def _put(
    cache, scales, x, y, tables, tables_of, first_extra, extra, rows, is_row, position, is_dim,
    is_more, ROTATED: tl.constexpr, LATENT: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr, GROUP_AT: tl.constexpr,
    KV: tl.constexpr, SCALES_AT: tl.constexpr,
):  # fmt: skip
    """Store rotated keys x and latent vectors y in the pages of their rows' tables."""
    dims, more = tl.arange(0, x.shape[1])[None, :], tl.arange(0, y.shape[1])[None, :]
    x, y, scale = _rounded_together(x, y, KV)
    x, y = x.to(cache.dtype.element_ty), y.to(cache.dtype.element_ty)
    within, place = position % PAGE_SIZE, position // PAGE_SIZE + GROUP_AT
    first = tl.load(first_extra + rows, is_row, 0)
    count = tl.load(first_extra + rows + 1, is_row, 0) - first
    for index in range(-1, tl.max(count, 0)):  # the row's own table, then others
        is_own = is_row & (index < count)
        table = tl.load(extra + first + index, is_own & (index >= 0), 0)
        table = tl.where(index < 0, tl.load(tables_of + rows, is_own, 0), table)
        page_at = tables + table.to(tl.int64) * TABLE_STRIDE + place
        page = tl.load(page_at, is_own, 0).to(tl.int64)
        line = cache + (page * PAGE_STRIDE + within * (ROTATED + LATENT))[:, None]
        tl.store(line + dims, x, is_own[:, None] & is_dim)
        tl.store(line + ROTATED + more, y, is_own[:, None] & is_more)
        if KV != "":
            tl.store(scales + page * (PAGE_STRIDE // 2) + SCALES_AT + within, scale, is_own)


@triton.jit(
    do_not_specialize=[f"{x}_{y}" for x in ("q", "ql", "k", "l") for y in ("count", "part_stride")]
    + ["q_tiles"]
)
def _store(
    header, positions, tables_of, first_extra, extra, tables, q, ql, k, latents, weight, turn,
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
    begin(OVERLAPS)
    num_rows = tl.load(header)
    is_query = tl.program_id(0) < q_tiles
    dims, more = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_L)[None, :]
    is_dim, is_more = dims < ROTATED, more < LATENT
    factors = balance + (ROTATED + LATENT) + dims
    tile = tl.program_id(0) - tl.where(is_query, 0, q_tiles)
    pairs = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    heads = tl.where(is_query, pairs % HEADS, 0)
    rows = tl.where(is_query, pairs // HEADS, pairs).to(tl.int64)
    is_row = rows < num_rows
    position = tl.load(positions + rows, is_row, 0)
    inside, inside_more = is_row[:, None] & is_dim, is_row[:, None] & is_more
    if is_query:
        x = turned(
            q + (heads * Q_HEAD + FIRST)[:, None], q, q, turn, q_count, q_part_stride, rows,
            heads * 0, position, inside, Q_STRIDE, False, False, 0.0, PAIRS, IS_INTERLEAVED,
            ROTATED, BLOCK_R,
        )  # fmt: skip
        if HAS_BALANCE:
            x *= tl.load(factors + (ROTATED + LATENT), is_dim, 0.0)
        query = (ql + rows * QL_STRIDE + heads * LATENT)[:, None] + more
        y = sum_parts(query, inside_more, ql_count, ql_part_stride)
        x = spread(x, BLOCK_H, BLOCK_R, LEVELS)
        y = spread(y, BLOCK_H, BLOCK_L, LEVELS)
        to = output + ((rows * HEADS + heads) * (ROTATED + LATENT))[:, None]
        tl.store(to + dims, x.to(output.dtype.element_ty), inside)
        tl.store(to + ROTATED + more, y.to(output.dtype.element_ty), inside_more)
    else:
        x = turned(
            k, k, k, turn, k_count, k_part_stride, rows, heads, position, inside, K_STRIDE, False,
            False, 0.0, PAIRS, IS_INTERLEAVED, ROTATED, BLOCK_R,
        )  # fmt: skip
        if HAS_BALANCE:
            x *= tl.load(factors, is_dim, 0.0)
        latent = (latents + rows * L_STRIDE)[:, None] + more
        y = sum_parts(latent, inside_more, l_count, l_part_stride)
        y *= 1 / tl.sqrt(tl.sum(y * y, 1) / LATENT + EPSILON)[:, None]
        y *= tl.load(weight + more, is_more, 0.0)
        _put(
            cache, scales, spread(x, BLOCK_H, BLOCK_R, LEVELS) * (1 / (1 << LEVELS)),
            spread(y, BLOCK_H, BLOCK_L, LEVELS) * (1 / (1 << LEVELS)), tables, tables_of,
            first_extra, extra, rows, is_row, position, is_dim, is_more, ROTATED, LATENT,
            PAGE_SIZE, PAGE_STRIDE, TABLE_STRIDE, GROUP_AT, KV, SCALES_AT,
        )  # fmt: skip


@triton.jit
def _stored(
    cache, scales, page, within, element: tl.constexpr, ROTATED: tl.constexpr,
    LATENT: tl.constexpr, PAGE_STRIDE: tl.constexpr, KV: tl.constexpr, SCALES_AT: tl.constexpr,
    ASSEMBLY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Return rotated keys and latent vectors (tokens, dims) within pages, and scales if any."""
    page = page.to(tl.int64)
    stored = (cache + page * PAGE_STRIDE + within * (ROTATED + LATENT))[:, None]
    dims, more = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_L)[None, :]
    keys = tl.load(stored + dims, dims < ROTATED, 0)
    values = tl.load(stored + ROTATED + more, more < LATENT, 0)
    keys = numbers_of(keys, element, KV, ASSEMBLY)
    values = numbers_of(values, element, KV, ASSEMBLY)
    if KV == "":
        return keys, values, within
    else:
        return keys, values, scales_at(scales + page * (PAGE_STRIDE // 2) + SCALES_AT + within, KV)


@triton.jit
def _attention(
    header, frame, tables, q, cache, scales, output, sums, tops, PLACE: tl.constexpr,
    HEADS: tl.constexpr, ROTATED: tl.constexpr, LATENT: tl.constexpr, SCALE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr,
    GROUP_AT: tl.constexpr, KV: tl.constexpr, SCALES_AT: tl.constexpr, LEVELS: tl.constexpr,
    ASSEMBLY: tl.constexpr, ALONE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr, NUM_PROGRAMS: tl.constexpr, ITEM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    DIM: tl.constexpr = ROTATED + LATENT
    # Heads in a tile; Triton 3.5 knows no `min` of constants.
    OF_ROW: tl.constexpr = HEADS if HEADS < BLOCK_M else BLOCK_M  # noqa: FURB136
    TILES: tl.constexpr = (HEADS + OF_ROW - 1) // OF_ROW
    element: tl.constexpr = (
        tl.float16 if cache.dtype.element_ty == tl.float16 else q.dtype.element_ty
    )
    items = frame + tl.load(header + PLACE)
    pairs, tokens = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    dims, more = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_L)
    is_dim, is_more = dims < ROTATED, more < LATENT
    for turn in range(turns_of(tl.load(header + PLACE + 1) * TILES, NUM_PROGRAMS)):
        index = index_of(turn, NUM_PROGRAMS)
        item = items + index // TILES * ITEM
        table = tables + tl.load(item + 2).to(tl.int64) * TABLE_STRIDE + GROUP_AT
        position, start, end = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
        slot = tl.load(item + 6)
        within = pairs // OF_ROW
        head = index % TILES * OF_ROW + pairs % OF_ROW
        is_pair = (within < tl.load(item + 1)) & (head < HEADS)
        inside = is_pair[:, None] & is_more[None, :]
        at = ((tl.load(item) + within).to(tl.int64) * (HEADS * DIM) + head * DIM)[:, None]
        to_turned = q + at + dims[None, :]
        turned_queries = tl.load(to_turned, is_pair[:, None] & is_dim[None, :], 0.0).to(element)
        queries = tl.load(q + at + ROTATED + more[None, :], inside, 0.0).to(element)
        until = tl.minimum(position + within + 1, end)
        top, total, mixed, unit = nothing_seen(BLOCK_M, BLOCK_L)
        page = pages_of(table, within_seen(start + tokens, 0, end), PAGE_SIZE)
        for block in range(start, end, BLOCK_N):
            keys, values, scale = _stored(
                cache, scales, page, within_seen(block + tokens, 0, end) & (PAGE_SIZE - 1),
                element, ROTATED, LATENT, PAGE_STRIDE, KV, SCALES_AT, ASSEMBLY, BLOCK_R, BLOCK_L,
            )  # fmt: skip
            page = pages_of(table, within_seen(block + BLOCK_N + tokens, 0, end), PAGE_SIZE)
            scores = tl.dot(turned_queries, tl.trans(keys), input_precision="ieee")
            scores = tl.dot(queries, tl.trans(values), scores, input_precision="ieee")
            if KV != "":
                scores *= scale[None, :]
            is_seen = (block + tokens)[None, :] < until[:, None]
            scores = tl.where(is_seen, scores, -float("inf"))
            top, total, mixed, unit = updated(
                scores, values, scale, top, total, mixed, unit, SCALE * LOG2_E, KV, ALONE
            )  # fmt: skip
        mixed = spread(mixed * unit, BLOCK_M, BLOCK_L, LEVELS)
        own = (slot + within * tl.load(item + 7)).to(tl.int64) * HEADS + head
        write(
            slot, output + at + ROTATED + more[None, :],
            sums + own[:, None] * DIM + ROTATED + more[None, :], tops + own * 2, inside, is_pair,
            top * (SCALE * LOG2_E), total, mixed,
        )  # fmt: skip
