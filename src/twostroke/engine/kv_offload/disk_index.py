"""What a folder of pages holds, and which of them go when it is full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

TAG_BYTES: Final = 4  # of a name, by which the page after it knows it
_YOUNG_S: Final = 60.0  # added to every age: the last minute's order says little


@dataclass(slots=True)
class Entry:
    """A stored page; `used_s` is its last use, or until when it is kept, if that is later.

    `saved_s` is what computing it takes, and `before` how the name of the page before it begins;
    empty if there is none. Times are seconds since 1970.
    """

    num_bytes: int
    saved_s: float
    place: int
    used_s: float
    num_uses: int = 1
    before: bytes = b""

    def score(self, now_s: float) -> float:
        """Return the seconds that it saves, for each byte and each second since its last use.

        Hyperbolic caching (Blankstein et al., USENIX ATC 2017) with a cost and a size.
        """
        age_s = max(0.0, now_s - self.used_s) + _YOUNG_S
        return self.num_uses * self.saved_s / (self.num_bytes * age_s)


class _Judged(NamedTuple):
    name: bytes
    entry: Entry
    score: float
    until_s: float


class DiskIndex:
    """The pages of a folder, by name, with at most `most_bytes` in all.

    A page is worth at least as much as those that continue it, and stays as long. So it never goes
    before them: of equal scores the later place goes first. Kept pages go last, and only those
    beyond half of the bytes.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self.entries: dict[bytes, Entry] = {}

    def add(self, name: bytes, entry: Entry) -> None:
        """Enter a page, instead of what had its name."""
        self.remove(name)
        self.entries[name] = entry
        self.num_bytes += entry.num_bytes

    def remove(self, name: bytes) -> None:
        """Strike out a page, if it is there."""
        if (entry := self.entries.pop(name, None)) is not None:
            self.num_bytes -= entry.num_bytes

    def use(self, name: bytes, saved_s: float, until_s: float) -> None:
        """Note a use of a page that is there; it stays until `until_s` if that is in the future."""
        entry = self.entries[name]
        entry.num_uses += 1
        entry.saved_s = max(entry.saved_s, saved_s)
        entry.used_s = max(entry.used_s, until_s)

    def surplus(self, now_s: float, room: int) -> list[bytes]:
        """Return which pages must go, the least valuable first, for `room` more bytes."""
        left = self.num_bytes + room - self.most_bytes
        if left <= 0:
            return []
        pages = self._judged(now_s)
        kept = self._kept(pages, now_s)
        pages.sort(key=lambda page: (page.name in kept, page.score, -page.entry.place))
        gone: list[bytes] = []
        for page in pages:
            if left <= 0:
                break
            gone.append(page.name)
            left -= page.entry.num_bytes
        return gone

    def _judged(self, now_s: float) -> list[_Judged]:
        """Return all pages, each with at least the score and the time of those that continue it."""
        pages, needed = list[_Judged](), dict[bytes, tuple[float, float]]()  # by the name's begin
        for name, entry in sorted(self.entries.items(), key=lambda item: -item[1].place):
            least_score, least_s = needed.get(name[:TAG_BYTES], (0.0, 0.0))
            score, until_s = max(entry.score(now_s), least_score), max(entry.used_s, least_s)
            pages.append(_Judged(name, entry, score, until_s))
            if entry.before:
                known_score, known_s = needed.get(entry.before, (0.0, 0.0))
                needed[entry.before] = max(score, known_score), max(until_s, known_s)
        return pages

    def _kept(self, pages: list[_Judged], now_s: float) -> set[bytes]:
        """Return the pages that are kept: those kept longest, up to half of the bytes."""
        asked = [page for page in pages if page.until_s > now_s]
        asked.sort(key=lambda page: (-page.until_s, page.entry.place))
        room, kept = self.most_bytes // 2, set()
        for page in asked:
            room -= page.entry.num_bytes
            if room < 0:
                break
            kept.add(page.name)
        return kept
