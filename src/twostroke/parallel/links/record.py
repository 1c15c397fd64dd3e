"""An opened engine as native code sees it; mirrors native/links/messages.h."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_void_p
from enum import IntEnum
from typing import ClassVar, Final

_NUM_FUNCTIONS: Final = 8


class EngineKind(IntEnum):
    """Whose functions they are."""

    UCX = 0
    MPI = 1


class EngineRecord(Structure):
    """What native code needs to send and receive messages."""

    _fields_: ClassVar = [
        ("kind", c_int32),
        ("rank", c_int32),
        ("num_ranks", c_int32),
        ("tag", c_int32),
        ("event_fd", c_int32),
        ("world", c_void_p),
        ("peers", c_void_p),
        ("lost", c_void_p),
        ("functions", c_void_p * _NUM_FUNCTIONS),
        ("byte_type", c_void_p),
        ("ignored_status", c_void_p),
    ]
