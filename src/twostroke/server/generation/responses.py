"""Sends the response to a job: streamed as server-sent events or JSON lines, or whole."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, TypeAlias

from twostroke.core.errors import EngineStoppedError
from twostroke.server.generation.events import StreamFailed
from twostroke.server.generation.protocol import SSE
from twostroke.server.http.errors import report
from twostroke.server.http.request_context import served_of
from twostroke.server.http.responses import (
    abort_connection,
    to_json,
    until_disconnect,
    while_connected,
)
from twostroke.server.http.router_messages import RESUME_HEADER

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from twostroke.engine.output import Completion
    from twostroke.server.generation.events import Event, EventReader
    from twostroke.server.generation.protocol import Encoder, Framing
    from twostroke.server.generation.redraw import AnswerGuard
    from twostroke.server.generation.running import RunningAnswers
    from twostroke.server.generation.stream_records import StreamRecorder
    from twostroke.server.http.fair_queue import Readers
    from twostroke.server.options import ServeOptions

Started: TypeAlias = "tuple[RunningAnswers, EventReader, AnswerGuard | None]"
_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # tells a proxy not to buffer events
]


async def read_events(started: Started) -> AsyncGenerator[list[Event]]:
    """Yield the events of a job's answers as they arrive, in groups.

    If answers are checked against schemas, events that the check may change are held back.

    Raises:
        SchemaMissError: an answer breaks its strict schema.
        EngineStoppedError: the engine or the server stopped.
    """
    answers, reader, guard = started
    if guard is None:
        async for output in answers:
            yield reader.read(output)
        yield [reader.finish(answers.usage)]
        return
    async with aclosing(guard.stream(answers, reader)) as groups:
        async for events in groups:
            yield events


class EventStream:
    """The HTTP response that streams a job's answers to the client.

    The headers are sent with the first event, so an early failure has an ordinary error status. If
    the first event takes long, they are sent with keep-alive bytes. A later failure becomes an
    event. A stream that ends early (the client left or does not read, or the server failed) cancels
    its job.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[Started]],
        encoder: Encoder | None,
        options: ServeOptions,
        framing: Framing = SSE,
        recorder: StreamRecorder | None = None,
    ) -> None:
        """Prepare the stream; the job is not submitted before `__call__`.

        Args:
            start: submits the job; returns the answers, their event reader, and the guard that
                checks them against schemas, if any.
            encoder: writes events in the protocol's form; None for a subclass that yields its
                own bytes.
            options: the server's options.
            framing: the protocol's framing of streams.
            recorder: adds records for a router; None if the client has not asked for them.
        """
        self._start = start
        self._answers: RunningAnswers | None = None
        self._encoder = encoder
        self._options = options
        self._framing = framing
        self._recorder = recorder
        self._has_begun = False
        self._sending_since_s: float | None = None
        self._last_sent_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Submit the job, and send its events until its end or until the client leaves.

        Raises errors that happen before the first byte, which become ordinary error responses.
        """
        pump = asyncio.create_task(self._pump(scope, send))
        disconnect = asyncio.create_task(until_disconnect(receive))
        keep_alive: asyncio.Task[None] | None = None
        limits = self._options.limits
        check_interval_s = min(self._options.keep_alive_s, limits.reader_timeout_s) / 2
        try:
            while not pump.done() and not disconnect.done():
                await asyncio.wait(
                    (pump, disconnect),
                    timeout=check_interval_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if self._is_stuck():
                    await abort_connection(scope)
                    break
                if self._is_silent():  # a task, since sending may block
                    keep_alive = asyncio.create_task(self._send(send, self._framing.keep_alive))
                    await asyncio.sleep(0)
            if pump.done():
                await pump
        finally:
            if self._answers is not None:
                self._answers.cancel()
            tasks = [task for task in (pump, disconnect, keep_alive) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, scope: Scope, send: Send) -> None:
        """Send the bytes of all events to the client, then end the response body."""
        async with aclosing(self._events(scope)) as events:
            async for data in events:
                await self._send(send, data)
        await self._begin(send)  # there may be no events
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, scope: Scope) -> AsyncGenerator[bytes]:
        """Yield the bytes of the stream's events; the last event may be an error."""
        assert self._encoder is not None
        write, recorder = self._encoder.write, self._recorder
        try:
            started = await self._start()
            self._answers = started[0]
            async with aclosing(read_events(started)) as groups:
                async for events in groups:
                    if recorder is not None:
                        data = recorder.write(events, write)
                    else:
                        data = b"".join([write(event) for event in events])
                    if data:
                        yield data
        except Exception as error:  # a response that has begun can only end with an error event
            explained = error if recorder is None else recorder.explain(error)
            if not self._has_begun:
                if explained is error:
                    raise
                raise explained from error
            reported = report(explained, scope)
            if recorder is not None and isinstance(reported, EngineStoppedError):
                yield recorder.loss(reported)  # the response has not failed: it continues elsewhere
            else:
                yield write(StreamFailed(reported, served_of(scope).request_id))

    async def _send(self, send: Send, data: bytes) -> None:
        self._sending_since_s = time.monotonic()
        await self._begin(send)
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending_since_s = None
        self._last_sent_s = time.monotonic()

    async def _begin(self, send: Send) -> None:
        """Send the response's status and headers, unless they have been sent."""
        if not self._has_begun:
            self._has_begun = True
            content_type = (b"content-type", self._framing.content_type.encode())
            headers = [content_type, *_STREAM_HEADERS]
            if self._recorder is not None:
                headers.append((RESUME_HEADER, b"1"))
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    def _is_stuck(self) -> bool:
        """Return whether the client reads the stream so slowly that it must be aborted."""
        if self._sending_since_s is None:
            return False
        limits = self._options.limits
        if time.monotonic() - self._sending_since_s > limits.reader_timeout_s:
            return True
        return self._answers is not None and self._answers.num_unread > limits.max_unread

    def _is_silent(self) -> bool:
        """Return whether nothing has been sent to the client for the keep-alive interval."""
        elapsed_s = time.monotonic() - self._last_sent_s
        return self._sending_since_s is None and elapsed_s >= self._options.keep_alive_s


# More log-probabilities are encoded in a thread, since each takes microseconds and blocks streams.
_MAX_INLINE_LOGPROBS: Final = 4096


async def respond_whole(
    request: Request,
    started: Started,
    encoder: Encoder,
    readers: Readers,
) -> Response:
    """Wait until all answers of a job have ended, and return the response without a stream.

    If answers must fit JSON schemas, they are checked first.

    Raises:
        SchemaMissError: an answer breaks its strict schema.
        ClientGoneError: the client disconnected before the answers ended.
        EngineStoppedError: the engine or the server stopped.
    """
    answers, reader, guard = started

    def encode(completions: list[Completion]) -> Response:
        events = reader.read_whole(completions, answers.usage)
        if guard is None:
            return to_json(encoder.whole_response(events))
        return to_json(encoder.whole_response(guard.marked(events)), headers=guard.headers)

    try:
        work = answers.completions() if guard is None else guard.checked_completions(answers)
        completions = await while_connected(request.receive, work)
        params = answers.params
        num_logprobs_per_token = 1 + max(params.logprobs or 0, params.prompt_logprobs or 0)
        num_scored_tokens = sum(
            len(answer.logprobs) + len(answer.prompt_logprobs) for answer in completions
        )
        if num_logprobs_per_token * num_scored_tokens <= _MAX_INLINE_LOGPROBS:
            return encode(completions)
        return await readers.run_for(request, encode, completions)
    finally:
        answers.cancel()
