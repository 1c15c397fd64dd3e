"""A client that sends any bytes, and reads responses as strictly as it can."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_LIMIT = 1 << 24  # bytes of a line or a head
TIMEOUT_S = 60.0


class Reply(Frozen):
    """A whole response. `closes`: the server ends the connection after it."""

    status: int
    headers: dict[str, str]
    body: bytes
    closes: bool


class RawClient:
    """One connection, opened again whenever the server has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, method: str, data: bytes) -> Reply:
        """Send a request and return the response.

        Raises:
            OSError, EOFError: there is no response, also not on a fresh connection.
            TimeoutError: the response does not end.
            ValueError: it is not HTTP.
        """
        async with asyncio.timeout(TIMEOUT_S):
            is_old = self._streams is not None
            try:
                return await self._exchange(method, data)
            except (OSError, EOFError):
                self.close()
                if not is_old:
                    raise
            return await self._exchange(
                method, data
            )  # the old connection had been idle for too long

    def close(self) -> None:
        """End the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _exchange(self, method: str, data: bytes) -> Reply:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=_LIMIT)
        reader, writer = self._streams
        writer.write(data)
        with suppress(ConnectionError):  # what the server has said is there all the same
            await writer.drain()
        reply = await read_reply(reader, method)
        if reply.closes:
            self.close()
        return reply


async def read_reply(reader: asyncio.StreamReader, method: str) -> Reply:
    """Return the next response, EOFError if the server has closed, ValueError if it is not HTTP."""
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *lines = head[:-4].split("\r\n")
        version, status, *_ = line.split(" ", 2)
        if version != "HTTP/1.1" or not status.isdecimal():
            raise ValueError(f"not a response: {line!r}")
        if int(status) >= 200:
            break
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    closes = headers.get("connection", "").lower() == "close"
    if method == "HEAD" or status in {"204", "304"}:
        body = b""
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        body = b"".join([chunk async for chunk in _chunks(reader)])
    else:
        closes, body = True, await reader.read()
    return Reply(int(status), headers, body, closes)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
