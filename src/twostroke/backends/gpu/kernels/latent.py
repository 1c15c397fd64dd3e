"""Latent attention: tokens store one vector and one rotated key, which all heads read.

A stored vector is the rotated key, then the latent vector, which is both key and value.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.attention import ITEM, updated
from twostroke.backends.gpu.kernels.bytes import (
    assembly,
    bounded,
    numbers_of,
    rounded,
    scales_at,
    spread,
)
from twostroke.backends.gpu.kernels.parts import Parts, sum_parts
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.kernels.attention import Heads, Work
    from twostroke.backends.gpu.kernels.norm import Norm
    from twostroke.backends.gpu.kernels.rope import Places, Turn
    from twostroke.backends.gpu.launch import Gpu

_MOST_PAIRS = 64  # of row and head, in a tile


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
    # With mma.sync sums and queries are in registers, and there is room for half as many.
    most = _MOST_PAIRS if gpu.architecture in {90, 100} else _MOST_PAIRS // 2
    if gpu.same_tokens:
        return _MOST_PAIRS // 2
    return max(16, min(most, triton.next_power_of_2(num_heads))) if is_few else most


def levels_of(heads: Heads) -> int:
    """Return the power of two of neighbours that int8 spreads together, in both of its parts."""
    if heads.kv_format != "int8":
        return 0
    both = math.gcd(heads.rotated, heads.head_dim)
    return (both & -both).bit_length() - 1


def store(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    places: Places,
    sources: Sources,
    turn: Turn,
    heads: Heads,
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
        **{
            f"{name}_STRIDE": part.row_stride
            for name, part in zip(("Q", "QL", "K", "L"), parts, strict=True)
        },
        FIRST=sources.first,
        Q_HEAD=sources.query_head,
        EPSILON=sources.norm.epsilon,
        PAIRS=turn.num_pairs,
        IS_INTERLEAVED=turn.is_interleaved,
        HAS_BALANCE=balance is not None,
        **_constants(heads),
        LEVELS=levels_of(heads),
        BLOCK_H=block_h,
        BLOCK_R=triton.next_power_of_2(heads.rotated),
        BLOCK_L=triton.next_power_of_2(latent),
    )


def _constants(heads: Heads) -> dict[str, Any]:
    found = heads.constants
    for name in ("KV_HEADS", "DIM", "KEYS_AT", "VALUES_AT"):
        del found[name]
    return {**found, "ROTATED": heads.rotated, "LATENT": heads.head_dim - heads.rotated}


def launch(
    gpu: Gpu,
    work: Work,
    place: int,
    block_m: int,
    q: Tensor,
    cache: Tensor,
    output: Tensor,
    heads: Heads,
) -> None:
    """Compute the items at `place` of the header, in tiles of `block_m` pairs (`block_of`).

    q and output are (rows, heads * head_dim); of a head's output the rotated values are not
    written. What has several pieces is left to `attention.merge`.
    """
    latent = heads.head_dim - heads.rotated
    is_small = block_m < _MOST_PAIRS
    num_programs = gpu.programs(2 if is_small else 1)
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
        num_warps=4 if block_m <= 16 else 8,
        num_stages=2,
        PLACE=place,
        SCALE=heads.scale,
        **_constants(heads),
        LEVELS=levels_of(heads),
        ASSEMBLY=assembly(gpu, heads.kv_format),
        BLOCK_M=block_m,
        BLOCK_N=32,
        BLOCK_R=max(16, triton.next_power_of_2(heads.rotated)),
        BLOCK_L=max(16, triton.next_power_of_2(latent)),
        NUM_PROGRAMS=num_programs,
        ITEM=ITEM,
    )


@triton.jit
def _turned(
    at, turn, count, part_stride, position, inside, dims, PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Return values (pairs, dims), rotated."""
    x = sum_parts(at + dims[None, :], inside, count, part_stride)
    is_turned = dims < 2 * PAIRS
    if IS_INTERLEAVED:
        other, pair, is_first = dims ^ 1, dims // 2, dims % 2 == 0
    else:
        is_first = dims < PAIRS
        other = tl.where(is_first, dims + PAIRS, dims - PAIRS)
        pair = tl.where(is_first, dims, dims - PAIRS)
    inside &= is_turned[None, :]
    y = sum_parts(at + other[None, :], inside, count, part_stride)
    turn += position.to(tl.int64)[:, None] * (2 * PAIRS) + pair[None, :]
    sine = tl.load(turn + PAIRS, inside, 0.0)
    return x * tl.load(turn, inside, 1.0) + tl.where(is_first[None, :], -sine, sine) * y


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
    BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    num_rows = tl.load(header)
    tile = tl.program_id(0)
    dims, more = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_L)
    is_dim, is_more = (dims < ROTATED)[None, :], (more < LATENT)[None, :]
    factors = balance + (ROTATED + LATENT) + dims[None, :]
    if tile < q_tiles:
        pairs = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        rows, heads = (pairs // HEADS).to(tl.int64), pairs % HEADS
        is_row = rows < num_rows
        position = tl.load(positions + rows, is_row, 0)
        at = (q + rows * Q_STRIDE + heads * Q_HEAD + FIRST)[:, None]
        inside = is_row[:, None] & is_dim
        x = _turned(
            at, turn, q_count, q_part_stride, position, inside, dims, PAIRS, IS_INTERLEAVED
        )  # fmt: skip
        if HAS_BALANCE:
            x *= tl.load(factors + (ROTATED + LATENT), is_dim, 0.0)
        at = (ql + rows * QL_STRIDE + heads * LATENT)[:, None] + more[None, :]
        y = sum_parts(at, is_row[:, None] & is_more, ql_count, ql_part_stride)
        at = output + ((rows * HEADS + heads) * (ROTATED + LATENT))[:, None]
        x = spread(x, BLOCK_H, BLOCK_R, LEVELS).to(output.dtype.element_ty)
        y = spread(y, BLOCK_H, BLOCK_L, LEVELS).to(output.dtype.element_ty)
        tl.store(at + dims[None, :], x, inside)
        tl.store(at + ROTATED + more[None, :], y, is_row[:, None] & is_more)
    else:
        rows = ((tile - q_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
        is_row = rows < num_rows
        position = tl.load(positions + rows, is_row, 0)
        inside, inside_more = is_row[:, None] & is_dim, is_row[:, None] & is_more
        x = _turned(
            (k + rows * K_STRIDE)[:, None], turn, k_count, k_part_stride, position, inside, dims,
            PAIRS, IS_INTERLEAVED,
        )  # fmt: skip
        if HAS_BALANCE:
            x *= tl.load(factors, is_dim, 0.0)
        at = (latents + rows * L_STRIDE)[:, None] + more[None, :]
        y = sum_parts(at, inside_more, l_count, l_part_stride)
        y *= 1 / tl.sqrt(tl.sum(y * y, 1) / LATENT + EPSILON)[:, None]
        y *= tl.load(weight + more, more < LATENT, 0.0)[None, :]
        x = spread(x, BLOCK_H, BLOCK_R, LEVELS) * (1 / (1 << LEVELS))
        y = spread(y, BLOCK_H, BLOCK_L, LEVELS) * (1 / (1 << LEVELS))
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
            at = cache + (page * PAGE_STRIDE + within * (ROTATED + LATENT))[:, None]
            tl.store(at + dims[None, :], x, inside & is_own[:, None])
            tl.store(at + ROTATED + more[None, :], y, inside_more & is_own[:, None])
            if KV != "":
                tl.store(scales + page * (PAGE_STRIDE // 2) + SCALES_AT + within, scale, is_own)


@triton.jit
def _attention(
    header, frame, tables, q, cache, scales, output, sums, tops,
    PLACE: tl.constexpr, HEADS: tl.constexpr, ROTATED: tl.constexpr, LATENT: tl.constexpr,
    SCALE: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr, GROUP_AT: tl.constexpr, KV: tl.constexpr, SCALES_AT: tl.constexpr,
    LEVELS: tl.constexpr, ASSEMBLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr, NUM_PROGRAMS: tl.constexpr, ITEM: tl.constexpr,
):  # fmt: skip
    DIM: tl.constexpr = ROTATED + LATENT
    OF_ROW: tl.constexpr = HEADS if HEADS < BLOCK_M else BLOCK_M  # heads in a tile
    TILES: tl.constexpr = (HEADS + OF_ROW - 1) // OF_ROW
    items = frame + tl.load(header + PLACE)
    num_work = tl.load(header + PLACE + 1) * TILES
    pairs = tl.arange(0, BLOCK_M)
    dims, more = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_L)
    is_dim, is_more = (dims < ROTATED)[None, :], (more < LATENT)[None, :]
    tokens = tl.arange(0, BLOCK_N)
    element = q.dtype.element_ty
    for index in range(tl.program_id(0), num_work, NUM_PROGRAMS):
        item = items + index // TILES * ITEM
        row = tl.load(item)
        num_rows = tl.load(item + 1)
        table = tables + tl.load(item + 2).to(tl.int64) * TABLE_STRIDE + GROUP_AT
        position = tl.load(item + 3)
        start = tl.load(item + 4)
        end = tl.load(item + 5)
        slot = tl.load(item + 6)
        row_slots = tl.load(item + 7)
        within = pairs // OF_ROW
        head = index % TILES * OF_ROW + pairs % OF_ROW
        is_pair = (within < num_rows) & (head < HEADS)
        at = ((row + within).to(tl.int64) * (HEADS * DIM) + head * DIM)[:, None]
        turned = tl.load(q + at + dims[None, :], is_pair[:, None] & is_dim, 0.0)
        queries = tl.load(q + at + ROTATED + more[None, :], is_pair[:, None] & is_more, 0.0)
        if cache.dtype.element_ty == tl.float16:
            turned, queries = turned.to(tl.float16), queries.to(tl.float16)
        top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        mixed = tl.zeros((BLOCK_M, BLOCK_L), tl.float32)
        for block in range(start, end, BLOCK_N):
            seen_at = block + tokens
            is_token = seen_at < end
            page = tl.load(table + seen_at // PAGE_SIZE, is_token, 0).to(tl.int64)
            place = seen_at % PAGE_SIZE
            stored = cache + page * PAGE_STRIDE + place * DIM
            is_key = is_token[None, :] & (dims < ROTATED)[:, None]
            keys = tl.load(stored[None, :] + dims[:, None], is_key, 0)
            is_value = is_token[:, None] & is_more
            values = tl.load(stored[:, None] + ROTATED + more[None, :], is_value, 0)
            keys = numbers_of(keys, turned.dtype, KV, ASSEMBLY)
            values = numbers_of(values, turned.dtype, KV, ASSEMBLY)
            scores = tl.dot(turned, keys, input_precision="ieee")
            scores = tl.dot(queries, tl.trans(values), scores, input_precision="ieee") * SCALE
            scale = place.to(tl.float32)  # of no format
            if KV != "":
                at_scale = scales + page * (PAGE_STRIDE // 2) + SCALES_AT + place
                scale = scales_at(at_scale, is_token, KV)
                scores *= scale[None, :]
            is_seen = (position + within[:, None] >= seen_at[None, :]) & is_token[None, :]
            top, total, mixed = updated(scores, values, scale, is_seen, top, total, mixed, KV)
        mixed = spread(mixed, BLOCK_M, BLOCK_L, LEVELS)
        inside = is_pair[:, None] & is_more
        if slot < 0:
            mixed = mixed / tl.where(total == 0, 1.0, total)[:, None]
            tl.store(output + at + ROTATED + more[None, :], mixed.to(element), inside)
        else:
            to = (slot + within * row_slots).to(tl.int64) * HEADS + head
            tl.store(sums + to[:, None] * DIM + ROTATED + more[None, :], mixed, inside)
            tl.store(tops + to * 2, top, is_pair)
            tl.store(tops + to * 2 + 1, total, is_pair)
