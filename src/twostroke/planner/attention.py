"""Attention that plans count and no backend computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen
from twostroke.program.operation import Operation
from twostroke.program.pages import CacheLayer
from twostroke.program.work import Cost, EachAttended

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.program.batch import BatchShape
    from twostroke.program.operation import Work
    from twostroke.program.pages import CacheFormat


class EachRead(Frozen):
    """Counts the positions whose keys and values are read."""

    window: int | None

    def __call__(self, batch: BatchShape) -> int:
        """Return the number of positions."""
        return batch.num_context(self.window)


class SharedAttention(Operation):
    """Attention to the keys and values that an earlier layer has stored."""

    q: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None

    reads = ("q",)

    @property
    def width(self) -> int:
        """Values in a row of the output."""
        return self.num_heads * self.head_dim

    @property
    def label(self) -> str:
        """As that of the other layer."""
        return "attention" if self.window is None else f"attention({self.window})"

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Two products over each row's context; nothing is written."""
        del weight_bytes
        yield EachAttended(self.window), Cost(4 * self.num_heads * self.head_dim)
        stored = CacheLayer(self.num_kv_heads, self.head_dim).bytes_per_token(cache)
        yield EachRead(self.window), Cost(0, 0, stored)
