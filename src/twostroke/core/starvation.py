"""Measures whether a process that makes no progress waits for a processor."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

_STARVED_SHARE: Final = 0.3  # of the time that a thread was ready to run, but waited


class StarvationMonitor:
    """Measures how long the threads of a process wait for a processor.

    Linux counts these times (`/proc/PID/task/TID/schedstat`). A process that hangs, sleeps or is
    stopped does not wait for a processor. Where the times cannot be read, no process is starved.
    """

    def __init__(self, pid: int) -> None:
        """Measure the process with this id, from `start` on."""
        self._threads = Path("/proc", str(pid), "task")
        self._start_s = 0.0
        self._waits_at_start_ns: dict[str, int] | None = None

    def start(self) -> None:
        """Begin to measure, unless a measurement is in progress."""
        if self._waits_at_start_ns is None:
            self._start_s, self._waits_at_start_ns = time.monotonic(), self._waits_ns()

    def stop(self) -> None:
        """End the measurement."""
        self._waits_at_start_ns = None

    @property
    def is_starved(self) -> bool:
        """Whether a thread has waited for a processor for much of the time since `start`."""
        before = self._waits_at_start_ns
        if not before:
            return False
        passed_s = time.monotonic() - self._start_s
        waits_ns = [wait - before[tid] for tid, wait in self._waits_ns().items() if tid in before]
        return max(waits_ns, default=0) / 1e9 > _STARVED_SHARE * passed_s

    def _waits_ns(self) -> dict[str, int]:
        """Return how long each thread has waited for a processor since it was started.

        The waits are in nanoseconds, by the id of the thread.
        """
        waits: dict[str, int] = {}
        try:
            for thread in self._threads.iterdir():
                waits[thread.name] = int((thread / "schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):  # a thread has ended, or this is not Linux
            pass
        return waits
