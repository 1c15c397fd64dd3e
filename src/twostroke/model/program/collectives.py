"""Operations of a divided Program that exchange values between ranks, or take columns of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.model.program.operation import Operation
from twostroke.model.program.sharding import Sharding
from twostroke.model.program.work import (
    Cost,
    each_row,
    each_row_of_all_parts,
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

_VALUE_BYTES = 4  # values are sent as float32


class AllGather(Operation):
    """Collective: concatenates the parts of a value that ranks hold, to the undivided `output`.

    `x` is this rank's part. `team` lists the ranks in the order of their parts; this rank is
    `team[team_index]`. A rank whose part is empty has no `x`. All ranks of the team give the output
    the same name. With a `root` only that rank receives the result, and no operation reads the
    output on other ranks. Only the logits have a root; they have one row for each sampled row.
    """

    x: str | None
    width: int
    parts: Parts
    team: tuple[int, ...]
    team_index: int
    root: int | None = None

    reads = ("x",)
    label = "gather"

    @property
    def exchange_name(self) -> str:
        """Return the name by which the ranks of the team match their parts: the output's name."""
        return self.output

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the name of this rank's part; empty if the rank has none."""
        return () if self.x is None else (self.x,)

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield the bytes that this rank sends and receives, and one exchange to wait for."""
        del weight_bytes, cache
        own_share = self.parts.share(self.team_index)
        sent_share = own_share * (len(self.team) - 1)
        received_share = 1 - own_share
        if self.root is None:
            count = each_row_of_all_parts if self.parts.are_rows else each_row
            yield from _exchange(self.width * sent_share, self.width * received_share, count, once)
            return
        sent_share, received_share = (
            (0, received_share) if self.team[self.team_index] == self.root else (own_share, 0)
        )
        yield from _exchange(
            self.width * sent_share, self.width * received_share, each_sampled_row, once_if_sampled
        )


class TakeColumns(Operation):
    """Operation: `output` is `width` columns of `x`, beginning at column `first`."""

    x: str
    width: int
    first: int

    reads = ("x",)
    sharding = Sharding.REPLICATED
    label = "columns"


class Send(Operation):
    """Operation: sends the value `x` to rank `to`, which is in the next pipeline stage.

    It has an output name only because every operation must have one; nothing reads it.
    """

    x: str
    width: int
    to: int

    reads = ("x",)

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield the bytes of the send: each row goes to one rank."""
        del weight_bytes, cache
        return _exchange(self.width, 0)


class Receive(Operation):
    """Operation: receives `output` from rank `sender`, whose value has the same name."""

    width: int
    sender: int

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield the bytes of the receive: each row comes from one rank."""
        del weight_bytes, cache
        return _exchange(0, self.width)


class AllReduce(Operation):
    """Collective: `output` is the sum of `x` over a team's ranks; a rank without `x` adds 0."""

    x: str | None
    width: int
    team: tuple[int, ...]
    team_index: int

    reads = ("x",)
    label = "reduce"

    @property
    def exchange_name(self) -> str:
        """Return the name by which the ranks of the team match their terms: the output's name."""
        return self.output

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the name of the term that this rank adds; empty if it has none."""
        return () if self.x is None else (self.x,)

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield the bytes of the all-reduce, which is a reduce-scatter and an all-gather."""
        del weight_bytes, cache
        width = 2 * self.width * (1 - 1 / len(self.team))
        return _exchange(width, width)


def _exchange(
    sent: float, received: float, row_count: Count = each_row, step_count: Count = once
) -> Work:
    """Yield the cost terms of an exchange between ranks: its bytes, and one wait.

    `sent`, `received`: how many float32 values are sent and received for each counted row.
    `row_count` counts rows, `step_count` waits.
    """
    sent_bytes, received_bytes = round(_VALUE_BYTES * sent), round(_VALUE_BYTES * received)
    yield row_count, Cost(0, sent_bytes=sent_bytes, received_bytes=received_bytes)
    yield step_count, Cost(0, exchanges=1)
