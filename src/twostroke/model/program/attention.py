"""Attention over cached keys and values, and the rotation (RoPE) of its queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.model.program.kv_layout import CacheLayer
from twostroke.model.program.operation import Operation
from twostroke.model.program.sharding import Sharding, Weight
from twostroke.model.program.work import Cost, EachAttended, EachCached, EachRead

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from twostroke.model.program.kv_layout import CacheFormat
    from twostroke.model.program.operation import Work
    from twostroke.model.program.sharding import Range


class Projection(Frozen):
    """How an attention layer computes its queries or keys: by a matrix product or a norm.

    It names the weights of the operation whose output the attention reads. If that is a product,
    `weight` is the matrix (width, in_width), and `input_norm` is the weight of the norm before the
    product. If it is a norm, of each head or of the row, `weight` has the norm's factors, to which
    `offset` is added.
    """

    weight: str
    bias: str | None = None
    input_norm: str = ""
    offset: float = 0.0


class QkProjections(Frozen):
    """How an attention layer computes its queries and keys before RoPE rotates them.

    From the weights of these projections, backends estimate how large the keys are in each channel,
    and choose the scales of KV formats of few bits, such as int8. If a rank computes only some
    heads, `first` is its first column among the columns of all the layer's keys. In latent
    attention, `keys` computes the rotary part of the keys, and `latents` the rest.
    """

    queries: Projection
    keys: Projection
    rope: Rope
    first: int = 0
    latents: Projection | None = None


class Attention(Operation):
    """Causal attention, which first stores the step's keys and values in KV cache layer `layer`.

    Query head h reads key-value head `(first_head + h) // group_size` (grouped queries,
    arXiv:2305.13245). All groups have the same size, unless this is one rank's part: then `group`
    is the size, and the first group lacks its first `first_head` heads. `output = softmax(q k^T *
    scale) v` over the positions up to the row's own: all of them, or the last `window` (sliding
    window, arXiv:2310.06825). If the window `is_chunked`, the context is cut into chunks of
    `window` positions, and a row sees the positions of its own chunk (Llama 4). With a `soft_cap` c
    the scaled scores s become `c * tanh(s / c)` (arXiv:2408.00118). With `sinks` the weight of this
    name has a learned score for each query head: the softmax has one more term, `exp(sink)`, whose
    value is zero (arXiv:2309.17453).

    KV formats of few bits use two identities, for which they need `origin`. Scores do not change
    when a channel of the keys is multiplied by a factor and the same channel of the queries is
    divided by it. Subtracting one vector from all keys of a head changes all scores of a row by the
    same amount, which without a soft cap and sinks does not change the output.
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
    sinks: str | None = None
    is_chunked: bool = False

    reads: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    sharding = Sharding.BY_COLUMN_PARTS
    needs_all_rows: ClassVar[tuple[str, ...]] = ("k", "v")
    values_are_keys: ClassVar[bool] = False

    @property
    def width(self) -> int:
        """Return the number of values in a row of the attention's output."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Return the number of query heads that read one key-value head."""
        return self.num_heads // self.num_kv_heads if self.group is None else self.group

    @property
    def grain(self) -> int:
        """Return how many neighbouring columns always stay on one rank: a query head's values."""
        return self.head_dim

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return the name and shape of the sinks; empty if the attention has none."""
        if self.sinks is None:
            return ()
        sinks = Weight(self.sinks, (self.num_heads,), is_divided=True, units_per_row=self.head_dim)
        return (sinks,)

    def part(self, first: int, end: int) -> Self:
        """Return the attention that computes only output columns `first` to `end`, for one rank.

        The part has whole query heads, and the key-value heads that they read.
        """
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
        """Return the columns of "q", "k" or "v" that a rank reads for columns `first` to `end`.

        `first` and `end` are columns of the output, in whole heads. The result has the same columns
        of the queries, or the key-value heads that these queries read.
        """
        if field == "q":
            return first, end
        kv_first, kv_end = self._kv_heads(first, end)
        return kv_first * self.head_dim, kv_end * self.head_dim

    def _kv_heads(self, first: int, end: int) -> Range:
        first_head, end_head = (self.first_head + x // self.head_dim for x in (first, end))
        kv_first, kv_end = first_head // self.group_size, -(-end_head // self.group_size)
        return kv_first, kv_end if first < end else kv_first

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield the cost of attention: two products over each row's context, and KV traffic."""
        del weight_bytes
        flops = 4 * self.num_heads * self.head_dim
        yield EachAttended(self.window, self.is_chunked), Cost(flops)
        stored = self.cache_layer.bytes_per_token(cache)
        yield EachCached(self.window, self.is_chunked), Cost(0, 0, stored)

    @property
    def cache_layer(self) -> CacheLayer:
        """Return the shape of the keys and values that this layer uses and stores for a token."""
        return CacheLayer(
            self.num_kv_heads, self.head_dim, self.window, values_are_keys=self.values_are_keys
        )

    @property
    def stores(self) -> Mapping[int, CacheLayer]:
        """Return the shape of the KV cache layer that this attention writes, by layer number."""
        return {self.layer: self.cache_layer}

    def with_layers(self, new_layers: Mapping[int, int]) -> Self:
        """Return the attention with its KV cache layer renumbered by `new_layers` (old to new)."""
        return self._changed(layer=new_layers[self.layer])

    @property
    def label(self) -> str:
        """Return the name in profiles: "attention", followed by the window if there is one."""
        if self.is_chunked:
            return f"attention(chunks of {self.window})"
        return "attention" if self.window is None else f"attention({self.window})"


