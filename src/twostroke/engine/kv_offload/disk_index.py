"""The pages of a disk tier with their values, and which of them are evicted when it is full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

PREFIX_BYTES: Final = 4  # of a name, by which the next page of the sequence refers to it
_MIN_AGE_S: Final = 60.0  # added to every age, since the order of the last minute says little


@dataclass(slots=True)
class Entry:
    """A KV page stored on disk. Times are seconds since 1970.

    Attributes:
        num_bytes: size of the file.
        saved_s: seconds to compute the page.
        index: index of the page in its sequence.
        used_s: last use, or the time until which the page must stay, if that is later.
        num_uses: uses since the page was written.
        previous: first bytes of the name of the previous page of the sequence; empty if there is
            none.
    """

    num_bytes: int
    saved_s: float
    index: int
    used_s: float
    num_uses: int = 1
    previous: bytes = b""

    def score(self, now_s: float) -> float:
        """Return the page's value on disk; pages with the lowest values are evicted first.

        The score is the prefill time saved, divided by the page's bytes and by the time since its
        last use: hyperbolic caching (Blankstein et al., USENIX ATC 2017) with a cost and a size.
        """
        age_s = max(0.0, now_s - self.used_s) + _MIN_AGE_S
        return self.num_uses * self.saved_s / (self.num_bytes * age_s)


class _ScoredPage(NamedTuple):
    """A stored KV page, its eviction score, and the time until which it must stay.

    Later pages of the sequence are useless without this page. So `score` and `keep_until_s` are the
    maximums over this page and the pages that follow it.
    """

    name: bytes
    entry: Entry
    score: float
    keep_until_s: float


class DiskIndex:
    """An index of the KV pages in a disk tier's folder, which chooses the pages to evict.

    A page is as valuable as any page that follows it in its sequence, and stays as long, since the
    later pages are useless without it. Pages that must be kept are evicted last, and only if they
    take more than half of `max_bytes`.

    Attributes:
        max_bytes: maximum size of all stored pages together.
        num_bytes: size of all stored pages together.
        entries: the pages by name.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.entries: dict[bytes, Entry] = {}

    def add(self, name: bytes, entry: Entry) -> None:
        """Add a stored page to the index, and replace an entry of the same name."""
        self.remove(name)
        self.entries[name] = entry
        self.num_bytes += entry.num_bytes

    def remove(self, name: bytes) -> None:
        """Remove a stored page from the index if it is there."""
        if (entry := self.entries.pop(name, None)) is not None:
            self.num_bytes -= entry.num_bytes

    def use(self, name: bytes, saved_s: float, keep_until_s: float) -> None:
        """Record a use of a stored page, which must stay on disk until `keep_until_s`.

        `saved_s` is the time in seconds to compute the page.
        """
        entry = self.entries[name]
        entry.num_uses += 1
        entry.saved_s = max(entry.saved_s, saved_s)
        entry.used_s = max(entry.used_s, keep_until_s)

    def surplus(self, now_s: float, room: int) -> list[bytes]:
        """Return the names of KV pages to evict until `room` more bytes fit, least valuable first.

        Of pages with equal scores, the later page of a sequence goes first.
        """
        excess = self.num_bytes + room - self.max_bytes
        if excess <= 0:
            return []
        pages = self._scored_pages(now_s)
        protected = self._protected_names(pages, now_s)
        pages.sort(key=lambda page: (page.name in protected, page.score, -page.entry.index))
        evicted: list[bytes] = []
        for page in pages:
            if excess <= 0:
                break
            evicted.append(page.name)
            excess -= page.entry.num_bytes
        return evicted

    def _scored_pages(self, now_s: float) -> list[_ScoredPage]:
        """Return all stored KV pages with their scores, and the times until which they must stay.

        Each page has at least the score and the time of the pages that follow it in its sequence.
        """
        pages: list[_ScoredPage] = []
        minimums: dict[bytes, tuple[float, float]] = {}  # score and time by first bytes of names
        for name, entry in sorted(self.entries.items(), key=lambda item: -item[1].index):
            min_score, min_s = minimums.get(name[:PREFIX_BYTES], (0.0, 0.0))
            score = max(entry.score(now_s), min_score)
            keep_until_s = max(entry.used_s, min_s)
            pages.append(_ScoredPage(name, entry, score, keep_until_s))
            if entry.previous:
                previous_score, previous_s = minimums.get(entry.previous, (0.0, 0.0))
                minimums[entry.previous] = (
                    max(score, previous_score),
                    max(keep_until_s, previous_s),
                )
        return pages

    def _protected_names(self, pages: list[_ScoredPage], now_s: float) -> set[bytes]:
        """Return the names of pages that must stay now and are evicted last.

        The pages that must stay longest come first, until the pages take half of `max_bytes`.
        """
        candidates = [page for page in pages if page.keep_until_s > now_s]
        candidates.sort(key=lambda page: (-page.keep_until_s, page.entry.index))
        room = self.max_bytes // 2
        protected: set[bytes] = set()
        for page in candidates:
            room -= page.entry.num_bytes
            if room < 0:
                break
            protected.add(page.name)
        return protected
