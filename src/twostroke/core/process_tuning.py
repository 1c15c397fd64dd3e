"""Tune this process for many streams: garbage collection, the heap, time slices, open files."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import platform
import resource
import struct
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

# A step of 256 streams makes about a thousand objects, which live until their callers have read
# them. By default that is one or two collections a step, a tenth of its time
# (`make bench WHAT=overhead`).
_OBJECTS_A_COLLECTION = 10_000


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect no cycles while the block runs, which makes none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def tune_garbage_collector() -> None:
    """Exempt all present objects from cyclic collection, and collect new ones rarely.

    Call it once the model is loaded, in a process that only serves it. Reference counts free what
    requests leave; cycles stay longer and take a megabyte or two.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # what grows old is compared with what is found now: collected at a quarter of it
    gc.set_threshold(_OBJECTS_A_COLLECTION)


_SLICE_NS: Final = 100_000  # the shortest that Linux has
_SET_ATTR: Final = {"x86_64": 314, "aarch64": 274}  # the number of sched_setattr
_RESET_ON_FORK: Final = 1


def request_short_time_slices(thread: int = 0) -> bool:
    """Ask for short slices for a thread, but not its children; return whether that was granted.

    `thread` is the system's number of one of this process, 0 for the calling one.

    Linux since 6.12 lets a thread with a short slice interrupt those with long ones when it wakes.
    An event loop, which works for a moment, then does not wait behind threads that compute. Its
    share of the time stays the same.
    """
    number = _SET_ATTR.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return False
    try:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return False
    except OSError:  # musl has none, and containers may forbid it
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice < 0:  # which children would lose
        return False
    fields = (48, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, _SLICE_NS, 0, 0)
    attributes = ctypes.create_string_buffer(struct.pack("=IIQiIQQQ", *fields))
    return bool(ctypes.CDLL(None).syscall(number, thread, attributes, 0) == 0)


_EVERY_S: Final = 60.0


def trim() -> bool:
    """Give back free memory; return whether this system's C library can."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is None:
        return False
    give_back(0)
    return True


async def trim_regularly() -> NoReturn:
    """Trim every minute, in a thread: it takes some milliseconds.

    Cycles are collected here, since what they free may belong to the event loop.
    """
    while True:
        await asyncio.sleep(_EVERY_S)
        gc.collect()
        await asyncio.to_thread(trim)


_MOST_FILES: Final = 1 << 16  # if the system lets it


def raise_open_file_limit() -> int:
    """Raise the limit of open files, which shells set low; return how many there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(_MOST_FILES, hard) if hard >= 0 else _MOST_FILES  # -1 is none
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
