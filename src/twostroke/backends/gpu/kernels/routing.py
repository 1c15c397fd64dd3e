"""Which experts each row uses, and those pairs of row and expert in the order of the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.parts import Parts, sum_parts
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu

_ITEM: Final = 4  # numbers: expert, first place in the order, pairs, 0
_BLOCK: Final = 1024
_LINE: Final = 4  # numbers; arrays begin at multiples, so that pointers are aligned


class Routes(Frozen, eq=False):
    """A step's pairs of row and expert: pair `r * num_used + i` is row r and its i-th choice.

    `header` counts the pairs, then the items. An item is an expert and up to `block` of its pairs,
    which lie together in `order`. There are at most `max_items`, whatever is chosen, so that the
    launches of a bucket of rows are always the same. `shares` are those of the pairs, float32.
    """

    num_experts: int
    num_used: int
    block: int
    max_items: int
    header: Tensor
    items: Tensor
    chosen: Tensor
    order: Tensor
    shares: Tensor


class Grouped(Frozen, eq=False):
    """How a product reads a mixture's rows: pair p reads line `p // lines` of x.

    With `is_shared` sums are multiplied by the pairs' shares.
    """

    routes: Routes
    lines: int = 1
    is_shared: bool = False


def routes_in(
    memory: Tensor, num_rows: int, num_experts: int, num_used: int, limits: tuple[int, int]
) -> Routes:
    """Divide `memory`, int32, (rows, `route_ints`), among the routes of a bucket of rows.

    A block has as many pairs as an expert on average, rounded to a power of two within the limits.
    """
    pairs = num_rows * num_used
    least, most = limits
    block = max(least, min(most, triton.next_power_of_2(-(-pairs // num_experts))))
    at, arrays = 0, []
    for count in (_LINE, _ITEM * pairs, pairs, pairs, pairs):
        arrays.append(memory[at : at + count])
        at += -(-count // _LINE) * _LINE
    header, items, chosen, order, shares = arrays
    max_items = min(pairs, pairs // block + num_experts)
    counts = num_experts, num_used, block, max_items
    return Routes(*counts, header, items, chosen, order, shares.view(torch.float32))


def launch(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    scores: Parts,
    bias: Tensor | None,
    routes: Routes,
    *,
    normalize: bool,
) -> None:
    """Choose the experts of each row by its scores, and put the pairs in order.

    The scores' softmax are the shares; with `normalize` they are divided by the sum of those that
    are chosen. Of equal scores the first is larger. A row with a score that is not a number has
    such shares.
    """
    block_e = triton.next_power_of_2(routes.num_experts)
    gpu.launch(
        _choose,
        (-(-num_rows // gpu.row_block),),
        header,
        scores.values,
        header if bias is None else bias,
        routes.chosen,
        routes.shares,
        scores.count,
        scores.part_stride,
        num_warps=1,
        STRIDE=scores.row_stride,
        EXPERTS=routes.num_experts,
        USED=routes.num_used,
        HAS_BIAS=bias is not None,
        NORMALIZE=normalize,
        BLOCK_E=block_e,
        BLOCK_K=triton.next_power_of_2(routes.num_used),
        ROWS=gpu.row_block,
    )
    gpu.launch(
        _order,
        (routes.num_experts,),
        header,
        routes.chosen,
        routes.header,
        routes.items,
        routes.order,
        USED=routes.num_used,
        BLOCK_M=routes.block,
        BLOCK_E=block_e,
        BLOCK=min(_BLOCK, triton.next_power_of_2(num_rows * routes.num_used)),
    )


@triton.jit
def rows_of(header, items, order, BLOCK_M: tl.constexpr, LINES: tl.constexpr):
    """Return how many rows a product's program has, which, those of x, its expert and columns.

    LINES 0 means a product of all rows with one matrix. The programs of a mixture are in the order
    of the items for each block of columns, so that those with one matrix run together.
    """
    places = tl.arange(0, BLOCK_M)
    if LINES == 0:
        first = tl.program_id(2) * BLOCK_M
        rows = (first + places).to(tl.int64)
        return tl.load(header) - first, rows, rows, tl.zeros((), tl.int64), tl.program_id(0)
    else:
        number = tl.program_id(0)
        is_item = number < tl.load(header + 1)
        item = items + number * 4
        count = tl.load(item + 2, is_item, 0)
        first = tl.load(item + 1, is_item, 0)
        rows = tl.load(order + first + places, places < count, 0).to(tl.int64)
        expert = tl.load(item, is_item, 0).to(tl.int64)
        return count, rows, rows // LINES, expert, tl.program_id(2)


@triton.jit
def rows_again(rows, items, order, BLOCK_M: tl.constexpr, LINES: tl.constexpr):
    """Return the rows of a mixture's program again, which take no registers in its loop."""
    if LINES == 0:
        return rows
    else:
        item = items + tl.program_id(0) * 4
        places = tl.arange(0, BLOCK_M)
        is_own = places < tl.load(item + 2, volatile=True)
        first = tl.load(item + 1, volatile=True)
        return tl.load(order + first + places, is_own, 0, volatile=True).to(tl.int64)


