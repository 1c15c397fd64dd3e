"""Responses in the background: computed whether or not a client waits, and streamed again.

A response is stored when it is queued, and again when it has ended. Its events stay in memory, so
that a client can come back for the events that it has missed.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import RequestError
from twostroke.core.json_io import encode_json
from twostroke.server.generation.events import StreamFailed
from twostroke.server.generation.responses import EventStream, read_events
from twostroke.server.http.errors import report, to_message
from twostroke.server.http.request_context import served_of
from twostroke.server.http.responses import named_sse, to_json
from twostroke.server.protocols.responses.body import ResponseBody, ResponseError
from twostroke.server.protocols.responses.stream_events import StreamError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from starlette.types import Receive, Scope, Send

    from twostroke.server.generation.job import Job
    from twostroke.server.generation.response_store import StoredResponse
    from twostroke.server.generation.responses import Started
    from twostroke.server.generation.running import Answers
    from twostroke.server.http.request_context import ServedRequest
    from twostroke.server.options import ServeOptions
    from twostroke.server.protocols.responses.reply import ResponsesEncoder

    Start = Callable[[], Awaitable[Started]]

MAX_LOG_BYTES: Final = 64 * 1024 * 1024  # of the events of all responses together
_IS_OPEN: Final = re.compile(rb'^\{"id":"[^"]*","object":"response",[^{}]{0,60}"status":"queued"')
_response_decoder: Final = msgspec.json.Decoder(ResponseBody)
_STOPPED: Final = "The server stopped before this response was complete."


class BackgroundRun:
    """One response in the background, with the events that it has sent so far.

    Attributes:
        first_number: the number of the oldest event that is still there.
        is_over: whether no event follows.
    """

    def __init__(self, encoder: ResponsesEncoder) -> None:
        """Begin without events; `encoder` writes them."""
        self.id = encoder.body.id
        self.encoder: ResponsesEncoder | None = encoder  # None after the end, since it is large
        self.first_number = 0
        self.num_bytes = 0
        self.is_over = False
        self._is_cancelled = False
        self._events: list[bytes] = []
        self._news = asyncio.Event()  # set when an event comes, and then replaced
        self._end_event = asyncio.Event()
        self._answers: Answers | None = None

    async def compute(self, started: Started, scope: Scope, runs: BackgroundRuns) -> None:
        """Take all events of the answer, and store the response at the end."""
        answers = self._answers = started[0]
        encoder = self.encoder
        assert encoder is not None
        try:
            async with aclosing(read_events(started)) as groups:
                async for events in groups:
                    for event in events:
                        runs.log(self, encoder.write_each(event))
        except Exception as error:  # noqa: BLE001 only the response can report it
            if self._is_cancelled:
                runs.log(self, encoder.cancel())
            else:
                failed = StreamFailed(report(error, scope), served_of(scope).request_id)
                runs.log(self, encoder.write_each(failed))
        finally:
            answers.cancel()
            self.is_over = True
            self.encoder = self._answers = None  # they hold the prompt and the conversation
            self._announce()
            self._end_event.set()

    async def cancel(self) -> None:
        """Stop the work, and return when the response has ended."""
        if not self.is_over and self._answers is not None:
            self._is_cancelled = True
            self._answers.cancel()
        await self._end_event.wait()

    def add(self, events: list[bytes]) -> None:
        """Add events, for those who follow."""
        self._events += events
        self.num_bytes += sum(map(len, events))
        self._announce()

    def drop(self, count: int) -> None:
        """Forget the oldest events."""
        self.num_bytes -= sum(map(len, self._events[:count]))
        del self._events[:count]
        self.first_number += count

    @property
    def num_events(self) -> int:
        """The number of events that are still there."""
        return len(self._events)

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """Yield the events after number `after`, also future events, as they come.

        Raises:
            RequestError: some of them are not there any more.
        """
        number = after + 1
        while True:
            if number < self.first_number:
                reason = (
                    f"is before the events that are still there, of which the first has the number "
                    f"{self.first_number}: retrieve the response without stream."
                )
                raise RequestError(reason, field="starting_after")
            if events := self._events[number - self.first_number :]:
                number += len(events)
                yield b"".join(events)
            elif self.is_over:
                return
            else:
                await self._news.wait()

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class BackgroundRuns:
    """The responses in the background of one server: running ones, and the last that ended."""

    def __init__(self, max_bytes: int = MAX_LOG_BYTES) -> None:
        """Keep events of at most `max_bytes` together."""
        self._max_bytes = max_bytes
        self._runs: dict[str, BackgroundRun] = {}  # by the response's id, the oldest first
        self._num_bytes = 0

    def begin(self, run: BackgroundRun) -> None:
        """Add a response that is queued."""
        self._runs[run.id] = run
        assert run.encoder is not None
        self.log(run, run.encoder.queue())

    def find(self, id_: str) -> BackgroundRun | None:
        """Return a response whose events are still there."""
        return self._runs.get(id_)

    def log(self, run: BackgroundRun, events: list[bytes]) -> None:
        """Add events to a response; over the limit, the oldest that ended loses all of its own.

        If all of them run, the response with the most loses its first half.
        """
        before = run.num_bytes
        run.add(events)
        self._num_bytes += run.num_bytes - before
        while self._num_bytes > self._max_bytes:
            oldest_run = next((each for each in self._runs.values() if each.is_over), None)
            if oldest_run is not None:
                self.forget(oldest_run.id)
                continue
            largest = max(self._runs.values(), key=lambda each: each.num_bytes)
            before = largest.num_bytes
            largest.drop(max(1, largest.num_events // 2))
            self._num_bytes += largest.num_bytes - before

    def forget(self, id_: str) -> None:
        """Forget the events of a response that has ended."""
        run = self._runs.pop(id_, None)
        if run is not None:
            self._num_bytes -= run.num_bytes


class BackgroundResponse:
    """Answers a request with its queued response, or with its events, and computes it to its end.

    The request counts as running until then, for the limits and the usage of its key.
    """

    def __init__(
        self,
        start: Start,
        encoder: ResponsesEncoder,
        options: ServeOptions,
        runs: BackgroundRuns,
        *,
        is_streamed: bool,
    ) -> None:
        """Compute the answer that `start` begins, for `encoder` to write."""
        self._start, self._encoder, self._options = start, encoder, options
        self._runs, self._is_streamed = runs, is_streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond. Raises what `start` raises."""
        started = await self._start()
        run = BackgroundRun(self._encoder)
        self._runs.begin(run)
        queued = to_json(self._encoder.body)
        computing = asyncio.create_task(run.compute(started, scope, self._runs))
        try:
            if self._is_streamed:
                await FollowingStream(run, -1, self._options)(scope, receive, send)
            else:
                await queued(scope, receive, send)
        finally:
            await computing


