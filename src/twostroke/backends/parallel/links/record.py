"""An opened worker of UCX as native code sees it; mirrors native/links/ucx.h."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_void_p
from typing import ClassVar, Final

_NUM_FUNCTIONS: Final = 8


class UcxRecord(Structure):
    """What native code needs to send and receive messages."""

    _fields_: ClassVar = [
        ("rank", c_int32),
        ("num_ranks", c_int32),
        ("event_fd", c_int32),
        ("worker", c_void_p),
        ("endpoints", c_void_p),
        ("lost", c_void_p),
        ("functions", c_void_p * _NUM_FUNCTIONS),
    ]
