"""Which experts each row uses, and those pairs of row and expert in the order of the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.common import Parts, begin, sum_parts
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


class ExpertSelection(Frozen, eq=False):
    """How a row's scores choose experts, and become their shares (`ops.Route`).

    `wanted` is added to shares where they choose; `factors` multiply those that are chosen. Both
    are (experts,), float32.
    """

    normalize: bool
    is_sigmoid: bool = False
    scale: float = 1.0
    num_groups: int = 1
    num_used_groups: int = 1
    group_best: int = 1
    wanted: Tensor | None = None
    factors: Tensor | None = None


def launch(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    scores: Parts,
    bias: Tensor | None,
    routes: Routes,
    choice: ExpertSelection,
) -> None:
    """Choose the experts of each row by its scores, and put the pairs in order.

    Of equal scores the first is larger. A row with a score that is not a number has such shares.
    """
    block_e = triton.next_power_of_2(routes.num_experts)
    unused = header
    gpu.launch(
        _choose,
        (-(-num_rows // gpu.row_block),),
        header,
        scores.values,
        unused if bias is None else bias,
        unused if choice.wanted is None else choice.wanted,
        unused if choice.factors is None else choice.factors,
        routes.chosen,
        routes.shares,
        scores.count,
        scores.part_stride,
        num_warps=1,
        STRIDE=scores.row_stride,
        EXPERTS=routes.num_experts,
        USED=routes.num_used,
        HAS_BIAS=bias is not None,
        HAS_WANTED=choice.wanted is not None,
        HAS_FACTORS=choice.factors is not None,
        NORMALIZE=choice.normalize,
        IS_SIGMOID=choice.is_sigmoid,
        SCALE=choice.scale,
        GROUPS=choice.num_groups,
        USED_GROUPS=choice.num_used_groups,
        GROUP_BEST=choice.group_best,
        BLOCK_E=block_e,
        BLOCK_G=triton.next_power_of_2(choice.num_groups),
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

    LINES 0 means a product of all rows with one matrix. Programs are in the order of the rows, or
    of a mixture's items, for each block of columns, so that those with one matrix run together.
    """
    places, number = tl.arange(0, BLOCK_M), tl.program_id(0)
    if LINES == 0:
        first = number * BLOCK_M
        rows = (first + places).to(tl.int64)
        return tl.load(header) - first, rows, rows, tl.zeros((), tl.int64), tl.program_id(2)
    else:
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


@triton.jit
def _largest(ranks, places):
    """Return which of a row's numbers is the largest, and its place; no two are equal."""
    is_best = ranks == tl.max(ranks, 1)[:, None]
    return is_best, tl.sum(tl.where(is_best, places, 0), 1)[:, None]


@triton.jit
def _in_groups(
    ranks, wanted, experts, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, USED: tl.constexpr,
    BEST: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Return the ranks of experts in the groups whose best are the largest, of others the least."""
    least: tl.constexpr = -(1 << 62)
    group_of = experts // (EXPERTS // GROUPS)
    groups = tl.arange(0, BLOCK_G)[None, :]
    sums = tl.zeros((ranks.shape[0], BLOCK_G), tl.float32)
    for group in range(GROUPS):
        own = tl.where(group_of == group, ranks, least)
        for _ in range(BEST):
            is_best = own == tl.max(own, 1)[:, None]
            value = tl.sum(tl.where(is_best, wanted, 0.0), 1)[:, None]
            sums += tl.where(groups == group, value, 0.0)
            own = tl.where(is_best, least, own)
    of_groups = tl.where(groups < GROUPS, _rank_of(sums, groups), least)
    found = tl.full(ranks.shape, least, tl.int64)
    for _ in range(USED):
        is_chosen, chosen = _largest(of_groups, groups)
        found = tl.where(group_of == chosen, ranks, found)
        of_groups = tl.where(is_chosen, least, of_groups)
    return found


@triton.jit(do_not_specialize=["count", "part_stride"])
def _choose(
    header, scores, bias, wanted, factors, chosen, shares, count, part_stride,
    STRIDE: tl.constexpr, EXPERTS: tl.constexpr, USED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_WANTED: tl.constexpr, HAS_FACTORS: tl.constexpr, NORMALIZE: tl.constexpr,
    IS_SIGMOID: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr, USED_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
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
    if IS_SIGMOID:
        all_shares = 1 / (1 + tl.exp(-x))
        x = all_shares
    else:
        largest = tl.max(tl.where(is_expert, x, -float("inf")), 1)[:, None]
        all_shares = tl.where(is_expert, tl.exp(x - largest), 0.0)
        all_shares /= tl.sum(all_shares, 1)[:, None]
        if HAS_WANTED or GROUPS > 1:  # what is added to shares does not keep the order of scores
            x = all_shares
    if HAS_WANTED:
        x += tl.load(wanted + experts, is_expert, 0.0)
    ranks = tl.where(is_expert, _rank_of(x, experts), -(1 << 62))
    if GROUPS > 1:
        ranks = _in_groups(ranks, x, experts, EXPERTS, GROUPS, USED_GROUPS, GROUP_BEST, BLOCK_G)
    places = tl.arange(0, BLOCK_K)[None, :]
    own = tl.zeros((ROWS, BLOCK_K), tl.int32)
    own_shares = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for place in range(USED):
        is_best, best = _largest(ranks, experts)
        share = tl.sum(tl.where(is_best, all_shares, 0.0), 1)[:, None]
        own = tl.where(places == place, best, own)
        own_shares = tl.where(places == place, share, own_shares)
        ranks = tl.where(is_best, -(1 << 62), ranks)
    if NORMALIZE:
        own_shares /= tl.sum(own_shares, 1)[:, None] + 1e-20
    own_shares *= SCALE
    at = rows * USED + places
    is_place = (rows < num_rows) & (places < USED)
    if HAS_FACTORS:
        own_shares *= tl.load(factors + own, is_place, 0.0)
    tl.store(chosen + at, own, is_place)
    tl.store(shares + at, own_shares, is_place)


@triton.jit
def _order(
    header, chosen, counts, items, order,
    USED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the items and the order of one expert's pairs; the first program counts them all."""
    begin(OVERLAPS)
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
