"""Operations of a divided Program that move values between ranks, or take parts of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.model.program.operation import Operation
from twostroke.model.program.sharding import Sharding
from twostroke.model.program.work import (
    Cost,
    each_row,
    each_row_of_all,
    each_sampled_row,
    once,
    once_if_sampled,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.program.kv_layout import CacheFormat
    from twostroke.model.program.operation import Work
    from twostroke.model.program.sharding import Parts
    from twostroke.model.program.work import Count

_VALUE_BYTES = 4  # values travel as float32


class AllGather(Operation):
    """`output` is the whole of `x`, of which each member of the team holds its part.

    `team` are ranks in the order of their parts, and this rank is `team[place]`. A rank whose part
    is empty has no `x`. `AllGather`s of one value have the same output on all ranks of the team.
    With a `root` only that rank gets the whole, nothing reads the output on the others, and there
    is a row for each one that is sampled: these are logits.
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
    def meeting(self) -> str:
        """What all members of the team call the exchange."""
        return self.output

    @property
    def inputs(self) -> tuple[str, ...]:
        """Its own part, if it has one."""
        return () if self.x is None else (self.x,)

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """The own part goes to each of the others, and theirs come."""
        del weight_bytes, cache
        own = self.parts.share(self.place)
        sent, received = own * (len(self.team) - 1), 1 - own
        if self.root is None:
            rows = each_row_of_all if self.parts.are_rows else each_row
            yield from _exchange(self.width * sent, self.width * received, rows, once)
            return
        sent, received = (0, received) if self.team[self.place] == self.root else (own, 0)
        sizes = self.width * sent, self.width * received
        yield from _exchange(*sizes, each_sampled_row, once_if_sampled)


class TakeColumns(Operation):
    """`output` is `width` columns of `x`, from column `first` on."""

    x: str
    width: int
    first: int

    reads = ("x",)
    sharding = Sharding.WHOLE
    label = "columns"


class Send(Operation):
    """`x` goes to another rank, which receives it; `output` is a name that nothing reads."""

    x: str
    width: int
    to: int

    reads = ("x",)

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Each row goes to one rank."""
        del weight_bytes, cache
        return _exchange(self.width, 0)


class Receive(Operation):
    """`output` comes from another rank, which sends it under the same name."""

    width: int
    sender: int

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Each row comes from one rank."""
        del weight_bytes, cache
        return _exchange(0, self.width)


class AllReduce(Operation):
    """`output` is the sum of what the members of the team have; a rank without `x` adds nothing."""

    x: str | None
    width: int
    team: tuple[int, ...]
    place: int

    reads = ("x",)
    label = "reduce"

    @property
    def meeting(self) -> str:
        """What all members of the team call the exchange."""
        return self.output

    @property
    def inputs(self) -> tuple[str, ...]:
        """Its own term, if it has one."""
        return () if self.x is None else (self.x,)

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Parts of the sums go around, then the sums."""
        del weight_bytes, cache
        width = 2 * self.width * (1 - 1 / len(self.team))
        return _exchange(width, width)


def _exchange(sent: float, received: float, rows: Count = each_row, steps: Count = once) -> Work:
    """Yield the cost of an exchange, given how many values of a row go and come."""
    sent_bytes, received_bytes = round(_VALUE_BYTES * sent), round(_VALUE_BYTES * received)
    yield rows, Cost(0, sent_bytes=sent_bytes, received_bytes=received_bytes)
    yield steps, Cost(0, exchanges=1)
