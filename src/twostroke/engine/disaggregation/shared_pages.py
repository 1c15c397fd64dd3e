"""Page memory that engines of one machine share: a file without a name, mapped by both."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.backends.memory import PageMemory

_MAP_FIXED: Final = 0x10
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)


def share(memory: PageMemory) -> int | None:
    """Put a file in the place of page memory that nobody has written to; return the open file.

    None if the memory is not mapped in whole pages, or the system refuses: pages are then sent.
    """
    if memory.mapped is None:
        return None
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory.mapped))
    size = -(-len(memory.mapped) // mmap.PAGESIZE) * mmap.PAGESIZE
    if address % mmap.PAGESIZE:
        return None
    file = -1
    try:
        file = os.memfd_create("twostroke", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)  # a reader could not survive less
    except OSError:
        with suppress(OSError):
            os.close(file)
        return None
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address, size, protection, flags, file, 0) != address:
        os.close(file)
        return None
    return file


class SharedPages:
    """Another engine's page memory, to read."""

    def __init__(self, file: int, num_pages: int, page_bytes: int) -> None:
        """Map an open file, and close it.

        Raises:
            OSError: it is not page memory of that size.
        """
        try:
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError("memory that could shrink")
            if os.fstat(file).st_size < num_pages * page_bytes:
                raise OSError("too little memory")
            self._map = mmap.mmap(file, num_pages * page_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        self._pages = np.frombuffer(self._map, np.uint8).reshape(num_pages, page_bytes)

    def copy(self, pages: Sequence[int], memory: PageMemory, targets: Sequence[int]) -> None:
        """Copy pages into `memory`, without Python's lock; neighbours in one go.

        Copies of half a megabyte or less pass through the cache, at a quarter of the speed.
        """
        assert memory.mapped is not None, "its kind is that of pages which are"
        own = np.frombuffer(memory.mapped, np.uint8).reshape(-1, memory.page_bytes)
        first = 0
        for last, (page, target) in enumerate(zip(pages, targets, strict=True), 1):
            if pages[last : last + 1] != [page + 1] or targets[last : last + 1] != [target + 1]:
                count = last - first
                own[target + 1 - count : target + 1] = self._pages[page + 1 - count : page + 1]
                first = last

    def close(self) -> None:
        """Unmap it."""
        del self._pages
        self._map.close()
