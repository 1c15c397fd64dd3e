"""Runs ranks in lockstep: each computes until it needs a value that another rank has not sent."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from twostroke.backends.reference.operations import apply, choose_experts
from twostroke.backends.reference.split_kv import merge_partials, partial_attentions
from twostroke.model.program import ops
from twostroke.model.program.sharding import ColumnParts, RowParts, TermParts, TokenParts

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator, Sequence

    from numpy.typing import NDArray

    from twostroke.backends.reference.operations import ReferenceStepState
    from twostroke.model.program.shard import RankProgram

    Array = NDArray[np.float32]
    Values = dict[str, Array]


def run_ranks(
    ranks: Sequence[RankProgram],
    states: Sequence[ReferenceStepState],
    returned_names: Collection[str],
) -> Values:
    """Compute a step on all ranks, one after another in this process, and return rank 0's values.

    The returned values are those in `returned_names`, and the outputs that no operation reads.
    """
    exchange = _Exchange()
    first: Values = {}
    runs = [
        _run_rank(
            number,
            rank,
            state=state,
            exchange=exchange,
            values=first if number == 0 else {},
            returned_names=returned_names if number == 0 else (),
        )
        for number, (rank, state) in enumerate(zip(ranks, states, strict=True))
    ]
    with np.errstate(all="ignore"):  # numbers that are not finite reach the logits
        while runs:
            num_done_before = exchange.num_done
            runs = [run for run in runs if next(run, None) is not None]
            assert not runs or exchange.num_done > num_done_before, "ranks wait for each other"
    return first


class _Exchange:
    """The values that the ranks in this process send to each other in a step."""

    def __init__(self) -> None:
        self.num_done = 0  # operations of all ranks
        self.contributions: dict[tuple[str, int], Any] = {}  # by exchange name and rank
        self.sent: defaultdict[tuple[int, int], deque[Array]] = defaultdict(deque)

    def meet(
        self, op: ops.AllGather | ops.AllReduce | ops.SplitKvAttention
    ) -> Generator[bool, None, list[Any]]:
        """Wait for the contributions of all ranks of a team to a collective, and return them.

        Yields True while contributions are missing, so that other ranks compute meanwhile.
        """
        while any((op.exchange_name, member) not in self.contributions for member in op.team):
            yield True
        return [self.contributions[op.exchange_name, member] for member in op.team]


def _run_rank(
    rank_number: int,
    rank: RankProgram,
    state: ReferenceStepState,
    exchange: _Exchange,
    values: Values,
    returned_names: Collection[str],
) -> Iterator[bool]:
    """Compute one rank's part of a step, operation by operation.

    Yields True when another rank must compute first.
    """
    last_use = {name: op for op in rank.program.ops for name in op.inputs}
    for op in rank.program.ops:
        match op:
            case ops.AllGather() | ops.AllReduce():
                exchange.contributions[op.exchange_name, rank_number] = (
                    None if op.x is None else values[op.x]
                )
                if isinstance(op, ops.AllReduce) or op.root in (None, rank_number):
                    parts = yield from exchange.meet(op)
                    values[op.output] = _combine_parts(op, parts, values, state)
            case ops.SplitKvAttention():
                exchange.contributions[op.exchange_name, rank_number] = partial_attentions(
                    op, values, state
                )
                team = yield from exchange.meet(op)
                values[op.output] = _own_rows(rank, merge_partials(op, team, state))
            case ops.Send():
                exchange.sent[rank_number, op.to].append(values[op.x])
            case ops.Receive():
                while not exchange.sent[op.sender, rank_number]:
                    yield True
                values[op.output] = exchange.sent[op.sender, rank_number].popleft()
            case ops.Embed() | ops.Logits():
                values[op.output] = apply(op, values, state)
            case _:
                values[op.output] = _own_rows(rank, apply(op, values, state))
        for name in set(op.inputs):
            if last_use[name] is op and name not in returned_names:
                del values[name]
        exchange.num_done += 1


def _own_rows(rank: RankProgram, value: Array) -> Array:
    """Set the rows of a value that other ranks compute to NaN, in a copy of the value.

    If an operation read these rows by mistake, its result would be NaN.
    """
    if rank.num_row_parts == 1:
        return value
    masked = np.full_like(value, np.nan)
    rows = _rows(len(value), rank.row_part, rank.num_row_parts)
    masked[rows] = value[rows]
    return masked


def _rows(num_rows: int, part: int, num_parts: int) -> slice:
    return slice(num_rows * part // num_parts, num_rows * (part + 1) // num_parts)


def _combine_parts(
    op: ops.AllGather | ops.AllReduce,
    parts: Sequence[Array | None],
    values: Values,
    state: ReferenceStepState,
) -> Array:
    """Compute the result of a collective from the parts of a team's ranks."""
    present = [part for part in parts if part is not None]
    if isinstance(op, ops.AllReduce):
        return sum(present[1:], present[0])
    if isinstance(op.parts, ColumnParts):
        return np.concatenate(present, axis=1)
    num_rows = len(present[0])
    combined = np.empty((num_rows, op.width), np.float32)
    match op.parts:
        case RowParts(count=count):
            for index, rows_of_part in enumerate(present):
                rows = _rows(num_rows, index, count)
                combined[rows] = rows_of_part[rows]
            return combined
        case TokenParts(cuts=cuts):
            owner = state.tokens
        case TermParts(cuts=cuts, scores=scores, num_used=num_used):
            owner = choose_experts(values[scores], num_used)
    shape = (*owner.shape, -1)
    for part, (first, end) in zip(parts, pairwise(cuts), strict=True):
        if part is not None:
            is_in_part = (owner >= first) & (owner < end)
            combined.reshape(shape)[is_in_part] = part.reshape(shape)[is_in_part]
    return combined
