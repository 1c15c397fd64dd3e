"""How long requests will wait, by the pace at which others got their turn."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_RECENT_S: Final = 10.0  # of waiting, over which a pace is measured
_LEAST: Final = 1e-9  # tokens a second


class StartRate:
    """Measures how many waiting tokens start in a second, for each priority.

    Only the time in which some of the priority were left waiting counts, so a pace is what the
    engine can do, and what more urgent requests leave of it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turned_s = clock()
        self._waited: dict[int, int] = {}  # tokens, when the last step was planned
        self._started: Counter[int] = Counter()  # tokens since then
        self._sums: dict[int, tuple[float, float]] = {}  # recent tokens, and seconds

    def start(self, priority: int, num_tokens: int) -> None:
        """Take in that a request starts."""
        self._started[priority] += num_tokens

    def turn(self, waiting: Mapping[int, int]) -> None:
        """Take in, before a step is planned, how many tokens wait."""
        now_s = self._clock()
        took_s, self._turned_s = now_s - self._turned_s, now_s
        for priority, num_tokens in self._waited.items():
            started = self._started[priority]
            if started < num_tokens:
                kept = math.exp(-took_s / _RECENT_S)
                tokens, seconds = self._sums.get(priority, (0.0, 0.0))
                self._sums[priority] = tokens * kept + started, seconds * kept + took_s
        self._waited = dict(waiting)
        self._started.clear()

    def wait_s(self, tokens: Mapping[int, int]) -> float | None:
        """Return how long tokens by priority take to start; None if nothing has been measured.

        A priority that has not waited yet has the best pace of the others.
        """
        paces = {p: num / s for p, (num, s) in self._sums.items() if num and s}
        if not paces:
            return None
        best = max(paces.values())
        waits = [num / max(paces.get(p, best), _LEAST) for p, num in tokens.items()]
        return max(waits, default=0.0)
