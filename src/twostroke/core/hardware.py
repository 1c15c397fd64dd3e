"""This machine: its memory, its cores, its NUMA nodes, and the limits of its speed."""

from __future__ import annotations

import math
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
    """The limits of a machine's speed: memory bandwidth and peak arithmetic.

    The engine's speed is reported as a fraction of these limits (MBU and MFU).

    Attributes:
        name: the processor or device.
        num_threads: the number of threads with which the limits were measured: the engine's
            threads, but at most one for each usable core.
        memory_bytes: the size of the memory.
        bandwidth: memory bandwidth in bytes per second, for reading data as large as a model's
            weights.
        peak: operations per second of the fastest arithmetic that the kernels use; a fused
            multiply-add counts as two operations.
        peak_kind: the arithmetic of `peak`, as text.
        source: how the limits were found.
    """

    name: str
    num_threads: int
    memory_bytes: int
    bandwidth: float
    peak: float
    peak_kind: str
    source: str


class MemoryNode(Frozen):
    """A NUMA node of this machine: its number, and the cores near its memory.

    Only cores that this process may use are included.
    """

    number: int  # as the operating system counts
    cores: tuple[int, ...]


def memory_total() -> int:
    """Return the maximum number of bytes of memory that this process can have.

    This is the machine's memory, or the limit of a control group if that is lower.
    """
    limit = memory_limit()
    return limit.limit_bytes if limit else _memory_of_machine()


def memory_available() -> int:
    """Return the bytes of memory that this process can allocate without swapping.

    Limits of control groups are respected.
    """
    limits = memory_limits(_ROOT)
    return min([_available_on_machine(), *(limit.free_bytes for limit in limits)])


def memory_limit() -> MemoryLimit | None:
    """Return the lowest memory limit that a control group sets on this process.

    Returns None if no control group allows less than the machine's memory.
    """
    limit = min(memory_limits(_ROOT), key=lambda limit: limit.limit_bytes, default=None)
    return limit if limit and limit.limit_bytes < _memory_of_machine() else None


def scarcest_memory() -> MemoryLimit | None:
    """Return the memory limit of the control group that has the fewest free bytes.

    Returns None if the machine itself has fewer free bytes.
    """
    limit = min(memory_limits(_ROOT), key=lambda limit: limit.free_bytes, default=None)
    return limit if limit and limit.free_bytes < _available_on_machine() else None


