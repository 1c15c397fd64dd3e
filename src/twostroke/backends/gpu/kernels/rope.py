"""Norms and rotates the heads of queries and keys, and writes keys and values to their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.parts import Parts, sum_parts
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.kernels.attention import Heads
    from twostroke.backends.gpu.kernels.norm import Norm
    from twostroke.backends.gpu.launch import Gpu


class Source(Frozen, eq=False):
    """The heads of queries, keys or values as a product left them, and what is done with each."""

    parts: Parts
    bias: Tensor | None = None
    norm: Norm | None = None


class Turn(Frozen, eq=False):
    """A rotation: `table` (positions, 2, pairs) has each position's cosines and sines, float32."""

    table: Tensor
    num_pairs: int
    is_interleaved: bool


class Places(Frozen, eq=False):
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
    places: Places,
    sources: tuple[Source, Source, Source],
    turns: tuple[Turn | None, Turn | None],
    heads: Heads,
    cache: Tensor,
    output: Tensor,
) -> None:
    """Write queries to `output` (rows, heads * head_dim), keys and values to the `cache`.

    `sources` are queries, keys and values; `turns` those of queries and keys.
    """
    unused = header
    parts = [source.parts for source in sources]
    biases = [unused if source.bias is None else source.bias for source in sources]
    norms = [unused if source.norm is None else source.norm.weight for source in sources[:2]]
    tables = [unused if turn is None else turn.table for turn in turns]
    block_d = triton.next_power_of_2(heads.head_dim)
    block_h = min(8, triton.next_power_of_2(heads.num_kv_heads)) if num_rows > 64 else 1
    q_tiles, kv_tiles = (-(-count // block_h) for count in (heads.num_heads, heads.num_kv_heads))
    gpu.launch(
        _rope,
        (num_rows, q_tiles + 2 * kv_tiles),
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
        cache,
        output,
        *(number for part in parts for number in (part.count, part.part_stride)),
        num_warps=max(1, min(4, block_h * block_d // 256)),
        **_constants_of(sources, turns),
        Q_TILES=q_tiles,
        KV_TILES=kv_tiles,
        **heads.constants,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
    )


def _constants_of(sources: tuple[Source, ...], turns: tuple[Turn | None, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, source in zip("QKV", sources, strict=True):
        found[f"{name}_STRIDE"] = source.parts.row_stride
        found[f"HAS_{name}_BIAS"] = source.bias is not None
    for name, source, turn in zip("QK", sources, turns, strict=False):
        found[f"HAS_{name}_NORM"] = source.norm is not None
        found[f"{name}_EPSILON"] = source.norm.epsilon if source.norm else 0.0
        found[f"{name}_PAIRS"] = turn.num_pairs if turn else 0
    found["IS_INTERLEAVED"] = any(turn.is_interleaved for turn in turns if turn)
    return found


@triton.jit
def _turned(
    source, bias, weight, turn, count, part_stride, heads, dims, inside,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, EPSILON: tl.constexpr, PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Return the values of some heads of a row, (heads, dims), normed and rotated."""
    at = heads[:, None] * DIM + dims[None, :]
    x = sum_parts(source + at, inside, count, part_stride)
    if HAS_BIAS:
        x += tl.load(bias + at, inside, 0.0)
    scale = tl.full((1,), 1.0, tl.float32)
    if HAS_NORM:
        scale = 1 / tl.sqrt(tl.sum(x * x, 1) / DIM + EPSILON)
        x *= scale[:, None] * tl.load(weight + dims, dims < DIM, 0.0)[None, :]
    if PAIRS:
        is_turned = dims < 2 * PAIRS
        if IS_INTERLEAVED:
            other, pair, is_first = dims ^ 1, dims // 2, dims % 2 == 0
        else:
            is_first = dims < PAIRS
            other = tl.where(is_first, dims + PAIRS, dims - PAIRS)
            pair = tl.where(is_first, dims, dims - PAIRS)
        other_at = heads[:, None] * DIM + other[None, :]
        has_other = inside & is_turned[None, :]
        y = sum_parts(source + other_at, has_other, count, part_stride)
        if HAS_BIAS:
            y += tl.load(bias + other_at, has_other, 0.0)
        if HAS_NORM:
            y *= scale[:, None] * tl.load(weight + other, is_turned, 0.0)[None, :]
        cosine = tl.load(turn + pair, is_turned, 1.0)
        sine = tl.load(turn + PAIRS + pair, is_turned, 0.0)
        sine = tl.where(is_first, -sine, sine)
        x = x * cosine[None, :] + y * sine[None, :]
    return x


_CHANGING: Final = [f"{x}_{y}" for x in "qkv" for y in ("count", "part_stride")]


@triton.jit(do_not_specialize=_CHANGING)
def _rope(
    header, positions, tables_of, first_extra, extra, tables, q, k, v, q_bias, k_bias, v_bias,
    q_weight, k_weight, q_turn, k_turn, cache, output, q_count, q_part_stride, k_count,
    k_part_stride, v_count, v_part_stride,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    HAS_Q_BIAS: tl.constexpr, HAS_K_BIAS: tl.constexpr, HAS_V_BIAS: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, Q_EPSILON: tl.constexpr,
    K_EPSILON: tl.constexpr, Q_PAIRS: tl.constexpr, K_PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, Q_TILES: tl.constexpr, KV_TILES: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, KEYS_AT: tl.constexpr, VALUES_AT: tl.constexpr,
    TABLE_STRIDE: tl.constexpr, GROUP_AT: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(header):
        return
    tile = tl.program_id(1)
    position = tl.load(positions + row)
    dims = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_H)
    if tile < Q_TILES:
        heads = tile * BLOCK_H + lanes
        inside = (heads < HEADS)[:, None] & (dims < DIM)[None, :]
        turned = _turned(
            q + row * Q_STRIDE, q_bias, q_weight, q_turn + position.to(tl.int64) * (2 * Q_PAIRS),
            q_count, q_part_stride, heads, dims, inside,
            HAS_Q_BIAS, HAS_Q_NORM, Q_EPSILON, Q_PAIRS, IS_INTERLEAVED, DIM,
        )  # fmt: skip
        at = output + row * (HEADS * DIM) + heads[:, None] * DIM + dims[None, :]
        tl.store(at, turned.to(output.dtype.element_ty), inside)
    else:
        is_key = tile < Q_TILES + KV_TILES
        heads = (tile - Q_TILES) % KV_TILES * BLOCK_H + lanes
        inside = (heads < KV_HEADS)[:, None] & (dims < DIM)[None, :]
        x = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
        if is_key:
            x = _turned(
                k + row * K_STRIDE, k_bias, k_weight,
                k_turn + position.to(tl.int64) * (2 * K_PAIRS), k_count, k_part_stride, heads, dims,
                inside, HAS_K_BIAS, HAS_K_NORM, K_EPSILON, K_PAIRS, IS_INTERLEAVED, DIM,
            )  # fmt: skip
        else:
            x = _turned(
                v + row * V_STRIDE, v_bias, v_bias, q_turn, v_count, v_part_stride, heads, dims,
                inside, HAS_V_BIAS, HAS_NORM=False, EPSILON=0.0, PAIRS=0, IS_INTERLEAVED=False,
                DIM=DIM,
            )  # fmt: skip
        stored = x.to(cache.dtype.element_ty)
        line = (heads[:, None] * PAGE_SIZE + position % PAGE_SIZE) * DIM + dims[None, :]
        line += tl.where(is_key, KEYS_AT, VALUES_AT)
        place = position // PAGE_SIZE + GROUP_AT
        page = tl.load(tables + tl.load(tables_of + row).to(tl.int64) * TABLE_STRIDE + place)
        tl.store(cache + page.to(tl.int64) * PAGE_STRIDE + line, stored, inside)
        for index in range(tl.load(first_extra + row), tl.load(first_extra + row + 1)):
            page = tl.load(tables + tl.load(extra + index).to(tl.int64) * TABLE_STRIDE + place)
            tl.store(cache + page.to(tl.int64) * PAGE_STRIDE + line, stored, inside)