@triton.jit
def _rank_of(score, expert):
    """Return numbers that grow with the score, and for equal ones with an earlier place."""
    score = tl.where(score == 0, 0.0, score)  # -0
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ordered.to(tl.int64) * 65536 + (65535 - expert)


@triton.jit(do_not_specialize=["count", "part_stride"])
def _choose(
    header, scores, bias, chosen, shares, count, part_stride,
    STRIDE: tl.constexpr, EXPERTS: tl.constexpr, USED: tl.constexpr, HAS_BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    num_rows = tl.load(header)
    if tl.program_id(0) * ROWS >= num_rows:
        return
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    experts = tl.arange(0, BLOCK_E)[None, :]
    is_expert = experts < EXPERTS
    inside = (rows < num_rows) & is_expert
    x = sum_parts(scores + rows * STRIDE + experts, inside, count, part_stride)
    if HAS_BIAS:
        x += tl.load(bias + experts, is_expert, 0.0)
    largest = tl.max(tl.where(is_expert, x, -float("inf")), 1)[:, None]
    all_shares = tl.where(is_expert, tl.exp(x - largest), 0.0)
    all_shares /= tl.sum(all_shares, 1)[:, None]
    ranks = tl.where(is_expert, _rank_of(x, experts), -(1 << 62))
    places = tl.arange(0, BLOCK_K)[None, :]
    own = tl.zeros((ROWS, BLOCK_K), tl.int32)
    own_shares = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for place in range(USED):
        is_best = ranks == tl.max(ranks, 1)[:, None]
        best = tl.sum(tl.where(is_best, experts, 0), 1)[:, None]
        share = tl.sum(tl.where(is_best, all_shares, 0.0), 1)[:, None]
        own = tl.where(places == place, best, own)
        own_shares = tl.where(places == place, share, own_shares)
        ranks = tl.where(is_best, -(1 << 62), ranks)
    if NORMALIZE:
        own_shares /= tl.sum(own_shares, 1)[:, None]
    at = rows * USED + places
    is_place = (rows < num_rows) & (places < USED)
    tl.store(chosen + at, own, is_place)
    tl.store(shares + at, own_shares, is_place)


@triton.jit
def _order(
    header, chosen, counts, items, order,
    USED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the items and the order of one expert's pairs; the first program counts them all."""
    expert = tl.program_id(0)
    num_pairs = tl.load(header) * USED
    experts = tl.arange(0, BLOCK_E)
    found = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        inside = pairs < num_pairs
        found += tl.histogram(tl.load(chosen + pairs, inside, 0), BLOCK_E, mask=inside)
    blocks = (found + BLOCK_M - 1) // BLOCK_M
    if expert == 0:
        tl.store(counts, num_pairs)
        tl.store(counts + 1, tl.sum(blocks, 0))
    own = tl.sum(tl.where(experts == expert, found, 0), 0)
    first = tl.sum(tl.where(experts < expert, found, 0), 0)
    item = items + tl.sum(tl.where(experts < expert, blocks, 0), 0) * 4
    for done in range(0, own, BLOCK_M):
        tl.store(item, expert)
        tl.store(item + 1, first + done)
        tl.store(item + 2, tl.minimum(own - done, BLOCK_M))
        item += 4
    if own == 0:
        return
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        is_own = tl.load(chosen + pairs, pairs < num_pairs, -1) == expert
        place = first + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order + place, pairs, is_own)
        first += tl.sum(is_own.to(tl.int32), 0)
