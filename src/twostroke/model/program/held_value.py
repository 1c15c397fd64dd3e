"""How the ranks of a stage hold a value while a Program is divided."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen
from twostroke.model.program.sharding import ColumnParts

if TYPE_CHECKING:
    from twostroke.model.program.sharding import Parts, Range

    Ranges = tuple[Range, ...]


class HeldValue(Frozen):
    """How the ranks of a stage hold a value.

    Each has all columns, or member i of a team has `ranges[i]` (columns, if `parts` says so).
    """

    name: str
    width: int
    ranges: Ranges | None = None
    parts: Parts | None = None
    all_rows: bool = True

    @property
    def has_columns(self) -> bool:
        """Whether ranks have different columns of it."""
        return isinstance(self.parts, ColumnParts)

    def range_at(self, index: int) -> Range:
        """Return the range of the stage's rank `index`."""
        return (0, self.width) if self.ranges is None else self.ranges[index % len(self.ranges)]

    def at(self, index: int) -> str | None:
        """Return the name on the stage's rank `index`, None if that has nothing of it."""
        first, end = self.range_at(index)
        kind = "" if self.has_columns else ".part"
        part = "" if self.ranges is None else f"{kind}[{first}:{end}]"
        rows = "" if self.all_rows else ".rows"
        return None if first == end else f"{self.name}{part}{rows}"

    def width_at(self, index: int) -> int:
        """Return how many of a row's values the stage's rank `index` has."""
        first, end = self.range_at(index)
        return end - first


def cuts_of(ranges: Ranges) -> tuple[int, ...]:
    """Return cuts that give each column to the first rank which has it."""
    return (0, *accumulate([end for _, end in ranges], max))
