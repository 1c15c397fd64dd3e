"""Collectives by native code that sends messages by UCX, without Python."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

from twostroke.backends.cpu.library import load_library
from twostroke.backends.cpu.records import (
    AllGatherFunction,
    LinkRecord,
    ReceiveFunction,
    SendFunction,
)
from twostroke.backends.parallel.links.ucx import UcxConnections

if TYPE_CHECKING:
    from collections.abc import Sequence


class UcxEngine:
    """See `Engine`."""

    def __init__(self, rank: int, num_ranks: int, level: str) -> None:
        """Prepare the native side, of an instruction-set level's library."""
        self._library = call = load_library(level)
        self._rank, self._num_ranks = rank, num_ranks
        self._connections: UcxConnections | None = None
        self._in_use = threading.Lock()  # the context, by threads that do not own it
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
        self._connections = UcxConnections(self._rank, self._num_ranks, on_error)
        return self._connections.address()

    def connect(self, parts: Sequence[bytes]) -> None:
        """Connect to the others; from here on collectives can run."""
        assert self._connections is not None
        record = self._connections.connect(parts)
        self._library.ts_messages_connect(self._context, ctypes.byref(record))

    def interrupt(self) -> None:
        """End the collective that waits, and let each later one fail."""
        with self._in_use:
            if self._context:
                self._library.ts_messages_abort(self._context)

    def progress(self) -> int:
        """Return a number that changes when bytes move; odd inside a collective."""
        with self._in_use:
            count = self._library.ts_messages_progress(self._context) if self._context else 0
        return int(count)

    def leave(self) -> None:
        """Drop all connections without waiting for anybody."""
        if self._connections is not None:
            self.interrupt()
            self._connections.close()
            self._connections = None

    def close(self) -> None:
        """Give native memory back; closing twice does no harm."""
        with self._in_use:
            context, self._context = self._context, 0
        if context:
            self._library.ts_messages_destroy(context)
