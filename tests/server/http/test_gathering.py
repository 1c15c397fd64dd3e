"""Writes of a response at the same time are sent together, and nothing is lost."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from twostroke.server.http.write_coalescer import WriteCoalescer, limit_read_size

if TYPE_CHECKING:
    from collections.abc import Callable


class Seen(asyncio.Transport):
    """A transport that records the bytes that are written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.written.append(b"closed")

    def abort(self) -> None:
        self.written.append(b"aborted")


def written(act: Callable[[WriteCoalescer], Any]) -> list[bytes]:
    """Return the bytes that are sent if `act` writes in one round of the event loop."""
    seen = Seen()

    async def run() -> None:
        act(WriteCoalescer(seen, asyncio.get_running_loop()))
        await asyncio.sleep(0)

    asyncio.run(run())
    return seen.written


def test_the_writes_of_a_round_are_one() -> None:
    def act(transport: WriteCoalescer) -> None:
        transport.write(b"head ")
        transport.write(b"")
        transport.write_now(b"piece ")
        transport.write(bytearray(b"end"))

    assert written(act) == [b"head piece end"]
    assert written(lambda transport: transport.write_now(b"piece")) == [b"piece"]


def test_held_bytes_are_sent_before_the_end() -> None:
    for end in ("close", "abort"):

        def act(transport: WriteCoalescer, end: str = end) -> None:
            transport.write(b"last")
            getattr(transport, end)()

        assert written(act)[0] == b"last"
        assert len(written(act)) == 2


def test_much_is_not_held() -> None:
    def act(transport: WriteCoalescer) -> None:
        for _ in range(8):
            transport.write(bytes(20_000))

    assert [len(data) for data in written(act)] == [80_000, 80_000]


def test_asyncio_reads_at_most_the_limited_size() -> None:
    sizes: list[int] = []

    class Reader(asyncio.Protocol):
        def __init__(self) -> None:
            self.has_ended = asyncio.Event()

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            limit_read_size(transport)

        def data_received(self, data: bytes) -> None:
            sizes.append(len(data))

        def connection_lost(self, exc: Exception | None) -> None:
            self.has_ended.set()

    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.send(b"x" * 150_000)
        _, reader = await asyncio.get_running_loop().create_connection(Reader, sock=ours)
        await reader.has_ended.wait()

    asyncio.run(run())
    assert max(sizes) == 64 * 1024
