"""Sends together what a response writes at the same time, such as its head and its first bytes."""

from __future__ import annotations

import asyncio
from typing import Final

# The ASGI extension that writes a piece of a body without waiting; false if `send` must.
WRITE: Final = "twostroke.write"
_MOST_HELD: Final = 64 * 1024
_READ_BYTES: Final = 64 * 1024


def read_less(transport: asyncio.BaseTransport) -> None:
    """Let asyncio read 64 KiB at most: a buffer of its 256 is mapped for each read, 15 us."""
    transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # of all Python's transports


class WriteCoalescer(asyncio.Transport):
    """Joins the writes of one round of the event loop: each send takes longer than the joining."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Write to `transport`."""
        super().__init__()
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []
        self._num_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write before the next round."""
        if not data:
            return
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(bytes(data))
        self._num_bytes += len(data)
        if self._num_bytes > _MOST_HELD:
            self.flush()

    def write_now(self, data: bytes) -> None:
        """Write what nothing follows soon."""
        if self._held:
            self.write(data)
        else:
            self._transport.write(data)

    def is_closing(self) -> bool:
        """Whether it is closed."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close once all is sent."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self.flush()
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes are not sent yet."""
        return self._num_bytes + self._transport.get_write_buffer_size()

    def resume_reading(self) -> None:
        """Read on."""
        self._transport.resume_reading()

    def flush(self) -> None:
        """Write at once what is held."""
        if self._held:
            data, self._held, self._num_bytes = b"".join(self._held), [], 0
            self._transport.write(data)
