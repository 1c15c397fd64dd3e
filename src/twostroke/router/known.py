"""Which replicas were sent the blocks of which prompts, and when: what they may still hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_HOLDERS: Final = 8  # of the longest prefix that are looked at: the last ones


class Stay:
    """Blocks that a replica was sent with one request; `epoch` counts its restarts.

    `used_s` is when the request ended, after which they may be evicted; until then it is inf.
    """

    __slots__ = ("epoch", "place", "used_s")

    def __init__(self, place: int, epoch: int) -> None:
        """Begin, in use."""
        self.place, self.epoch, self.used_s = place, epoch, math.inf


class Known:
    """The last `most` blocks, by the keys of their prompts up to their ends.

    A request's stay replaces those of all its blocks, so who holds a block holds those before it,
    and a bisection finds the longest prefix. Blocks are forgotten in two generations, which costs
    the same at each request, and keeps those that were asked for since half of them were new.
    """

    def __init__(self, most: int) -> None:
        """Begin with none."""
        self._half = max(1, most // 2)
        self._young: dict[int, Stay | dict[int, Stay]] = {}
        self._old: dict[int, Stay | dict[int, Stay]] = {}
        self._dead: dict[int, Stay | dict[int, Stay]] = {}
        self._epochs: list[int] = []  # by place
        self._cutoffs_s: list[float] = []  # what was last used before is evicted

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def begin_epoch(self, place: int) -> None:
        """Forget what a replica holds, which is new or has started again."""
        while place >= len(self._epochs):
            self._epochs.append(0)
            self._cutoffs_s.append(0.0)
        self._epochs[place] += 1
        self._cutoffs_s[place] = 0.0

    def cut(self, place: int, before_s: float) -> None:
        """Forget the blocks of a replica that were last used before a time."""
        self._cutoffs_s[place] = before_s

    def longest(self, keys: Sequence[int]) -> tuple[int, list[int]]:
        """Return how many of the first blocks some replica holds, and the last ones to get them."""
        low, high, found = 0, len(keys), list[int]()
        while low < high:
            middle = (low + high + 1) // 2
            holders = self._holders(keys[middle - 1])
            if holders:
                low, found = middle, holders
            else:
                high = middle - 1
        return low, found

    def num_held(self, keys: Sequence[int], most: int, place: int) -> int:
        """Return how many of the first blocks, at most `most`, a replica holds."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            found = self._get(keys[middle - 1])
            stay = found.get(place) if isinstance(found, dict) else found
            if isinstance(stay, Stay) and stay.place == place and self._is_valid(stay):
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, keys: Sequence[int], place: int) -> Stay:
        """Note that a replica was sent these blocks; the caller ends their stay."""
        stay = Stay(place, self._epochs[place])
        young, old = self._young, self._old
        for key in keys:
            found = young.get(key)
            if found is None:
                found = old.get(key)
            if found is None or (isinstance(found, Stay) and found.place == place):
                young[key] = stay
            elif isinstance(found, Stay):
                young[key] = {found.place: found, place: stay} if self._is_valid(found) else stay
            else:
                found.pop(place, None)  # the last to come is last
                found[place] = stay
                young[key] = found
        if len(young) >= self._half:
            self._dead, self._old, self._young = old, young, {}
        for _ in range(min(len(self._dead), 4 * len(keys))):  # at once would take too long
            self._dead.popitem()
        return stay

    def _get(self, key: int) -> Stay | dict[int, Stay] | None:
        found = self._young.get(key)
        return self._old.get(key) if found is None else found

    def _holders(self, key: int) -> list[int]:
        found = self._get(key)
        if found is None:
            return []
        if isinstance(found, Stay):
            return [found.place] if self._is_valid(found) else []
        places: list[int] = []
        for stay in reversed(list(found.values())):
            if self._is_valid(stay):
                places.append(stay.place)
                if len(places) == _MOST_HOLDERS:
                    break
        return places

    def _is_valid(self, stay: Stay) -> bool:
        place = stay.place
        return stay.epoch == self._epochs[place] and stay.used_s >= self._cutoffs_s[place]
