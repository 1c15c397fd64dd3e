"""How ranks can share an operation: a rule for each, and which weights they divide.

No sum is ever split: a rank computes some outputs of an operation, each from all of its inputs.
"""

from __future__ import annotations

from enum import Enum
from itertools import accumulate
from typing import ClassVar

from twostroke.core.frozen import Frozen

COLUMN_GRAIN = 32  # kernels compute 16 outputs at once, and prepare 32 inputs with one scale

Range = tuple[int, int]  # the first, and the one after the last


def cuts(count: int, shares: tuple[int, ...], grain: int = 1) -> tuple[int, ...]:
    """Return where `count` things are cut into parts: one more number than there are shares.

    Parts are as near to the shares as multiples of `grain` allow. Where they are not equal, the
    first, which is the part of rank 0, is smaller.
    """
    num_grains, total = -(-count // grain), sum(shares)
    ends = [num_grains * share // total for share in accumulate(shares)]
    return (0, *(min(count, end * grain) for end in ends))


class Sharding(Enum):
    """Which part of an operation a rank computes."""

    WHOLE = "whole"  # all of it
    AS_INPUTS = "as inputs"  # the columns that the rank has of the inputs
    BY_COLUMN_PARTS = "by column parts"  # its share among the ranks with the same layers and rows
    BY_STAGE = "by stage"  # its share among all ranks with the same layers


class Weight(Frozen):
    """A vector (values) or matrix (outputs, inputs).

    If it `is_divided`, the part of an operation from `first` to `end` reads these rows of it.
    """

    name: str
    shape: tuple[int, ...]
    is_divided: bool = False


class _CutParts(Frozen):
    """Member i of a team holds what lies between `cuts[i]` and `cuts[i + 1]`."""

    cuts: tuple[int, ...]

    are_rows: ClassVar = False

    def share(self, place: int) -> float:
        """Return the share of the values that a member holds."""
        return (self.cuts[place + 1] - self.cuts[place]) / self.cuts[-1]


class ColumnParts(_CutParts):
    """Member i of a team holds the columns from `cuts[i]` to `cuts[i + 1]` of each row."""


class TokenParts(_CutParts):
    """Member i of a team holds the rows whose token is in `range(cuts[i], cuts[i + 1])`."""

    are_rows = True


class TermParts(_CutParts):
    """Member i of a team holds the terms of the experts in `range(cuts[i], cuts[i + 1])`.

    `scores` names the value by which each row chooses `num_used` experts.
    """

    scores: str
    num_used: int


class RowParts(Frozen):
    """Of the n rows of a step, member i of `count` holds those from n * i // count on."""

    count: int

    are_rows: ClassVar = True

    def share(self, place: int) -> float:
        """Return the share of the rows that a member holds."""
        del place
        return 1 / self.count


Parts = ColumnParts | RowParts | TokenParts | TermParts
