"""Short slices of processor time: a thread that asks for them runs as soon as it wakes."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from typing import Final

_SLICE_NS: Final = 100_000  # the shortest that Linux has
_SET_ATTR: Final = {"x86_64": 314, "aarch64": 274}  # the number of sched_setattr
_RESET_ON_FORK: Final = 1


def run_at_once(thread: int = 0) -> bool:
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
