"""Streams answers as server-sent events, and notices at once when the client leaves."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, TypeVar

from twostroke.core.errors import TwostrokeError
from twostroke.serve.events import Failed
from twostroke.serve.http.errors import ClientGoneError, note_failure, note_fault, request_id_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from starlette.types import Receive, Scope, Send

    from twostroke.serve.dialect import Encoder
    from twostroke.serve.events import EventReader
    from twostroke.serve.options import ServeOptions
    from twostroke.serve.running import Answers

T = TypeVar("T")

ABORT: Final = "twostroke.abort"  # the ASGI extension that drops a connection, unsent data and all

_COMMENT = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks a proxy to pass events on as they come
]
_logger = logging.getLogger("twostroke.serve")


class EventStream:
    """A response of server-sent events.

    The headers wait for the first event, so that an early failure has an ordinary status; if that
    takes long, they are sent with a comment. A later failure is an event. If the stream ends early
    (the client left or does not read, or the server failed), the job is cancelled.
    """

    def __init__(
        self, answers: Answers, reader: EventReader, encoder: Encoder, options: ServeOptions
    ) -> None:
        """Stream `answers`: `reader` makes events of them, and `encoder` writes these."""
        self._answers = answers
        self._reader = reader
        self._encoder = encoder
        self._options = options
        self._has_begun = False
        self._sending_since_s: float | None = None
        self._last_sent_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond. Raises errors that happen before the first byte, or while sending."""
        pump = asyncio.create_task(self._pump(scope, send))
        gone = asyncio.create_task(_until_gone(receive))
        tasks = [pump, gone]
        limits = self._options.limits
        tick_s = min(self._options.keep_alive_s, limits.reader_timeout_s) / 2
        try:
            while not pump.done() and not gone.done():
                await asyncio.wait(
                    (pump, gone), timeout=tick_s, return_when=asyncio.FIRST_COMPLETED
                )
                if self._is_stuck():
                    await _drop(scope)
                    break
                if self._is_silent():  # a task, since sending may block
                    tasks[2:] = [asyncio.create_task(self._send(send, _COMMENT))]
                    await asyncio.sleep(0)
            if pump.done():
                await pump
        finally:
            self._answers.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, scope: Scope, send: Send) -> None:
        """Send all events, then the end."""
        async with aclosing(self._events(scope)) as events:
            async for data in events:
                await self._send(send, data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, scope: Scope) -> AsyncGenerator[bytes]:
        """Yield the bytes of all events; the last one may be an error."""
        read, write = self._reader.read, self._encoder.write
        try:
            async for output in self._answers:
                if data := b"".join([write(event) for event in read(output)]):
                    yield data
            yield write(self._reader.finish(self._answers.usage))
        except TwostrokeError as error:
            if not self._has_begun:
                raise
            note_failure(error, scope)
            yield write(Failed(error, request_id_of(scope)))
        except Exception as error:
            if not self._has_begun:
                raise
            note_fault(error, scope)
            yield write(Failed(TwostrokeError("An unforeseen failure."), request_id_of(scope)))

    async def _send(self, send: Send, data: bytes) -> None:
        self._sending_since_s = time.monotonic()
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending_since_s = None
        self._last_sent_s = time.monotonic()

    def _is_stuck(self) -> bool:
        """Whether the client reads too slowly."""
        since, limits = self._sending_since_s, self._options.limits
        if since is None:
            return False
        waited_s = time.monotonic() - since
        return waited_s > limits.reader_timeout_s or self._answers.num_unread > limits.max_unread

    def _is_silent(self) -> bool:
        if self._sending_since_s is not None:
            return False
        return time.monotonic() - self._last_sent_s >= self._options.keep_alive_s


async def while_connected(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Return what `work` returns, unless the client leaves first.

    Raises:
        ClientGoneError: it left; `work` was cancelled.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        raise ClientGoneError("The client left before its answer was ready.")
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _drop(scope: Scope) -> None:
    """Cut the connection, and drop what was not read."""
    abort = scope.get("extensions", {}).get(ABORT)
    if abort is not None:
        abort()
        await asyncio.sleep(0)  # the server notices in the loop's next round
