"""Norms and rotates the heads of queries and keys, and stores keys and values in KV pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.bytes import clamp_to_float16, hadamard_transform, quantize
from twostroke.backends.gpu.kernels.common import Parts, overlap_kernels, sum_parts
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.kernels.attention import HeadLayout
    from twostroke.backends.gpu.kernels.norm import Norm
    from twostroke.backends.gpu.launch import Gpu


class HeadSource(Frozen, eq=False):
    """Queries, keys or values of a step: a product's result, its bias, and the norm of heads."""

    parts: Parts
    bias: Tensor | None = None
    norm: Norm | None = None


class Rotation(Frozen, eq=False):
    """A rotary embedding's table of cosines and sines: float32 (positions, 2, pairs)."""

    table: Tensor
    num_pairs: int
    is_interleaved: bool


class SlotMapping(Frozen, eq=False):
    """The page tables, and the position and table of each row, for storing keys and values.

    All arrays are int32. `positions` and `tables_of`: the position and the page table of each row.
    Keys and values of row r are also stored in the tables `extra[first_extra[r] : first_extra[r +
    1]]`. `tables` has the page ids.
    """

    positions: Tensor
    tables_of: Tensor
    first_extra: Tensor
    extra: Tensor
    tables: Tensor

    @property
    def arguments(self) -> dict[str, Tensor]:
        """Return the arrays of the slot mapping as arguments of a kernel."""
        return {
            "positions": self.positions,
            "tables_of": self.tables_of,
            "first_extra": self.first_extra,
            "extra": self.extra,
            "tables": self.tables,
        }


