"""Whether the machine is ours alone: how much of the processor others took while something ran.

Engines that wait by spinning lose a hundredfold when another process wants one of their cores, so
a run beside others says nothing. Only the standard library is used here.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

MAX_SHARE = 0.03  # of all cores' time that others may take before a run counts as disturbed

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Watch:
    """Counts, from its making on, the processor time of processes other than `pids`."""

    def __init__(self, *pids: int) -> None:
        """Start counting; this process is never among the others."""
        self._pids = {os.getpid(), *pids}
        self._began_s = time.monotonic()
        self._others_s = self._count()

    def others_share(self) -> float:
        """Return the others' share of all cores' time so far."""
        wall_s = time.monotonic() - self._began_s
        return max(0.0, self._count() - self._others_s) / wall_s / (os.cpu_count() or 1)

    def _count(self) -> float:
        return busy_s() - sum(process_s(pid) for pid in self._pids)


def busy_s() -> float:
    """Return the processor seconds that all cores have worked for since the machine started."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) * _TICK_S


def process_s(pid: int) -> float:
    """Return the processor seconds of a process, its threads included, its children not."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) * _TICK_S
