"""One HTTP connection: uvicorn's, with limits on time and size, and a clean end.

Closing a connection that has unread bytes resets it, and a client that still sends then sees the
reset and never its response. So the server reads on, within limits, before it closes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from twostroke.server.http.errors import ServerStoppingError
from twostroke.server.http.responses import ABORT
from twostroke.server.http.write_coalescer import WRITE, WriteCoalescer, read_less

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from twostroke.server.http.limits import RequestLimits

_MOMENT_S: Final = 0.5  # for bytes that were sent already
_CLOSE: Final = (b"connection", b"close")
_END: Final[Message] = {"type": "http.response.body", "body": b""}


class HttpConnection(H11Protocol):
    """Drops clients that do not finish the headers of a request in time."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: RequestLimits,
        is_draining: Callable[[], bool],
        most: int,
        idle: dict[HttpConnection, None],
    ) -> None:
        """Serve one client, of whom there are at most `most`.

        `idle` has the server's idle connections, the longest idle one first. A server that drains
        takes no further request on its connection.
        """
        super().__init__(config, server_state, app_state, _loop)
        self._most, self._idle = most, idle
        self._header_timeout_s = limits.header_timeout_s
        self._reader_timeout_s = limits.reader_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._body: BodyReader | None = None  # of the newest request
        self._is_stopping = is_draining()
        inner = self.app

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["extensions"] = {ABORT: self.transport.abort}
            self._body = BodyReader(receive, self._chunking(scope, send), limits, self._is_asked)
            if self._is_stopping:
                self._body.hurry()
            if not await self._body.answer(inner, scope):
                self.transport.close()

        self.app = app

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first headers; one connection too many replaces the longest idle one."""
        super().connection_made(transport)
        read_less(transport)
        self.transport: WriteCoalescer = WriteCoalescer(transport, self.loop)
        if len(self.connections) > self._most:
            other = next(iter(self._idle), self)
            self._idle.pop(other, None)
            other.transport.abort()
        self._note_idle()
        self._time_headers()

    def data_received(self, data: bytes) -> None:
        """Take in bytes, and time the headers of the next request."""
        super().data_received(data)
        if not self.is_idle:
            self._idle.pop(self, None)
        self._time_headers()

    def eof_received(self) -> None:
        """Send what is held: no request follows, and the connection ends now."""
        self.transport.flush()

    def on_response_complete(self) -> None:
        """Be idle, unless another request has arrived meanwhile."""
        super().on_response_complete()
        self._note_idle()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP; only close if a response has begun."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # so that its application does not answer as well
            self.cycle.message_event.set()
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:
            self.transport.close()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        is_ending = self.transport.is_closing()
        return not is_ending and (self.cycle is None or self.cycle.response_complete)

    def shutdown(self) -> None:
        """Let a response end, without waiting for the rest of a body or for the next request."""
        super().shutdown()
        self.hurry()

    def hurry(self) -> None:
        """Wait only a moment for bodies, and close after the next response that begins."""
        self._is_stopping = True
        if self._body is not None:
            self._body.hurry()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._stop_timer()
        self._idle.pop(self, None)
        super().connection_lost(exc)

    def _note_idle(self) -> None:
        if self.is_idle:
            self._idle[self] = None

    def _chunking(self, scope: Scope, send: Send) -> Send:
        """Return what sends the pieces of a chunked body itself: h11 takes a fifth of a token."""
        is_chunked = False

        def write_piece(body: bytes) -> bool:
            if not is_chunked or self.flow.write_paused or self.transport.is_closing():
                return False
            if body:
                self.transport.write_now(b"%x\r\n%b\r\n" % (len(body), body))
            return True

        async def write(message: Message) -> None:
            nonlocal is_chunked
            if message.get("more_body", False) and (body := message.get("body")):
                if write_piece(body):
                    return
            elif message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                has_body = scope["method"] != "HEAD" and message["status"] not in {204, 304}
                is_new = scope["http_version"] == "1.1"  # before, the end of the connection ends it
                is_chunked = has_body and is_new and b"content-length" not in names
            await self._wait_for_reader()
            await send(message)

        scope["extensions"][WRITE] = write_piece
        return write

    async def _wait_for_reader(self) -> None:
        """Wait until there is room for more; cut off a client that reads nothing for too long."""
        num_left = self.transport.get_write_buffer_size()
        while self.flow.write_paused and not self.transport.is_closing():
            try:
                async with asyncio.timeout(self._reader_timeout_s):
                    await self.flow.drain()
            except TimeoutError:
                if self.transport.get_write_buffer_size() == num_left:
                    self.transport.abort()
            num_left = self.transport.get_write_buffer_size()

    def _is_asked(self) -> bool:
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
    """Reads a request's body for the application, and drops the rest of it after the response.

    A refused client that expects `100 Continue` still gets a moment, since some send the body.
    """

    def __init__(
        self,
        receive: Receive,
        send: Send,
        limits: RequestLimits,
        is_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read from `receive`, and delay the end of the response to `send`.

        `is_asked` returns whether the client waits for `100 Continue` before it sends its body.
        """
        self._receive = receive
        self._send = send
        self._limits = limits
        self._is_asked = is_asked
        self._is_read = False
        self._is_answered = False  # at least in part
        self._is_refused = False  # the client expects 100 Continue and gets an error
        self._owes_end = False
        self._stops_at: float | None = None  # in the loop's time; set when the server stops
        self._limit: asyncio.Timeout | None = None  # while waiting for the body or its rest

    async def answer(self, app: ASGIApp, scope: Scope) -> bool:
        """Let `app` answer; return whether the connection can be used again.

        The end of the response would close the connection, so it waits for the end of the request:
        until the time limit of the body, and for up to `max_dropped_bytes`.
        """
        ends_at = asyncio.get_running_loop().time() + self._limits.body_timeout_s
        await app(scope, self._take, self._give)
        if self._owes_end:
            await self._drop(ends_at)
            await self._send(_END)
        return self._is_read or not self._owes_end

    def hurry(self) -> None:
        """From now on wait only a moment for a body or its rest."""
        self._stops_at = asyncio.get_running_loop().time() + _MOMENT_S
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(self._stops_at)

    async def _take(self) -> Message:
        """Return the next message.

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

    async def _give(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_refused = self._is_asked()  # this answer tells it not to send the body
            if self._is_refused or self._stops_at is not None:
                message = {**message, "headers": _closing(message.get("headers", []))}
            self._is_answered = True
        elif not message.get("more_body", False) and not self._is_read:
            self._owes_end = True
            message = {**message, "more_body": True}
        await self._send(message)

    async def _drop(self, ends_at: float) -> None:
        now = asyncio.get_running_loop().time()
        num_left = self._limits.max_dropped_bytes
        until = max(ends_at, now + _MOMENT_S) if self._stops_at is None else self._stops_at
        try:
            begins_by = min(until, now + _MOMENT_S) if self._is_refused else until
            async with asyncio.timeout_at(begins_by) as self._limit:
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
    """Return the headers of a response that closes the connection."""
    return [*(one for one in headers if one[0] != _CLOSE[0]), _CLOSE]
