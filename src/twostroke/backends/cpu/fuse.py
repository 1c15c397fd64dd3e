"""Divides a Program into runs of operations that one native record can do together."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from twostroke.program import ops

if TYPE_CHECKING:
    from collections.abc import Collection

    from twostroke.program import Op, Program


def fuse(program: Program, kept: Collection[str] = ()) -> list[tuple[Op, ...]]:
    """Return runs in the Program's order; each operation is in exactly one.

    A run is one operation, or one of: RMSNorm and every Linear that reads it; the same two and
    their GatedActivation; RMSNorm and Logits; Embed and Scale; Linear, RMSNorm or MixtureOfExperts
    and the Add of its output to an earlier value. Values that are `kept` end a run.
    """
    uses = Counter(name for op in program.ops for name in op.inputs)
    uses.update(kept)
    runs: list[tuple[Op, ...]] = []
    rest = program.ops
    while rest:
        run = rest[: _run_length(rest, uses)]
        runs.append(run)
        rest = rest[len(run) :]
    return runs


def _run_length(rest: tuple[Op, ...], uses: Counter[str]) -> int:
    """Return how many operations the longest run at the beginning of `rest` has."""
    first, *following = rest
    if isinstance(first, ops.RMSNorm) and first.num_groups == 1:
        readers = _readers(first, following)
        if readers and len(readers) == uses[first.output]:
            return 1 + len(readers) + _ends_in_gate(readers, following[len(readers) :], uses)
    is_pair = bool(following) and uses[first.output] == 1 and _is_pair(first, following[0])
    return 2 if is_pair else 1


def _readers(norm: ops.RMSNorm, following: list[Op]) -> list[ops.Linear] | list[ops.Logits]:
    """Return the products right after `norm` that read its output, or the logits alone."""
    readers: list[ops.Linear] = []
    for op in following:
        if not readers and isinstance(op, ops.Logits) and op.x == norm.output:
            return [op]
        if not isinstance(op, ops.Linear) or op.x != norm.output:
            break
        readers.append(op)
    return readers


def _ends_in_gate(
    readers: list[ops.Linear] | list[ops.Logits], rest: list[Op], uses: Counter[str]
) -> bool:
    follower = rest[0] if rest else None
    return (
        isinstance(follower, ops.GatedActivation)
        and [op.output for op in readers] == [follower.gate, follower.up]
        and all(uses[op.output] == 1 and len(op.weights) == 1 for op in readers)
    )


def _is_pair(first: Op, second: Op) -> bool:
    match first, second:
        case ((ops.Linear(bias=None) | ops.RMSNorm() | ops.MixtureOfExperts()), ops.Add(b=name)):
            return name == first.output
        case ops.Embed(), ops.Scale(x=name):
            return name == first.output
        case _:
            return False
