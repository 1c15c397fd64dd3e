"""Reference counts of key-value pages, and which are free or kept for reuse."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from twostroke.model.program.kv_layout import PageGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class PagePool:
    """Reference-counted ids of `num_pages` pages that hold `page_size` tokens each.

    A page serves any of the model's cache groups. It is in exactly one of three states:

    - referenced: at least one request reads or writes it;
    - cached: it has no references, but an index keeps its content. It can be shared again, or be
      evicted when pages run short, least recently used first;
    - free: its content means nothing.

    The pool knows ids, not memory: the backend owns the content.

    Attributes:
        groups: how many pages of which group a request needs.
        on_evict: called with cached pages just before they are handed out again.
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
        self._kept = [False] * num_pages
        # Last in, first out: a page that was just used is likelier to be in a near cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, float] = OrderedDict()  # by when each was last used
        self._evicted_s: float | None = None  # when the page was last used that was evicted last
        self._clock = clock

    @property
    def num_free(self) -> int:
        """Pages whose content means nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages without references that an index keeps."""
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        """Pages that requests refer to."""
        return self.num_pages - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def horizon_s(self) -> float | None:
        """How long ago the page was used that was evicted last; None if none was.

        Since pages are evicted by age, those that were used since are there.
        """
        return None if self._evicted_s is None else self._clock() - self._evicted_s

    def num_references(self, page: int) -> int:
        """Return how many references `page` has."""
        return self._counts[page]

    def contents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return copies of the reference counts of all pages and of the cached pages."""
        return tuple(self._counts), tuple(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages, at most `num_available`, with one reference each."""
        assert count <= self.num_available, "more pages were asked for than there are"
        free, counts = self._free, self._counts
        num_evicted = max(0, count - len(free))
        pages = free[: -count - 1 : -1]
        del free[len(free) - len(pages) :]
        pages += self._evict(num_evicted)
        for page in pages:
            counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each of `pages`, which are referenced or cached."""
        for page in pages:
            if self._counts[page] == 0:
                del self._cached[page]
            self._counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each of `pages`, which are in the order of their sequence.

        The last page is evicted first: no prefix could reach it without the pages before it.
        """
        counts, kept, now_s = self._counts, self._kept, self._clock()
        for page in reversed(pages):
            left = counts[page] - 1
            assert left >= 0, "a page without references was released"
            counts[page] = left
            if not left:
                if kept[page]:
                    self._cached[page] = now_s
                else:
                    self._free.append(page)

    def release_passed(self, page: int, *, is_sought: bool = False) -> None:
        """Drop a reference to a page that a window has passed, before its request ends.

        It becomes the first to be evicted, unless it `is_sought`: most places of a sequence are
        never the end of another request's prefix.
        """
        self.release([page])
        if page in self._cached:
            self._cached[page] = math.inf  # its age says nothing of the others
            if not is_sought:
                self._cached.move_to_end(page, last=False)

    def evict_all(self) -> None:
        """Evict all cached pages, because their content is lost."""
        self._free += self._evict(len(self._cached))

    def keep(self, pages: Iterable[int]) -> None:
        """Let referenced pages outlive their references until they are evicted."""
        counts, kept = self._counts, self._kept
        for page in pages:
            assert counts[page] > 0, "only a referenced page has content worth keeping"
            kept[page] = True

    def _evict(self, count: int) -> list[int]:
        """Evict the cached pages that were used longest ago."""
        cached, kept, pages = self._cached, self._kept, list[int]()
        for _ in range(count):
            page, used_s = cached.popitem(last=False)
            if used_s != math.inf:
                self._evicted_s = used_s
            kept[page] = False
            pages.append(page)
        if pages and self.on_evict is not None:
            self.on_evict(pages)
        return pages
