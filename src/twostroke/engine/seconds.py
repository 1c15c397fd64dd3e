"""Sums as they were at the beginning of each of the last seconds."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MAX_SECONDS: Final = 130


class TimeSpan(Frozen, Generic[T]):
    """Sums at the beginning and at the end of some whole seconds."""

    first: T
    last: T
    seconds: int


class Seconds(Generic[T]):
    """Remembers sums at the beginning of each second in which they changed. Not thread-safe."""

    def __init__(self, read: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        """Take sums from `read`, which returns immutable values."""
        self._read = read
        self._clock = clock
        self._began_s = clock()
        self._marks: deque[tuple[int, T]] = deque([(0, read())], maxlen=MAX_SECONDS + 2)

    def turn(self, now_s: float) -> None:
        """Keep the sums if a new second has begun; call this before each change."""
        second = int(now_s - self._began_s)
        if second != self._marks[-1][0]:
            self._marks.append((second, self._read()))

    def span(self, seconds: int, ago_s: int = 0) -> TimeSpan[T]:
        """Return the last whole `seconds` up to `ago_s`, or as many as there have been."""
        last = max(0, int(self._clock() - self._began_s) - ago_s)
        first = max(0, last - seconds)
        return TimeSpan(self._at(first), self._at(last), last - first)

    def _at(self, second: int) -> T:
        """Return the sums at the beginning of a second: nothing changed until the next mark."""
        for at, sums in self._marks:
            if at >= second:
                return sums
        return self._read()
