"""The last minute, second by second: what sums were when each second began."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MOST_SECONDS: Final = 60


@dataclass(frozen=True, slots=True)
class Span(Generic[T]):
    """Sums at the beginning and at the end of some whole seconds."""

    first: T
    last: T
    seconds: int


class Seconds(Generic[T]):
    """Remembers sums as of the beginnings of the last seconds. Not thread-safe.

    Nothing is kept of seconds in which nothing was counted. Whoever counts calls `turn` before.
    """

    def __init__(self, read: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        """Take sums from `read`; what it returns is never changed afterwards."""
        self._read = read
        self._clock = clock
        self._began_s = clock()
        self._second = 0
        self._marks: deque[tuple[int, T]] = deque([(0, read())], maxlen=MOST_SECONDS + 2)

    @property
    def age_s(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self._began_s

    def turn(self, now_s: float) -> None:
        """Note the sums if a second has begun."""
        second = int(now_s - self._began_s)
        if second != self._second:
            self._second = second
            self._marks.append((second, self._read()))

    def span(self, most: int) -> Span[T]:
        """Return the last `most` whole seconds, or as many as there were so far."""
        now = int(self.age_s)
        first = max(0, now - most)
        return Span(self._at(first), self._at(now), now - first)

    def _at(self, second: int) -> T:
        """Return the sums at the beginning of a second; what was counted first is behind it."""
        for at, sums in self._marks:
            if at >= second:
                return sums
        return self._read()
