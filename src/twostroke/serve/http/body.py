"""A request's body on its way: what a stopping server does with it, and what with an unread rest.

Closing a connection with bytes in it that nobody has read resets it, and a client that is still
sending then hears of the reset and never of its answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import EngineStoppedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from twostroke.serve.options import Limits

_MOMENT_S: Final = 0.5  # for bytes that were sent already
_CLOSE: Final = (b"connection", b"close")
_END: Final[Message] = {"type": "http.response.body", "body": b""}


class BodyReader:
    """Reads a request's body for the application, and behind the answer what is left of it.

    The rest is dropped, within limits of size and time; of a client that was told not to send a
    body it is waited for a moment, since some send it all the same.
    """

    def __init__(
        self,
        receive: Receive,
        send: Send,
        limits: Limits,
        is_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Stand between the application and the connection.

        `is_asked` tells whether the client waits to be told to send its body, or not to.
        """
        self._receive = receive
        self._send = send
        self._limits = limits
        self._is_asked = is_asked
        self._is_read = False
        self._is_answered = False  # in part, at least
        self._is_refused = False  # the client asked whether to send its body, and was told no
        self._owes_end = False
        self._stops_at: float | None = None  # in the loop's time; with the server
        self._limit: asyncio.Timeout | None = None  # while a body or a rest is waited for

    async def answer(self, app: ASGIApp, scope: Scope) -> bool:
        """Let `app` answer; return whether the connection can be used again.

        The answer goes out whole at once; only its end, which would close the connection, waits
        until the request's end has come, or more of it than is dropped, or too slowly: a rest has
        the time that the body had, and a moment if that is over.
        """
        ends_at = asyncio.get_running_loop().time() + self._limits.body_timeout_s
        await app(scope, self._take, self._give)
        if self._owes_end:
            await self._drop(ends_at)
            await self._send(_END)
        return self._is_read or not self._owes_end

    def hurry(self) -> None:
        """From now on wait for a body no longer than a moment, and for a rest not at all."""
        self._stops_at = asyncio.get_running_loop().time() + _MOMENT_S
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(0.0 if self._is_answered else self._stops_at)

    async def _take(self) -> Message:
        """Return what comes next.

        Raises:
            EngineStoppedError: the server stops, and the body has not come whole.
        """
        if self._is_read or self._is_answered:
            return await self._next()
        try:
            async with asyncio.timeout_at(self._stops_at) as self._limit:
                return await self._next()
        except TimeoutError:
            message = "The server stops, and the request's body has not come whole."
            raise EngineStoppedError(message) from None
        finally:
            self._limit = None

    async def _next(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):  # the end, or nobody is there any more
            self._is_read = True
        return message

    async def _give(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self._is_asked():  # this is its no: no body comes
                self._is_refused = True
                message = {**message, "headers": _closing(message.get("headers", []))}
            self._is_answered = True
        elif not message.get("more_body", False) and not self._is_read:
            self._owes_end = True
            message = {**message, "more_body": True}
        await self._send(message)

    async def _drop(self, ends_at: float) -> None:
        now = asyncio.get_running_loop().time()
        num_left = self._limits.max_dropped_bytes
        until = max(ends_at, now + _MOMENT_S) if self._stops_at is None else 0.0
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
    """Return the headers of an answer behind which the connection is closed."""
    return [*(one for one in headers if one[0] != _CLOSE[0]), _CLOSE]
