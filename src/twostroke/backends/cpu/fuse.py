"""Groups neighbouring operations of a Program that one native record can compute."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from twostroke.backends.cpu.records import MAX_OUTPUTS
from twostroke.model.program import ops

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from twostroke.model.program import Op, Program


def fuse(program: Program, kept_values: Collection[str] = ()) -> list[tuple[Op, ...]]:
    """Group a Program's operations into runs; one native record computes each run.

    A run is a single operation, or one of:

    - RMSNorm, and every Linear that reads it, and perhaps the GatedActivation of two of them;
    - RMSNorm and Logits;
    - Embed and Scale;
    - Linear, RMSNorm, MixtureOfExperts or SumTerms, and the Add of its output to an earlier value
      that no later operation reads, so that the sum can replace the earlier value.

    The outputs in `kept_values` end a run, because they must exist in memory.
    """
    uses = Counter(name for op in program.ops for name in op.inputs)
    uses.update(kept_values)
    last_reader = {name: op for op in program.ops for name in op.inputs}
    runs: list[tuple[Op, ...]] = []
    rest = _with_columns_first(program.ops)
    while rest:
        run = rest[: _run_length(rest, uses, last_reader)]
        runs.append(run)
        rest = rest[len(run) :]
    return runs


def _with_columns_first(operations: tuple[Op, ...]) -> tuple[Op, ...]:
    """Move each TakeColumns to just before the operation whose output is added to its result.

    That operation and the Add are then neighbours, and can be fused.
    """
    operations_in_order = list(operations)
    for i in range(1, len(operations_in_order) - 1):
        before, take, after = operations_in_order[i - 1 : i + 2]
        if (
            isinstance(take, ops.TakeColumns)
            and isinstance(after, ops.Add)
            and (after.a, after.b) == (take.output, before.output)
            and take.x != before.output
        ):
            operations_in_order[i - 1 : i + 1] = take, before
    return tuple(operations_in_order)


def _run_length(rest: tuple[Op, ...], uses: Counter[str], last_reader: Mapping[str, Op]) -> int:
    """Return how many of the first operations of `rest` one native record can compute."""
    first, *following = rest
    if isinstance(first, ops.RMSNorm) and first.num_groups == 1:
        linears = _linears(first, following)
        if 0 < len(linears) == uses[first.output] and len(linears) <= MAX_OUTPUTS:
            return 1 + len(linears) + _ends_in_gate(linears, following[len(linears) :], uses)
    if following and uses[first.output] == 1 and _is_pair(first, following[0], last_reader):
        return 2
    return 1


def _linears(norm: ops.RMSNorm, following: list[Op]) -> list[ops.Linear]:
    """Return the matrix products right after a norm that read the norm's output."""
    linears: list[ops.Linear] = []
    for op in following:
        if not isinstance(op, ops.Linear) or op.x != norm.output:
            break
        linears.append(op)
    return linears


def _ends_in_gate(linears: list[ops.Linear], rest: list[Op], uses: Counter[str]) -> bool:
    """Return whether two products can be fused with the gated activation after them.

    They must be its gate and up projections without biases, and have no other reader.
    """
    follower = rest[0] if rest else None
    return (
        isinstance(follower, ops.GatedActivation)
        and [op.output for op in linears] == [follower.gate, follower.up]
        and all(uses[op.output] == 1 and op.bias is None for op in linears)
    )


def _is_pair(first: Op, second: Op, last_reader: Mapping[str, Op]) -> bool:
    """Return whether one kernel can compute both operations of a pair.

    `second` must be the only reader of `first`'s output.
    """
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
