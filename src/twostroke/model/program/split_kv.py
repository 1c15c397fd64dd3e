"""Attention whose keys and values lie on several ranks, divided by the places of tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from twostroke.model.program.kv_layout import PIECE_TOKENS, CacheLayer
from twostroke.model.program.operation import Operation
from twostroke.model.program.sharding import cuts
from twostroke.model.program.work import (
    Cost,
    EachAttended,
    EachCached,
    EachPiece,
    EachRead,
    EachShare,
    OfWholeStep,
    once,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from twostroke.model.program.attention import Attention, QkProjections
    from twostroke.model.program.kv_layout import CacheFormat
    from twostroke.model.program.operation import Work
    from twostroke.model.program.sharding import Range

_VALUE_BYTES = 4  # shares travel as float32


class SplitKvAttention(Operation):
    """The part of an `Attention` that one rank of a team computes; fields by name are those of it.

    Attention sums over pieces of `PIECE_TOKENS` positions, counted from a request's first. A
    piece's share of a query (its maximum, its sum, its weighted values) depends on that query and
    on the piece alone, and shares are merged in the order of pieces. Piece p is on member
    `p % len(team)`, which stores its keys and values, of all heads; this rank is `team[place]`.

    `q`, `k` and `v` are whole on each member: all heads, and all rows that row parts have between
    them. The member stores what belongs to its pieces, computes their shares of all queries, gives
    each share to the member that merges that query, and merges its own queries: those of the heads
    from `first_head` to `end_head` in the rows of its row part. These columns are its output; where
    there are more column parts than heads, some members have none. See `head_cuts`.
    """

    q: str
    k: str
    v: str
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    team: tuple[int, ...]
    place: int
    head_cuts: tuple[int, ...]  # column part i merges the heads from cut i to cut i + 1
    origin: QkProjections | None = None
    values_are_keys: bool = False
    borrows: bool = False  # keys and values, of an earlier operation

    reads = ("q", "k", "v")
    needs_all_rows = reads

    @classmethod
    def of(
        cls, op: Attention, team: tuple[int, ...], place: int, head_cuts: tuple[int, ...]
    ) -> SplitKvAttention:
        """Return the part of a whole attention that a member of a team computes."""
        return cls(
            op.output, op.q, op.k, op.v, op.layer, op.num_heads, op.num_kv_heads, op.head_dim,
            op.scale, op.window, op.soft_cap, team, place, head_cuts, op.origin,
            op.values_are_keys, not op.stores,
        )  # fmt: skip

    @property
    def inputs(self) -> tuple[str, ...]:
        """Queries, and keys and values if it stores them."""
        return (self.q,) if self.borrows else (self.q, self.k, self.v)

    @property
    def meeting(self) -> str:
        """What all members of the team, and no other operation of theirs, call the exchange."""
        return f"pieces for {self.q}"

    @property
    def num_column_parts(self) -> int:
        """Into how many parts columns are divided: member i has column part i modulo this."""
        return len(self.head_cuts) - 1

    @property
    def num_row_parts(self) -> int:
        """Into how many parts rows are divided: member i has row part i // num_column_parts."""
        return len(self.team) // self.num_column_parts

    @property
    def first_head(self) -> int:
        """The first query head that this member merges."""
        return self.head_cuts[self.place % self.num_column_parts]

    @property
    def end_head(self) -> int:
        """The one after the last."""
        return self.head_cuts[self.place % self.num_column_parts + 1]

    @property
    def group_size(self) -> int:
        """How many query heads read one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def width(self) -> int:
        """Values in a row of the output: those of the heads that it merges."""
        return (self.end_head - self.first_head) * self.head_dim

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Its share of the products and of the pages' traffic, and what is exchanged.

        Few rows exchange their shares of pieces; many rows the pieces' keys and values, if these
        are less.
        """
        del weight_bytes
        size = len(self.team)
        flops = 4 * self.num_heads * self.head_dim // size
        yield OfWholeStep(EachAttended(self.window)), Cost(flops)
        stored = self.stored.bytes_per_token(cache)
        moved = EachRead(self.window) if self.borrows else EachCached(self.window)
        yield OfWholeStep(moved), Cost(0, 0, stored // size)

        head_bytes, piece_bytes = (self.head_dim + 2) * _VALUE_BYTES, PIECE_TOKENS * stored
        most_rows = piece_bytes // (self.num_heads * head_bytes)
        own_heads = (self.end_head - self.first_head) / self.num_row_parts
        sent = (self.num_heads - own_heads) * head_bytes / size
        received = own_heads * head_bytes * (size - 1) / size
        yield OfWholeStep(EachShare(self.window, most_rows)), _exchanged(sent, received)
        sent, received = piece_bytes * (size - 1) / size, piece_bytes * (size - 1) / size
        yield OfWholeStep(EachPiece(self.window, most_rows + 1)), _exchanged(sent, received)
        yield once, Cost(0, exchanges=1)

    @property
    def stored(self) -> CacheLayer:
        """What is stored of each token that it sees, by its share of the tokens."""
        return CacheLayer(
            self.num_kv_heads,
            self.head_dim,
            self.window,
            len(self.team),
            values_are_keys=self.values_are_keys,
        )

    @property
    def stores(self) -> Mapping[int, CacheLayer]:
        """Keys and values of its layer."""
        return {} if self.borrows else {self.layer: self.stored}

    def with_layers(self, places: Mapping[int, int]) -> Self:
        """Return it with another number of its layer."""
        return self._changed(layer=places[self.layer])

    @property
    def label(self) -> str:
        """With its window, if it has one."""
        return "pieces" if self.window is None else f"pieces({self.window})"


def _exchanged(sent: float, received: float) -> Cost:
    return Cost(0, sent_bytes=round(sent), received_bytes=round(received))


def heads_of_each(op: Attention, shares: tuple[int, ...]) -> dict[str, tuple[Range, ...]]:
    """Return which columns of an attention's inputs each column part computes: whole heads.

    They are put side by side and cut together, so that all have their share of the columns, though
    some may have no key or no query.
    """
    counts = dict.fromkeys(op.inputs, op.num_kv_heads) | {op.q: op.num_heads}
    all_heads = cuts(sum(counts.values()), shares)
    ranges, first = {}, 0
    for name, count in counts.items():
        own = [min(max(cut - first, 0), count) * op.head_dim for cut in all_heads]
        ranges[name] = tuple(pairwise(own))
        first += count
    return ranges
