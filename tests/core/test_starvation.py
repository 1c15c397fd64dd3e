"""A process that waits for a processor is told from one that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from twostroke.core.starvation import StarvationMonitor

if TYPE_CHECKING:
    from collections.abc import Iterator

_COUNTS_WAITS = Path("/proc/self/schedstat").exists()
needs_counts = pytest.mark.skipif(not _COUNTS_WAITS, reason="the system counts no waiting times")

_BUSY = "import os, sys; os.sched_setaffinity(0, [int(sys.argv[1])])\nwhile True: pass"
_ASLEEP = "import time; time.sleep(600)"


@contextmanager
def process(program: str, *arguments: str) -> Iterator[int]:
    """Run a Python program, and yield its process id."""
    with subprocess.Popen([sys.executable, "-c", program, *arguments]) as running:
        try:
            yield running.pid
        finally:
            running.kill()


def becomes_starved(pid: int, timeout_s: float) -> bool:
    """Measure again and again; return whether the process was starved in one of the times."""
    end_s = time.monotonic() + timeout_s
    monitor = StarvationMonitor(pid)
    while time.monotonic() < end_s:
        monitor.start()
        time.sleep(0.3)
        if monitor.is_starved:
            return True
        monitor.stop()
    return False


@needs_counts
def test_one_of_many_busy_processes_on_a_processor_is_starved() -> None:
    core = str(min(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        pids = [stack.enter_context(process(_BUSY, core)) for _ in range(4)]
        assert becomes_starved(pids[0], timeout_s=60)


@needs_counts
def test_a_process_that_sleeps_or_is_stopped_is_not_starved() -> None:
    with process(_ASLEEP) as pid:
        time.sleep(1)  # while it starts, it may wait
        assert not becomes_starved(pid, timeout_s=1)
    with process(_BUSY, str(min(os.sched_getaffinity(0)))) as pid:
        os.kill(pid, signal.SIGSTOP)
        assert not becomes_starved(pid, timeout_s=1)


def test_a_process_that_has_ended_is_not_starved() -> None:
    with process("") as pid:
        pass
    monitor = StarvationMonitor(pid)
    monitor.start()
    assert not monitor.is_starved
