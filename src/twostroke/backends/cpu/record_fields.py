"""The fields of native records, apart from their values and weights: sizes, teams, precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from twostroke.backends.cpu.layout import RankChannel
from twostroke.backends.cpu.records import ExpertShareKind, OpKind, PartsKind, Precision
from twostroke.core.errors import BackendError
from twostroke.core.options import ACTIVATION_BITS
from twostroke.model.program import ops
from twostroke.model.program.ops import Receive, Send
from twostroke.model.program.sharding import ColumnParts, RowParts, TermParts, TokenParts

if TYPE_CHECKING:
    from twostroke.model.program import Program

    Fields = dict[str, Any]
    from collections.abc import Sequence

    from twostroke.backends.cpu.layout import Team
    from twostroke.core.activation_bits import Bits
    from twostroke.model.program import Op
    from twostroke.model.program.ops import AllGather, SplitKvAttention

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


_PARTS = {
    ColumnParts: PartsKind.COLUMNS,
    RowParts: PartsKind.ROWS,
    TokenParts: PartsKind.TOKENS,
    TermParts: PartsKind.TERMS,
}


@dataclass(slots=True)
class Collectives:
    """What a rank's collectives name. A team has this rank's place among it."""

    teams: dict[tuple[Team, int], int] = field(default_factory=dict)
    channels: list[RankChannel] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    _cuts_at: dict[tuple[int, ...], int] = field(default_factory=dict)

    def fields(self, gather: AllGather | None) -> dict[str, Any]:
        """Return the fields of a record that gathers, or computes a part to be gathered."""
        if gather is None:
            return {}
        team = self._place_of_team(gather.team, gather.team_index)
        fields: dict[str, Any] = {"team": team, "parts": _PARTS[type(gather.parts)]}
        if not isinstance(gather.parts, RowParts):
            fields["first_cut"] = self._place_of_cuts(gather.parts.cuts)
        return fields

    def fields_of_pieces(self, op: SplitKvAttention) -> dict[str, Any]:
        """Return the fields of a record that exchanges pieces or their shares."""
        return {
            "team": self._place_of_team(op.team, op.team_index),
            "first_cut": self._place_of_cuts(op.head_cuts),
            "num_parts": op.num_column_parts,
        }

    def channel(self, op: Send | Receive) -> int:
        """Return the place of the channel for an operation's value."""
        is_sent = isinstance(op, Send)
        peer = op.to if isinstance(op, Send) else op.sender
        number = sum((c.is_sent, c.peer) == (is_sent, peer) for c in self.channels)
        self.channels.append(RankChannel(is_sent, peer, number, op.width))
        return len(self.channels) - 1

    def _place_of_team(self, team: Team, place: int) -> int:
        return self.teams.setdefault((team, place), len(self.teams))

    def _place_of_cuts(self, cuts: tuple[int, ...]) -> int:
        if cuts not in self._cuts_at:
            self._cuts_at[cuts] = len(self.cuts)
            self.cuts += cuts
        return self._cuts_at[cuts]


_BEFORE_ROUTERS: Final = {
    OpKind.LINEAR,
    OpKind.HEAD_PRODUCTS,
    OpKind.GATED,
    OpKind.ATTENTION,
    OpKind.PIECES,
}
_MOST_BITS: Final = max(ACTIVATION_BITS)
_PRECISIONS: Final = dict(
    zip(ACTIVATION_BITS, (Precision.PLAIN, Precision.MIXED, Precision.COARSE), strict=True)
)


def precision_of(kind: OpKind, run: Sequence[Op], bits: Bits, *, has_routers: bool) -> Precision:
    """Return how precise the inputs of a record that computes `run` are.

    With routers, the smallest difference can change the choice of experts. The products of a
    record share prepared inputs, so the one that needs most bits decides; a choice gives products
    of the same value the same number, so that ranks, which compute other parts of a record, agree.
    """
    if has_routers and kind in _BEFORE_ROUTERS:
        return Precision.PRECISE
    if isinstance(bits, int):
        return _PRECISIONS[bits]
    matrices = [weight.name for op in run for weight in op.weights if len(weight.shape) == 2]
    return _PRECISIONS[max((bits.get(name, _MOST_BITS) for name in matrices), default=_MOST_BITS)]
