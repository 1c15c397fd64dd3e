"""Gloo, by torch.distributed: a link for machines that have PyTorch, but no faster engine.

Each message passes through Python, so collectives wait for Python's lock. A wait of Gloo ends only
when its connection ends, which may take minutes after a host has vanished.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from twostroke.backends.cpu.records import (
    AllGatherFunction,
    LinkRecord,
    ReceiveFunction,
    SendFunction,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CONNECT_TIMEOUT: Final = timedelta(seconds=15)
# Linux's `struct tcp_info` of a connection has the bytes that were acknowledged and received.
_TCP_INFO: Final = (socket.IPPROTO_TCP, socket.TCP_INFO, 256)
_MOVED_BYTES: Final = struct.Struct("QQ")
_MOVED_BYTES_OFFSET: Final = 120
_WAIT_TIMEOUT: Final = timedelta(days=1)  # heartbeats notice lost ranks


def obstacle() -> str | None:
    """Return why the Gloo link cannot be used on this machine; None if it can."""
    return None if find_spec("torch") else "PyTorch is not installed"


def version() -> str:
    """Return the version of PyTorch, which includes Gloo."""
    import torch

    return f"Gloo of PyTorch {torch.__version__}"


class GlooEngine:
    """One rank's connections to all others by Gloo (torch.distributed); a `LinkEngine`."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        """Prepare the callbacks by which native code runs collectives over Gloo."""
        self._rank, self._num_ranks = rank, num_ranks
        self._host = ""
        self._store: Any = None
        self._group: Any = None
        self._sockets: list[socket.socket] = []  # Gloo's connections
        self._files_before: set[int] | None = None
        self._is_interrupted = True
        self._progress = 0
        self.record = LinkRecord(
            rank=rank,
            num_ranks=num_ranks,
            all_gather=AllGatherFunction(self._all_gather),
            send=SendFunction(self._send),
            receive=ReceiveFunction(self._receive),
        )

    def open(self, host: str) -> bytes:
        """On rank 0, open the store in which ranks find each other; return the store's address."""
        from torch.distributed import TCPStore

        self._host = host
        if self._rank == 0:
            self._store = TCPStore(
                host_name=host,
                port=0,
                is_master=True,
                timeout=_CONNECT_TIMEOUT,
                wait_for_workers=False,
            )
            return f"{self._store.port} {host}".encode()
        return b""

    def connect(self, parts: Sequence[bytes]) -> None:
        """Create the Gloo group of all ranks, over the network interface that leads to rank 0."""
        from torch.distributed import ProcessGroupGloo, TCPStore

        if self._rank != 0:
            port, host = parts[0].decode().split(" ", 1)
            self._store = TCPStore(
                host_name=host,
                port=int(port),
                is_master=False,
                timeout=_CONNECT_TIMEOUT,
                wait_for_workers=False,
            )
        options = ProcessGroupGloo._Options()  # noqa: SLF001 - the only way to choose an interface
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]  # noqa: SLF001
        options._timeout = _CONNECT_TIMEOUT  # noqa: SLF001
        self._files_before = _open_files()
        self._group = ProcessGroupGloo(self._store, self._rank, self._num_ranks, options)
        self._is_interrupted = False

    def interrupt(self) -> None:
        """End a rank's wait in a collective, and make all later collectives fail."""
        self._is_interrupted = True
        for socket_ in self._sockets:  # only this ends a wait of Gloo
            with suppress(OSError):
                socket_.shutdown(socket.SHUT_RDWR)

    def progress(self) -> int:
        """Return a counter that changes when Gloo moves bytes; odd inside a collective."""
        moved_bytes = 0
        for socket_ in self._sockets:
            with suppress(OSError):  # the socket was closed meanwhile
                moved_bytes += sum(
                    _MOVED_BYTES.unpack_from(socket_.getsockopt(*_TCP_INFO), _MOVED_BYTES_OFFSET)
                )
        return self._progress + 2 * moved_bytes

    def leave(self) -> None:
        """Close all connections to other ranks."""
        self.interrupt()
        for socket_ in self._sockets:
            socket_.close()
        self._sockets = []
        self._group = self._store = None

    def close(self) -> None:
        """Do nothing, because `leave` has freed the connections."""

    def _all_gather(
        self, _: Any, team: Any, size: int, contribution: int, gathered: int, sizes: Any
    ) -> int:
        messages, address, length = [], gathered, 0
        for i in range(size):
            if team[i] == self._rank:
                length = sizes[i]
                ctypes.memmove(address, contribution, length)
            elif sizes[i]:
                messages.append((self._group.recv, team[i], address, sizes[i]))
            address += sizes[i]
        others = [team[i] for i in range(size) if team[i] != self._rank and length]
        return self._exchange(
            [*messages, *((self._group.send, to, contribution, length) for to in others)]
        )

    def _send(self, _: Any, to: int, data: int, length: int) -> int:
        return self._exchange([(self._group.send, to, data, length)])

    def _receive(self, _: Any, sender: int, data: int, length: int) -> int:
        return self._exchange([(self._group.recv, sender, data, length)])

    def _exchange(self, messages: Sequence[tuple[Callable[..., Any], int, int, int]]) -> int:
        """Send and receive all messages of a collective; return 0, or 1 after a failure."""
        import torch

        if self._is_interrupted:
            return 1
        self._progress += 1
        works = []
        try:
            for move, peer, data, length in messages:
                memory = (ctypes.c_uint8 * length).from_address(data)
                tensor = torch.frombuffer(memory, dtype=torch.uint8)
                works.append(move([tensor], peer, 0))
            for work in works:
                work.wait(_WAIT_TIMEOUT)
        except RuntimeError:  # a rank is lost, or `interrupt` was called
            self._is_interrupted = True
            return 1
        finally:
            self._progress += 1
        self._find_sockets()
        return 0

    def _find_sockets(self) -> None:
        """Find Gloo's sockets, which the first collective has opened, to watch and close them."""
        if self._files_before is None:
            return
        ends = (_connection(number) for number in _open_files() - self._files_before)
        self._sockets = [end for end in ends if end and end.getsockname()[0] == self._host]
        self._files_before = None


def _open_files() -> set[int]:
    return {int(number) for number in os.listdir("/proc/self/fd")}  # noqa: PTH208 - no files


def _connection(number: int) -> socket.socket | None:
    """Return a socket object for an open file of this process; None if it is no connected socket.

    `number`: the file descriptor.
    """
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            end = socket.socket(fileno=os.dup(number))
            with suppress(OSError):
                end.getpeername()
                return end
            end.close()
    return None
