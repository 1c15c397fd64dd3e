"""The fields of native records except values and weights: sizes, teams, precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from twostroke.backends.cpu.layout import RankChannel
from twostroke.backends.cpu.records import (
    ACTIVATIONS,
    NONE,
    ExpertShareKind,
    OpKind,
    PartsKind,
    Precision,
)
from twostroke.core.errors import BackendError
from twostroke.core.message_text import counted_noun
from twostroke.core.options import ACTIVATION_BITS
from twostroke.model.program import ops
from twostroke.model.program.ops import Receive, Send
from twostroke.model.program.sharding import ColumnParts, RowParts, TermParts, TokenParts

if TYPE_CHECKING:
    from twostroke.model.program import Program

    Fields = dict[str, Any]
    from collections.abc import Sequence

    from twostroke.backends.cpu.layout import Team
    from twostroke.core.options import Bits
    from twostroke.model.program import Op
    from twostroke.model.program.ops import AllGather, SplitKvAttention

_MAX_TOKENS: Final = 2**31 - 1
_HEAD_UNIT: Final = 16  # values of a head that the kernels handle at once
_MAX_HEAD_DIM: Final = 576


def check_heads(program: Program) -> None:
    """Raise BackendError if the cpu kernels do not support a model's head size."""
    for op in program.ops:
        if isinstance(op, ops.Attention | ops.SplitKvAttention | ops.Rope) and (
            op.head_dim % _HEAD_UNIT or op.head_dim > _MAX_HEAD_DIM
        ):
            message = (
                f"{program.name}: heads of {counted_noun(op.head_dim, 'value')}; the cpu backend "
                "runs"
            )
            raise BackendError(f"{message} multiples of {_HEAD_UNIT} up to {_MAX_HEAD_DIM}.")


def fields_of_attention(op: ops.Attention | ops.SplitKvAttention) -> Fields:
    """Return the native record's fields for an attention operation, or a rank's part of it."""
    return {
        "layer": op.layer,
        "num_heads": op.num_heads,
        "group": op.group_size,
        "scale": op.scale,
        "window": min(op.window or 0, _MAX_TOKENS),
        "is_chunked": op.is_chunked,
        "soft_cap": op.soft_cap or 0,
    }


def fields_of_heads(op: ops.HeadLinear) -> Fields:
    """Return the native record's fields for a product with a separate matrix for each head."""
    sizes = {"x_head": op.x_head, "x_first": op.first, "x_width": op.in_width}
    return sizes | {"num_heads": op.num_heads}


def fields_of_join(op: ops.Join) -> Fields:
    """Return the native record's fields for a Join, which concatenates two values head by head."""
    sizes = {"x_head": op.a_head, "x_first": op.first, "x_width": op.a_width}
    return sizes | {"num_heads": op.num_heads}


def fields_of_route(op: ops.Route) -> Fields:
    """Return the native record's fields for the routing of rows to experts."""
    return {
        "num_experts": op.width,
        "num_used": op.num_used,
        "num_groups": op.num_groups,
        "num_used_groups": op.num_used_groups,
        "group_best": op.group_best,
        "is_sigmoid": op.is_sigmoid,
        "shares": ExpertShareKind.CHOSEN_SCORES if op.normalize else ExpertShareKind.ALL_SCORES,
        "factor": op.scale,
    }


def fields_of_convolution(op: ops.ShortConvolution) -> Fields:
    """Return the native record's fields for a short convolution."""
    activation = NONE if op.activation is None else ACTIVATIONS[op.activation]
    return {"layer": op.layer, "kernel": op.kernel, "activation": activation}


def fields_of_delta_rule(op: ops.GatedDeltaRule) -> Fields:
    """Return the native record's fields for a gated delta rule."""
    return {
        "layer": op.layer,
        "num_heads": op.num_value_heads,
        "first_head": op.first_head,
        "num_groups": op.num_key_heads,
        "group": op.num_all_heads // op.num_key_heads,
        "x_head": op.key_dim,
        "is_tiled": op.is_tiled,
        "gates_channels": op.gates_channels,
        "epsilon": op.epsilon,
    }


def fields_of_mamba2(op: ops.Mamba2) -> Fields:
    """Return the native record's fields for Mamba-2."""
    return {
        "layer": op.layer,
        "num_heads": op.num_heads,
        "first_head": op.first_head,
        "num_groups": op.num_groups,
        "group": op.num_all_heads // op.num_groups,
        "x_head": op.state_size,
        "scale": op.min_step,
        "factor": op.max_step,
    }


