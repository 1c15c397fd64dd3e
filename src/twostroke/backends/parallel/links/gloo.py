"""Gloo, by torch.distributed: the link of those who have PyTorch and nothing faster.

Each message passes through Python, so that collectives wait for its lock. Gloo's waits end when a
connection ends, which may take minutes after a host has vanished.
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

_CONNECT: Final = timedelta(seconds=15)
# Of a connection, from Linux's `struct tcp_info`: how many bytes were confirmed, and have come.
_TCP_INFO: Final = (socket.IPPROTO_TCP, socket.TCP_INFO, 256)
_MOVED: Final = struct.Struct("QQ")
_MOVED_AT: Final = 120
_FOREVER: Final = timedelta(days=1)  # lost ranks are noticed elsewhere


def obstacle() -> str | None:
    """Return why Gloo cannot be used here, or None."""
    return None if find_spec("torch") else "PyTorch is not installed"


def version() -> str:
    """Return the version of PyTorch that has it."""
    import torch

    return f"Gloo of PyTorch {torch.__version__}"


class GlooEngine:
    """See `Engine`."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        """Prepare the functions that native code calls."""
        self._rank, self._num_ranks = rank, num_ranks
        self._host = ""
        self._store: Any = None
        self._group: Any = None
        self._sockets: list[socket.socket] = []  # those of Gloo
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
        """Let rank 0 open the store by which the ranks of a group find each other."""
        from torch.distributed import TCPStore

        self._host = host
        if self._rank == 0:
            self._store = TCPStore(host, 0, None, True, _CONNECT, False)  # noqa: FBT003
            return f"{self._store.port} {host}".encode()
        return b""

    def connect(self, parts: Sequence[bytes]) -> None:
        """Make a group of all ranks, over the interface that leads to rank 0."""
        from torch.distributed import ProcessGroupGloo, TCPStore

        if self._rank != 0:
            port, host = parts[0].decode().split(" ", 1)
            self._store = TCPStore(host, int(port), None, False, _CONNECT, False)  # noqa: FBT003
        options = ProcessGroupGloo._Options()  # noqa: SLF001 - the only way to choose an interface
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]  # noqa: SLF001
        options._timeout = _CONNECT  # noqa: SLF001
        self._files_before = _open_files()
        self._group = ProcessGroupGloo(self._store, self._rank, self._num_ranks, options)
        self._is_interrupted = False

    def interrupt(self) -> None:
        """End the collective that waits, and let each later one fail."""
        self._is_interrupted = True
        for end in self._sockets:  # nothing else ends a wait of Gloo
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def progress(self) -> int:
        """Return a number that changes when bytes move; odd inside a collective."""
        moved = 0
        for end in self._sockets:
            with suppress(OSError):  # closed meanwhile
                moved += sum(_MOVED.unpack_from(end.getsockopt(*_TCP_INFO), _MOVED_AT))
        return self._progress + 2 * moved

    def leave(self) -> None:
        """Drop all connections."""
        self.interrupt()
        for end in self._sockets:
            end.close()
        self._sockets = []
        self._group = self._store = None

    def close(self) -> None:
        """Do nothing more than `leave` does."""

    def _all_gather(
        self, _: Any, team: Any, size: int, own: int, everything: int, sizes: Any
    ) -> int:
        messages, place, length = [], everything, 0
        for i in range(size):
            if team[i] == self._rank:
                length = sizes[i]
                ctypes.memmove(place, own, length)
            elif sizes[i]:
                messages.append((self._group.recv, team[i], place, sizes[i]))
            place += sizes[i]
        others = [team[i] for i in range(size) if team[i] != self._rank and length]
        return self._exchange([*messages, *((self._group.send, to, own, length) for to in others)])

    def _send(self, _: Any, to: int, data: int, length: int) -> int:
        return self._exchange([(self._group.send, to, data, length)])

    def _receive(self, _: Any, sender: int, data: int, length: int) -> int:
        return self._exchange([(self._group.recv, sender, data, length)])

    def _exchange(self, messages: Sequence[tuple[Callable[..., Any], int, int, int]]) -> int:
        """Send and receive all messages; return 0, or 1 if that failed."""
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
                work.wait(_FOREVER)
        except RuntimeError:  # a rank is gone, or `interrupt`
            self._is_interrupted = True
            return 1
        finally:
            self._progress += 1
        self._find_sockets()
        return 0

    def _find_sockets(self) -> None:
        """Find Gloo's connections, after the first collective has made them."""
        if self._files_before is None:
            return
        ends = (_connection(number) for number in _open_files() - self._files_before)
        self._sockets = [end for end in ends if end and end.getsockname()[0] == self._host]
        self._files_before = None


def _open_files() -> set[int]:
    return {int(number) for number in os.listdir("/proc/self/fd")}  # noqa: PTH208 - no files


def _connection(number: int) -> socket.socket | None:
    """Return another handle of an open file that is a connected socket."""
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            end = socket.socket(fileno=os.dup(number))
            with suppress(OSError):
                end.getpeername()
                return end
            end.close()
    return None
