"""What still comes of a request that is answered already, such as a body that is too large.

Closing a connection with bytes in it that nobody has read resets it, and a client that is still
sending then hears of the reset and never of its answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from twostroke.serve.options import Limits

_END: Final[Message] = {"type": "http.response.body", "body": b""}


class Leftover:
    """Answers a request, then drops what nobody has read of it, within limits."""

    def __init__(self, receive: Receive, send: Send, limits: Limits) -> None:
        """Stand between the application and the connection."""
        self._receive = receive
        self._send = send
        self._limits = limits
        self._is_read = False
        self._owes_end = False
        self._patience_s = limits.body_timeout_s
        self._limit: asyncio.Timeout | None = None  # while a rest is waited for

    async def answer(self, app: ASGIApp, scope: Scope) -> bool:
        """Let `app` answer; return whether the connection can be used again.

        The answer goes out whole at once; only its end, which would close the connection, waits
        until the request's end has come, or more of it than is dropped, or too slowly.
        """
        await app(scope, self._take, self._give)
        if self._owes_end:
            await self._drop()
            await self._send(_END)
        return self._is_read or not self._owes_end

    def hurry(self) -> None:
        """From now on drop what is here already, and wait for nothing."""
        self._patience_s = 0.0
        if self._limit is not None:
            self._limit.reschedule(0.0)

    async def _take(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):  # the end, or nobody is there any more
            self._is_read = True
        return message

    async def _give(self, message: Message) -> None:
        is_end = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_end and not self._is_read:
            self._owes_end = True
            message = {**message, "more_body": True}
        await self._send(message)

    async def _drop(self) -> None:
        num_left = self._limits.max_dropped_bytes
        try:
            async with asyncio.timeout(self._patience_s) as self._limit:
                while not self._is_read and num_left > 0:
                    num_left -= len((await self._take()).get("body", b""))
        except TimeoutError:
            pass
        finally:
            self._limit = None
