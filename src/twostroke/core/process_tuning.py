"""Tunes a process for many streams: garbage collection, the heap, time slices, open files."""

from __future__ import annotations

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
_OBJECTS_PER_COLLECTION = 10_000


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turn Python's cyclic garbage collector off during a block that creates no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def tune_garbage_collector() -> None:
    """Make Python's cyclic garbage collector run rarely, and skip all objects that exist now.

    A process that serves a model calls this function once, after the model is loaded. Reference
    counts free the objects of requests; cycles stay longer, and take one or two megabytes.
    """
    gc.collect()
    gc.freeze()
    # Python postpones a full collection until new objects exceed a quarter of the objects that the
    # last full collection saw. After this one, that number is small.
    gc.collect()
    gc.set_threshold(_OBJECTS_PER_COLLECTION)


_TIME_SLICE_NS: Final = 100_000  # the shortest time slice of Linux
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}  # the number of the system call
_RESET_ON_FORK: Final = 1  # SCHED_FLAG_RESET_ON_FORK


def request_short_time_slices(thread: int = 0) -> bool:
    """Ask Linux to run a thread in short time slices; return whether Linux agreed.

    Since Linux 6.12, a thread with a short slice interrupts threads with long slices when it wakes.
    So an event loop, which works for a moment at a time, does not wait for threads that compute.
    Its share of the processor time stays the same.

    `thread` is the system's id of a thread of this process; 0 is the calling thread. Child
    processes and threads do not inherit the request.
    """
    call_number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or call_number is None:
        return False
    try:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return False
    except OSError:  # musl has no such function, and containers may forbid it
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice < 0:  # with _RESET_ON_FORK, children would lose the higher priority
        return False
    layout = struct.Struct("=IIQiIQQQ")  # `struct sched_attr` of sched_setattr(2)
    packed = layout.pack(layout.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, _TIME_SLICE_NS, 0, 0)
    attributes = ctypes.create_string_buffer(packed)
    return bool(ctypes.CDLL(None).syscall(call_number, thread, attributes, 0) == 0)


_TRIM_INTERVAL_S: Final = 60.0


def return_freed_memory() -> bool:
    """Give memory that Python freed back to the operating system; return False without glibc.

    glibc itself gives back only the free memory at the end of its heap. The heap of a busy server
    has many free holes between blocks in use, so without this call it would grow by some kilobytes
    with each request.
    """
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is None:
        return False
    give_back(0)
    return True


async def return_freed_memory_regularly() -> NoReturn:
    """Give freed memory back to the operating system every minute; a task of a server's event loop.

    Each time, garbage cycles are collected first, which halves the remaining growth. The collection
    runs on the event loop, since the freed objects may belong to the loop. Trimming the heap takes
    some milliseconds, and runs in a thread.
    """
    import asyncio  # slow: most users of this module have no event loop

    while True:
        await asyncio.sleep(_TRIM_INTERVAL_S)
        gc.collect()
        await asyncio.to_thread(return_freed_memory)


_MAX_OPEN_FILES: Final = 1 << 16  # if the system allows it


def raise_open_file_limit() -> int:
    """Raise this process's limit of open files and connections, and return the new limit.

    Shells often set a limit that is too low for a server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a negative number is no limit
    limit = min(_MAX_OPEN_FILES, hard) if hard >= 0 else _MAX_OPEN_FILES
    if 0 <= soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit
