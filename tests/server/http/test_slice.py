"""The thread of an event loop has short time slices, so that it runs as soon as it wakes."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from twostroke.core.process_tuning import request_short_time_slices

if TYPE_CHECKING:
    from support.servers import LiveServer

_GET_ATTR: Final = {"x86_64": 315, "aarch64": 275}
_SHORT_NS: Final = 100_000


def attributes(thread: int = 0) -> tuple[int, int]:
    """Return the nice value and the time slice of a thread."""
    result = ctypes.create_string_buffer(48)
    number = _GET_ATTR[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, thread, result, 48, 0) == 0
    _, _, _, nice, _, slice_ns, _, _ = struct.unpack("=IIQiIQQQ", result.raw)
    return nice, slice_ns


@pytest.fixture(autouse=True)
def _needed() -> None:
    version = tuple(map(int, os.uname().release.split(".")[:2]))
    if sys.platform != "linux" or platform.machine() not in _GET_ATTR or version < (6, 12):
        pytest.skip("needs Linux 6.12")
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        pytest.skip("needs a nice value of at least 0")


def test_a_thread_gets_short_slices_and_its_children_do_not() -> None:
    seen: list[tuple[int, int]] = []

    def run() -> None:
        seen.append(attributes())
        assert request_short_time_slices()
        seen.append(attributes())
        child = threading.Thread(target=lambda: seen.append(attributes()))
        child.start()
        child.join()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    before, after, of_child = seen
    assert after == (before[0], _SHORT_NS)
    assert of_child == before


def test_a_system_that_does_not_say_its_policy_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(_thread: int) -> int:
        raise OSError

    monkeypatch.setattr(os, "sched_getscheduler", forbidden)
    assert not request_short_time_slices()


def test_a_server_asks_for_them(server: LiveServer) -> None:
    assert server.http.get("/health").is_success
    threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    assert _SHORT_NS in [attributes(thread)[1] for thread in threads]
