"""One HTTP connection: uvicorn's, with limits on time and size, and a clean end.

Closing a connection that has unread bytes resets it, and a client that still sends then sees the
reset and never its response. So the server reads on, within limits, before it closes.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from twostroke.serve.http.stream import ABORT

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from twostroke.serve.options import Limits

_MOMENT_S: Final = 0.5  # for bytes that were sent already
_END: Final[Message] = {"type": "http.response.body", "body": b""}


class Connection(H11Protocol):
    """Drops clients that do not finish the headers of a request in time."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: Limits,
    ) -> None:
        """Serve one client."""
        super().__init__(config, server_state, app_state, _loop)
        self._header_timeout_s = limits.header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        inner = self.app

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["extensions"] = {ABORT: self.transport.abort}
            if not await BodyReader(receive, send, limits).answer(inner, scope):
                self.transport.close()

        self.app = app

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first headers."""
        super().connection_made(transport)
        self._time_headers()

    def data_received(self, data: bytes) -> None:
        """Take in bytes, and time the headers of the next request."""
        super().data_received(data)
        self._time_headers()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP; only close if a response has begun."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # so that its application does not answer as well
            self.cycle.message_event.set()
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._stop_timer()
        super().connection_lost(exc)

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
    """Reads a request's body for the application, and drops the rest of it after the response."""

    def __init__(self, receive: Receive, send: Send, limits: Limits) -> None:
        """Read from `receive`, and delay the end of the response to `send`."""
        self._receive = receive
        self._send = send
        self._limits = limits
        self._is_read = False
        self._owes_end = False

    async def answer(self, app: ASGIApp, scope: Scope) -> bool:
        """Let `app` answer; return whether the connection can be used again.

        The end of the response would close the connection, so it waits for the end of the request:
        until the time limit of the body, and for up to `max_dropped_bytes`.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._limits.body_timeout_s
        await app(scope, self._take, self._give)
        if self._owes_end:
            await self._drop(max(ends_at, loop.time() + _MOMENT_S))
            await self._send(_END)
        return self._is_read or not self._owes_end

    async def _take(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):  # the end, or the client has left
            self._is_read = True
        return message

    async def _give(self, message: Message) -> None:
        is_end = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_end and not self._is_read:
            self._owes_end = True
            message = {**message, "more_body": True}
        await self._send(message)

    async def _drop(self, ends_at: float) -> None:
        num_left = self._limits.max_dropped_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout_at(ends_at):
                while not self._is_read and num_left > 0:
                    num_left -= len((await self._take()).get("body", b""))
