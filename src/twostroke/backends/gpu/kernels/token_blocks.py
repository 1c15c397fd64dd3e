"""Functions that attention kernels share: a program's items, tokens' pages, and online softmax.

Scores are not scaled. Instead, one constant factor makes them exponents of 2, so that a token's
softmax weight takes one multiply-add and one `exp2`.
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
MIN_TOP = tl.constexpr(
    -1e30
)  # the top before the first token; finite, because differences are computed


def scales_alone(gpu: Gpu, kv_format: str) -> bool:
    """Return whether attention applies the scales of 8-bit values before the softmax weights.

    Otherwise the scales are multiplied into the softmax weights; see `add_block`.
    """
    return gpu.same_tokens and bool(kv_format) and gpu.element == torch.float16


@triton.jit
def num_items_of(num, NUM_PROGRAMS: tl.constexpr):
    """Return how many of `num` attention work items this program computes."""
    last = item_index(num // NUM_PROGRAMS, NUM_PROGRAMS)
    return num // NUM_PROGRAMS + tl.where(last < num, 1, 0)


@triton.jit
def item_index(turn, NUM_PROGRAMS: tl.constexpr):
    """Return the index of the attention work item that this program computes in turn `turn`.

    In every second turn, items are assigned to programs in reverse order. This balances the work if
    items are sorted by size.
    """
    program = tl.program_id(0)
    return turn * NUM_PROGRAMS + tl.where(turn % 2 == 0, program, NUM_PROGRAMS - 1 - program)


@triton.jit
def clamp_position(at, first, end):
    """Return token positions limited to the range from `first` to `end` - 1."""
    return tl.maximum(tl.minimum(at, end - 1), first)


@triton.jit
def pages_of(table, at, PAGE_SIZE: tl.constexpr):
    """Load the KV page ids of tokens at these positions from a page table.

    Loops load the page ids of the next block in advance, so that the pipeline waits only for keys
    and values.
    """
    return tl.load(table + (at.to(tl.uint32) // PAGE_SIZE))


@triton.jit
def cast_to_pages(queries, cache):
    """Convert queries to float16 if KV pages are float16; keys then need no conversion."""
    return queries.to(tl.float16 if cache.dtype.element_ty == tl.float16 else queries.dtype)


@triton.jit
def empty_sums(NUM: tl.constexpr, WIDTH: tl.constexpr):
    """Return the online softmax's initial state: (top, total, mixed, unit) of `add_block`."""
    total = tl.zeros((NUM,), tl.float32)
    return total + MIN_TOP, total, tl.zeros((NUM, WIDTH), tl.float32), 1.0


@triton.jit
def add_block(
    scores, values, value_scales, top, total, mixed, unit, FACTOR: tl.constexpr, KV: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    """Add a block of tokens to the online softmax of attention rows; return the new state.

    The state is (top, total, mixed, unit): `top` is the largest score so far, `total` the sum of
    weights, and `mixed` * `unit` the weighted sum of values. A token's weight is 2^(FACTOR *
    score). With ALONE, values are multiplied by their scales first, so that a token's scale cannot
    change the rounding of other tokens' weights.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    shares = tl.exp2(scores * FACTOR - (new_top * FACTOR)[:, None])
    shrink = tl.exp2((top - new_top) * FACTOR)
    total = total * shrink + tl.sum(shares, 1)
    if ALONE:
        values = (values.to(tl.float32) * value_scales[:, None]).to(values.dtype)
    elif KV != "":
        # Weights times small scales would underflow in float16, so scales are relative to the
        # largest scale. It is rounded to a power of two, so that the division is exact.
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
def write_result(slot, output, sums, tops, inside, is_pair, top, total, mixed):
    """Write attention results: to `output`, or the sums of a context's piece to its slot.

    The merge kernel reads the sums of pieces.
    """
    if slot < 0:
        result = mixed / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(output, result.to(output.dtype.element_ty), inside)
    else:
        tl.store(sums, mixed, inside)
        tl.store(tops, top, is_pair)
        tl.store(tops + 1, total, is_pair)