def _memory_of_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _available_on_machine() -> int:
    available_kb = _line_words(Path("/proc/meminfo"), after="MemAvailable:")
    if available_kb:
        return int(available_kb[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def memory_used() -> int:
    """Return the resident size of this process in bytes; 0 if it is unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def num_cores() -> int:
    """Return how many processor cores this process may keep busy.

    Affinity, cpusets and quotas of control groups are respected.
    """
    quota = core_limit()
    return max(1, int(quota.num_cores)) if quota else _num_allowed_cores()


def max_busy_threads() -> int:
    """Return how many threads can compute at once; more threads would share the cores.

    It is `num_cores`, except that a quota of 1.5 cores keeps two threads busy.
    """
    quota = core_limit()
    return max(1, math.ceil(quota.num_cores)) if quota else _num_allowed_cores()


def core_limit() -> CoreLimit | None:
    """Return the lowest limit of processor time that a control group sets on this process.

    Returns None if no limit is below the number of cores that affinity and cpusets allow.
    """
    limit = min(core_limits(_ROOT), key=lambda limit: limit.num_cores, default=None)
    return limit if limit and limit.num_cores < _num_allowed_cores() else None


def _num_allowed_cores() -> int:
    """Return how many processor cores affinity and cpusets allow this process to use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resolve_num_threads(requested: int | None) -> int:
    """Return the number of compute threads of an engine.

    It is `requested`, else the number in `TWOSTROKE_NUM_THREADS`, else the number of all cores.

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
    """Return the name of the processor, or its architecture if the name is unknown."""
    words = _line_words(Path("/proc/cpuinfo"), after="model name\t:")
    return " ".join(words) or platform.processor() or platform.machine()


def memory_nodes(folder: Path = _NODES) -> tuple[MemoryNode, ...]:
    """Return the NUMA nodes whose cores this process may use; empty if they are unknown.

    `folder` has the layout of Documentation/ABI/stable/sysfs-devices-node of Linux. The result is
    also empty if some core is listed on no node or on two nodes: such files are wrong, and binding
    threads by them would leave cores unused.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    allowed = os.sched_getaffinity(0)
    nodes = []
    for number in sorted(_numbers_in_list_file(folder / "online")):
        cores = _numbers_in_list_file(folder / f"node{number}" / "cpulist") & allowed
        if cores:
            nodes.append(MemoryNode(number, tuple(sorted(cores))))
    if sorted(core for node in nodes for core in node.cores) != sorted(allowed):
        return ()
    return tuple(nodes)


def threads_by_node(nodes: Sequence[MemoryNode], num_threads: int) -> dict[MemoryNode, int]:
    """Return how many compute threads to bind to each NUMA node; empty to bind none.

    Each node gets threads in proportion to its cores, with a rounding error of less than one
    thread: the cores of all nodes, in a row, are divided into `num_threads` equal parts, and each
    thread goes to the node with the middle of its part. If all threads would be on one node, the
    result is empty, and the operating system chooses their cores.
    """
    if not nodes:
        return {}
    node_of_core = [node for node in nodes for _ in node.cores]
    num_all = len(node_of_core)
    middles = [(2 * i + 1) * num_all // (2 * num_threads) for i in range(num_threads)]
    counts = Counter(node_of_core[middle] for middle in middles)
    return dict(counts) if len(counts) > 1 else {}


class OtherProgramsLoad:
    """Measures how busy other programs keep the processors, from the creation of the object on.

    Measurements such as `twostroke profile` warn if other programs disturbed them.
    """

    def __init__(self) -> None:
        """Start measuring the processor time of other programs."""
        self._began_s = time.monotonic()
        self._before_s = _other_programs_s()

    def share(self) -> float | None:
        """Return the share of all processors' time that other programs have used, from 0 to 1.

        The time counts from the object's creation. None if the system does not report the time.
        """
        after_s = _other_programs_s()
        if self._before_s is None or after_s is None:
            return None
        total_s = (time.monotonic() - self._began_s) * (os.cpu_count() or 1)
        return max(0.0, after_s - self._before_s) / total_s


def _other_programs_s() -> float | None:
    """Return the processor seconds that other programs have used since the machine's start.

    It is None if the system does not report them.
    """
    times = _line_words(Path("/proc/stat"), after="cpu", num_words=8)
    if len(times) < 8:
        return None
    user, nice, system, _, _, *interrupts = map(int, times)
    own_times = os.times()
    busy_ticks = user + nice + system + sum(interrupts)
    return busy_ticks / os.sysconf("SC_CLK_TCK") - own_times.user - own_times.system


def _numbers_in_list_file(path: Path) -> set[int]:
    """Return the numbers in a Linux list file such as `0-3,8,10-11`; empty if it is damaged."""
    try:
        parts = [part.split("-") for part in path.read_text().strip().split(",")]
        return {n for part in parts for n in range(int(part[0]), int(part[-1]) + 1)}
    except (OSError, ValueError):
        return set()


def _line_words(path: Path, after: str = "", num_words: int | None = None) -> list[str]:
    """Return the words after `after` in the first line of a file that begins with `after`.

    The result has at most `num_words` words. It is empty if the file cannot be read or has no such
    line.
    """
    try:
        with path.open(errors="replace") as lines:
            line = next((line for line in lines if line.startswith(after)), after)
    except OSError:
        return []
    return line.removeprefix(after).split()[:num_words]
