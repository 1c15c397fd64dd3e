"""JSON responses, server-sent events, and cancelling work when the client disconnects."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from starlette.responses import Response

from twostroke.core.json_io import encode_json
from twostroke.server.http.errors import ClientGoneError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.types import Receive, Scope, Send


_CHUNK_BYTES: Final = 1 << 18


def to_json(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an HTTP response with a JSON body."""
    return Response(encode_json(body), status, headers, media_type="application/json")


class JsonInChunks(Response):
    """A large JSON response that is sent in chunks, so that it does not block the event loop."""

    media_type = "application/json"

    def __init__(
        self, body: Callable[[list[msgspec.Raw]], object], parts: list[msgspec.Raw]
    ) -> None:
        """Prepare a response with the JSON of `body(parts)`.

        `body` must put all `parts`, JSON values that are encoded already, into one list.
        """
        marker = b'"%b"' % secrets.token_hex(16).encode()
        # The list is encoded with a marker in place of the parts, so that they are not copied.
        before, _, after = encode_json(body([msgspec.Raw(marker)])).partition(marker)
        self._segments = [before]
        for index, part in enumerate(parts):
            self._segments += [b",", part] if index else [part]
        self._segments.append(after)
        size = sum(memoryview(segment).nbytes for segment in self._segments)
        super().__init__(headers={"content-length": str(size)})

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send the JSON response; between two chunks, the event loop does other work."""
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        for segment in self._segments:
            view = memoryview(segment)
            for first in range(0, view.nbytes, _CHUNK_BYTES):
                chunk = bytes(view[first : first + _CHUNK_BYTES])
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def sse(data: bytes) -> bytes:
    """Return a server-sent event with the given data and without an event name."""
    return b"data: %b\n\n" % data


def named_sse(data: msgspec.Struct) -> bytes:
    """Return a server-sent event with a struct as its data, and the struct's tag as its name."""
    name = data.__struct_config__.tag
    assert isinstance(name, str)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(data))


T = TypeVar("T")

ABORT: Final = "twostroke.abort"  # the scope extension that closes a connection at once


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Wait for `work`, and return its result; cancel it if the request's client disconnects.

    Raises:
        ClientGoneError: the client disconnected.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.create_task(until_disconnect(receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise ClientGoneError("The client left before its answer was ready.")
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def until_disconnect(receive: Receive) -> None:
    """Wait until the request's client has disconnected; drop unread bytes of the body."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def abort_connection(scope: Scope) -> None:
    """Close a request's connection at once, and drop response bytes that are not sent yet."""
    abort = scope.get("extensions", {}).get(ABORT)
    if abort is not None:
        abort()
        await asyncio.sleep(0)  # the server notices in the event loop's next round
