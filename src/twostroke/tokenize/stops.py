"""Find the first of several stop strings in text that arrives piece by piece."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopMatcher:
    """An automaton over characters that says how much text may still become a stop string.

    The first stop string to be complete wins; of several that end at the same character, the
    longest. So the answer does not depend on how the text was cut into pieces. Time is
    proportional to the text (Aho and Corasick, "Efficient string matching", 1975).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Build the automaton; empty stop strings are ignored."""
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._stop_at = [""]  # the longest stop string that ends in this state
        words = [stop for stop in stops if stop]
        for word in words:
            self._add(word)
        self._link()
        self._state = 0
        starts = "".join(sorted({word[0] for word in words}))
        self._start = re.compile(f"[{re.escape(starts)}]") if starts else None

    @property
    def held(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return self._depth[self._state]

    def feed(self, text: str) -> tuple[int, str] | None:
        """Read `text`; return the offset after a stop string and that string, or None.

        After a match nothing more may be fed.
        """
        state = self._state
        start = 0
        if state == 0:
            hit = self._start.search(text) if self._start else None
            if hit is None:
                return None
            start = hit.start()
        follow, fail = self._next, self._fail
        for place in range(start, len(text)):
            char = text[place]
            while state and char not in follow[state]:
                state = fail[state]
            state = follow[state].get(char, 0)
            if self._stop_at[state]:
                return place + 1, self._stop_at[state]
        self._state = state
        return None

    def _add(self, word: str) -> None:
        state = 0
        for depth, char in enumerate(word, 1):
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(depth)
                self._stop_at.append("")
            state = self._next[state][char]
        self._stop_at[state] = word

    def _link(self) -> None:
        """Point each state at the longest proper suffix that is a state; shorter states first."""
        queue = list(self._next[0].values())
        for state in queue:
            for char, child in self._next[state].items():
                link = self._fail[state]
                while link and char not in self._next[link]:
                    link = self._fail[link]
                self._fail[child] = self._next[link].get(char, 0)
                if not self._stop_at[child]:
                    self._stop_at[child] = self._stop_at[self._fail[child]]
                queue.append(child)
