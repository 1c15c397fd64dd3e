"""Chooses the experts of each row, and sorts (row, expert) pairs by expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.common import Parts, overlap_kernels, sum_parts
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu

_ITEM: Final = 4  # numbers of an item: expert, first index in the order, number of pairs, 0
_BLOCK: Final = 1024
_LINE: Final = 4  # arrays begin at multiples of 4 numbers, so that pointers are aligned


class Routes(Frozen, eq=False):
    """A step's (row, expert) pairs, sorted by expert, for the products of a mixture of experts.

    Pair `r * num_used + i` is row r and its i-th expert.

    - `header`: the number of pairs, then the number of items.
    - `items`: an item is an expert and up to `block` of its pairs, which are consecutive in
      `order`. There are at most `max_items`, so that all steps of a bucket have the same launches.
    - `order`: the pairs, sorted by expert.
    - `expert_ids` and `shares`: the expert and the weight (float32) of each pair.
    """

    num_experts: int
    num_used: int
    block: int
    max_items: int
    header: Tensor
    items: Tensor
    expert_ids: Tensor
    order: Tensor
    shares: Tensor


class Grouped(Frozen, eq=False):
    """How a mixture's product reads its rows: (row, expert) pair p reads row `p // lines` of x.

    So `lines` consecutive pairs read the same row. `is_shared`: the results are multiplied by the
    pairs' weights.
    """

    routes: Routes
    lines: int = 1
    is_shared: bool = False


def divide_memory(
    memory: Tensor, num_rows: int, num_experts: int, num_used: int, limits: tuple[int, int]
) -> Routes:
    """Divide `memory`, int32 (rows, `route_ints`), into the arrays of a step's expert routes.

    The size of a block is the mean number of pairs of an expert, rounded up to a power of two, and
    clamped to `limits`.
    """
    pairs = num_rows * num_used
    min_rows, max_rows = limits
    block = max(min_rows, min(max_rows, triton.next_power_of_2(-(-pairs // num_experts))))
    at, arrays = 0, []
    for count in (_LINE, _ITEM * pairs, pairs, pairs, pairs):
        arrays.append(memory[at : at + count])
        at += -(-count // _LINE) * _LINE
    header, items, expert_ids, order, shares = arrays
    max_items = min(pairs, pairs // block + num_experts)
    return Routes(
        num_experts=num_experts,
        num_used=num_used,
        block=block,
        max_items=max_items,
        header=header,
        items=items,
        expert_ids=expert_ids,
        order=order,
        shares=shares.view(torch.float32),
    )


class ExpertSelection(Frozen, eq=False):
    """The rule by which a router's scores choose and weight a row's experts (`ops.Route`).

    `selection_bias` is added to the weights only for the choice; `factors` multiply the weights of
    chosen experts. Both are (experts,), float32.
    """

    normalize: bool
    is_sigmoid: bool = False
    scale: float = 1.0
    num_groups: int = 1
    num_used_groups: int = 1
    group_best: int = 1
    selection_bias: Tensor | None = None
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
    """Launch the router of a mixture: choose each row's experts, and sort pairs by expert.

    Among equal scores, the first expert is chosen. If a score is NaN, the row's weights are NaN.
    """
    block_e = triton.next_power_of_2(routes.num_experts)
    unused = header
    gpu.launch(
        _choose_experts,
        (-(-num_rows // gpu.row_block),),
        header=header,
        scores=scores.values,
        bias=unused if bias is None else bias,
        selection_bias=unused if choice.selection_bias is None else choice.selection_bias,
        factors=unused if choice.factors is None else choice.factors,
        expert_ids=routes.expert_ids,
        shares=routes.shares,
        count=scores.count,
        part_stride=scores.part_stride,
        num_warps=1,
        STRIDE=scores.row_stride,
        EXPERTS=routes.num_experts,
        USED=routes.num_used,
        HAS_BIAS=bias is not None,
        HAS_SELECTION_BIAS=choice.selection_bias is not None,
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
        _sort_pairs,
        (routes.num_experts,),
        header=header,
        expert_ids=routes.expert_ids,
        counts=routes.header,
        items=routes.items,
        order=routes.order,
        USED=routes.num_used,
        BLOCK_M=routes.block,
        BLOCK_E=block_e,
        BLOCK=min(_BLOCK, triton.next_power_of_2(num_rows * routes.num_used)),
    )


@triton.jit
def rows_of(header, items, order, BLOCK_M: tl.constexpr, LINES: tl.constexpr):
    """Return the part of a product that a Triton program computes.

    Returns (number of rows, rows of the output, rows of x, expert, block of columns). LINES 0 means
    a product of all rows with one matrix. For each block of columns, programs are in the order of
    rows or of items, so that programs with the same matrix run together.
    """
    offsets, number = tl.arange(0, BLOCK_M), tl.program_id(0)
    if LINES == 0:
        first = number * BLOCK_M
        rows = (first + offsets).to(tl.int64)
        return tl.load(header) - first, rows, rows, tl.zeros((), tl.int64), tl.program_id(2)
    else:
        is_item = number < tl.load(header + 1)
        item = items + number * 4
        count = tl.load(item + 2, is_item, 0)
        first = tl.load(item + 1, is_item, 0)
        rows = tl.load(order + first + offsets, offsets < count, 0).to(tl.int64)
        expert = tl.load(item, is_item, 0).to(tl.int64)
        return count, rows, rows // LINES, expert, tl.program_id(2)


@triton.jit
def reload_rows(rows, items, order, BLOCK_M: tl.constexpr, LINES: tl.constexpr):
    """Load the row numbers of a mixture's program again, after its loop.

    If they were kept instead, they would take registers during the loop.
    """
    if LINES == 0:
        return rows
    else:
        item = items + tl.program_id(0) * 4
        offsets = tl.arange(0, BLOCK_M)
        is_pair = offsets < tl.load(item + 2, volatile=True)
        first = tl.load(item + 1, volatile=True)
        return tl.load(order + first + offsets, is_pair, 0, volatile=True).to(tl.int64)


@triton.jit
def _sort_keys(score, expert):
    """Return int64 keys that sort experts by score, and experts of equal score by id.

    A larger score, and of equal scores a lower id, has a larger key.
    """
    score = tl.where(score == 0, 0.0, score)  # -0
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ordered.to(tl.int64) * 65536 + (65535 - expert)


@triton.jit
def _largest(ranks, ids):
    """Return (the mask of each row's largest key, its expert id); no two keys are equal."""
    is_best = ranks == tl.max(ranks, 1)[:, None]
    return is_best, tl.sum(tl.where(is_best, ids, 0), 1)[:, None]


@triton.jit
def _limit_to_groups(
    ranks, selection_bias, experts, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, USED: tl.constexpr,
    BEST: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Exclude experts outside a row's best expert groups: give them the lowest sort key.

    Groups are ranked by the sum of the scores of their BEST best experts.
    """
    lowest: tl.constexpr = -(1 << 62)
    group_of = experts // (EXPERTS // GROUPS)
    groups = tl.arange(0, BLOCK_G)[None, :]
    sums = tl.zeros((ranks.shape[0], BLOCK_G), tl.float32)
    for group in range(GROUPS):
        group_ranks = tl.where(group_of == group, ranks, lowest)
        for _ in range(BEST):
            is_best = group_ranks == tl.max(group_ranks, 1)[:, None]
            value = tl.sum(tl.where(is_best, selection_bias, 0.0), 1)[:, None]
            sums += tl.where(groups == group, value, 0.0)
            group_ranks = tl.where(is_best, lowest, group_ranks)
    of_groups = tl.where(groups < GROUPS, _sort_keys(sums, groups), lowest)
    limited = tl.full(ranks.shape, lowest, tl.int64)
    for _ in range(USED):
        is_chosen, chosen_group = _largest(of_groups, groups)
        limited = tl.where(group_of == chosen_group, ranks, limited)
        of_groups = tl.where(is_chosen, lowest, of_groups)
    return limited


@triton.jit(do_not_specialize=["count", "part_stride"])
def _choose_experts(
    header, scores, bias, selection_bias, factors, expert_ids, shares, count, part_stride,
    STRIDE: tl.constexpr, EXPERTS: tl.constexpr, USED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SELECTION_BIAS: tl.constexpr, HAS_FACTORS: tl.constexpr, NORMALIZE: tl.constexpr,
    IS_SIGMOID: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr, USED_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    overlap_kernels(OVERLAPS)
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
        if HAS_SELECTION_BIAS or GROUPS > 1:  # sums of weights have another order than scores
            x = all_shares
    if HAS_SELECTION_BIAS:
        x += tl.load(selection_bias + experts, is_expert, 0.0)
    ranks = tl.where(is_expert, _sort_keys(x, experts), -(1 << 62))
    if GROUPS > 1:
        ranks = _limit_to_groups(
            ranks, x, experts=experts, EXPERTS=EXPERTS, GROUPS=GROUPS, USED=USED_GROUPS,
            BEST=GROUP_BEST, BLOCK_G=BLOCK_G,
        )  # fmt: skip
    slots = tl.arange(0, BLOCK_K)[None, :]
    chosen_ids = tl.zeros((ROWS, BLOCK_K), tl.int32)
    chosen_shares = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for slot in range(USED):
        is_best, best = _largest(ranks, experts)
        share = tl.sum(tl.where(is_best, all_shares, 0.0), 1)[:, None]
        chosen_ids = tl.where(slots == slot, best, chosen_ids)
        chosen_shares = tl.where(slots == slot, share, chosen_shares)
        ranks = tl.where(is_best, -(1 << 62), ranks)
    if NORMALIZE:
        chosen_shares /= tl.sum(chosen_shares, 1)[:, None] + 1e-20
    chosen_shares *= SCALE
    at = rows * USED + slots
    is_slot = (rows < num_rows) & (slots < USED)
    if HAS_FACTORS:
        chosen_shares *= tl.load(factors + chosen_ids, is_slot, 0.0)
    tl.store(expert_ids + at, chosen_ids, is_slot)
    tl.store(shares + at, chosen_shares, is_slot)


@triton.jit
def _sort_pairs(
    header, expert_ids, counts, items, order,
    USED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write one expert's work items, and the order of its (row, expert) pairs.

    The first program also writes the header.
    """
    overlap_kernels(OVERLAPS)
    expert = tl.program_id(0)
    num_pairs = tl.load(header) * USED
    experts = tl.arange(0, BLOCK_E)
    counts_of_experts = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        inside = pairs < num_pairs
        counts_of_experts += tl.histogram(
            tl.load(expert_ids + pairs, inside, 0), BLOCK_E, mask=inside
        )
    blocks = (counts_of_experts + BLOCK_M - 1) // BLOCK_M
    if expert == 0:
        tl.store(counts, num_pairs)
        tl.store(counts + 1, tl.sum(blocks, 0))
    num_own_pairs = tl.sum(tl.where(experts == expert, counts_of_experts, 0), 0)
    first = tl.sum(tl.where(experts < expert, counts_of_experts, 0), 0)
    item = items + tl.sum(tl.where(experts < expert, blocks, 0), 0) * 4
    for done in range(0, num_own_pairs, BLOCK_M):
        tl.store(item, expert)
        tl.store(item + 1, first + done)
        tl.store(item + 2, tl.minimum(num_own_pairs - done, BLOCK_M))
        item += 4
    if num_own_pairs == 0:
        return
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        is_own = tl.load(expert_ids + pairs, pairs < num_pairs, -1) == expert
        index = first + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order + index, pairs, is_own)
        first += tl.sum(is_own.to(tl.int32), 0)
