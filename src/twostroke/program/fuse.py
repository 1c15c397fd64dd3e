"""Fusions: runs of operations that a backend does in one kernel.

A fused operation is its parts, in order, so whoever cannot run it whole can run its parts, and
its cost is theirs less the values that no longer leave the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from twostroke.program.ops import (
    Add,
    Embed,
    GatedActivation,
    Linear,
    Logits,
    MixtureOfExperts,
    RMSNorm,
    Scale,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from twostroke.program.ops import Op
    from twostroke.program.program import Program


class Kind(Enum):
    """What a run of operations does together."""

    SINGLE = "single"  # one operation by itself
    NORM_LINEAR = "norm_linear"  # RMSNorm, then one or more Linear of the same input
    NORM_GATED = "norm_gated"  # RMSNorm, two Linear, their GatedActivation
    LINEAR_ADD = "linear_add"  # Linear, then Add of its output to an earlier value
    NORM_LOGITS = "norm_logits"  # RMSNorm, then Logits
    NORM_ADD = "norm_add"  # RMSNorm, then Add of its output to an earlier value
    EXPERTS_ADD = "experts_add"  # MixtureOfExperts, then Add of its output to an earlier value
    EMBED_SCALE = "embed_scale"  # Embed, then Scale


@dataclass(frozen=True, slots=True)
class Fused:
    """One kernel's share of a Program."""

    kind: Kind
    parts: tuple[Op, ...]


def fuse(program: Program, kept: Collection[str] = ()) -> tuple[Fused, ...]:
    """Cut the Program into fused runs; each operation is in exactly one, in the Program's order.

    Values that are `kept` leave the kernel that computes them.
    """
    ops = program.ops
    uses = dict.fromkeys(kept, 1)
    for op in ops:
        for name in op.inputs:
            uses[name] = uses.get(name, 0) + 1
    runs: list[Fused] = []
    start = 0
    while start < len(ops):
        run = _run_at(ops[start:], uses)
        runs.append(run)
        start += len(run.parts)
    return tuple(runs)


def _run_at(ops: tuple[Op, ...], uses: dict[str, int]) -> Fused:
    """Return the longest fused run that `ops` begins with."""
    first = ops[0]
    if isinstance(first, RMSNorm) and first.num_groups == 1:
        readers = _readers(first, ops[1:])
        if len(readers) == uses[first.output]:
            run = _norm_run(first, readers, ops[1 + len(readers) :], uses)
            if run is not None:
                return run
    kind = _pair(first, ops[1]) if len(ops) > 1 and uses.get(first.output) == 1 else None
    return Fused(Kind.SINGLE, (first,)) if kind is None else Fused(kind, ops[:2])


def _pair(first: Op, second: Op) -> Kind | None:
    """Return what two operations do together of which the second alone reads the first."""
    match first, second:
        case Linear(bias=None), Add(b=name) if name == first.output:
            return Kind.LINEAR_ADD
        case RMSNorm(), Add(b=name) if name == first.output:
            return Kind.NORM_ADD
        case MixtureOfExperts(), Add(b=name) if name == first.output:
            return Kind.EXPERTS_ADD
        case Embed(), Scale(x=name) if name == first.output:
            return Kind.EMBED_SCALE
        case _:
            return None


def _readers(norm: RMSNorm, following: tuple[Op, ...]) -> list[Linear | Logits]:
    """Return the products right behind `norm` that read its output."""
    readers: list[Linear | Logits] = []
    for op in following:
        if not isinstance(op, Linear | Logits) or op.x != norm.output:
            break
        readers.append(op)
    return readers


def _norm_run(
    norm: RMSNorm, readers: list[Linear | Logits], rest: tuple[Op, ...], uses: dict[str, int]
) -> Fused | None:
    if any(isinstance(op, Logits) for op in readers):
        return Fused(Kind.NORM_LOGITS, (norm, *readers)) if len(readers) == 1 else None
    follower = rest[0] if rest else None
    if (
        isinstance(follower, GatedActivation)
        and [op.output for op in readers] == [follower.gate, follower.up]
        and all(uses[op.output] == 1 and op.weights == (op.weight,) for op in readers)
    ):
        return Fused(Kind.NORM_GATED, (norm, *readers, follower))
    return Fused(Kind.NORM_LINEAR, (norm, *readers)) if readers else None
