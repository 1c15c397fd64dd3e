"""Memory nodes of this machine: the cores near each, and how threads are placed on them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_FOLDER = Path("/sys/devices/system/node")
_MOST_DIGITS = 4  # of a core's or a node's number: Linux has at most 8192 cores


@dataclass(frozen=True, slots=True)
class MemoryNode:
    """Cores that this process may use, and that are near one part of the memory."""

    number: int  # the operating system's
    cores: tuple[int, ...]


def memory_nodes(folder: Path = _FOLDER) -> tuple[MemoryNode, ...]:
    """Return the nodes that have cores for this process; none if the system does not report them.

    `folder` is laid out as Documentation/ABI/stable/sysfs-devices-node of Linux says. If a core is
    missing or on two nodes, no nodes are returned: a mistake must not keep threads away from cores.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    allowed = os.sched_getaffinity(0)
    nodes = []
    for number in _numbers(folder / "online"):
        cores = _numbers(folder / f"node{number}" / "cpulist") & allowed
        if cores:
            nodes.append(MemoryNode(number, tuple(sorted(cores))))
    if sorted(core for node in nodes for core in node.cores) != sorted(allowed):
        return ()
    return tuple(sorted(nodes, key=lambda node: node.number))


def place_threads(nodes: Sequence[MemoryNode], num_threads: int) -> dict[MemoryNode, int]:
    """Return how many threads to bind to each node, in order; {} for no binding.

    All cores in a row are divided into `num_threads` equal parts; each thread goes to the node with
    the middle of its part, so that nodes have their share of threads to less than one. Threads
    that would all be on one node are left to the system.
    """
    ends: list[int] = []
    for node in nodes:
        ends.append(len(node.cores) + (ends[-1] if ends else 0))
    placed: dict[MemoryNode, int] = {}
    for thread in range(num_threads if len(nodes) > 1 else 0):
        middle = (2 * thread + 1) * ends[-1] // (2 * num_threads)
        node = next(node for node, end in zip(nodes, ends, strict=True) if middle < end)
        placed[node] = placed.get(node, 0) + 1
    return placed if len(placed) > 1 else {}


def _numbers(path: Path) -> set[int]:
    """Return the numbers in a list such as `0-3,8,10-11`; none if it is missing or damaged."""
    try:
        text = path.read_text().strip()
    except (OSError, ValueError):
        return set()
    numbers: set[int] = set()
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        bounds = first, last or first
        if not all(bound.isdecimal() and len(bound) <= _MOST_DIGITS for bound in bounds):
            return set()
        numbers.update(range(int(bounds[0]), int(bounds[1]) + 1))
    return numbers
