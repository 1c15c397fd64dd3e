"""One HTTP connection: uvicorn's protocol, with limits on time and size, and a clean end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from twostroke.server.http.errors import ServerStoppingError
from twostroke.server.http.responses import ABORT
from twostroke.server.http.write_coalescer import (
    WRITE_NOW,
    WriteCoalescer,
    limit_read_size,
    send_small_writes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from twostroke.server.http.limits import RequestLimits

_GRACE_S: Final = 0.5  # the wait for bytes of a request that may be on their way
_CLOSE_HEADER: Final = (b"connection", b"close")
_BODY_END: Final[Message] = {"type": "http.response.body", "body": b""}


class HttpConnection(H11Protocol):
    """One client's HTTP connection: uvicorn's protocol class, with limits on times and sizes.

    It closes the connection of a client that does not finish a request's headers in time, or that
    does not read the response.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: RequestLimits,
        is_draining: Callable[[], bool],
        max_connections: int,
        idle_connections: dict[HttpConnection, None],
    ) -> None:
        """Prepare to serve a client's connection.

        `max_connections` limits the connections of the server; `idle_connections` has its idle
        connections, in the order in which they became idle. While the server drains
        (`is_draining`), each connection closes after its response.
        """
        super().__init__(config, server_state, app_state, _loop)
        self._max_connections = max_connections
        self._idle_connections = idle_connections
        self._header_timeout_s = limits.header_timeout_s
        self._reader_timeout_s = limits.reader_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._body: BodyReader | None = None  # of the latest request
        self._is_stopping = is_draining()
        inner = self.app

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["extensions"] = {ABORT: self.transport.abort}
            self._body = BodyReader(
                receive, self._send_chunked(scope, send), limits, self._is_awaiting_continue
            )
            if self._is_stopping:
                self._body.hurry()
            if not await self._body.answer(inner, scope):
                self.transport.close()

        self.app = app

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to serve the connection, and limit the time for the first request's headers.

        If there are too many connections, the connection that has been idle longest is closed.
        """
        super().connection_made(transport)
        limit_read_size(transport)
        send_small_writes(transport)
        self.transport: WriteCoalescer = WriteCoalescer(transport, self.loop)
        if len(self.connections) > self._max_connections:
            longest_idle = next(iter(self._idle_connections), self)
            self._idle_connections.pop(longest_idle, None)
            longest_idle.transport.abort()
        self._note_idle()
        self._time_headers()

    def data_received(self, data: bytes) -> None:
        """Process bytes of the client, and limit the time for the next request's headers."""
        super().data_received(data)
        if not self.is_idle:
            self._idle_connections.pop(self, None)
        self._time_headers()

    def eof_received(self) -> None:
        """When the client closes its sending side, send the response bytes that are still held."""
        self.transport.flush()

    def on_response_complete(self) -> None:
        """Count the connection as idle when a response ends, unless another request has arrived."""
        super().on_response_complete()
        self._note_idle()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP; if a response has begun, only close the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # so that its application does not answer as well
            self.cycle.message_event.set()
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:
            self.transport.close()

    @property
    def is_idle(self) -> bool:
        """Whether the connection is open and no request is being answered on it."""
        is_ending = self.transport.is_closing()
        return not is_ending and (self.cycle is None or self.cycle.response_complete)

    def shutdown(self) -> None:
        """Close the connection after the current response, because the server stops.

        The connection waits only briefly for the rest of a request body, and not for a next
        request.
        """
        super().shutdown()
        self.hurry()

    def hurry(self) -> None:
        """Close the connection soon, because the server begins to stop.

        The connection waits at most `_GRACE_S` seconds for request bodies, and closes after the
        next response that begins.
        """
        self._is_stopping = True
        if self._body is not None:
            self._body.hurry()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after the connection: stop its timer, and no longer count it as idle."""
        self._stop_timer()
        self._idle_connections.pop(self, None)
        super().connection_lost(exc)

    def _note_idle(self) -> None:
        if self.is_idle:
            self._idle_connections[self] = None

    def _send_chunked(self, scope: Scope, send: Send) -> Send:
        """Return an ASGI `send` that encodes chunked bodies itself, which is faster than h11.

        The function also puts the extension `WRITE_NOW` into the scope, which writes a chunk of the
        response without waiting.
        """
        is_chunked = False

        def write_chunk(body: bytes) -> bool:
            if not is_chunked or self.flow.write_paused or self.transport.is_closing():
                return False
            if body:
                self.transport.write_now(b"%x\r\n%b\r\n" % (len(body), body))
            return True

        async def write(message: Message) -> None:
            nonlocal is_chunked
            if message.get("more_body", False) and (body := message.get("body")):
                if write_chunk(body):
                    return
            elif message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                has_body = scope["method"] != "HEAD" and message["status"] not in {204, 304}
                is_http_1_1 = scope["http_version"] == "1.1"  # HTTP/1.0 has no chunks
                is_chunked = has_body and is_http_1_1 and b"content-length" not in names
            await self._wait_for_reader()
            await send(message)

        scope["extensions"][WRITE_NOW] = write_chunk
        return write

    async def _wait_for_reader(self) -> None:
        """Wait while the client is slow to read the response.

        The connection is aborted if the client reads nothing for `reader_timeout_s`.
        """
        num_unsent = self.transport.get_write_buffer_size()
        while self.flow.write_paused and not self.transport.is_closing():
            try:
                async with asyncio.timeout(self._reader_timeout_s):
                    await self.flow.drain()
            except TimeoutError:
                if self.transport.get_write_buffer_size() == num_unsent:
                    self.transport.abort()
            num_unsent = self.transport.get_write_buffer_size()

    def _is_awaiting_continue(self) -> bool:
        return bool(self.conn.they_are_waiting_for_100_continue)

    def _time_headers(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self._header_timeout_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class BodyReader:
    """Passes a request's body to the application, and drops bytes that stay unread.

    Unread bytes must be received before the connection can be used for another request. A refused
    client that waits for `100 Continue` may still send its body, so the reader waits `_GRACE_S`
    seconds for the body's first bytes.
    """

    def __init__(
        self,
        receive: Receive,
        send: Send,
        limits: RequestLimits,
        is_awaiting_continue: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare to read one request's body from `receive`, and to send its response by `send`.

        If the application answers before it has read the whole body, the end of the response is
        held back until the rest has been read and dropped, within `limits`.

        `is_awaiting_continue` returns whether the client waits for `100 Continue` before it sends
        its body.
        """
        self._receive = receive
        self._send = send
        self._limits = limits
        self._is_awaiting_continue = is_awaiting_continue
        self._is_read = False
        self._is_answered = False  # the response has begun
        self._is_refused = False  # the client waits for 100 Continue and gets an error
        self._owes_end = False  # the end of the response waits for the end of the request
        self._stops_at: float | None = None  # in the event loop's time; set when the server stops
        self._limit: asyncio.Timeout | None = None  # of the wait for the body or its rest

    async def answer(self, app: ASGIApp, scope: Scope) -> bool:
        """Let the application answer the request; return whether the connection can be used again.

        The end of the response would close the connection, so it is delayed until the request's
        body has been read and dropped, within `body_timeout_s` and `max_dropped_bytes`.
        """
        ends_at = asyncio.get_running_loop().time() + self._limits.body_timeout_s
        await app(scope, self._receive_body, self._send_response)
        if self._owes_end:
            await self._drop_body(ends_at)
            await self._send(_BODY_END)
        return self._is_read or not self._owes_end

    def hurry(self) -> None:
        """Wait at most `_GRACE_S` seconds longer for the request's body, as the server stops."""
        self._stops_at = asyncio.get_running_loop().time() + _GRACE_S
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(self._stops_at)

    async def _receive_body(self) -> Message:
        """Return the next ASGI message: a part of the request's body, or that the client has left.

        Raises:
            ServerStoppingError: the server stops before the whole body has arrived.
        """
        if self._is_read or self._is_answered:
            return await self._next()
        try:
            async with asyncio.timeout_at(self._stops_at) as self._limit:
                return await self._next()
        except TimeoutError:
            message = "The server is stopping, and the request's body is incomplete."
            raise ServerStoppingError(message) from None
        finally:
            self._limit = None

    async def _next(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):  # the end, or the client has left
            self._is_read = True
        return message

    async def _send_response(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_refused = self._is_awaiting_continue()  # an answer before the body
            if self._is_refused or self._stops_at is not None:
                message = {**message, "headers": _closing(message.get("headers", []))}
            self._is_answered = True
        elif not message.get("more_body", False) and not self._is_read:
            self._owes_end = True
            message = {**message, "more_body": True}
        await self._send(message)

    async def _drop_body(self, ends_at: float) -> None:
        """Read and drop the rest of a request's body, up to `max_dropped_bytes`, until `ends_at`.

        `ends_at` is in the event loop's time; the deadline is sooner if the server stops.
        """
        now = asyncio.get_running_loop().time()
        num_left = self._limits.max_dropped_bytes
        until = max(ends_at, now + _GRACE_S) if self._stops_at is None else self._stops_at
        try:
            deadline = min(until, now + _GRACE_S) if self._is_refused else until
            async with asyncio.timeout_at(deadline) as self._limit:
                while not self._is_read and num_left > 0:
                    num_left -= len((await self._next()).get("body", b""))
                    if self._is_refused and self._stops_at is None:
                        self._is_refused = False
                        self._limit.reschedule(until)
        except TimeoutError:
            pass
        finally:
            self._limit = None


def _closing(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return response headers with `connection: close` in place of another value."""
    other_headers = [header for header in headers if header[0] != _CLOSE_HEADER[0]]
    return [*other_headers, _CLOSE_HEADER]
