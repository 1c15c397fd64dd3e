"""How keys and values are stored: bytes per token, layers that share pages, pages per request."""

from __future__ import annotations

import sys
from math import ceil
from typing import TYPE_CHECKING, Final

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


class PageGroups(Frozen):
    """How far the rows of each cache group see: `windows[g]` positions, or all of them if None.

    A page holds `page_size` tokens of one group. A request has the same number of places for pages
    in each group. A row at position p with a window w reads the positions above p - w, its own
    included; in a group with a window, a place is empty once no later row reads its page.
    """

    page_size: int
    windows: tuple[int | None, ...] = (None,)

    def __post_init__(self) -> None:
        """Check the sizes."""
        assert self.page_size >= 1, "a page must hold a token"
        assert self.windows, "a model without attention has no pages"
        assert all(window is None or window >= 1 for window in self.windows), "an empty window"

    @property
    def has_windows(self) -> bool:
        """Whether the rows of any group see only the last positions."""
        return any(self.windows)

    def first_seen(self, num_computed: int) -> list[int]:
        """Return, for each group, the first place that rows from `num_computed` on read."""
        size = self.page_size
        return [
            0 if window is None else max(0, num_computed + 1 - window) // size
            for window in self.windows
        ]

    def next_passed(self, num_computed: int) -> int:
        """Return how many tokens must be computed until a window passes another page."""
        size = self.page_size
        return min(
            (
                (max(0, num_computed + 1 - window) // size + 1) * size + window - 1
                for window in self.windows
                if window is not None
            ),
            default=sys.maxsize,
        )

    def num_needed(self, num_tokens: int, num_rows: int = 1) -> int:
        """Return the most pages that a request of `num_tokens` holds, with `num_rows` a step."""
        num_places = -(-num_tokens // self.page_size)
        return sum(
            num_places if window is None else min(num_places, self._most_held(window, num_rows))
            for window in self.windows
        )

    def num_missing(
        self, num_places: int, num_computed: int, num_tokens: int, num_rows: int
    ) -> int:
        """Return the pages that a request may still take, at least one for each group.

        It has `num_places` in each group and will compute `num_tokens` tokens, at most `num_rows` a
        step. Pages that its windows leave until then are not counted.
        """
        growth = max(1, -(-num_tokens // self.page_size) - num_places)
        if not any(self.windows):
            return growth * len(self.windows)
        num_rows = max(1, min(num_rows, num_tokens - num_computed))
        total = 0
        for window, first in zip(self.windows, self.first_seen(num_computed), strict=True):
            if window is None:
                total += growth
            else:
                room = self._most_held(window, num_rows) - (num_places - first)
                total += max(0, min(growth, room))
        return total

    def most_tokens(self, num_pages: int, limit: int, num_rows: int = 1) -> int:
        """Return how many tokens a request with all of `num_pages` can have, at most `limit`."""
        num_growing = len(self.windows)
        held = sorted(self._most_held(w, num_rows) for w in self.windows if w is not None)
        for most in held:  # groups that stop growing before the others do
            if most * num_growing > num_pages:
                break
            num_pages -= most
            num_growing -= 1
        if not num_growing:
            return limit
        return min(limit, num_pages // num_growing * self.page_size)

    def _most_held(self, window: int, num_rows: int) -> int:
        """Return in how many pages the positions that `num_rows` rows read and write can lie."""
        return (window + num_rows + self.page_size - 3) // self.page_size + 1


FORMATS: Final = {
    "f32": CacheFormat(4),
    "f16": FLOAT16,
    "bf16": CacheFormat(2),
    "int8": CacheFormat(1, head_bytes=2),  # a float16 scale
    "int16": CacheFormat(2, head_bytes=2),  # a bfloat16 scale; for the cpu backend
    "fp8": CacheFormat(1, head_bytes=2),  # E4M3, with such a scale; for the gpu backend
}
DEFAULT_FORMAT: Final = "f16"
