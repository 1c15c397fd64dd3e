"""How keys and values are stored: bytes per token, layers that share pages, pages per request."""

from __future__ import annotations

import sys
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

KV_SPLIT_TOKENS = 64  # attention sums over this many tokens of a request before it merges sums
STATE_VALUE_BYTES = 4  # recurrent states are float32, in memory and in arithmetic
_MAX_GROUPS = 16  # each costs the scheduler a page id for every `page_size` tokens of a request


class CacheFormat(Frozen):
    """A number format of the KV cache, such as float16 or int8.

    `value_bytes` is the size of a number. `head_bytes` is the size of a scale: a token's key and
    its value have a scale each, for each head.
    """

    value_bytes: float
    head_bytes: int = 0

    def bytes_per_head(self, head_dim: int) -> float:
        """Return the KV cache bytes of one head's key, or of its value, for one token."""
        return head_dim * self.value_bytes + self.head_bytes


FLOAT16 = CacheFormat(2)


class CacheLayer(Frozen):
    """The shape of the keys and values that an attention layer stores for each token.

    With a `window`, a row reads only the last `window` tokens up to its own. If `num_kv_ranks` is
    above 1, that many ranks take turns in storing the KV splits (`KV_SPLIT_TOKENS` tokens each) of
    a request. With `values_are_keys` (latent attention), the keys are also the values and are
    stored once.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    num_kv_ranks: int = 1
    values_are_keys: bool = False

    @property
    def num_rows(self) -> int:
        """Return how many vectors a head stores for a token: its key and value, or one for both."""
        return 1 if self.values_are_keys else 2

    @property
    def values_per_token(self) -> int:
        """Return how many numbers the layer stores for a token, keys and values together."""
        return self.num_rows * self.num_kv_heads * self.head_dim

    def bytes_per_token(self, stored: CacheFormat) -> int:
        """Return the KV cache bytes that the layer stores for a token."""
        return ceil(self.num_rows * self.num_kv_heads * stored.bytes_per_head(self.head_dim))

    def bytes_in_page(self, page_size: int, stored: CacheFormat) -> int:
        """Return the bytes that the layer has in a KV page of `page_size` tokens, on one rank."""
        return page_size // self.num_kv_ranks * self.bytes_per_token(stored)


class StateLayer(Frozen):
    """The shape of the recurrent state that a layer stores for each request.

    Attributes:
        num_values: the float32 numbers of the state.
    """

    num_values: int


class CacheGroup(Frozen):
    """Attention layers that share KV pages: a page has the keys and values of each of the layers.

    `layers[i]` is the cache layer in slot i of the group's pages. Rows of these layers read the
    last `window` positions, their own included; None: all positions.
    """

    layers: tuple[int, ...]
    window: int | None = None


def group_layers(windows: Sequence[int | None]) -> tuple[CacheGroup, ...]:
    """Divide attention layers into cache groups of one size, so that any KV page fits any group.

    `windows`: the sliding window of each layer; None: no window. A group's layers have the same
    window.

    The group size makes at most 16 groups, and leaves as few slots empty as possible; of equally
    good sizes the largest is taken. Usually this is the greatest common divisor of the numbers of
    layers with each window. If that makes too many groups, some groups have fewer layers than
    slots. The layers of a group are spread over the model. Without layers there is one empty group.
    """
    layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers.setdefault(window, []).append(layer)
    if not layers:
        return (CacheGroup(()),)
    sorted_windows = sorted(layers, key=lambda window: (window is not None, window or 0))
    counts = [len(layers[window]) for window in sorted_windows]
    max_groups = max(_MAX_GROUPS, len(sorted_windows))
    sizes = [size for size in range(1, max(counts) + 1) if _num_groups(counts, size) <= max_groups]
    size = min(sizes, key=lambda size: (size * _num_groups(counts, size), -size))
    groups = []
    for window, count in zip(sorted_windows, counts, strict=True):
        step = _num_groups([count], size)  # interleaved, so that each pipeline stage has some
        groups += [CacheGroup(tuple(layers[window][first::step]), window) for first in range(step)]
    return tuple(groups)


def _num_groups(counts: list[int], size: int) -> int:
    return sum(-(-count // size) for count in counts)


class PageGroups(Frozen):
    """Computes which KV pages a request needs, from the sliding window of each cache group.

    Rows of group g read `windows[g]` positions, or all if None.

    A page holds `page_size` tokens of one group. A request has the same number of page slots in
    each group. A row at position p with a window w reads the positions above p - w, its own
    included; in a group with a window, a slot is empty once no later row reads its page.
    """

    page_size: int
    windows: tuple[int | None, ...] = (None,)

    def __post_init__(self) -> None:
        """Assert that there are groups, and that page size and windows are positive."""
        assert self.page_size >= 1, "a page must hold a token"
        assert self.windows, "a model without attention has no pages"
        assert all(window is None or window >= 1 for window in self.windows), "an empty window"

    @property
    def has_windows(self) -> bool:
        """Return whether any cache group has a sliding window."""
        return any(self.windows)

    def first_read_pages(self, num_computed: int) -> list[int]:
        """Return, for each cache group, the index of the first page that a request will read again.

        Pages before that index have left the group's window, and can be freed. `num_computed`: the
        number of computed tokens, which is the position of the next row.
        """
        size = self.page_size
        return [
            0 if window is None else max(0, num_computed + 1 - window) // size
            for window in self.windows
        ]

    def next_release(self, num_computed: int) -> int:
        """Return how many tokens must be computed before a sliding window frees another KV page."""
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
        """Return the maximum of KV pages that a request of `num_tokens` tokens ever holds.

        `num_rows`: the largest number of rows that a step computes of the request.
        """
        num_pages = -(-num_tokens // self.page_size)
        return sum(
            num_pages
            if window is None
            else min(num_pages, self._max_pages_in_window(window, num_rows))
            for window in self.windows
        )

    def num_missing(self, num_pages: int, num_computed: int, num_tokens: int, num_rows: int) -> int:
        """Return how many more KV pages a request may need, at least one for each cache group.

        The request has `num_pages` page slots in each group and will compute `num_tokens` tokens,
        at most `num_rows` in a step. Pages that its sliding windows free on the way are subtracted.
        """
        growth = max(1, -(-num_tokens // self.page_size) - num_pages)
        if not any(self.windows):
            return growth * len(self.windows)
        num_rows = max(1, min(num_rows, num_tokens - num_computed))
        total = 0
        for window, first in zip(self.windows, self.first_read_pages(num_computed), strict=True):
            if window is None:
                total += growth
            else:
                num_free = self._max_pages_in_window(window, num_rows) - (num_pages - first)
                total += max(0, min(growth, num_free))
        return total

    def max_tokens(self, num_pages: int, limit: int, num_rows: int = 1) -> int:
        """Return how many tokens a request can have that holds all of `num_pages` KV pages.

        The result is at most `limit`. `num_rows`: as in `num_needed`.
        """
        num_growing = len(self.windows)
        window_pages = sorted(
            self._max_pages_in_window(w, num_rows) for w in self.windows if w is not None
        )
        for num_held in window_pages:  # groups with small windows stop growing first
            if num_held * num_growing > num_pages:
                break
            num_pages -= num_held
            num_growing -= 1
        if not num_growing:
            return limit
        return min(limit, num_pages // num_growing * self.page_size)

    def _max_pages_in_window(self, window: int, num_rows: int) -> int:
        """Return the maximum of KV pages of a request in a cache group with this window.

        Each step computes at most `num_rows` rows.
        """
        return (window + num_rows + self.page_size - 3) // self.page_size + 1


# By the names that users give them; f32 is for the reference and torch backends alone.
FORMATS: Final = {
    "f32": CacheFormat(4),
    "f16": FLOAT16,
    "bf16": CacheFormat(2),
    "int8": CacheFormat(1, head_bytes=2),  # a float16 scale
    "int16": CacheFormat(2, head_bytes=2),  # a bfloat16 scale; for the cpu backend
    "fp8": CacheFormat(1, head_bytes=2),  # E4M3 with a bfloat16 scale; for the gpu backend
}
DEFAULT_FORMAT: Final = "f16"


def first_seen(position: Any, window: int, *, is_chunked: bool) -> Any:
    """Return the first position that a row sees through a window (see `Attention`).

    `position` is the row's position: a number, or an array of numbers. The result may be negative.
    """
    return position // window * window if is_chunked else position - window + 1
