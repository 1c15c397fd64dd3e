"""Operations of a divided Program that move values between ranks, or take parts of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.program.operation import Operation

if TYPE_CHECKING:
    from twostroke.program.sharding import Parts


class AllGather(Operation):
    """`output` is the whole of `x`, of which each member of the team holds its part.

    `team` are ranks in the order of their parts, and this rank is `team[place]`. A rank whose part
    is empty has no `x`. With a `root` only that rank gets the whole; nothing reads the output on
    the others. `AllGather`s of one value have the same output on all ranks of the team.
    """

    x: str | None
    width: int
    parts: Parts
    team: tuple[int, ...]
    place: int
    root: int | None = None

    reads = ("x",)
    label = "gather"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Its own part, if it has one."""
        return () if self.x is None else (self.x,)


class TakeColumns(Operation):
    """`output` is `width` columns of `x`, from column `first` on."""

    x: str
    width: int
    first: int

    reads = ("x",)
    label = "columns"


class Send(Operation):
    """`x` goes to another rank, which receives it; `output` is a name that nothing reads."""

    x: str
    width: int
    to: int

    reads = ("x",)


class Receive(Operation):
    """`output` comes from another rank, which sends it under the same name."""

    width: int
    sender: int


class AllReduce(Operation):
    """`output` is the sum of what the members of the team have; a rank without `x` adds nothing."""

    x: str | None
    width: int
    team: tuple[int, ...]
    place: int

    reads = ("x",)
    label = "reduce"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Its own term, if it has one."""
        return () if self.x is None else (self.x,)
