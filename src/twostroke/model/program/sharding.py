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
    """Divide `count` units into consecutive parts by shares; return the bounds of all parts.

    There is one bound more than there are shares, from 0 to `count`.

    Parts are as near to the shares as multiples of `grain` allow. If equal shares cannot have equal
    parts, rank 0 has a smaller part.
    """
    num_grains = -(-count // grain)
    total = sum(shares)
    ends = [num_grains * share // total for share in accumulate(shares)]
    return (0, *(min(count, end * grain) for end in ends))


class Sharding(Enum):
    """The part of an operation that a rank computes."""

    REPLICATED = "replicated"  # all of it: every rank computes the same
    AS_INPUTS = "as inputs"  # the same columns that the rank holds of the inputs
    BY_COLUMN_PARTS = "by column parts"  # its part among ranks with the same layers and rows
    BY_STAGE = "by stage"  # its part among all ranks with the same layers


class Weight(Frozen):
    """A weight of an operation: a vector (values) or a matrix (outputs, inputs).

    If it `is_divided`, a rank's part of the operation from `first` to `end` reads these rows of it.
    """

    name: str
    shape: tuple[int, ...]
    is_divided: bool = False


class _CutParts(Frozen):
    """A division of a value over ranks: member i of a team has part `cuts[i]` to `cuts[i + 1]`."""

    cuts: tuple[int, ...]

    are_rows: ClassVar = False

    def share(self, index: int) -> float:
        """Return the share of the values that member `index` of the team has, 0 to 1."""
        return (self.cuts[index + 1] - self.cuts[index]) / self.cuts[-1]


class ColumnParts(_CutParts):
    """A division by columns: member i of a team has the columns `cuts[i]` to `cuts[i + 1]`."""


class TokenParts(_CutParts):
    """A division by token ids: a rank has the rows whose tokens are in its range.

    The range of member i of a team is `cuts[i]` to `cuts[i + 1]`.
    """

    are_rows = True


class TermParts(_CutParts):
    """A division by experts: member i of a team has the outputs of a range of experts.

    The range is `cuts[i]` to `cuts[i + 1]`. `scores` names the value by which each row chooses
    `num_used` experts.
    """

    scores: str
    num_used: int


class RowParts(Frozen):
    """A division by rows: member i has rows n * i // count to n * (i + 1) // count of n rows."""

    count: int

    are_rows: ClassVar = True

    def share(self, index: int) -> float:
        """Return the share of the rows that a member has, 0 to 1."""
        del index
        return 1 / self.count


Parts = ColumnParts | RowParts | TokenParts | TermParts


class HeldValue(Frozen):
    """How a value is divided over the ranks of a pipeline stage.

    Without `ranges` each rank has all columns. Else member i of a team has `ranges[i]`: a range of
    columns if `parts` are `ColumnParts`, else of the units that `parts` divides.
    """

    name: str
    width: int
    ranges: Ranges | None = None
    parts: Parts | None = None
    all_rows: bool = True

    @property
    def has_columns(self) -> bool:
        """Return whether ranks have different columns of the value."""
        return isinstance(self.parts, ColumnParts)

    def range_at(self, index: int) -> Range:
        """Return the range of the value that rank `index` of the stage has."""
        return (0, self.width) if self.ranges is None else self.ranges[index % len(self.ranges)]

    def at(self, index: int) -> str | None:
        """Return the value's name on rank `index` of the stage; None if the rank has no part."""
        first, end = self.range_at(index)
        separator = "" if self.has_columns else ".part"
        columns = "" if self.ranges is None else f"{separator}[{first}:{end}]"
        rows = "" if self.all_rows else ".rows"
        return None if first == end else f"{self.name}{columns}{rows}"

    def width_at(self, index: int) -> int:
        """Return how many values of a row rank `index` of the stage has."""
        first, end = self.range_at(index)
        return end - first


def cuts_from_ranges(ranges: Ranges) -> tuple[int, ...]:
    """Return cuts that assign each column of overlapping ranges to the first rank that has it."""
    return (0, *accumulate([end for _, end in ranges], max))
