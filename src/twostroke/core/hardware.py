"""This machine: its memory, its cores, its memory nodes, and the limits of its speed."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.core import env
from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

_CGROUP = Path("/sys/fs/cgroup")  # version 2, as a container sees its own
_NODES = Path("/sys/devices/system/node")


class Hardware(Frozen):
    """The limits that measured speeds are compared with, and where they come from.

    `bandwidth` is in bytes/s for streams the size of a model; `peak` in operations/s (one
    multiply-add is two) of the best arithmetic that the kernels of this level can use.
    """

    name: str
    num_threads: int
    memory_bytes: int
    bandwidth: float
    peak: float
    peak_kind: str
    source: str


class MemoryNode(Frozen):
    """Cores that this process may use, and that are near one part of the memory."""

    number: int  # the operating system's
    cores: tuple[int, ...]


def memory_total() -> int:
    """Return the bytes of memory that this process can have at most, control groups included."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_number("memory.max")
    return total if limit is None else min(total, limit)


def memory_available() -> int:
    """Return the bytes that can still be taken without swapping, control groups included."""
    available_kb = _words(Path("/proc/meminfo"), after="MemAvailable:")
    if available_kb:
        available = int(available_kb[0]) * 1024
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    if limit is not None and used is not None:
        # Cached files count as used, but the system drops them when memory is needed.
        cached = _words(_CGROUP / "memory.stat", after="inactive_file")
        available = min(available, max(0, limit - used + int(cached[0] if cached else 0)))
    return available


def memory_used() -> int:
    """Return the bytes of memory that this process holds (its resident size)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


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
    quota = _words(_CGROUP / "cpu.max")
    if len(quota) == 2 and all(word.isdecimal() for word in quota) and int(quota[1]):
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def resolve_num_threads(requested: int | None) -> int:
    """Return the number of compute threads: as requested, else the environment's, else every core.

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


def processor_name() -> str:
    """Return the processor's own name, or its architecture."""
    words = _words(Path("/proc/cpuinfo"), after="model name\t:")
    return " ".join(words) or platform.processor() or platform.machine()


def memory_nodes(folder: Path = _NODES) -> tuple[MemoryNode, ...]:
    """Return the nodes that have cores for this process; none if the system does not report them.

    `folder` is laid out as Documentation/ABI/stable/sysfs-devices-node of Linux says. If a core is
    missing or on two nodes, no nodes are returned: a mistake must not keep threads away from cores.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    allowed = os.sched_getaffinity(0)
    nodes = []
    for number in sorted(_numbers(folder / "online")):
        cores = _numbers(folder / f"node{number}" / "cpulist") & allowed
        if cores:
            nodes.append(MemoryNode(number, tuple(sorted(cores))))
    if sorted(core for node in nodes for core in node.cores) != sorted(allowed):
        return ()
    return tuple(nodes)


def place_threads(nodes: Sequence[MemoryNode], num_threads: int) -> dict[MemoryNode, int]:
    """Return how many threads to bind to each node, in order; {} for no binding.

    All cores in a row are divided into `num_threads` equal parts; each thread goes to the node with
    the middle of its part, so that nodes have their share of threads to less than one. Threads
    that would all be on one node are left to the system.
    """
    node_of = [node for node in nodes for _ in node.cores]
    middles = [(2 * i + 1) * len(node_of) // (2 * num_threads) for i in range(num_threads)]
    placed = Counter(node_of[middle] for middle in middles) if nodes else {}
    return dict(placed) if len(placed) > 1 else {}


class OtherPrograms:
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
    times = _words(Path("/proc/stat"), after="cpu", num_words=8)
    if len(times) < 8:
        return None
    user, nice, system, _, _, *interrupts = map(int, times)
    own = os.times()
    busy = user + nice + system + sum(interrupts)
    return busy / os.sysconf("SC_CLK_TCK") - own.user - own.system


def _numbers(path: Path) -> set[int]:
    """Return the numbers in a list such as `0-3,8,10-11`; none if it is missing or damaged."""
    try:
        parts = [part.split("-") for part in path.read_text().strip().split(",")]
        return {n for part in parts for n in range(int(part[0]), int(part[-1]) + 1)}
    except (OSError, ValueError):
        return set()


def _cgroup_number(name: str) -> int | None:
    words = _words(_CGROUP / name)
    return int(words[0]) if words and words[0].isdecimal() else None


def _words(path: Path, after: str = "", num_words: int | None = None) -> list[str]:
    """Return the words after `after` in the first line that begins so; none if there is no line."""
    try:
        with path.open(errors="replace") as lines:
            found = next((line for line in lines if line.startswith(after)), after)
    except OSError:
        return []
    return found.removeprefix(after).split()[:num_words]
