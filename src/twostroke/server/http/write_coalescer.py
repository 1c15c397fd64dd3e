"""Joins small socket writes, such as a response's headers and its first bytes."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

# The scope extension that writes a chunk of a body without waiting. It returns False if the chunk
# must go through `send`.
WRITE_NOW: Final = "twostroke.write"
_MAX_HELD_BYTES: Final = 64 * 1024
_READ_BYTES: Final = 64 * 1024


def limit_read_size(transport: asyncio.BaseTransport) -> None:
    """Make asyncio read at most 64 KiB at once from a transport.

    asyncio's usual buffer of 256 KiB would be mapped anew for each read, which takes time.
    """
    transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # of all Python's transports


def send_small_writes(transport: asyncio.BaseTransport) -> None:
    """Let the kernel send small writes at once, also while earlier bytes are not acknowledged.

    Otherwise a token waits for the client's delayed acknowledgement, up to 40 ms. asyncio does this
    only for sockets that name their protocol, which `socket.create_server` does not.
    """
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in {socket.AF_INET, socket.AF_INET6}:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class WriteCoalescer(asyncio.Transport):
    """An asyncio transport that joins the writes of one event loop round into one socket write."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Wrap `transport`, to which the joined writes go."""
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._chunks: list[bytes] = []
        self._num_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Hold data until the event loop's next round, and then write all held data at once.

        Data is written at once if more than 64 KiB are held.
        """
        if not data:
            return
        if not self._chunks:
            self._loop.call_soon(self.flush)
        self._chunks.append(bytes(data))
        self._num_bytes += len(data)
        if self._num_bytes > _MAX_HELD_BYTES:
            self.flush()

    def write_now(self, data: bytes) -> None:
        """Write data at once, since no other write follows soon.

        If earlier data is held, this data is held as well, to keep the order.
        """
        if self._chunks:
            self.write(data)
        else:
            self._transport.write(data)

    def is_closing(self) -> bool:
        """Return whether the wrapped transport is closing."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once all data is sent."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once; data that the kernel has not taken is lost."""
        self.flush()
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes are not sent yet, held here or in the transport's buffer."""
        return self._num_bytes + self._transport.get_write_buffer_size()

    def resume_reading(self) -> None:
        """Continue reading from the wrapped transport."""
        self._transport.resume_reading()

    def flush(self) -> None:
        """Write the held data to the wrapped transport at once."""
        if self._chunks:
            data = b"".join(self._chunks)
            self._chunks = []
            self._num_bytes = 0
            self._transport.write(data)
