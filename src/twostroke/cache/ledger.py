"""What a folder of pages holds, and which of them go when it is full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_YOUNG_S = 60.0  # added to every age: the last minute's order says little


@dataclass(slots=True)
class Entry:
    """A stored page; `used_s` is its last use, or until when it is kept, if that is later.

    `saved_s` is what computing it takes. Times are seconds since 1970.
    """

    num_bytes: int
    saved_s: float
    place: int
    used_s: float
    num_uses: int = 1

    def score(self, now_s: float) -> float:
        """Return the seconds that it saves, for each byte and each second since its last use.

        Hyperbolic caching (Blankstein et al., USENIX ATC 2017) with a cost and a size.
        """
        age_s = max(0.0, now_s - self.used_s) + _YOUNG_S
        return self.num_uses * self.saved_s / (self.num_bytes * age_s)


class Ledger:
    """The pages of a folder, by name, with at most `most_bytes` in all.

    A use of a page is a use of all pages before it, whose `saved_s` is raised to its own. So a page
    never goes before those that need it: of equal scores the later place goes first. Kept pages go
    last, and only those beyond half of the bytes.
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
        kept = self._kept(now_s)
        order = sorted(
            self.entries.items(),
            key=lambda item: (item[0] in kept, item[1].score(now_s), -item[1].place),
        )
        gone: list[bytes] = []
        for name, entry in order:
            if left <= 0:
                break
            gone.append(name)
            left -= entry.num_bytes
        return gone

    def _kept(self, now_s: float) -> set[bytes]:
        """Return the pages that are kept: those kept longest, up to half of the bytes."""
        asked: Iterable[tuple[bytes, Entry]] = sorted(
            (item for item in self.entries.items() if item[1].used_s > now_s),
            key=lambda item: (-item[1].used_s, item[1].place),
        )
        room, kept = self.most_bytes // 2, set()
        for name, entry in asked:
            room -= entry.num_bytes
            if room < 0:
                break
            kept.add(name)
        return kept
