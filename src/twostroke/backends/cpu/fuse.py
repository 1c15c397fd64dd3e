"""Divides a Program into runs of operations that one native record can do together."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from twostroke.backends.cpu.records import MAX_OUTPUTS
from twostroke.model.program import ops

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from twostroke.model.program import Op, Program


def fuse(program: Program, kept: Collection[str] = ()) -> list[tuple[Op, ...]]:
    """Return runs in the Program's order; each operation is in exactly one.

    A run is one operation, or one of: RMSNorm and every Linear that reads it; the same two and
    their GatedActivation; RMSNorm and Logits; Embed and Scale; Linear, RMSNorm, MixtureOfExperts or
    SumTerms and the Add of its output to an earlier value that nothing reads later, so that the sum
    can take its place. Values that are `kept` end a run.
    """
    uses = Counter(name for op in program.ops for name in op.inputs)
    uses.update(kept)
    last_reader = {name: op for op in program.ops for name in op.inputs}
    runs: list[tuple[Op, ...]] = []
    rest = _with_columns_first(program.ops)
    while rest:
        run = rest[: _run_length(rest, uses, last_reader)]
        runs.append(run)
        rest = rest[len(run) :]
    return runs


def _with_columns_first(operations: tuple[Op, ...]) -> tuple[Op, ...]:
    """Take columns before the operation whose output is added to them."""
    found = list(operations)
    for i in range(1, len(found) - 1):
        before, take, after = found[i - 1 : i + 2]
        if (
            isinstance(take, ops.TakeColumns)
            and isinstance(after, ops.Add)
            and (after.a, after.b) == (take.output, before.output)
            and take.x != before.output
        ):
            found[i - 1 : i + 1] = take, before
    return tuple(found)


def _run_length(rest: tuple[Op, ...], uses: Counter[str], last_reader: Mapping[str, Op]) -> int:
    """Return how many operations the longest run at the beginning of `rest` has."""
    first, *following = rest
    if isinstance(first, ops.RMSNorm) and first.num_groups == 1:
        linears = _linears(first, following)
        if 0 < len(linears) == uses[first.output] and len(linears) <= MAX_OUTPUTS:
            return 1 + len(linears) + _ends_in_gate(linears, following[len(linears) :], uses)
    if following and uses[first.output] == 1 and _is_pair(first, following[0], last_reader):
        return 2
    return 1


def _linears(norm: ops.RMSNorm, following: list[Op]) -> list[ops.Linear]:
    """Return the products right after `norm` that read its output."""
    found: list[ops.Linear] = []
    for op in following:
        if not isinstance(op, ops.Linear) or op.x != norm.output:
            break
        found.append(op)
    return found


def _ends_in_gate(linears: list[ops.Linear], rest: list[Op], uses: Counter[str]) -> bool:
    """Whether the products are a gate's two, without biases, and nothing else reads them."""
    follower = rest[0] if rest else None
    return (
        isinstance(follower, ops.GatedActivation)
        and [op.output for op in linears] == [follower.gate, follower.up]
        and all(uses[op.output] == 1 and op.bias is None for op in linears)
    )


def _is_pair(first: Op, second: Op, last_reader: Mapping[str, Op]) -> bool:
    """Whether one kernel does both, where `second` alone reads the output of `first`."""
    match first, second:
        case (
            (ops.Linear(bias=None) | ops.RMSNorm() | ops.MixtureOfExperts() | ops.SumTerms()),
            ops.Add(a=earlier, b=name),
        ):
            is_free = last_reader[earlier] is second and earlier not in first.inputs
            return name == first.output and is_free
        case (ops.Embed(), ops.Scale(x=name, weight=None)) | (
            ops.RMSNorm(num_groups=1),
            ops.Logits(x=name),
        ):
            return name == first.output
        case _:
            return False
