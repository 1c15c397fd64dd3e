"""How ranks can share an operation, as data: a rule for each, and an axis for each weight."""

from __future__ import annotations

from enum import Enum

from twostroke.core.frozen import Frozen


class Unit(Enum):
    """The pieces of an operation's work that can go to different ranks."""

    OPERATION = "operation"  # it stays whole: every rank computes all of it
    COLUMN = "column"  # values of a row
    HEAD = "head"
    EXPERT = "expert"  # each rank's terms are gathered, then added in the order of the experts
    VOCABULARY = "vocabulary"


class Layout(Enum):
    """How ranks hold a value."""

    REPLICATED = "replicated"
    COLUMNS = "columns"
    ROWS = "rows"


class Sharding(Frozen):
    """How ranks can share an operation without splitting a sum: each computes some `unit`s.

    A rank runs the operation with the fields named in `divided` as small as its share, and with
    its part of each weight along the weight's `axis`. It needs the whole inputs where it `gathers`
    them, otherwise the columns that it computes. The output is then held as `output` says.
    """

    unit: Unit
    divided: tuple[str, ...] = ()
    gathers: bool = False
    output: Layout = Layout.COLUMNS


class Weight(Frozen):
    """A vector (values) or matrix (outputs, inputs); ranks can each have a part along `axis`."""

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
