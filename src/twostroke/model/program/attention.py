"""Attention over the pages of a cache layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.model.program.kv_layout import CacheLayer
from twostroke.model.program.operation import Operation
from twostroke.model.program.sharding import Sharding
from twostroke.model.program.work import Cost, EachAttended, EachCached, EachRead

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from twostroke.model.program.kv_layout import CacheFormat
    from twostroke.model.program.operation import Work
    from twostroke.model.program.sharding import Range


class Projection(Frozen):
    """What made queries or keys: a product with a `bias`, or a norm of heads or of the row.

    `weight` is that of the product (width, in_width), whose input was normed by `input_norm`, or
    that of the norm, to which `offset` is added.
    """

    weight: str
    bias: str | None = None
    input_norm: str = ""
    offset: float = 0.0


class QkProjections(Frozen):
    """Where a layer's queries and keys, rotated by `rope`, come from, and so how large they are.

    `first` is the place, among the keys of the whole layer, of this part's first value. Of latent
    attention, `keys` are the rotated part, and `latents` what follows it.
    """

    queries: Projection
    keys: Projection
    rope: Rope
    first: int = 0
    latents: Projection | None = None


class Attention(Operation):
    """Causal attention over the pages of cache layer `layer`, k and v of this step stored first.

    Query head h reads key-value head `(first_head + h) // group_size` (grouped queries,
    arXiv:2305.13245). Groups are equal, unless this is a part: then `group` is their size, and the
    first of them lacks its first `first_head` heads. `output = softmax(q k^T * scale) v` over the
    positions up to the row's own: all of them, or the last `window` (sliding window,
    arXiv:2310.06825). With a `soft_cap` c the scaled scores s become `c * tanh(s / c)`
    (arXiv:2408.00118).

    Scores stay when a channel of keys is multiplied by what that of queries is divided by; and a
    vector taken from all keys of a head moves all scores of a row alike, which without a soft cap
    changes nothing. `origin` tells pages of few bits what makes the keys small and even.
    """

    q: str
    k: str
    v: str
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    group: int | None = None
    first_head: int = 0
    origin: QkProjections | None = None

    reads: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    sharding = Sharding.BY_COLUMN_PARTS
    needs_all_rows: ClassVar[tuple[str, ...]] = ("k", "v")
    values_are_keys: ClassVar[bool] = False

    @property
    def width(self) -> int:
        """Values in a row of the output."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """How many query heads read one key-value head."""
        return self.num_heads // self.num_kv_heads if self.group is None else self.group

    @property
    def grain(self) -> int:
        """A query head."""
        return self.head_dim

    def part(self, first: int, end: int) -> Self:
        """Return the attention of some query heads, with the key-value heads that they read."""
        head = self.first_head + first // self.head_dim
        kv_first, kv_end = self._kv_heads(first, end)
        origin = self.origin
        if origin is not None:
            origin = replace(origin, first=origin.first + kv_first * self.head_dim)
        return self._changed(
            num_heads=(end - first) // self.head_dim,
            num_kv_heads=kv_end - kv_first,
            group=self.group_size,
            first_head=head - kv_first * self.group_size,
            origin=origin,
        )

    def part_reads(self, field: str, first: int, end: int) -> Range:
        """Read the heads of the queries, and their key-value heads, which others may read too."""
        if field == "q":
            return first, end
        kv_first, kv_end = self._kv_heads(first, end)
        return kv_first * self.head_dim, kv_end * self.head_dim

    def _kv_heads(self, first: int, end: int) -> Range:
        first_head, end_head = (self.first_head + x // self.head_dim for x in (first, end))
        kv_first, kv_end = first_head // self.group_size, -(-end_head // self.group_size)
        return kv_first, kv_end if first < end else kv_first

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Two products over each row's context, and the traffic of the pages."""
        del weight_bytes
        yield EachAttended(self.window), Cost(4 * self.num_heads * self.head_dim)
        yield EachCached(self.window), Cost(0, 0, self.stored.bytes_per_token(cache))

    @property
    def stored(self) -> CacheLayer:
        """What is stored of each token that it sees."""
        return CacheLayer(
            self.num_kv_heads, self.head_dim, self.window, values_are_keys=self.values_are_keys
        )

    @property
    def stores(self) -> Mapping[int, CacheLayer]:
        """Keys and values of its layer."""
        return {self.layer: self.stored}

    def with_layers(self, places: Mapping[int, int]) -> Self:
        """Return it with another number of its layer."""
        return self._changed(layer=places[self.layer])

    @property
    def label(self) -> str:
        """With its window, if it has one."""
        return "attention" if self.window is None else f"attention({self.window})"


class SharedKvAttention(Attention):
    """Attention to the keys and values that an earlier operation stores, for cache layer `layer`.

    It has none of its own: `k` and `v` are empty (arXiv:2405.12981). Heads, their width and the
    window are those of the other operation.
    """

    reads = ("q",)
    needs_all_rows = ()

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Two products over each row's context, which is read."""
        del weight_bytes
        yield EachAttended(self.window), Cost(4 * self.num_heads * self.head_dim)
        yield EachRead(self.window), Cost(0, 0, self.stored.bytes_per_token(cache))

    @property
    def stores(self) -> Mapping[int, CacheLayer]:
        """Nothing."""
        return {}


class Rope(Operation):
    """Rotate pairs of each head's first values by position times `inverse_frequencies[i]`.

    Pair i is (2i, 2i + 1) when `interleaved`, else (i, i + len(inverse_frequencies)); values
    beyond the pairs pass through (arXiv:2104.09864). Every rope scaling is a choice of
    frequencies, and of `magnitude`, which multiplies sine and cosine (YaRN, arXiv:2309.00071).
    """

    x: str
    num_heads: int
    head_dim: int
    inverse_frequencies: tuple[float, ...]
    interleaved: bool
    magnitude: float = 1.0

    reads = ("x",)

    @property
    def width(self) -> int:
        """Values in a row of the output."""
        return self.num_heads * self.head_dim

    @property
    def grain(self) -> int:
        """A head."""
        return self.head_dim

    def part(self, first: int, end: int) -> Self:
        """Return the rotation of some heads."""
        return self._changed(num_heads=(end - first) // self.head_dim)

    @property
    def row_flops(self) -> int:
        """Four products and two sums for each pair."""
        return 6 * self.num_heads * len(self.inverse_frequencies)
