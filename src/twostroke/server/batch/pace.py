"""How far a batch is, and how long the rest takes."""

from __future__ import annotations

import time


class BatchPace:
    """How far a running batch is. It belongs to the event loop."""

    def __init__(self, num_done: int, num_failed: int, total: int) -> None:
        """Begin with what an earlier process has done."""
        self.num_failed = num_failed
        self.num_done = num_done
        self.total = total
        self._began_s, self._num_before = time.monotonic(), num_done

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end at the pace of this process; None before a line has ended."""
        num_new = self.num_done - self._num_before
        if not num_new:
            return None
        return (time.monotonic() - self._began_s) / num_new * (self.total - self.num_done)
