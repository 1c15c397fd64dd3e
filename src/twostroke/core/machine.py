"""Free memory and cores of this machine, as the operating system reports them."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from pathlib import Path

from twostroke.core import env
from twostroke.core.errors import UsageError

_CGROUP = Path("/sys/fs/cgroup")  # version 2, as a container sees its own


def memory_total() -> int:
    """Return the bytes of memory that this process can have at most, control groups included."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_number("memory.max")
    return total if limit is None else min(total, limit)


def memory_available() -> int:
    """Return the bytes that can still be taken without swapping, control groups included."""
    available = _meminfo("MemAvailable")
    if available is None:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    if limit is not None and used is not None:
        # Cached files count as used, but the system drops them when memory is needed.
        available = min(available, max(0, limit - used + _cgroup_reclaimable()))
    return available


def give_back_memory() -> None:
    """Return freed memory to the operating system, where the C library keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def num_cores() -> int:
    """Return how many cores this process may keep busy, a container's quota included."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    # Processor time in each period, and the period's length.
    quota = _cgroup_words("cpu.max")
    if len(quota) == 2 and all(word.isdecimal() for word in quota) and int(quota[1]):
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def resolve_num_threads(requested: int | None) -> int:
    """Return the number of compute threads: as asked, else the environment's, else every core.

    Raises:
        UsageError: `TWOSTROKE_NUM_THREADS` is not a number from 1 to 1024.
    """
    if requested is not None:
        return requested
    text = env.num_threads()
    if text is None:
        return num_cores()
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        message = f"TWOSTROKE_NUM_THREADS must be a number from 1 to 1024, not '{text}'."
        raise UsageError(message)
    return int(text)


class OthersWatch:
    """Measures the processor time of other programs since it was created."""

    def __init__(self) -> None:
        """Start."""
        self._began_s, self._before_s = time.monotonic(), _others_s()

    def share(self) -> float | None:
        """Return their share of all processors' time so far; None if it is unknown."""
        after_s = _others_s()
        if self._before_s is None or after_s is None:
            return None
        whole_s = (time.monotonic() - self._began_s) * (os.cpu_count() or 1)
        return max(0.0, after_s - self._before_s) / whole_s


def _others_s() -> float | None:
    """Return for how many seconds other programs have kept processors busy since the start."""
    try:
        line = Path("/proc/stat").read_text().splitlines()[0]
        user, nice, system, _, _, *interrupts = map(int, line.split()[1:9])
    except (OSError, ValueError, IndexError):
        return None
    own = os.times()
    busy = user + nice + system + sum(interrupts)
    return busy / os.sysconf("SC_CLK_TCK") - own.user - own.system


def processor_name() -> str:
    """Return the processor's own name, or its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _meminfo(key: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup_number(name: str) -> int | None:
    words = _cgroup_words(name)
    return int(words[0]) if words and words[0].isdecimal() else None


def _cgroup_reclaimable() -> int:
    words = _cgroup_words("memory.stat")
    facts = dict(zip(words[::2], words[1::2], strict=False))
    return int(facts.get("inactive_file", "0"))


def _cgroup_words(name: str) -> list[str]:
    """Return the words of a control group's file; none if the file does not exist."""
    try:
        return (_CGROUP / name).read_text().split()
    except OSError:
        return []
