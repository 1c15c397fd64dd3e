"""Attention, a block of tokens after another: a program's items, tokens' pages, sums of rows.

Scores are kept as products leave them. A constant turns them into exponents of two, so that a
token's share takes one multiply-add and one instruction for the power.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from twostroke.backends.gpu.launch import Gpu

LOG2_E = tl.constexpr(math.log2(math.e))
LEAST = tl.constexpr(-1e30)  # the top of rows that have seen no token; finite, for differences


def scales_alone(gpu: Gpu, kv_format: str) -> bool:
    """Whether values are scaled, not shares: see `updated`."""
    return gpu.same_tokens and bool(kv_format) and gpu.element == torch.float16


@triton.jit
def turns_of(num, NUM_PROGRAMS: tl.constexpr):
    """Return how many of `num` items this program computes."""
    last = index_of(num // NUM_PROGRAMS, NUM_PROGRAMS)
    return num // NUM_PROGRAMS + tl.where(last < num, 1, 0)


@triton.jit
def index_of(turn, NUM_PROGRAMS: tl.constexpr):
    """Return the item that this program computes in a turn.

    Every other turn begins with the last program, so that all have as much to do if items are
    sorted by size.
    """
    own = tl.program_id(0)
    return turn * NUM_PROGRAMS + tl.where(turn % 2 == 0, own, NUM_PROGRAMS - 1 - own)


@triton.jit
def within_seen(at, first, end):
    """Return positions; of tokens before the first or after the last one, those of these."""
    return tl.maximum(tl.minimum(at, end - 1), first)


@triton.jit
def pages_of(table, at, PAGE_SIZE: tl.constexpr):
    """Return the pages of tokens at positions.

    Loops read those of the next block ahead: then the pipeline has keys and values to wait for,
    but no pages.
    """
    return tl.load(table + (at.to(tl.uint32) // PAGE_SIZE))


@triton.jit
def as_pages(queries, cache):
    """Return queries in F16 for pages in F16, or keys and values would go by way of registers."""
    return queries.to(tl.float16 if cache.dtype.element_ty == tl.float16 else queries.dtype)


@triton.jit
def nothing_seen(NUM: tl.constexpr, WIDTH: tl.constexpr):
    """Return the sums of rows before a block of tokens, as `updated` does."""
    total = tl.zeros((NUM,), tl.float32)
    return total + LEAST, total, tl.zeros((NUM, WIDTH), tl.float32), 1.0


@triton.jit
def updated(
    scores, values, value_scales, top, total, mixed, unit, FACTOR: tl.constexpr, KV: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    """Return the sums of rows after a block of tokens more, with such scores and values.

    A token's share is 2 to the power of FACTOR times its score. `mixed` counts in `unit`s. ALONE
    means that no token's scale may touch another one's share, not even by what float16 rounds.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    shares = tl.exp2(scores * FACTOR - (new_top * FACTOR)[:, None])
    shrink = tl.exp2((top - new_top) * FACTOR)
    total = total * shrink + tl.sum(shares, 1)
    if ALONE:
        values = (values.to(tl.float32) * value_scales[:, None]).to(values.dtype)
    elif KV != "":
        # Shares times small scales are less than float16 holds: scales relative to the largest.
        # Powers of two round nothing, whatever other rows' tokens are in the block.
        bits = tl.max(value_scales, 0).to(tl.int32, bitcast=True) & 0x7F800000
        bits = tl.where(bits == 0, 127 << 23, bits)
        inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
        shares *= (value_scales * inverse)[None, :]
        shrink *= unit * inverse
        unit = bits.to(tl.float32, bitcast=True)
    mixed *= shrink[:, None]
    mixed = tl.dot(shares.to(values.dtype), values, mixed, input_precision="ieee")
    return new_top, total, mixed, unit


@triton.jit
def write(slot, output, sums, tops, inside, is_pair, top, total, mixed):
    """Write results to `output`, or the sums of a piece, which has a slot, for the merge."""
    if slot < 0:
        result = mixed / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(output, result.to(output.dtype.element_ty), inside)
    else:
        tl.store(sums, mixed, inside)
        tl.store(tops, top, is_pair)
        tl.store(tops + 1, total, is_pair)
