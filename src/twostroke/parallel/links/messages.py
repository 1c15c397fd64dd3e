"""Collectives by native code that sends the messages of an engine, without Python."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Protocol

from twostroke.backends.cpu.library import load_library
from twostroke.backends.cpu.records import (
    AllGatherFunction,
    LinkRecord,
    ReceiveFunction,
    SendFunction,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.parallel.links.record import EngineRecord


class Connections(Protocol):
    """A rank's connections by an engine whose C functions native code calls."""

    def address(self) -> bytes:
        """Return what the other ranks need to connect to this one."""

    def connect(self, addresses: Sequence[bytes]) -> EngineRecord:
        """Connect to all others; what the record points to lives as long as this object."""

    def close(self) -> None:
        """Drop all connections at once."""


class MessageEngine:
    """See `Engine`. `open_connections` takes the rank, how many there are, and whom errors call."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        level: str,
        open_connections: Callable[[int, int, ctypes.c_void_p], Connections],
    ) -> None:
        """Prepare the native side, of an instruction-set level's library."""
        self._library = call = load_library(level)
        self._rank, self._num_ranks = rank, num_ranks
        self._open_connections = open_connections
        self._connections: Connections | None = None
        self._context: int = call.ts_messages_create()
        self.record = LinkRecord(
            context=self._context,
            rank=rank,
            num_ranks=num_ranks,
            all_gather=ctypes.cast(call.ts_messages_all_gather, AllGatherFunction),
            send=ctypes.cast(call.ts_messages_send, SendFunction),
            receive=ctypes.cast(call.ts_messages_receive, ReceiveFunction),
        )

    def open(self, host: str) -> bytes:
        """Open the engine; it finds this machine's addresses itself."""
        del host
        on_error = ctypes.cast(self._library.ts_messages_lose, ctypes.c_void_p)
        self._connections = self._open_connections(self._rank, self._num_ranks, on_error)
        return self._connections.address()

    def connect(self, parts: Sequence[bytes]) -> None:
        """Connect to the others; from here on collectives can run."""
        assert self._connections is not None
        record = self._connections.connect(parts)
        self._library.ts_messages_connect(self._context, ctypes.byref(record))

    def interrupt(self) -> None:
        """End the collective that waits, and let each later one fail."""
        if self._context:
            self._library.ts_messages_abort(self._context)

    def progress(self) -> int:
        """Return a number that changes when a collective begins or ends; odd inside one."""
        count: int = self._library.ts_messages_progress(self._context) if self._context else 0
        return count

    def leave(self) -> None:
        """Drop all connections without waiting for anybody."""
        if self._connections is not None:
            self._library.ts_messages_abort(self._context)
            self._connections.close()
            self._connections = None

    def close(self) -> None:
        """Give native memory back; closing twice does no harm."""
        if self._context:
            context, self._context = self._context, 0
            self._library.ts_messages_destroy(context)
