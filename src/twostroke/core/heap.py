"""Gives memory that requests have freed back to the system.

glibc gives back by itself only what is free at the end of its heap. Requests leave holes between
blocks that live longer, and a server under load grows by some kilobytes a request. Cycles that wait
for Python's collector make more of them: collected first, they halve what growth is left.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from typing import Final, NoReturn

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
