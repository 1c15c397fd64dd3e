"""How many pages a request needs in each cache group."""

from __future__ import annotations

import sys

from twostroke.core.frozen import Frozen


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
