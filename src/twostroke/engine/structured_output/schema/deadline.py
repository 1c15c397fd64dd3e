"""When work on a schema must end."""

from __future__ import annotations

import math
import time


class Deadline:
    """Time for some work. All are equal: what was made within one is known within another."""

    def __init__(self, limit_s: float = math.inf) -> None:
        """Begin now."""
        self._limit_s, self._at_s = limit_s, time.monotonic() + limit_s

    def check(self) -> None:
        """Raise TimeoutError if the time is over; the sentence says how long it was."""
        if time.monotonic() >= self._at_s:
            raise TimeoutError(f"took longer than {self._limit_s:g} s to compile: simplify it.")

    def __eq__(self, other: object) -> bool:
        """Whether this is a deadline, too."""
        return isinstance(other, Deadline)

    def __hash__(self) -> int:
        """Return the same for all."""
        return 0
