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
from twostroke.engine.disaggregation import messages
from twostroke.engine.disaggregation.connection import PeerLostError, RefusedError
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
    from twostroke.engine.disaggregation.connection import PeerConnection


_logger = logging.getLogger("twostroke.handover")

# What each word of `PEER_LINKS` lets engines choose from that share no memory.
_CHOICES: Final = {
    "auto": (SENT, COPIED, WRITTEN),
    "socket": (SENT,),
    "nixl": (COPIED, WRITTEN),
    "nixl-read": (COPIED,),
    "nixl-write": (WRITTEN,),
}
_TITLES: Final = {SENT: "socket", COPIED: "NIXL, read", WRITTEN: "NIXL, written"}
MOVE_S: Final = 2.0  # in which a move by NIXL must end
_MOST_BYTES: Final = 8 << 20  # of one
_WORTH: Final = 0.8  # of the socket's seconds, which NIXL must do with: carriers use cores, too
_NUM_PROBES: Final = 4
_PROBES_S: Final = 0.25  # after which a way is not measured again


class OwnPages(Frozen):
    """A decode engine's pages, as NIXL may write to them: an open file, None if there is none."""

    file: int | None
    num_pages: int
    page_bytes: int


class TransferMethod:
    """How pages come: `how` is a word of `messages`, `title` one for people."""

    def __init__(
        self, how: str, shared: SharedPages | None = None, carrier: NixlProcess | None = None
    ) -> None:
        """Use shared memory, a carrier, or neither: pages are sent."""
        self.how, self._shared, self._carrier = how, shared, carrier
        self.title = "shared memory" if shared is not None else _TITLES[how]
        self.is_nixl = carrier is not None

    def most_pages(self, page_bytes: int) -> int | None:
        """Return how many pages may be asked for at once; None for any number."""
        return max(1, _MOST_BYTES // page_bytes) if self.is_nixl else None

    def copy(self, pages: Sequence[int], memory: PageMemory, targets: Sequence[int]) -> None:
        """Copy pages that are `COPIED` into those of this engine.

        Raises:
            CarrierError: NIXL did not, and nothing writes to the targets any more.
        """
        if self._shared is not None:
            self._shared.copy(pages, memory, targets)
        elif self._carrier is not None and self.how == COPIED and pages:
            self._carrier.move(targets, pages, MOVE_S, is_write=False)

    def end(self) -> None:
        """Let a copy end with an error; any thread may."""
        if self._carrier is not None:
            self._carrier.end()

    def close(self) -> None:
        """Let nothing write to this engine's pages any more."""
        if self._shared is not None:
            self._shared.close()
        if self._carrier is not None:
            self._carrier.close()


def choose_way(
    connection: PeerConnection, file: int | None, num_pages: int, own: OwnPages, link: str
) -> TransferMethod:
    """Return the fastest way that `link` allows, as measured.

    A prefill engine that shares its `num_pages` has sent an open `file`: no other way is looked at.

    Raises:
        RefusedError: `link` asks for NIXL, which does not work here or there.
        PeerLostError: as `PeerConnection.receive`.
    """
    if file is not None:
        try:
            return TransferMethod(COPIED, SharedPages(file, num_pages, own.page_bytes))
        except OSError as error:
            raise PeerLostError(f"The pages cannot be mapped: {error}.") from None
    choices = _CHOICES[link]
    carrier = None
    try:
        if choices != (SENT,):
            carrier = _join(connection, own)
        return _fastest(connection, carrier, choices)
    except NixlProcessError as error:
        if carrier is not None:
            carrier.close()
        if SENT not in choices:
            raise RefusedError(str(error)) from None
        _logger.info("Pages are sent by the socket: %s", error)
        return TransferMethod(SENT)
    except PeerLostError:
        if carrier is not None:
            carrier.close()
        raise


def _join(connection: PeerConnection, own: OwnPages) -> NixlProcess:
    """Open a carrier, and let it meet that of the prefill engine."""
    if (reason := obstacle()) is not None:
        raise NixlProcessError(reason)
    if own.file is None:
        raise NixlProcessError("NIXL cannot reach this engine's pages.")
    carrier = NixlProcess(own.file, own.num_pages, own.page_bytes)
    try:
        connection.send(messages.NixlJoin(carrier.place))
        joined = _await(connection, messages.NixlJoined)
        if joined.place is None:
            raise NixlProcessError(
                f"The prefill engine does not move pages by NIXL: {joined.reason}"
            )
        carrier.meet(joined.place, MOVE_S)
    except PeerLostError:
        carrier.close()
        raise
    return carrier


def _fastest(
    connection: PeerConnection, carrier: NixlProcess | None, choices: Sequence[str]
) -> TransferMethod:
    if carrier is None:
        return TransferMethod(SENT)
    scratch, numbers = memoryview(bytearray(PROBE_BYTES)), itertools.count(1)

    def ask(how: str) -> None:
        connection.send(messages.NixlProbe(next(numbers), how))
        content = _await(connection, messages.Content)
        if not content.is_valid:
            raise NixlProcessError("NIXL failed there.")
        if content.num_bytes:
            connection.receive_into(scratch[: content.num_bytes])

    probes = {
        SENT: lambda: ask(SENT),
        COPIED: lambda: carrier.probe(MOVE_S, is_write=False),
        WRITTEN: lambda: ask(WRITTEN),
    }
    seconds = {how: _seconds(probes[how]) for how in choices}
    if SENT in seconds:
        seconds[SENT] *= _WORTH
    how = min(seconds, key=seconds.__getitem__)
    if how != SENT:
        return TransferMethod(how, carrier=carrier)
    carrier.close()
    return TransferMethod(SENT)


def _seconds(probe: Callable[[], None]) -> float:
    """Return the least time that a probe takes; the first one may have to connect."""
    least = float("inf")
    began_s = time.monotonic()
    for _ in range(_NUM_PROBES):
        start_s = time.monotonic()
        probe()
        end_s = time.monotonic()
        least = min(least, end_s - start_s)
        if end_s - began_s > _PROBES_S:
            break
    return least


def _await(connection: PeerConnection, kind: type[Any]) -> Any:
    """Return the next message of a kind; others that come while engines meet tell of the load."""
    while not isinstance(answer := connection.receive(), kind):
        pass
    return answer


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