class FollowingStream(EventStream):
    """A response of the events of a run, from one of them on. Its end does not end the run."""

    def __init__(self, run: BackgroundRun, after: int, options: ServeOptions) -> None:
        """Send the events after number `after`."""
        super().__init__(_nothing, None, options)
        self._run, self._after = run, after

    async def _events(self, _scope: Scope) -> AsyncGenerator[bytes]:
        """Yield events as they come; the last one may be an error."""
        try:
            async for data in self._run.follow(self._after):
                yield data
        except RequestError as error:  # the client reads too slowly
            if not self._has_begun:
                raise
            event = StreamError(error.code, to_message(error), error.field)
            event.sequence_number = self._run.first_number - 1  # to go on after
            yield named_sse(event)


def replayed(response: StoredResponse, after: int | None) -> bytes:
    """Return the events of a stored response whose own events are not there any more.

    Its last event has the whole answer. `after` is the number of the last event that the client
    has; None if it has none.
    """
    body: dict[str, Any] = msgspec.json.decode(response.answer)
    names = {"completed": "completed", "failed": "failed"}
    last = f"response.{names.get(body['status'], 'incomplete')}"
    kinds = ["response.created", "response.in_progress", last] if after is None else [last]
    begun = {**body, "status": "in_progress", "output": [], "usage": None, "completed_at": None}
    parts = []
    for number, kind in enumerate(kinds, 0 if after is None else after + 1):
        snapshot = body if kind == last else begun
        event = {"type": kind, "sequence_number": number, "response": snapshot}
        parts.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json(event)))
    return b"".join(parts)


def check_background(job: Job, request: ServedRequest) -> None:
    """Raise a RequestError if a line of a batch asks for the background."""
    if job.in_background and request.service is not None:
        reason = "cannot be set in a batch, which runs in the background anyhow."
        raise RequestError(reason, field="background")


def ended_by_restart(answer: bytes) -> bytes | None:
    """Return a stored response that was not complete as a failed one; None for all others."""
    if not _IS_OPEN.match(answer):
        return None
    body = _response_decoder.decode(answer)
    body.status, body.error = "failed", ResponseError("server_error", _STOPPED)
    return encode_json(body)


async def _nothing() -> Started:
    raise AssertionError
