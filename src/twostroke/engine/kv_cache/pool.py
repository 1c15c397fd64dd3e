"""The pool of KV cache pages: reference counts, allocation, and eviction of cached pages."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from twostroke.model.program.kv_layout import PageGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class PagePool:
    """The ids of the `num_pages` KV pages of an engine, with their reference counts.

    A page serves any of the model's cache groups. It is in exactly one of three states:

    - referenced: at least one request reads or writes it;
    - cached: it has no references, but the prefix index has its content. It can be shared again, or
      evicted when pages run short, least recently used first;
    - free: its content means nothing.

    The pool manages ids; the backend owns the memory.

    Attributes:
        groups: computes how many pages of each cache group a request needs.
        on_evict: called with cached pages just before they are allocated again.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        windows: tuple[int | None, ...] = (None,),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert num_pages >= 1, "a pool needs a page"
        self.num_pages = num_pages
        self.page_size = page_size
        self.groups = PageGroups(page_size, windows)
        self.on_evict: Callable[[Sequence[int]], None] | None = None
        self._counts = [0] * num_pages
        self._is_kept = [False] * num_pages  # whether a page is cached after its last reference
        # Last in, first out: a page that was just used is likelier to be in a processor cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, float] = OrderedDict()  # time of last use, oldest first
        self._evicted_s: float | None = None  # last use of the page that was evicted last
        self._clock = clock

    @property
    def num_free(self) -> int:
        """The number of free pages: their content means nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """The number of cached pages: they have no references, but the prefix index has them."""
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        """The number of KV pages that at least one request reads or writes."""
        return self.num_pages - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """The number of KV pages that `allocate` could return now: free pages and cached pages."""
        return len(self._free) + len(self._cached)

    @property
    def horizon_s(self) -> float | None:
        """Seconds between now and the last use of the KV page that was evicted last.

        None if no page was evicted. Pages are evicted in the order of their last use, so every page
        used since then is still cached.
        """
        return None if self._evicted_s is None else self._clock() - self._evicted_s

    def num_references(self, page: int) -> int:
        """Return the number of references to a KV page."""
        return self._counts[page]

    def contents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return all KV pages' reference counts, and the ids of the cached pages, as copies."""
        return tuple(self._counts), tuple(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` KV pages, at most `num_available`, with one reference each.

        Cached pages are evicted if too few pages are free.
        """
        assert count <= self.num_available, "more pages requested than available"
        free, counts = self._free, self._counts
        num_evicted = max(0, count - len(free))
        pages = free[: -count - 1 : -1]
        del free[len(free) - len(pages) :]
        pages += self._evict(num_evicted)
        for page in pages:
            counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each of `pages`, which are all referenced or cached."""
        for page in pages:
            if self._counts[page] == 0:
                del self._cached[page]
            self._counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each of `pages`, given in the order of their sequence.

        The last page of the sequence is evicted first: no prefix reaches it without the pages
        before it.
        """
        counts, is_kept, now_s = self._counts, self._is_kept, self._clock()
        for page in reversed(pages):
            num_left = counts[page] - 1
            assert num_left >= 0, "a page without references was released"
            counts[page] = num_left
            if not num_left:
                if is_kept[page]:
                    self._cached[page] = now_s
                else:
                    self._free.append(page)

    def release_out_of_window(self, page: int, *, is_reusable: bool = False) -> None:
        """Drop a reference to a KV page that is no longer in its request's sliding window.

        If no references are left, the page is the next to be evicted, unless it `is_reusable`. In a
        cache group with a sliding window, a page is useful to other requests only if their common
        prefix ends there, which is rare.
        """
        self.release([page])
        if page in self._cached:
            self._cached[page] = math.inf  # its eviction must not change `horizon_s`
            if not is_reusable:
                self._cached.move_to_end(page, last=False)

    def evict_all(self) -> None:
        """Evict all cached KV pages, because their content is lost."""
        self._free += self._evict(len(self._cached))

    def keep(self, pages: Iterable[int]) -> None:
        """Mark referenced KV pages to become cached, rather than free, after their last reference.

        The prefix index calls this for the pages that it has indexed.
        """
        counts, is_kept = self._counts, self._is_kept
        for page in pages:
            assert counts[page] > 0, "only a referenced page has content worth keeping"
            is_kept[page] = True

    def _evict(self, count: int) -> list[int]:
        """Evict the `count` least recently used cached KV pages, and return them."""
        cached, is_kept = self._cached, self._is_kept
        pages: list[int] = []
        for _ in range(count):
            page, used_s = cached.popitem(last=False)
            if used_s != math.inf:
                self._evicted_s = used_s
            is_kept[page] = False
            pages.append(page)
        if pages and self.on_evict is not None:
            self.on_evict(pages)
        return pages
