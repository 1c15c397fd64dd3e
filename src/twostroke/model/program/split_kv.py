"""Attention whose keys and values are divided by tokens among several ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from twostroke.model.program.kv_layout import KV_SPLIT_TOKENS, CacheLayer
from twostroke.model.program.operation import Operation
from twostroke.model.program.sharding import Weight, cuts
from twostroke.model.program.work import (
    Cost,
    EachAttended,
    EachCached,
    EachKvSplit,
    EachPartialAttention,
    EachRead,
    OfWholeStep,
    once,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from twostroke.model.program.attention import Attention, QkProjections
    from twostroke.model.program.kv_layout import CacheFormat
    from twostroke.model.program.operation import Work
    from twostroke.model.program.sharding import Range

_VALUE_BYTES = 4  # partial attentions are sent as float32


class SplitKvAttention(Operation):
    """One rank's part of an `Attention` whose keys and values ranks divide by tokens.

    Fields that `Attention` also has mean the same.

    The context is divided into KV splits of `KV_SPLIT_TOKENS` positions, counted from a request's
    first. The partial attention of a query to a split (its maximum, its sum, its weighted values)
    depends only on that query and that split, and partial attentions are merged in the order of
    splits. Split p is on member `p % len(team)`, which stores its keys and values, of all heads;
    this rank is `team[team_index]`.

    `q`, `k` and `v` are complete on each member: all heads, and the rows of all row parts. The
    member stores the keys and values of its splits, computes the partial attentions of all queries
    to them, sends each partial attention to the member that merges that query, and merges its own
    queries: the heads from `first_head` to `end_head` in the rows of its row part. These columns
    are its output; where there are more column parts than heads, some members have none. See
    `head_cuts`.
    """

    q: str
    k: str
    v: str
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    team: tuple[int, ...]
    team_index: int
    head_cuts: tuple[int, ...]  # column part i merges the heads from cut i to cut i + 1
    origin: QkProjections | None = None
    values_are_keys: bool = False
    reads_shared_kv: bool = False  # an earlier operation stores the keys and values
    sinks: str | None = None  # of all heads; the member that merges a head adds its sink
    is_chunked: bool = False

    reads = ("q", "k", "v")
    needs_all_rows = reads

    @classmethod
    def of(
        cls, op: Attention, team: tuple[int, ...], team_index: int, head_cuts: tuple[int, ...]
    ) -> SplitKvAttention:
        """Return rank `team[team_index]`'s part of an attention, divided by tokens."""
        return cls(
            op.output,
            q=op.q,
            k=op.k,
            v=op.v,
            layer=op.layer,
            num_heads=op.num_heads,
            num_kv_heads=op.num_kv_heads,
            head_dim=op.head_dim,
            scale=op.scale,
            window=op.window,
            soft_cap=op.soft_cap,
            team=team,
            team_index=team_index,
            head_cuts=head_cuts,
            origin=op.origin,
            values_are_keys=op.values_are_keys,
            reads_shared_kv=not op.stores,
            sinks=op.sinks,
            is_chunked=op.is_chunked,
        )

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the inputs; only the queries if an earlier layer stores the keys."""
        return (self.q,) if self.reads_shared_kv else (self.q, self.k, self.v)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return the name and shape of the sinks of all heads; empty if there are none."""
        return () if self.sinks is None else (Weight(self.sinks, (self.num_heads,)),)

    @property
    def exchange_name(self) -> str:
        """Return the name by which the ranks of the team match their partial attentions."""
        return f"pieces for {self.q}"

    @property
    def num_column_parts(self) -> int:
        """Return into how many parts the team divides heads.

        Member i of the team merges column part i % num_column_parts.
        """
        return len(self.head_cuts) - 1

    @property
    def num_row_parts(self) -> int:
        """Return into how many parts the team divides rows.

        Member i of the team merges row part i // num_column_parts.
        """
        return len(self.team) // self.num_column_parts

    @property
    def first_head(self) -> int:
        """Return the first query head whose partial attentions this rank merges."""
        return self.head_cuts[self.team_index % self.num_column_parts]

    @property
    def end_head(self) -> int:
        """Return the query head after the last head whose partial attentions this rank merges."""
        return self.head_cuts[self.team_index % self.num_column_parts + 1]

    @property
    def group_size(self) -> int:
        """Return the number of query heads that read one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def width(self) -> int:
        """Return the number of values in a row of the output: the heads that this rank merges."""
        return (self.end_head - self.first_head) * self.head_dim

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield the cost of this rank's share: products, KV cache traffic, and exchanged bytes.

        A request with so few rows that the partial attentions to a KV split take at most as many
        bytes as the split exchanges partial attentions; other requests exchange keys and values.
        """
        del weight_bytes
        team_size = len(self.team)
        flops = 4 * self.num_heads * self.head_dim // team_size
        yield OfWholeStep(EachAttended(self.window, self.is_chunked)), Cost(flops)
        stored = self.cache_layer.bytes_per_token(cache)
        each_moved = EachRead if self.reads_shared_kv else EachCached
        traffic = each_moved(self.window, self.is_chunked)
        yield OfWholeStep(traffic), Cost(0, 0, stored // team_size)

        head_bytes = (self.head_dim + 2) * _VALUE_BYTES
        split_bytes = KV_SPLIT_TOKENS * stored
        max_rows = split_bytes // (self.num_heads * head_bytes)
        own_heads = (self.end_head - self.first_head) / self.num_row_parts
        sent = (self.num_heads - own_heads) * head_bytes / team_size
        received = own_heads * head_bytes * (team_size - 1) / team_size
        partial_attentions = EachPartialAttention(self.window, max_rows, self.is_chunked)
        yield OfWholeStep(partial_attentions), _exchanged(sent, received)
        sent, received = (
            split_bytes * (team_size - 1) / team_size,
            split_bytes * (team_size - 1) / team_size,
        )
        kv_splits = EachKvSplit(self.window, max_rows + 1, self.is_chunked)
        yield OfWholeStep(kv_splits), _exchanged(sent, received)
        yield once, Cost(0, exchanges=1)

    @property
    def cache_layer(self) -> CacheLayer:
        """Return the shape of the keys and values that this rank uses and stores for a token."""
        return CacheLayer(
            self.num_kv_heads,
            self.head_dim,
            self.window,
            len(self.team),
            values_are_keys=self.values_are_keys,
        )

    @property
    def stores(self) -> Mapping[int, CacheLayer]:
        """Return the shape of the KV cache layer that this operation writes, by its number.

        Empty if an earlier operation writes the layer.
        """
        return {} if self.reads_shared_kv else {self.layer: self.cache_layer}

    def with_layers(self, new_layers: Mapping[int, int]) -> Self:
        """Return the attention with its KV cache layer renumbered by `new_layers` (old to new)."""
        return self._changed(layer=new_layers[self.layer])

    @property
    def label(self) -> str:
        """Return the name in profiles: "pieces" (of the context), with the window if any."""
        if self.is_chunked:
            return f"pieces(chunks of {self.window})"
        return "pieces" if self.window is None else f"pieces({self.window})"


def _exchanged(sent: float, received: float) -> Cost:
    return Cost(0, sent_bytes=round(sent), received_bytes=round(received))


def split_heads(op: Attention, shares: tuple[int, ...]) -> dict[str, tuple[Range, ...]]:
    """Return which columns of the queries, keys and values each rank computes, in whole heads.

    The result maps each input's name to a range (first, end) for each rank. The heads of
    queries, keys and values are concatenated and cut together by `shares`. So each rank has its
    share of all columns, though some ranks may have no keys or no queries.
    """
    counts = dict.fromkeys(op.inputs, op.num_kv_heads) | {op.q: op.num_heads}
    head_cuts = cuts(sum(counts.values()), shares)
    ranges = {}
    first = 0
    for name, count in counts.items():
        column_cuts = [min(max(cut - first, 0), count) * op.head_dim for cut in head_cuts]
        ranges[name] = tuple(pairwise(column_cuts))
        first += count
    return ranges
