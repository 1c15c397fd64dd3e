"""Norms and rotates the heads of queries and keys, and writes keys and values to their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.bytes import bounded, rounded, spread
from twostroke.backends.gpu.kernels.common import Parts, begin, sum_parts
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.kernels.attention import HeadLayout
    from twostroke.backends.gpu.kernels.norm import Norm
    from twostroke.backends.gpu.launch import Gpu


class HeadSource(Frozen, eq=False):
    """The heads of queries, keys or values as a product left them, and what is done with each."""

    parts: Parts
    bias: Tensor | None = None
    norm: Norm | None = None


class Rotation(Frozen, eq=False):
    """A rotation: `table` (positions, 2, pairs) has each position's cosines and sines, float32."""

    table: Tensor
    num_pairs: int
    is_interleaved: bool


class SlotMapping(Frozen, eq=False):
    """Where a step's rows are stored: each row's position and table of pages, int32.

    Row r is also stored in the tables at `extra` from `first_extra[r]` to `first_extra[r + 1]`.
    """

    positions: Tensor
    tables_of: Tensor
    first_extra: Tensor
    extra: Tensor
    tables: Tensor


def launch(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    places: SlotMapping,
    sources: tuple[HeadSource, ...],
    turns: tuple[Rotation | None, Rotation | None],
    heads: HeadLayout,
    cache: Tensor,
    output: Tensor,
    balance: Tensor | None = None,
) -> None:
    """Write queries to `output` (rows, heads * head_dim), keys and values to the `cache`.

    `sources` are queries, keys and values, or queries alone; `turns` those of queries and keys. In
    the format int8 keys first lose the first row of `balance` (3, kv_heads * head_dim), float32,
    and are multiplied by the second; queries are multiplied by the third.
    """
    unused, stores = header, len(sources) > 1
    sources = sources if stores else sources * 3
    parts = [source.parts for source in sources]
    biases = [unused if source.bias is None else source.bias for source in sources]
    norms = [unused if source.norm is None else source.norm.weight for source in sources]
    tables = [unused if turn is None else turn.table for turn in turns]
    block_d = triton.next_power_of_2(heads.head_dim)
    block_h = 64 if gpu.is_interpreted else 4
    q_tiles = -(-num_rows * heads.num_heads // block_h)
    kv_tiles = -(-num_rows * heads.num_kv_heads // block_h) if stores else 0
    gpu.launch(
        _rope,
        (q_tiles + 2 * kv_tiles,),
        header,
        places.positions,
        places.tables_of,
        places.first_extra,
        places.extra,
        places.tables,
        *(part.values for part in parts),
        *biases,
        *norms,
        *tables,
        heads.layer(cache),
        heads.scales(cache),
        unused if balance is None else balance,
        output,
        *(number for part in parts for number in (part.count, part.part_stride)),
        q_tiles,
        kv_tiles,
        num_warps=max(1, min(4, block_h * block_d // 256)),
        **_constants_of(sources, turns),
        **heads.constants,
        HAS_BALANCE=balance is not None,
        LEVELS=_levels(heads.head_dim) if heads.kv_format == "int8" else 0,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
    )


def _levels(head_dim: int) -> int:
    """Return the power of two, the largest that divides a head, of neighbours spread together."""
    return (head_dim & -head_dim).bit_length() - 1


def _constants_of(
    sources: tuple[HeadSource, ...], turns: tuple[Rotation | None, ...]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, source in zip("QKV", sources, strict=True):
        found[f"{name}_STRIDE"] = source.parts.row_stride
        found[f"HAS_{name}_BIAS"] = source.bias is not None
        found[f"HAS_{name}_NORM"] = source.norm is not None
        found[f"{name}_EPSILON"] = source.norm.epsilon if source.norm else 0.0
    for name, turn in zip("QK", turns, strict=True):
        found[f"{name}_PAIRS"] = turn.num_pairs if turn else 0
    found["IS_INTERLEAVED"] = any(turn.is_interleaved for turn in turns if turn)
    return found


@triton.jit
def turned(
    source, bias, weight, turn, count, part_stride, rows, heads, position, inside,
    STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, EPSILON: tl.constexpr,
    PAIRS: tl.constexpr, IS_INTERLEAVED: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return the values of pairs of row and head, (pairs, dims), normed and rotated."""
    dims = tl.arange(0, BLOCK_D)
    line = heads[:, None] * DIM
    source += rows[:, None] * STRIDE + line
    x = sum_parts(source + dims[None, :], inside, count, part_stride)
    if HAS_BIAS:
        x += tl.load(bias + line + dims[None, :], inside, 0.0)
    if HAS_NORM:
        scale = 1 / tl.sqrt(tl.sum(x * x, 1) / DIM + EPSILON)[:, None]
        x *= scale * tl.load(weight + dims, dims < DIM, 0.0)[None, :]
    if PAIRS:
        is_turned = dims < 2 * PAIRS
        if IS_INTERLEAVED:
            other, pair, is_first = dims ^ 1, dims // 2, dims % 2 == 0
        else:
            is_first = dims < PAIRS
            other = tl.where(is_first, dims + PAIRS, dims - PAIRS)
            pair = tl.where(is_first, dims, dims - PAIRS)
        inside &= is_turned[None, :]
        y = sum_parts(source + other[None, :], inside, count, part_stride)
        if HAS_BIAS:
            y += tl.load(bias + line + other[None, :], inside, 0.0)
        if HAS_NORM:
            y *= scale * tl.load(weight + other, is_turned, 0.0)[None, :]
        turn += position.to(tl.int64)[:, None] * (2 * PAIRS) + pair[None, :]
        sine = tl.load(turn + PAIRS, inside, 0.0)
        x = x * tl.load(turn, inside, 1.0) + tl.where(is_first[None, :], -sine, sine) * y
    return x


@triton.jit
def _even_queries(
    x, balance, groups, inside, HAS_BALANCE: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Return queries (pairs, dims) for keys that `_even_keys` has made even."""
    if HAS_BALANCE:
        balance += (2 * KV_HEADS + groups)[:, None] * DIM + tl.arange(0, x.shape[1])
        x *= tl.load(balance, inside, 0.0)
    return spread(x, x.shape[0], x.shape[1], LEVELS)


@triton.jit
def _even_keys(
    x, balance, heads, inside, HAS_BALANCE: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Return keys (pairs, dims) without their means, even and spread."""
    if HAS_BALANCE:
        balance += heads[:, None] * DIM + tl.arange(0, x.shape[1])
        x -= tl.load(balance, inside, 0.0)
        x *= tl.load(balance + KV_HEADS * DIM, inside, 0.0)
    return spread(x, x.shape[0], x.shape[1], LEVELS) * (1 / (1 << LEVELS))


@triton.jit
def _put(
    cache, scales, tables, tables_of, first_extra, extra, rows, heads, position, x, inside, at,
    scale_at, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr,
    GROUP_AT: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store keys or values in the pages of their rows' tables."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    is_pair = tl.max(inside.to(tl.int32), 1) > 0
    within = heads * PAGE_SIZE + position % PAGE_SIZE
    line = at + within[:, None] * DIM + dims
    place = position // PAGE_SIZE + GROUP_AT
    table = tl.load(tables_of + rows, is_pair, 0).to(tl.int64)
    page = tl.load(tables + table * TABLE_STRIDE + place, is_pair, 0).to(tl.int64)
    scale = position  # of no format
    if KV != "":
        x = bounded(x)
        x, scale = rounded(x, tl.max(tl.abs(x), 1), KV)
        scales += scale_at + within
        tl.store(scales + page * (PAGE_STRIDE // 2), scale, is_pair)
    x = x.to(cache.dtype.element_ty)
    tl.store(cache + page[:, None] * PAGE_STRIDE + line, x, inside)
    first = tl.load(first_extra + rows, is_pair, 0)
    count = tl.load(first_extra + rows + 1, is_pair, 0) - first
    for index in range(tl.max(count, 0)):
        has_more = is_pair & (index < count)
        table = tl.load(extra + first + index, has_more, 0).to(tl.int64)
        page = tl.load(tables + table * TABLE_STRIDE + place, has_more, 0).to(tl.int64)
        tl.store(cache + page[:, None] * PAGE_STRIDE + line, x, inside & has_more[:, None])
        if KV != "":
            tl.store(scales + page * (PAGE_STRIDE // 2), scale, has_more)


_CHANGING = [f"{x}_{y}" for x in "qkv" for y in ("count", "part_stride")]
_CHANGING += ["q_tiles", "kv_tiles"]


@triton.jit(do_not_specialize=_CHANGING)
def _rope(
    header, positions, tables_of, first_extra, extra, tables, q, k, v, q_bias, k_bias, v_bias,
    q_weight, k_weight, v_weight, q_turn, k_turn, cache, scales, balance, output, q_count,
    q_part_stride, k_count, k_part_stride, v_count, v_part_stride, q_tiles, kv_tiles,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    HAS_Q_BIAS: tl.constexpr, HAS_K_BIAS: tl.constexpr, HAS_V_BIAS: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, HAS_V_NORM: tl.constexpr,
    Q_EPSILON: tl.constexpr, K_EPSILON: tl.constexpr, V_EPSILON: tl.constexpr,
    Q_PAIRS: tl.constexpr, K_PAIRS: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, KEYS_AT: tl.constexpr,
    VALUES_AT: tl.constexpr, TABLE_STRIDE: tl.constexpr, GROUP_AT: tl.constexpr, KV: tl.constexpr,
    SCALES_AT: tl.constexpr, HAS_BALANCE: tl.constexpr, LEVELS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    num_rows = tl.load(header)
    tile = tl.program_id(0)
    is_dim = (tl.arange(0, BLOCK_D) < DIM)[None, :]
    if tile < q_tiles:
        pairs = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        rows, heads = (pairs // HEADS).to(tl.int64), pairs % HEADS
        if tile * BLOCK_H >= num_rows * HEADS:
            return
        inside = (rows < num_rows)[:, None] & is_dim
        position = tl.load(positions + rows, rows < num_rows, 0)
        x = turned(
            q, q_bias, q_weight, q_turn, q_count, q_part_stride, rows, heads, position, inside,
            Q_STRIDE, HAS_Q_BIAS, HAS_Q_NORM, Q_EPSILON, Q_PAIRS, IS_INTERLEAVED, DIM, BLOCK_D,
        )  # fmt: skip
        groups = heads // (HEADS // KV_HEADS)
        x = _even_queries(x, balance, groups, inside, HAS_BALANCE, KV_HEADS, DIM, LEVELS)
        at = rows[:, None] * (HEADS * DIM) + heads[:, None] * DIM + tl.arange(0, BLOCK_D)[None, :]
        tl.store(output + at, x.to(output.dtype.element_ty), inside)
    else:
        pairs = (tile - q_tiles) % kv_tiles * BLOCK_H + tl.arange(0, BLOCK_H)
        rows, heads = (pairs // KV_HEADS).to(tl.int64), pairs % KV_HEADS
        if (tile - q_tiles) % kv_tiles * BLOCK_H >= num_rows * KV_HEADS:
            return
        inside = (rows < num_rows)[:, None] & is_dim
        position = tl.load(positions + rows, rows < num_rows, 0)
        is_key = tile < q_tiles + kv_tiles
        if is_key:
            x = turned(
                k, k_bias, k_weight, k_turn, k_count, k_part_stride, rows, heads, position, inside,
                K_STRIDE, HAS_K_BIAS, HAS_K_NORM, K_EPSILON, K_PAIRS, IS_INTERLEAVED, DIM, BLOCK_D,
            )  # fmt: skip
            x = _even_keys(x, balance, heads, inside, HAS_BALANCE, KV_HEADS, DIM, LEVELS)
        else:
            x = turned(
                v, v_bias, v_weight, v_bias, v_count, v_part_stride, rows, heads, position, inside,
                V_STRIDE, HAS_V_BIAS, HAS_V_NORM, V_EPSILON, PAIRS=0, IS_INTERLEAVED=False,
                DIM=DIM, BLOCK_D=BLOCK_D,
            )  # fmt: skip
        _put(
            cache, scales, tables, tables_of, first_extra, extra, rows, heads, position, x, inside,
            tl.where(is_key, KEYS_AT, VALUES_AT),
            tl.where(is_key, SCALES_AT, SCALES_AT + KV_HEADS * PAGE_SIZE),
            PAGE_SIZE, PAGE_STRIDE, TABLE_STRIDE, GROUP_AT, KV, DIM, BLOCK_D,
        )  # fmt: skip
