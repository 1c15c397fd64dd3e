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
from twostroke.core.control_groups import CoreLimit, MemoryLimit, core_limits, memory_limits
from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROOT = Path("/")
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
    limit = memory_limit()
    return limit.limit_bytes if limit else _memory_of_machine()


def memory_available() -> int:
    """Return the bytes that can still be taken without swapping, control groups included."""
    limits = memory_limits(_ROOT)
    return min([_available_on_machine(), *(limit.free_bytes for limit in limits)])


def memory_limit() -> MemoryLimit | None:
    """Return the control group with the least limit of memory; None if the machine has less."""
    limit = min(memory_limits(_ROOT), key=lambda limit: limit.limit_bytes, default=None)
    return limit if limit and limit.limit_bytes < _memory_of_machine() else None


def scarcest_memory() -> MemoryLimit | None:
    """Return the control group that leaves the least memory; None if the machine leaves less."""
    limit = min(memory_limits(_ROOT), key=lambda limit: limit.free_bytes, default=None)
    return limit if limit and limit.free_bytes < _available_on_machine() else None


def _memory_of_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _available_on_machine() -> int:
    available_kb = _words(Path("/proc/meminfo"), after="MemAvailable:")
    if available_kb:
        return int(available_kb[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def memory_used() -> int:
    """Return the bytes of memory that this process holds (its resident size)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def return_freed_memory() -> None:
    """Return freed memory to the operating system, where the C library keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def num_cores() -> int:
    """Return how many cores this process may keep busy, quotas of control groups included."""
    quota = core_limit()
    return max(1, int(quota.num_cores)) if quota else _num_allowed_cores()


def core_limit() -> CoreLimit | None:
    """Return the least quota of processor time; None if it is more than the allowed cores."""
    limit = min(core_limits(_ROOT), key=lambda limit: limit.num_cores, default=None)
    return limit if limit and limit.num_cores < _num_allowed_cores() else None


def _num_allowed_cores() -> int:
    """Return how many cores affinity and cpusets allow."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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


def threads_by_node(nodes: Sequence[MemoryNode], num_threads: int) -> dict[MemoryNode, int]:
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


def _words(path: Path, after: str = "", num_words: int | None = None) -> list[str]:
    """Return the words after `after` in the first line that begins so; none if there is no line."""
    try:
        with path.open(errors="replace") as lines:
            found = next((line for line in lines if line.startswith(after)), after)
    except OSError:
        return []
    return found.removeprefix(after).split()[:num_words]
