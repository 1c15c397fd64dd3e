"""How keys and values are stored: bytes per token of a layer, and which layers share pages."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

PIECE_TOKENS = 64  # of a request, counted from its first, over which attention sums at once
_MAX_GROUPS = 16  # each costs the scheduler a page id for every `page_size` tokens of a request


class CacheFormat(Frozen):
    """How keys and values are stored: bytes per number, and bytes of scale per head.

    A token's keys of a head have one scale, and its values another.
    """

    value_bytes: float
    head_bytes: int = 0

    def head(self, head_dim: int) -> float:
        """Bytes of one head's keys, or of its values, of one token."""
        return head_dim * self.value_bytes + self.head_bytes


FLOAT16 = CacheFormat(2)


class CacheLayer(Frozen):
    """What an attention layer stores for each token: keys and values of its heads.

    With a `window`, only the last `window` tokens up to a row's own are ever read again. With
    several `places` a rank stores one of so many pieces of `PIECE_TOKENS`, in turn with others.
    Where `values_are_keys`, one row of numbers is both.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    places: int = 1
    values_are_keys: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of numbers that a head stores for one token: its keys and its values."""
        return 1 if self.values_are_keys else 2

    @property
    def values_per_token(self) -> int:
        """Numbers stored for one token, keys and values together."""
        return self.num_rows * self.num_kv_heads * self.head_dim

    def bytes_per_token(self, stored: CacheFormat) -> int:
        """Bytes stored for one token."""
        return ceil(self.num_rows * self.num_kv_heads * stored.head(self.head_dim))

    def bytes_in_page(self, page_size: int, stored: CacheFormat) -> int:
        """Bytes of this layer in a page of `page_size` tokens, of which others may store some."""
        return page_size // self.places * self.bytes_per_token(stored)


class CacheGroup(Frozen):
    """Layers whose keys and values lie together in pages: one page holds tokens of all of them.

    `layers[i]` is the cache layer at place i of the group's pages. Rows of these layers read the
    last `window` positions, their own included, or all of them if it is None.
    """

    layers: tuple[int, ...]
    window: int | None = None


def group_layers(windows: Sequence[int | None]) -> tuple[CacheGroup, ...]:
    """Divide layers, given by their windows, into groups of one size: any page fits any group.

    Of the sizes that make at most 16 groups it takes the one that leaves the fewest places empty,
    and of these the largest: the greatest common divisor of how many layers there are of each
    window, unless that makes too many groups. Then some groups have fewer layers than their pages
    have places. The layers of a group are spread over the whole. Without layers there is one empty
    group.
    """
    layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers.setdefault(window, []).append(layer)
    if not layers:
        return (CacheGroup(()),)
    kinds = sorted(layers, key=lambda window: (window is not None, window or 0))
    counts = [len(layers[kind]) for kind in kinds]
    max_groups = max(_MAX_GROUPS, len(kinds))
    sizes = [size for size in range(1, max(counts) + 1) if _num_groups(counts, size) <= max_groups]
    size = min(sizes, key=lambda size: (size * _num_groups(counts, size), -size))
    groups = []
    for kind, count in zip(kinds, counts, strict=True):
        step = _num_groups([count], size)  # so that each stage of a pipeline has some of a group
        groups += [CacheGroup(tuple(layers[kind][first::step]), kind) for first in range(step)]
    return tuple(groups)


def _num_groups(counts: list[int], size: int) -> int:
    return sum(-(-count // size) for count in counts)
