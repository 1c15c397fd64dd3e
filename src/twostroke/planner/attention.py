"""Kinds of attention that plans count and no backend computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twostroke.core.frozen import Frozen
from twostroke.program.operation import Operation
from twostroke.program.pages import CacheLayer
from twostroke.program.work import Cost, EachAttended, EachCached

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.program.batch import BatchShape
    from twostroke.program.operation import Work
    from twostroke.program.pages import CacheFormat


class LatentProducts(Frozen):
    """Counts the products of a head of latent attention, the cheaper way for each request.

    Scores and values can be computed from latent vectors as they are stored, or from keys and
    values into which those of the context are expanded first (arXiv:2405.04434). The first is
    cheaper for few rows, as in decoding. A row's own expansion is counted as a matrix product.
    """

    latent: int
    rotated: int
    key: int
    value: int

    def __call__(self, batch: BatchShape) -> Any:
        """Return the number of multiplications; for a `DecodeRun`, of each step."""
        stored = 2 * self.latent + self.rotated
        if batch.num_rows == len(batch.starts):
            return batch.num_attended() * stored
        expanded, each = self.key + self.rotated + self.value, self.latent * (self.key + self.value)
        total = 0
        for start, count in batch.spans:
            pairs = count * start + count * (count + 1) // 2
            total += min(pairs * stored, pairs * expanded + start * each)
        return total


class EachRead(Frozen):
    """Counts the positions whose keys and values are read."""

    window: int | None

    def __call__(self, batch: BatchShape) -> int:
        """Return the number of positions."""
        return batch.num_context(self.window)


class LatentAttention(Operation):
    """Attention to a latent vector and a rotated key for each token, which all heads share.

    `latent`, `rotated`, `key` and `value` are widths: of what is stored, and of a head's keys
    (without their rotated part) and values.
    """

    q: str
    kv: str
    layer: int
    num_heads: int
    latent: int
    rotated: int
    key: int
    value: int

    reads = ("q", "kv")
    label = "attention"

    @property
    def width(self) -> int:
        """Values in a row of the output."""
        return self.num_heads * self.value

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """The products of all heads, and the traffic of the pages."""
        del weight_bytes
        sizes = self.latent, self.rotated, self.key, self.value
        yield LatentProducts(*sizes), Cost(2 * self.num_heads)
        yield EachCached(None), Cost(0, 0, self.stores[self.layer].bytes_per_token(cache))

    @property
    def stores(self) -> Mapping[int, CacheLayer]:
        """Both vectors: as many numbers as keys and values of one head of half their width."""
        return {self.layer: CacheLayer(1, (self.latent + self.rotated) // 2)}


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
