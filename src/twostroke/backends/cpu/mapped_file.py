"""A file mapped read-only at an address that starts a huge page, shared with other processes."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from twostroke.core.files import open_regular_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HUGE_PAGE: Final = 1 << 21
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MREMAP_MAYMOVE: Final = 1
_MREMAP_FIXED: Final = 2
_MIN_HUGE_RATIO: Final = 0.75  # of the file's memory; steps then take up to a tenth longer
_CACHESTAT: Final = 451  # the number of the system call on every processor, since Linux 6.5
_MADV_POPULATE_READ: Final = 22  # since Linux 5.14; Python has no name for it
_SMAPS: Final = Path("/proc/self/smaps")
_FILE_IN_HUGE_PAGES: Final = b"\nFilePmdMapped:"
_FAILED: Final = ctypes.c_void_p(-1).value

_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def _function(name: str, result: Any, **parameters: Any) -> Any:
    """Return a function of the C library that is called with keyword arguments.

    `result` is the type of its result, `parameters` are the types of its parameters by name.
    """
    prototype = ctypes.CFUNCTYPE(result, *parameters.values(), use_errno=True)
    return prototype((name, _LIBC), tuple((1, parameter) for parameter in parameters))


_mmap = _function(
    "mmap",
    ctypes.c_void_p,
    address=ctypes.c_void_p,
    length=ctypes.c_size_t,
    protection=ctypes.c_int,
    flags=ctypes.c_int,
    descriptor=ctypes.c_int,
    offset=ctypes.c_int64,
)
_munmap = _function("munmap", ctypes.c_int, address=ctypes.c_void_p, length=ctypes.c_size_t)
_madvise = _function(
    "madvise",
    ctypes.c_int,
    address=ctypes.c_void_p,
    length=ctypes.c_size_t,
    advice=ctypes.c_int,
)


class _CacheRange(ctypes.Structure):
    """A range of a file, for the system call `cachestat`: Linux's `struct cachestat_range`."""

    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStatistics(ctypes.Structure):
    """How many pages of a file's range are in memory: Linux's `struct cachestat`."""

    _fields_ = (
        ("num_cached", ctypes.c_uint64),
        ("num_dirty", ctypes.c_uint64),
        ("num_writeback", ctypes.c_uint64),
        ("num_evicted", ctypes.c_uint64),
        ("num_recently_evicted", ctypes.c_uint64),
    )


def map_file(path: Path, num_bytes: int) -> Mapping:
    """Map a file of `num_bytes` bytes read-only.

    Raises:
        ValueError: the file has another size.
        OSError: the file cannot be opened or mapped.
    """
    with open_regular_file(path, follows_links=False) as file:
        descriptor = file.fileno()
        status = os.fstat(descriptor)
        if status.st_size != num_bytes:
            raise ValueError(f"its size is {status.st_size} bytes, not {num_bytes}")
        length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        is_in_memory = _is_in_memory(descriptor, num_bytes)
        reserved = _map(None, length + _HUGE_PAGE, _PROT_NONE, -1)
        address = -(-reserved // _HUGE_PAGE) * _HUGE_PAGE
        _unmap(reserved, address - reserved)
        _unmap(address + length, reserved + _HUGE_PAGE - address)
        try:
            _map(address, length, mmap.PROT_READ, descriptor)
        except OSError:
            _unmap(address, length)
            raise
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _madvise(
            address=address, length=length, advice=mmap.MADV_HUGEPAGE
        )  # a kernel may know no such pages
    return Mapping(address, length, status, is_in_memory=is_in_memory)


class Mapping:
    """The bytes of a mapped file, from `address` on.

    `status` is the file's status from before it was mapped. `is_in_memory`: whether the whole file
    was in memory at that time; False if the system does not tell.
    """

    def __init__(
        self, address: int, length: int, status: os.stat_result, *, is_in_memory: bool
    ) -> None:
        """Own `length` bytes of mapped memory at `address`, which begin with the file's bytes."""
        self.address, self._num_bytes, self._length = address, status.st_size, length
        self.status, self.is_in_memory = status, is_in_memory
        self._is_open = True

    def array(self) -> NDArray[np.uint8]:
        """Return the bytes of the file, which must not be used after `close`."""
        assert self._is_open
        return np.ctypeslib.as_array((ctypes.c_uint8 * self._num_bytes).from_address(self.address))

    def populate(self) -> None:
        """Map all pages of the file into this process's page table now.

        Otherwise each page is mapped when it is accessed for the first time. Does nothing if Linux
        is too old.
        """
        _madvise(address=self.address, length=self._length, advice=_MADV_POPULATE_READ)

    def has_huge_pages(self) -> bool:
        """Whether most of the file is mapped in huge pages.

        Only pages that are mapped already count: call `populate` first.
        """
        try:
            mappings = _SMAPS.read_bytes()
        except OSError:
            return False
        ours = mappings.find(b"\n%x-" % self.address)
        field = mappings.find(_FILE_IN_HUGE_PAGES, ours)
        if ours < 0 or field < 0:
            return False
        mapped_kb = int(mappings[field + len(_FILE_IN_HUGE_PAGES) :].split(maxsplit=1)[0])
        return mapped_kb * 1024 >= _MIN_HUGE_RATIO * self._num_bytes

    def move_to(self, address: int, num_bytes: int) -> None:
        """Move the first `num_bytes` bytes to `address`, in place of the memory that is there.

        The last page is moved completely. The rest of the file is unmapped, because the memory
        after the moved bytes may belong to other data of the process.

        Raises:
            OSError: the operating system refuses it; nothing has changed.
        """
        length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        mremap = _function(  # only Linux has it
            "mremap",
            ctypes.c_void_p,
            address=ctypes.c_void_p,
            length=ctypes.c_size_t,
            new_length=ctypes.c_size_t,
            flags=ctypes.c_int,
            new_address=ctypes.c_void_p,
        )
        moved = mremap(
            address=self.address,
            length=length,
            new_length=length,
            flags=_MREMAP_MAYMOVE | _MREMAP_FIXED,
            new_address=address,
        )
        if moved == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._is_open = False
        _unmap(self.address + length, self._length - length)

    def close(self) -> None:
        """Unmap the file; may be called twice."""
        if self._is_open:
            self._is_open = False
            _unmap(self.address, self._length)


def _is_in_memory(descriptor: int, num_bytes: int) -> bool:
    """Whether all pages of an open file are in memory, so that none must be read from the disk.

    False if the system does not tell.
    """
    pages, file_range = _CacheStatistics(), _CacheRange(offset=0, length=num_bytes)
    try:
        outcome = _LIBC.syscall(
            _CACHESTAT, descriptor, ctypes.byref(file_range), ctypes.byref(pages), 0
        )
    except AttributeError:  # not on this system
        return False
    num_pages = -(-num_bytes // mmap.PAGESIZE)
    return bool(outcome == 0 and pages.num_cached >= num_pages)


def _map(address: int | None, length: int, protection: int, descriptor: int) -> int:
    """Map memory without access rights, or a file, at a fixed address or at any address.

    `descriptor`: the file; -1: no file. `address` None: any address.

    Raises:
        OSError: the operating system refuses it.
    """
    flags = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if address is not None:
        flags |= _MAP_FIXED
    mapped: int | None = _mmap(
        address=address,
        length=length,
        protection=protection,
        flags=flags,
        descriptor=descriptor,
        offset=0,
    )
    if mapped is None or mapped == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapped


def _unmap(address: int, length: int) -> None:
    if length:
        _munmap(address=address, length=length)
