"""What an engine's ranks are, seen from outside, and what they leave when they have ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.common.quiet import descendants

_GONE_WITHIN_S = 2.0
_LISTENING = "0A"
_RANK = "twostroke.backends.parallel.worker"


class Traces:
    """Processes, listening ports and shared memory as they were, to be compared with afterwards."""

    def __init__(self) -> None:
        """Look."""
        self._before = _traces()

    def left(self) -> list[str]:
        """Return what is there now and was not, once it has had a moment to go."""
        deadline = time.monotonic() + _GONE_WITHIN_S
        while (new := _traces() - self._before) and time.monotonic() < deadline:
            time.sleep(0.05)
        return sorted(new)


def ranks() -> list[int]:
    """Return the processes that this one started to be ranks of its engine."""
    return [pid for pid in descendants(os.getpid()) if _RANK in _text(Path(f"/proc/{pid}/cmdline"))]


def exists(pid: int) -> bool:
    """Whether there is such a process, or one that ended and for which nobody waited."""
    return Path(f"/proc/{pid}").exists()


def _traces() -> set[str]:
    """Return this process's children, the ports they listen at, and all shared memory."""
    pids = [os.getpid(), *descendants(os.getpid())]
    sockets = {link for pid in pids for link in _links(Path(f"/proc/{pid}/fd"))}
    ports = {
        f"port {int(words[1].rpartition(':')[2], 16)}"
        for table in ("tcp", "tcp6")
        for words in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:])
        if words[3] == _LISTENING and f"socket:[{words[9]}]" in sockets
    }
    return {f"process {pid}" for pid in pids} | ports | _unused_memory()


def _unused_memory() -> set[str]:
    """Return the files of shared memory that no process maps."""
    mapped = {
        line.split(maxsplit=5)[5]
        for pid in _numbers(Path("/proc"))
        for line in _text(Path(f"/proc/{pid}/maps")).splitlines()
        if "/dev/shm/" in line
    }
    return {str(path) for path in Path("/dev/shm").iterdir()} - mapped


def _links(folder: Path) -> list[str]:
    try:
        return [str(path.readlink()) for path in folder.iterdir() if path.is_symlink()]
    except OSError:  # it has ended
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""


def _numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