def launch(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    slots: SlotMapping,
    sources: tuple[HeadSource, ...],
    rotations: tuple[Rotation | None, Rotation | None],
    heads: HeadLayout,
    cache: Tensor,
    output: Tensor,
    balance: Tensor | None = None,
) -> None:
    """Launch the kernel that norms and rotates queries and keys, and fills the KV pages.

    Queries are written to `output` (rows, heads * head_dim), and keys and values to the `cache`.
    `sources`: queries, keys and values, or only queries. `rotations`: of queries and of keys.
    `balance`: float32 (3, kv_heads * head_dim), for the format int8: keys are balanced as (key -
    balance[0]) * balance[1], and queries are multiplied by balance[2].
    """
    unused, stores = header, len(sources) > 1
    sources = sources if stores else sources * 3
    tables = [unused if rotation is None else rotation.table for rotation in rotations]
    block_d = triton.next_power_of_2(heads.head_dim)
    block_h = 64 if gpu.is_interpreted else 4
    q_tiles = -(-num_rows * heads.num_heads // block_h)
    kv_tiles = -(-num_rows * heads.num_kv_heads // block_h) if stores else 0
    gpu.launch(
        _rope,
        (q_tiles + 2 * kv_tiles,),
        header=header,
        **slots.arguments,
        **_source_arguments(sources, unused),
        q_rotation=tables[0],
        k_rotation=tables[1],
        cache=heads.layer(cache),
        scales=heads.scales(cache),
        balance=unused if balance is None else balance,
        output=output,
        q_tiles=q_tiles,
        kv_tiles=kv_tiles,
        num_warps=max(1, min(4, block_h * block_d // 256)),
        **_constants_of(sources, rotations),
        **heads.constants,
        HAS_BALANCE=balance is not None,
        LEVELS=_levels(heads.head_dim) if heads.kv_format == "int8" else 0,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
    )


def _source_arguments(sources: tuple[HeadSource, ...], unused: Tensor) -> dict[str, Any]:
    """Return the tensors of queries, keys and values as arguments of the kernel.

    In place of a missing tensor, the kernel gets `unused`.
    """
    arguments: dict[str, Any] = {}
    for name, source in zip("qkv", sources, strict=True):
        arguments[name] = source.parts.values
        arguments[f"{name}_bias"] = unused if source.bias is None else source.bias
        arguments[f"{name}_weight"] = unused if source.norm is None else source.norm.weight
        arguments[f"{name}_count"] = source.parts.count
        arguments[f"{name}_part_stride"] = source.parts.part_stride
    return arguments


def _levels(head_dim: int) -> int:
    """Return log2 of the size of the Hadamard matrix for int8 keys.

    The size is the largest power of two that divides head_dim.
    """
    return (head_dim & -head_dim).bit_length() - 1


def _constants_of(
    sources: tuple[HeadSource, ...], rotations: tuple[Rotation | None, ...]
) -> dict[str, Any]:
    constants: dict[str, Any] = {}
    for name, source in zip("QKV", sources, strict=True):
        constants[f"{name}_STRIDE"] = source.parts.row_stride
        constants[f"HAS_{name}_BIAS"] = source.bias is not None
        constants[f"HAS_{name}_NORM"] = source.norm is not None
        constants[f"{name}_EPSILON"] = source.norm.epsilon if source.norm else 0.0
    for name, rotation in zip("QK", rotations, strict=True):
        constants[f"{name}_PAIRS"] = rotation.num_pairs if rotation else 0
    constants["IS_INTERLEAVED"] = any(rotation.is_interleaved for rotation in rotations if rotation)
    return constants


@triton.jit
def norm_and_rotate(
    source, bias, weight, rotation, count, part_stride, rows, heads, position, inside,
    STRIDE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, EPSILON: tl.constexpr,
    PAIRS: tl.constexpr, IS_INTERLEAVED: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load (row, head) pairs of queries or keys, apply norm and RoPE; return (pairs, dims)."""
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
        is_rotated = dims < 2 * PAIRS
        if IS_INTERLEAVED:
            other, pair, is_first = dims ^ 1, dims // 2, dims % 2 == 0
        else:
            is_first = dims < PAIRS
            other = tl.where(is_first, dims + PAIRS, dims - PAIRS)
            pair = tl.where(is_first, dims, dims - PAIRS)
        inside &= is_rotated[None, :]
        y = sum_parts(source + other[None, :], inside, count, part_stride)
        if HAS_BIAS:
            y += tl.load(bias + line + other[None, :], inside, 0.0)
        if HAS_NORM:
            y *= scale * tl.load(weight + other, is_rotated, 0.0)[None, :]
        rotation += position.to(tl.int64)[:, None] * (2 * PAIRS) + pair[None, :]
        sine = tl.load(rotation + PAIRS, inside, 0.0)
        x = x * tl.load(rotation, inside, 1.0) + tl.where(is_first[None, :], -sine, sine) * y
    return x


@triton.jit
def _balance_queries(
    x, balance, groups, inside, HAS_BALANCE: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Return queries (pairs, dims) scaled to fit the keys that `_balance_keys` has balanced."""
    if HAS_BALANCE:
        balance += (2 * KV_HEADS + groups)[:, None] * DIM + tl.arange(0, x.shape[1])
        x *= tl.load(balance, inside, 0.0)
    return hadamard_transform(x, x.shape[0], x.shape[1], LEVELS)


@triton.jit
def _balance_keys(
    x, balance, heads, inside, HAS_BALANCE: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Return keys (pairs, dims) prepared for int8.

    Their means are subtracted, channels are scaled, and the result is multiplied by a Hadamard
    matrix.
    """
    if HAS_BALANCE:
        balance += heads[:, None] * DIM + tl.arange(0, x.shape[1])
        x -= tl.load(balance, inside, 0.0)
        x *= tl.load(balance + KV_HEADS * DIM, inside, 0.0)
    return hadamard_transform(x, x.shape[0], x.shape[1], LEVELS) * (1 / (1 << LEVELS))


@triton.jit
def _store_rows(
    cache, scales, tables, tables_of, first_extra, extra, rows, heads, position, x, inside, at,
    scale_at, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr,
    GROUP_AT: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store keys or values x (pairs, dims) in the KV pages of their rows.

    A row may be stored in several page tables, for draft branches.
    """
    dims = tl.arange(0, BLOCK_D)[None, :]
    is_pair = tl.max(inside.to(tl.int32), 1) > 0
    within = heads * PAGE_SIZE + position % PAGE_SIZE
    line = at + within[:, None] * DIM + dims
    page_index = position // PAGE_SIZE + GROUP_AT
    table = tl.load(tables_of + rows, is_pair, 0).to(tl.int64)
    page = tl.load(tables + table * TABLE_STRIDE + page_index, is_pair, 0).to(tl.int64)
    scale = position  # not used without a format
    if KV != "":
        x = clamp_to_float16(x)
        x, scale = quantize(x, tl.max(tl.abs(x), 1), KV)
        scales += scale_at + within
        tl.store(scales + page * (PAGE_STRIDE // 2), scale, is_pair)
    x = x.to(cache.dtype.element_ty)
    tl.store(cache + page[:, None] * PAGE_STRIDE + line, x, inside)
    first = tl.load(first_extra + rows, is_pair, 0)
    count = tl.load(first_extra + rows + 1, is_pair, 0) - first
    for index in range(tl.max(count, 0)):
        has_more = is_pair & (index < count)
        table = tl.load(extra + first + index, has_more, 0).to(tl.int64)
        page = tl.load(tables + table * TABLE_STRIDE + page_index, has_more, 0).to(tl.int64)
        tl.store(cache + page[:, None] * PAGE_STRIDE + line, x, inside & has_more[:, None])
        if KV != "":
            tl.store(scales + page * (PAGE_STRIDE // 2), scale, has_more)


_UNSPECIALIZED = [f"{x}_{y}" for x in "qkv" for y in ("count", "part_stride")]
_UNSPECIALIZED += ["q_tiles", "kv_tiles"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _rope(
    header, positions, tables_of, first_extra, extra, tables, q, k, v, q_bias, k_bias, v_bias,
    q_weight, k_weight, v_weight, q_rotation, k_rotation, cache, scales, balance, output, q_count,
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
    overlap_kernels(OVERLAPS)
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
        x = norm_and_rotate(
            q, q_bias, weight=q_weight, rotation=q_rotation, count=q_count,
            part_stride=q_part_stride, rows=rows, heads=heads, position=position, inside=inside,
            STRIDE=Q_STRIDE, HAS_BIAS=HAS_Q_BIAS, HAS_NORM=HAS_Q_NORM, EPSILON=Q_EPSILON,
            PAIRS=Q_PAIRS, IS_INTERLEAVED=IS_INTERLEAVED, DIM=DIM, BLOCK_D=BLOCK_D,
        )  # fmt: skip
        groups = heads // (HEADS // KV_HEADS)
        x = _balance_queries(
            x, balance, groups=groups, inside=inside, HAS_BALANCE=HAS_BALANCE, KV_HEADS=KV_HEADS,
            DIM=DIM, LEVELS=LEVELS,
        )  # fmt: skip
        at = rows[:, None] * (HEADS * DIM) + heads[:, None] * DIM + tl.arange(0, BLOCK_D)[None, :]
        tl.store(output + at, x.to(output.dtype.element_ty), inside)
    else:
        first = (tile - q_tiles) % kv_tiles * BLOCK_H
        pairs = first + tl.arange(0, BLOCK_H)
        rows, heads = (pairs // KV_HEADS).to(tl.int64), pairs % KV_HEADS
        if first >= num_rows * KV_HEADS:
            return
        inside = (rows < num_rows)[:, None] & is_dim
        position = tl.load(positions + rows, rows < num_rows, 0)
        is_key = tile < q_tiles + kv_tiles
        if is_key:
            x = norm_and_rotate(
                k, k_bias, weight=k_weight, rotation=k_rotation, count=k_count,
                part_stride=k_part_stride, rows=rows, heads=heads, position=position, inside=inside,
                STRIDE=K_STRIDE, HAS_BIAS=HAS_K_BIAS, HAS_NORM=HAS_K_NORM, EPSILON=K_EPSILON,
                PAIRS=K_PAIRS, IS_INTERLEAVED=IS_INTERLEAVED, DIM=DIM, BLOCK_D=BLOCK_D,
            )  # fmt: skip
            x = _balance_keys(
                x, balance, heads=heads, inside=inside, HAS_BALANCE=HAS_BALANCE,
                KV_HEADS=KV_HEADS, DIM=DIM, LEVELS=LEVELS,
            )  # fmt: skip
        else:
            x = norm_and_rotate(
                v, v_bias, weight=v_weight, rotation=v_bias, count=v_count,
                part_stride=v_part_stride, rows=rows, heads=heads, position=position, inside=inside,
                STRIDE=V_STRIDE, HAS_BIAS=HAS_V_BIAS, HAS_NORM=HAS_V_NORM, EPSILON=V_EPSILON,
                PAIRS=0, IS_INTERLEAVED=False, DIM=DIM, BLOCK_D=BLOCK_D,
            )  # fmt: skip
        _store_rows(
            cache, scales, tables=tables, tables_of=tables_of, first_extra=first_extra,
            extra=extra, rows=rows, heads=heads, position=position, x=x, inside=inside,
            at=tl.where(is_key, KEYS_AT, VALUES_AT),
            scale_at=tl.where(is_key, SCALES_AT, SCALES_AT + KV_HEADS * PAGE_SIZE),
            PAGE_SIZE=PAGE_SIZE, PAGE_STRIDE=PAGE_STRIDE, TABLE_STRIDE=TABLE_STRIDE,
            GROUP_AT=GROUP_AT, KV=KV, DIM=DIM, BLOCK_D=BLOCK_D,
        )  # fmt: skip