class SharedKvAttention(Attention):
    """Attention that reads the keys and values of an earlier layer, from cache layer `layer`.

    It computes no keys and values: `k` and `v` are empty (arXiv:2405.12981). Heads, head size and
    window equal the earlier layer's.
    """

    reads = ("q",)
    needs_all_rows = ()

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield the cost: two products over each row's context, and reading the KV cache."""
        del weight_bytes
        flops = 4 * self.num_heads * self.head_dim
        yield EachAttended(self.window, self.is_chunked), Cost(flops)
        stored = self.cache_layer.bytes_per_token(cache)
        yield EachRead(self.window, self.is_chunked), Cost(0, 0, stored)

    @property
    def stores(self) -> Mapping[int, CacheLayer]:
        """Return an empty mapping, because an earlier layer stores the keys and values."""
        return {}


class Rope(Operation):
    """Rotary position embedding: rotates pairs of each head's first values by the row's position.

    The angle of pair i is the position times `inverse_frequencies[i]`.

    Pair i is (2i, 2i + 1) when `interleaved`, else (i, i + len(inverse_frequencies)). Values after
    the pairs are not rotated (arXiv:2104.09864). Every RoPE scaling is a choice of frequencies, and
    of `magnitude`, which multiplies sine and cosine (YaRN, arXiv:2309.00071).
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
        """Return the number of values in a row of the output."""
        return self.num_heads * self.head_dim

    @property
    def grain(self) -> int:
        """Return how many neighbouring columns always stay on one rank: the values of a head."""
        return self.head_dim

    def part(self, first: int, end: int) -> Self:
        """Return the rotation of only the heads in columns `first` to `end`, for one rank."""
        return self._changed(num_heads=(end - first) // self.head_dim)

    @property
    def row_flops(self) -> int:
        """Return the FLOPs for a row: four multiplications and two additions for each pair."""
        return 6 * self.num_heads * len(self.inverse_frequencies)


class QueryRope(Rope):
    """RoPE of queries that also multiplies them by the attention temperature of their position.

    The factor is `1 + temperature_scale * ln(1 + periods)`, and the number of periods is
    `floor((position + temperature_offset) / temperature_length)`: 0 for the first positions
    (Ministral 3; with an offset of 1 Llama 4).
    """

    temperature_scale: float = 0.0
    temperature_length: int = 1
    temperature_offset: int = 0

    @property
    def label(self) -> str:
        """Return the name in profiles, which is the same for all rotations."""
        return "rope"
