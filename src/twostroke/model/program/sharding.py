"""How ranks can divide an operation, its weights, and the values that it reads and writes.

A sharding rule splits no sum: a rank computes some outputs of an operation, each from all of its
inputs. `split_sums` in `shard.py` makes the exceptions of `--reduce sum`.
"""

from __future__ import annotations

from enum import Enum
from itertools import accumulate
from typing import ClassVar

from twostroke.core.frozen import Frozen

COLUMN_GRAIN = 32  # kernels compute 16 outputs at once, and quantize 32 inputs with one scale

Range = tuple[int, int]  # the first index, and the index after the last
Ranges = tuple[Range, ...]


def cuts(count: int, shares: tuple[int, ...], grain: int = 1) -> tuple[int, ...]:
    """Return where `count` units are cut into parts: one number more than there are shares.

    Parts are as near to the shares as multiples of `grain` allow. If equal shares cannot have equal
    parts, rank 0 has a smaller part.
    """
    num_grains = -(-count // grain)
    total = sum(shares)
    ends = [num_grains * share // total for share in accumulate(shares)]
    return (0, *(min(count, end * grain) for end in ends))


class Sharding(Enum):
    """Which part of an operation a rank computes."""

    REPLICATED = "replicated"  # all of it: every rank computes the same
    AS_INPUTS = "as inputs"  # the same columns that the rank holds of the inputs
    BY_COLUMN_PARTS = "by column parts"  # its part among ranks with the same layers and rows
    BY_STAGE = "by stage"  # its part among all ranks with the same layers


class Weight(Frozen):
    """A vector (values) or matrix (outputs, inputs).

    If it `is_divided`, the part of an operation from `first` to `end` reads these rows of it.
    """

    name: str
    shape: tuple[int, ...]
    is_divided: bool = False


class _CutParts(Frozen):
    """Member i of a team holds the part from `cuts[i]` to `cuts[i + 1]`."""

    cuts: tuple[int, ...]

    are_rows: ClassVar = False

    def share(self, index: int) -> float:
        """Return the share of the values that a member holds."""
        return (self.cuts[index + 1] - self.cuts[index]) / self.cuts[-1]


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
    """Of the n rows of a step, member i holds those from n * i // count to n * (i + 1) // count."""

    count: int

    are_rows: ClassVar = True

    def share(self, index: int) -> float:
        """Return the share of the rows that a member holds."""
        del index
        return 1 / self.count


Parts = ColumnParts | RowParts | TokenParts | TermParts


class HeldValue(Frozen):
    """How the ranks of a stage hold a value.

    Without `ranges` each rank has all columns. Else member i of a team has `ranges[i]`: of the
    columns if `parts` are `ColumnParts`, else of what `parts` divides.
    """

    name: str
    width: int
    ranges: Ranges | None = None
    parts: Parts | None = None
    all_rows: bool = True

    @property
    def has_columns(self) -> bool:
        """Whether ranks have different columns of the value."""
        return isinstance(self.parts, ColumnParts)

    def range_at(self, index: int) -> Range:
        """Return the range that the stage's rank `index` holds."""
        return (0, self.width) if self.ranges is None else self.ranges[index % len(self.ranges)]

    def at(self, index: int) -> str | None:
        """Return the value's name on the stage's rank `index`; None if the rank holds nothing."""
        first, end = self.range_at(index)
        separator = "" if self.has_columns else ".part"
        columns = "" if self.ranges is None else f"{separator}[{first}:{end}]"
        rows = "" if self.all_rows else ".rows"
        return None if first == end else f"{self.name}{columns}{rows}"

    def width_at(self, index: int) -> int:
        """Return how many values of a row the stage's rank `index` has."""
        first, end = self.range_at(index)
        return end - first


def cuts_from_ranges(ranges: Ranges) -> tuple[int, ...]:
    """Return cuts that give each column to the first rank that has it."""
    return (0, *accumulate([end for _, end in ranges], max))
