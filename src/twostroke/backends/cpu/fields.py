"""What records say of an operation beside its values and weights, and what they cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from twostroke.backends.cpu.records import ExpertShareKind
from twostroke.core.errors import BackendError
from twostroke.model.program import ops

if TYPE_CHECKING:
    from twostroke.model.program import Program

    Fields = dict[str, Any]

_MOST_TOKENS: Final = 2**31 - 1
_HEAD_UNIT: Final = 16  # values of a head that the kernels handle at once
_MAX_HEAD_DIM: Final = 576


def check_heads(program: Program) -> None:
    """Refuse heads that the kernels cannot run, with a BackendError."""
    for op in program.ops:
        if isinstance(op, ops.Attention | ops.SplitKvAttention | ops.Rope) and (
            op.head_dim % _HEAD_UNIT or op.head_dim > _MAX_HEAD_DIM
        ):
            message = f"{program.name}: heads of {op.head_dim} values; the cpu backend runs"
            raise BackendError(f"{message} multiples of {_HEAD_UNIT} up to {_MAX_HEAD_DIM}.")


def fields_of_attention(op: ops.Attention | ops.SplitKvAttention) -> Fields:
    """Return those of attention, or of a rank's part of it."""
    return {
        "layer": op.layer,
        "num_heads": op.num_heads,
        "group": op.group_size,
        "scale": op.scale,
        "window": min(op.window or 0, _MOST_TOKENS),
        "soft_cap": op.soft_cap or 0,
    }


def fields_of_heads(op: ops.HeadLinear) -> Fields:
    """Return those of the products of heads."""
    sizes = {"x_head": op.x_head, "x_first": op.first, "x_width": op.in_width}
    return sizes | {"num_heads": op.num_heads}


def fields_of_joint(op: ops.Join) -> Fields:
    """Return those of a joint."""
    sizes = {"x_head": op.a_head, "x_first": op.first, "x_width": op.a_width}
    return sizes | {"num_heads": op.num_heads}


def fields_of_route(op: ops.Route) -> Fields:
    """Return those of a choice of experts."""
    return {
        "num_experts": op.width,
        "num_used": op.num_used,
        "num_groups": op.num_groups,
        "num_used_groups": op.num_used_groups,
        "group_best": op.group_best,
        "is_sigmoid": op.is_sigmoid,
        "shares": ExpertShareKind.CHOSEN if op.normalize else ExpertShareKind.ALL,
        "factor": op.scale,
    }


def shares_of(op: ops.MixtureOfExperts | ops.SumTerms) -> ExpertShareKind:
    """Return what the shares of chosen experts are."""
    if op.are_shares:
        return ExpertShareKind.GIVEN
    return ExpertShareKind.CHOSEN if op.normalize else ExpertShareKind.ALL