def shares_of(op: ops.MixtureOfExperts | ops.SumTerms) -> ExpertShareKind:
    """Return how a mixture's expert weights are computed from router scores, as a native code."""
    if op.scales_inputs:
        return ExpertShareKind.OF_INPUTS
    if op.are_shares:
        return ExpertShareKind.SCORES
    return ExpertShareKind.CHOSEN_SCORES if op.normalize else ExpertShareKind.ALL_SCORES


_PARTS = {
    ColumnParts: PartsKind.COLUMNS,
    RowParts: PartsKind.ROWS,
    TokenParts: PartsKind.TOKENS,
    TermParts: PartsKind.TERMS,
}


@dataclass(slots=True)
class Collectives:
    """Tables for collectives: teams of ranks, channels and cuts, which native records refer to.

    A key of `teams` is (the team's ranks, this rank's index among them). A channel sends one value
    from a rank of a pipeline stage to a rank of the next stage. `cuts` has the columns or heads at
    which ranks divide values.
    """

    teams: dict[tuple[Team, int], int] = field(default_factory=dict)
    channels: list[RankChannel] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    _cuts_indices: dict[tuple[int, ...], int] = field(default_factory=dict)

    def fields(self, gather: AllGather | None) -> dict[str, Any]:
        """Return the native record's fields for a gather, or for computing a part of a gather.

        Empty if `gather` is None.
        """
        if gather is None:
            return {}
        team = self._team_index(gather.team, gather.team_index)
        fields: dict[str, Any] = {"team": team, "parts": _PARTS[type(gather.parts)]}
        if not isinstance(gather.parts, RowParts):
            fields["first_cut"] = self._cuts_index(gather.parts.cuts)
        return fields

    def fields_of_split_kv(self, op: SplitKvAttention) -> dict[str, Any]:
        """Return the native record's fields for attention whose KV tokens are split over ranks."""
        return {
            "team": self._team_index(op.team, op.team_index),
            "first_cut": self._cuts_index(op.head_cuts),
            "num_parts": op.num_column_parts,
        }

    def channel(self, op: Send | Receive) -> int:
        """Add a channel for the value that `op` sends or receives; return its index in `channels`.

        Each operation has a separate channel, even if the two ranks are the same, so this is called
        once for each operation.
        """
        is_sent = isinstance(op, Send)
        peer = op.to if isinstance(op, Send) else op.sender
        number = sum((c.is_sent, c.peer) == (is_sent, peer) for c in self.channels)
        self.channels.append(RankChannel(is_sent, peer, number, op.width))
        return len(self.channels) - 1

    def _team_index(self, team: Team, rank_index: int) -> int:
        return self.teams.setdefault((team, rank_index), len(self.teams))

    def _cuts_index(self, cuts: tuple[int, ...]) -> int:
        if cuts not in self._cuts_indices:
            self._cuts_indices[cuts] = len(self.cuts)
            self.cuts += cuts
        return self._cuts_indices[cuts]


_BEFORE_ROUTERS: Final = {
    OpKind.LINEAR,
    OpKind.HEAD_PRODUCTS,
    OpKind.GATED,
    OpKind.ATTENTION,
    OpKind.PIECES,
}
_MAX_BITS: Final = max(ACTIVATION_BITS)
_PRECISIONS: Final = dict(
    zip(ACTIVATION_BITS, (Precision.PLAIN, Precision.MIXED, Precision.COARSE), strict=True)
)


def precision_of(kind: OpKind, run: Sequence[Op], bits: Bits, *, has_routers: bool) -> Precision:
    """Return the precision to which a native record rounds the inputs of its products.

    Inputs of products whose results reach routers stay precise, because the smallest difference can
    change the choice of experts. All products of a record share their rounded inputs, so the
    product that needs the most bits decides. Ranks have different products of a record, but choose
    the same precision, because all products of the same value have the same number in `bits`.
    """
    if has_routers and kind in _BEFORE_ROUTERS:
        return Precision.PRECISE
    if isinstance(bits, int):
        return _PRECISIONS[bits]
    matrices = [weight.name for op in run for weight in op.weights if len(weight.shape) == 2]
    return _PRECISIONS[max((bits.get(name, _MAX_BITS) for name in matrices), default=_MAX_BITS)]
