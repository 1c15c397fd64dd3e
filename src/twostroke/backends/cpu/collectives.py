"""The teams, cuts and channels that the records of a rank name by their places."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twostroke.backends.cpu.layout import RankChannel
from twostroke.backends.cpu.records import PartsKind
from twostroke.model.program.ops import Receive, Send
from twostroke.model.program.sharding import ColumnParts, RowParts, TermParts, TokenParts

if TYPE_CHECKING:
    from twostroke.backends.cpu.layout import Team
    from twostroke.model.program.ops import AllGather, SplitKvAttention

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
        team = self._place_of_team(gather.team, gather.place)
        fields: dict[str, Any] = {"team": team, "parts": _PARTS[type(gather.parts)]}
        if not isinstance(gather.parts, RowParts):
            fields["first_cut"] = self._place_of_cuts(gather.parts.cuts)
        return fields

    def fields_of_pieces(self, op: SplitKvAttention) -> dict[str, Any]:
        """Return the fields of a record that exchanges pieces or their shares."""
        return {
            "team": self._place_of_team(op.team, op.place),
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
