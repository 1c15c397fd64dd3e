"""How ranks can divide an operation, its weights, and the values that it reads and writes.

A sharding rule splits no sum: a rank computes some outputs of an operation, each from all of its
inputs. `split_sums` in `shard.py` makes exceptions for `--reduce sum`.
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
    """Divide `count` units among ranks by their shares; return where each rank's part begins.

    The result has one number more than there are shares, from 0 to `count`. Parts are as near to
    the shares as multiples of `grain` allow. If equal shares cannot have equal parts, rank 0 has a
    smaller part.
    """
    num_grains = -(-count // grain)
    total = sum(shares)
    ends = [num_grains * share // total for share in accumulate(shares)]
    return (0, *(min(count, end * grain) for end in ends))


class Sharding(Enum):
    """How ranks divide an operation: which part of it each rank computes."""

    REPLICATED = "replicated"  # all of it: every rank computes the same
    AS_INPUTS = "as inputs"  # the same columns that the rank holds of the inputs
    BY_COLUMN_PARTS = "by column parts"  # its part among ranks with the same layers and rows
    BY_STAGE = "by stage"  # its part among all ranks with the same layers


class Weight(Frozen):
    """The name and shape of a weight: a vector (values) or a matrix (outputs, inputs).

    If it `is_divided`, a rank that computes units `first` to `end` of the operation reads only the
    rows of the weight that belong to these units. `units_per_row` units share a row: for example, a
    head's columns share the one number that a weight has for the head.
    """

    name: str
    shape: tuple[int, ...]
    is_divided: bool = False
    units_per_row: int = 1

    def rows(self, units: Range | None) -> Range:
        """Return the rows of the weight that a rank reads to compute the range `units`.

        None as `units` means all units.
        """
        if units is None or not self.is_divided:
            return 0, self.shape[0]
        return units[0] // self.units_per_row, units[1] // self.units_per_row


class _CutParts(Frozen):
    """How several ranks (a team) divide a value: member i has units `cuts[i]` to `cuts[i + 1]`."""

    cuts: tuple[int, ...]

    are_rows: ClassVar = False

    def share(self, index: int) -> float:
        """Return the share of the value that member `index` of the team has, from 0 to 1."""
        return (self.cuts[index + 1] - self.cuts[index]) / self.cuts[-1]


class ColumnParts(_CutParts):
    """A value divided by columns: member i of the team has columns `cuts[i]` to `cuts[i + 1]`."""


class TokenParts(_CutParts):
    """An embedding divided by token ids: each rank has the rows whose tokens are in its range.

    Member i of the team has token ids `cuts[i]` to `cuts[i + 1]`.
    """

    are_rows = True


class TermParts(_CutParts):
    """Outputs of experts, divided by experts: each rank has the outputs of its own experts.

    Member i of the team has experts `cuts[i]` to `cuts[i + 1]`. `scores` names the value by which
    each row chooses `num_used` experts.
    """

    scores: str
    num_used: int


class RowParts(Frozen):
    """A value divided by rows: member i of the team has the i-th of `count` equal parts.

    Of n rows, these are the rows n * i // count to n * (i + 1) // count.
    """

    count: int

    are_rows: ClassVar = True

    def share(self, index: int) -> float:
        """Return the share of the rows that a member of the team has, from 0 to 1."""
        del index
        return 1 / self.count


Parts = ColumnParts | RowParts | TokenParts | TermParts


class HeldValue(Frozen):
    """How the ranks of a pipeline stage hold a value: each all of it, or each a part.

    Without `ranges` each rank has all columns. Otherwise member i of a team has `ranges[i]`: a
    range of columns if `parts` are `ColumnParts`, else a range of the units that `parts` divides.
    With `all_rows` each rank has all rows of the step, otherwise its row part.
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
        """Return the range of columns or units of the value that rank `index` of the stage has."""
        return (0, self.width) if self.ranges is None else self.ranges[index % len(self.ranges)]

    def name_at(self, index: int) -> str | None:
        """Return the name of the value's part on rank `index` of the stage; None if it has none."""
        first, end = self.range_at(index)
        separator = "" if self.has_columns else ".part"
        columns = "" if self.ranges is None else f"{separator}[{first}:{end}]"
        rows = "" if self.all_rows else ".rows"
        return None if first == end else f"{self.name}{columns}{rows}"

    def width_at(self, index: int) -> int:
        """Return how many columns of the value rank `index` of the stage has."""
        first, end = self.range_at(index)
        return end - first


def cuts_from_ranges(ranges: Ranges) -> tuple[int, ...]:
    """Return cuts that give each column of overlapping ranges to the first rank that has it.

    Member i then has columns `cuts[i]` to `cuts[i + 1]`.
    """
    return (0, *accumulate([end for _, end in ranges], max))
