"""How KV pages get from a prefill engine to this one: shared memory, NIXL or the socket."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import logging
import mmap
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.core.transport.frames import ConnectionLostError
from twostroke.engine.disaggregation import messages
from twostroke.engine.disaggregation.connection import RefusedError
from twostroke.engine.disaggregation.messages import COPIED, SENT, WRITTEN
from twostroke.engine.disaggregation.nixl import (
    PROBE_BYTES,
    NixlProcess,
    NixlProcessError,
    obstacle,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.backends.interface import PageMemory
    from twostroke.core.transport.connection import Connection
    from twostroke.engine.disaggregation.messages import PrefillMessage


_logger = logging.getLogger("twostroke.handover")

# The modes that each word of `PEER_LINKS` allows between engines that share no memory.
_ALLOWED_MODES: Final = {
    "auto": (SENT, COPIED, WRITTEN),
    "socket": (SENT,),
    "nixl": (COPIED, WRITTEN),
    "nixl-read": (COPIED,),
    "nixl-write": (WRITTEN,),
}
_TITLES: Final = {SENT: "socket", COPIED: "NIXL, read", WRITTEN: "NIXL, written"}
MOVE_TIMEOUT_S: Final = 2.0  # maximum duration of one NIXL transfer
_MAX_MOVE_BYTES: Final = 8 << 20  # size of one NIXL transfer
# NIXL is used if it needs at most 80% of the socket's time, since its processes use cores, too.
_NIXL_MAX_TIME_RATIO: Final = 0.8
_MAX_PROBES: Final = 4
_MAX_PROBE_S: Final = 0.25  # after which a mode is not measured again


class NixlMemory(Frozen):
    """The memory of a decode engine's KV pages, as NIXL needs it.

    It has the open file of the pages, None if there is none, and their number and size.
    """

    page_file: int | None
    num_pages: int
    page_bytes: int


class TransferMethod:
    """A method of fetching KV pages from a prefill engine: shared memory, NIXL or the socket.

    Attributes:
        mode: `COPIED`, `SENT` or `WRITTEN` (`messages.py`).
        title: the name for logs and metrics.
        is_nixl: whether NIXL moves the pages.
    """

    def __init__(
        self,
        mode: str,
        shared_pages: SharedPages | None = None,
        nixl_process: NixlProcess | None = None,
    ) -> None:
        """Fetch KV pages by shared memory or a NIXL process; without both, by the socket."""
        self.mode = mode
        self.title = "shared memory" if shared_pages is not None else _TITLES[mode]
        self.is_nixl = nixl_process is not None
        self._shared_pages = shared_pages
        self._nixl_process = nixl_process

    def max_pages(self, page_bytes: int) -> int | None:
        """Return the maximum number of KV pages of one fetch; None for no limit."""
        return max(1, _MAX_MOVE_BYTES // page_bytes) if self.is_nixl else None

    def copy(self, pages: Sequence[int], memory: PageMemory, targets: Sequence[int]) -> None:
        """Copy KV pages of the prefill engine to pages `targets` of `memory`, in mode `COPIED`.

        In other modes this does nothing.

        Raises:
            NixlProcessError: NIXL failed; nothing writes to the targets any more.
        """
        if self._shared_pages is not None:
            self._shared_pages.copy(pages, memory, targets)
        elif self._nixl_process is not None and self.mode == COPIED and pages:
            self._nixl_process.move(targets, pages, MOVE_TIMEOUT_S, is_write=False)

    def end(self) -> None:
        """Make a running copy of KV pages fail. Any thread may call this."""
        if self._nixl_process is not None:
            self._nixl_process.end()

    def close(self) -> None:
        """Release shared memory or the NIXL process.

        Nothing writes to this engine's KV pages afterwards.
        """
        if self._shared_pages is not None:
            self._shared_pages.close()
        if self._nixl_process is not None:
            self._nixl_process.close()


def choose_transfer_method(
    connection: Connection[PrefillMessage],
    shared_file: int | None,
    *,
    num_pages: int,
    nixl_memory: NixlMemory,
    link: str,
) -> TransferMethod:
    """Measure the methods of fetching KV pages that `link` allows, and return the fastest.

    `shared_file` is the open file of the prefill engine's `num_pages` pages, if that engine runs on
    this machine. Then shared memory is used without measuring. `nixl_memory` describes this
    engine's own pages.

    Raises:
        RefusedError: `link` requires NIXL, which one of the engines cannot use.
        ConnectionLostError: as `Connection.receive`.
    """
    if shared_file is not None:
        try:
            shared_pages = SharedPages(shared_file, num_pages, nixl_memory.page_bytes)
        except OSError as error:
            raise ConnectionLostError(f"The pages cannot be mapped: {error}.") from None
        return TransferMethod(COPIED, shared_pages)
    allowed_modes = _ALLOWED_MODES[link]
    nixl_process = None
    try:
        if allowed_modes != (SENT,):
            nixl_process = _join(connection, nixl_memory)
        return _fastest_method(connection, nixl_process, allowed_modes)
    except NixlProcessError as error:
        if nixl_process is not None:
            nixl_process.close()
        if SENT not in allowed_modes:
            raise RefusedError(str(error)) from None
        _logger.info("Pages are sent by the socket: %s", error)
        return TransferMethod(SENT)
    except ConnectionLostError:
        if nixl_process is not None:
            nixl_process.close()
        raise


def _join(connection: Connection[PrefillMessage], nixl_memory: NixlMemory) -> NixlProcess:
    """Start a NIXL process and connect it with the NIXL process of the prefill engine."""
    if (reason := obstacle()) is not None:
        raise NixlProcessError(reason)
    if nixl_memory.page_file is None:
        raise NixlProcessError("NIXL cannot reach this engine's pages.")
    nixl_process = NixlProcess(nixl_memory.page_file, nixl_memory.num_pages, nixl_memory.page_bytes)
    try:
        connection.send(messages.NixlJoin(nixl_process.address))
        joined = _receive_type(connection, messages.NixlJoined)
        if joined.address is None:
            raise NixlProcessError(
                f"The prefill engine does not move pages by NIXL: {joined.reason}"
            )
        nixl_process.connect(joined.address, MOVE_TIMEOUT_S)
    except ConnectionLostError:
        nixl_process.close()
        raise
    return nixl_process


def _fastest_method(
    connection: Connection[PrefillMessage],
    nixl_process: NixlProcess | None,
    allowed_modes: Sequence[str],
) -> TransferMethod:
    """Measure the allowed modes of fetching KV pages, and return the fastest.

    Without a NIXL process the socket is used.
    """
    if nixl_process is None:
        return TransferMethod(SENT)
    scratch = memoryview(bytearray(PROBE_BYTES))
    numbers = itertools.count(1)

    def probe(mode: str) -> None:
        connection.send(messages.NixlProbe(next(numbers), mode))
        content = _receive_type(connection, messages.Content)
        if not content.is_valid:
            raise NixlProcessError("NIXL failed in the prefill engine.")
        if content.num_bytes:
            connection.receive_into(scratch[: content.num_bytes])

    probes = {
        SENT: lambda: probe(SENT),
        COPIED: lambda: nixl_process.probe(MOVE_TIMEOUT_S, is_write=False),
        WRITTEN: lambda: probe(WRITTEN),
    }
    seconds = {mode: _min_seconds(probes[mode]) for mode in allowed_modes}
    if SENT in seconds:
        seconds[SENT] *= _NIXL_MAX_TIME_RATIO
    fastest = min(seconds, key=seconds.__getitem__)
    if fastest != SENT:
        return TransferMethod(fastest, nixl_process=nixl_process)
    nixl_process.close()
    return TransferMethod(SENT)


def _min_seconds(probe: Callable[[], None]) -> float:
    """Return the seconds of the fastest of several probes of a transfer method.

    The first probe may be slower because it has to connect.
    """
    min_seconds = float("inf")
    began_s = time.monotonic()
    for _ in range(_MAX_PROBES):
        start_s = time.monotonic()
        probe()
        end_s = time.monotonic()
        min_seconds = min(min_seconds, end_s - start_s)
        if end_s - began_s > _MAX_PROBE_S:
            break
    return min_seconds


def _receive_type(connection: Connection[PrefillMessage], message_type: type[Any]) -> Any:
    """Return the next message of a type from a prefill engine.

    Reports of its load, which may come before the message, are skipped.
    """
    while not isinstance(message := connection.receive(), message_type):
        pass
    return message


# Shared memory: a file without a name that engines of one machine and user both map.

_MAP_FIXED: Final = 0x10
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)


def share(memory: PageMemory) -> int | None:
    """Make the memory of KV pages readable by other processes, by backing it with a file.

    The memory must not be used yet. Returns the open file. Returns None if the memory does not
    consist of whole pages of the operating system, or if the system refuses; KV pages are then sent
    by the socket.
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
        # A process that has mapped the file would crash if the file shrank.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        with suppress(OSError):
            os.close(file)
        return None
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address, size, protection, flags, file, 0) != address:
        os.close(file)
        return None
    return file


class SharedPages:
    """Read access to the KV pages of a prefill engine on this machine."""

    def __init__(self, file: int, num_pages: int, page_bytes: int) -> None:
        """Map the open file of a prefill engine's KV pages, and close the descriptor.

        Raises:
            OSError: the file is not page memory of that size.
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
        """Copy a prefill engine's KV pages to pages `targets` of `memory`, without Python's GIL.

        Neighbouring pages are copied together, since copies of up to half a megabyte pass through
        the processor's cache at a quarter of the speed.
        """
        assert memory.mapped is not None, "engines with equal specs both have mapped memory"
        own_pages = np.frombuffer(memory.mapped, np.uint8).reshape(-1, memory.page_bytes)
        first = 0
        for end, (page, target) in enumerate(zip(pages, targets, strict=True), 1):
            if pages[end : end + 1] != [page + 1] or targets[end : end + 1] != [target + 1]:
                count = end - first
                source = self._pages[page + 1 - count : page + 1]
                own_pages[target + 1 - count : target + 1] = source
                first = end

    def close(self) -> None:
        """Unmap the prefill engine's KV pages."""
        del self._pages
        self._map.close()
