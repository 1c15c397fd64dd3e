"""How ranks share a Program: stages of layers, parts of rows, parts of columns."""

from __future__ import annotations

from itertools import accumulate

from twostroke.core.frozen import Frozen


class Place(Frozen):
    """Where a rank is in a mesh."""

    stage: int
    row_part: int
    column_part: int


class Mesh(Frozen):
    """A grid of ranks: one stage after another, in each of them row parts times column parts.

    `stages` and `column_parts` are shares: a rank with 3 of 5 computes three fifths of the layers,
    or of each operation's columns and experts. Row parts are equal. Rank 0 is in the last stage,
    where tokens are drawn.
    """

    stages: tuple[int, ...] = (1,)
    row_parts: int = 1
    column_parts: tuple[int, ...] = (1,)

    @property
    def ranks_per_stage(self) -> int:
        """How many ranks have the same layers."""
        return self.row_parts * len(self.column_parts)

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.stages) * self.ranks_per_stage

    def place(self, rank: int) -> Place:
        """Return where a rank is."""
        later, within = divmod(rank, self.ranks_per_stage)
        row_part, column_part = divmod(within, len(self.column_parts))
        return Place(len(self.stages) - 1 - later, row_part, column_part)

    def rank(self, place: Place) -> int:
        """Return the rank at a place."""
        later = len(self.stages) - 1 - place.stage
        within = place.row_part * len(self.column_parts) + place.column_part
        return later * self.ranks_per_stage + within


ONE_RANK = Mesh()


def cuts(count: int, shares: tuple[int, ...], grain: int = 1) -> tuple[int, ...]:
    """Return where `count` things are cut into parts: one more number than there are shares.

    Parts are as near to the shares as multiples of `grain` allow. Where they are not equal, the
    first, which is the part of rank 0, is smaller.
    """
    num_grains, total = -(-count // grain), sum(shares)
    ends = [num_grains * share // total for share in accumulate(shares)]
    return (0, *(min(count, end * grain) for end in ends))
