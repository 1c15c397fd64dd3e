"""One HTTP connection: uvicorn's, with a time limit on headers, a way to drop it and a good end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from twostroke.serve.http.body import BodyReader
from twostroke.serve.http.stream import ABORT

if TYPE_CHECKING:
    import asyncio

    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from twostroke.serve.options import Limits


class Connection(H11Protocol):
    """Drops clients that begin a request and do not finish its headers in time."""

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
        self._body: BodyReader | None = None  # of the newest request
        self._is_stopping = False
        inner = self.app

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["extensions"] = {ABORT: self.transport.abort}
            self._body = BodyReader(receive, send, limits, self._is_asked)
            if self._is_stopping:
                self._body.hurry()
            if not await self._body.answer(inner, scope):
                self.transport.close()

        self.app = app

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first headers."""
        super().connection_made(transport)
        self._time_headers()

    def data_received(self, data: bytes) -> None:
        """Take in bytes; those of a next request's headers are timed again."""
        super().data_received(data)
        self._time_headers()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP, and whatever request they came with.

        Nothing can be said any more where an answer is on its way.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # its application is not to answer, too
            self.cycle.message_event.set()
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            super().send_400_response(msg)
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Let an answer end, but wait for no body, and for nothing that comes behind an answer."""
        self._is_stopping = True
        super().shutdown()
        if self._body is not None:
            self._body.hurry()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._stop_timer()
        super().connection_lost(exc)

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
