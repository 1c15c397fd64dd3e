"""Measure how much of the processors other programs used during a run.

Engines that wait by spinning become a hundred times slower when another process needs one of
their cores, so a disturbed run says nothing. Only the standard library is imported.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

MAX_SHARE = 0.03  # of all cores' time that others may take before a run counts as disturbed

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Watch:
    """Counts, from its making on, the processor time of processes other than `pids`.

    What these have started is not among the others either, nor is this process.
    """

    def __init__(self, *pids: int) -> None:
        """Start counting."""
        self._pids = pids
        self._began_s = time.monotonic()
        self._others_s = self._count()

    def others_share(self) -> float:
        """Return the others' share of all cores' time so far."""
        wall_s = time.monotonic() - self._began_s
        return max(0.0, self._count() - self._others_s) / wall_s / (os.cpu_count() or 1)

    def _count(self) -> float:
        return busy_s() - process_s(os.getpid()) - sum(map(family_s, self._pids))


def busy_s() -> float:
    """Return the processor seconds that all cores have worked for since the machine started."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) * _TICK_S


def family_s(pid: int) -> float:
    """Return the processor seconds of a process and of all below it that still run."""
    return sum(map(process_s, (pid, *descendants(pid))))


def family_bytes(pid: int) -> int:
    """Return the memory of a process and of all below it; what several share counts once."""
    rollups = (Path(f"/proc/{process}/smaps_rollup") for process in (pid, *descendants(pid)))
    shares = (re.search(r"^Pss: *(\d+) kB", path.read_text(), re.MULTILINE) for path in rollups)
    return sum(1024 * int(share[1]) for share in shares if share is not None)


def descendants(pid: int) -> list[int]:
    """Return the processes below one; ended ones as long as nobody waited for them."""
    children: dict[int, list[int]] = {}
    for process_id in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
        if words := _stat(process_id):
            children.setdefault(int(words[1]), []).append(process_id)
    result = [pid]
    for process_id in result:
        result += children.get(process_id, [])
    return result[1:]


def process_s(pid: int) -> float:
    """Return the processor seconds of a process, its threads included, its children not."""
    words = _stat(pid)
    return (int(words[11]) + int(words[12])) * _TICK_S if words else 0.0


def held_bytes(pid: int) -> int:
    """Return the resident memory of a process that no file backs, shared memory included."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    words = dict(line.split(":", 1) for line in lines)
    return sum(int(words[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def _stat(pid: int) -> list[str]:
    """Return the words of a process's state, from its letter on; none if it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
