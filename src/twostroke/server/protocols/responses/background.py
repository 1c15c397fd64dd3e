"""Background responses of the Responses API, which are computed even if the client disconnects."""

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
    from twostroke.server.generation.running import RunningAnswers
    from twostroke.server.http.request_context import ServedRequest
    from twostroke.server.options import ServeOptions
    from twostroke.server.protocols.responses.reply import ResponsesEncoder

    Start = Callable[[], Awaitable[Started]]

MAX_LOG_BYTES: Final = 64 * 1024 * 1024  # for the events of all responses together
_QUEUED_RESPONSE: Final = re.compile(
    rb'^\{"id":"[^"]*","object":"response",[^{}]{0,60}"status":"queued"'
)
_response_decoder: Final = msgspec.json.Decoder(ResponseBody)
_STOPPED_MESSAGE: Final = "The server stopped before this response was complete."


class BackgroundRun:
    """One background response that is being computed, or has ended, with its events in memory.

    Attributes:
        id: the id of the response.
        encoder: writes the events; None after the end, since it is large.
        first_number: the number of the oldest event that is still in memory.
        num_bytes: the size of the events in memory.
        is_over: whether the response has ended.
    """

    def __init__(self, encoder: ResponsesEncoder) -> None:
        """Begin a background response without events; `encoder` writes its events later."""
        self.id = encoder.body.id
        self.encoder: ResponsesEncoder | None = encoder
        self.first_number = 0
        self.num_bytes = 0
        self.is_over = False
        self._is_cancelled = False
        self._events: list[bytes] = []
        self._news_event = asyncio.Event()  # set when events come, and then replaced
        self._end_event = asyncio.Event()
        self._answers: RunningAnswers | None = None

    async def compute(self, started: Started, scope: Scope, runs: BackgroundRuns) -> None:
        """Generate a background response to its end, and store it.

        Events are logged in `runs`, from which clients can stream them. An error becomes the last
        event.
        """
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
            self.encoder = self._answers = None  # frees the prompt and the conversation
            self._announce()
            self._end_event.set()

    async def cancel(self) -> None:
        """Cancel the background response, and return when it has ended."""
        if not self.is_over and self._answers is not None:
            self._is_cancelled = True
            self._answers.cancel()
        await self._end_event.wait()

    def add(self, events: list[bytes]) -> None:
        """Append events to the response, and wake the streams that send them to clients."""
        self._events += events
        self.num_bytes += sum(map(len, events))
        self._announce()

    def drop(self, count: int) -> None:
        """Remove the oldest `count` events of the response from memory."""
        self.num_bytes -= sum(map(len, self._events[:count]))
        del self._events[:count]
        self.first_number += count

    @property
    def num_events(self) -> int:
        """The number of the response's events that are still in memory."""
        return len(self._events)

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """Yield the response's events after the number `after`, and future events as they come.

        Events are numbered from 0, so -1 yields all events. Several events may come joined.

        Raises:
            RequestError: the next event is not in memory any more.
        """
        number = after + 1
        while True:
            if number < self.first_number:
                reason = (
                    "is before the events that are still in memory, which begin with the number "
                    f"{self.first_number}: retrieve the response without stream."
                )
                raise RequestError(reason, field="starting_after")
            if events := self._events[number - self.first_number :]:
                number += len(events)
                yield b"".join(events)
            elif self.is_over:
                return
            else:
                await self._news_event.wait()

    def _announce(self) -> None:
        self._news_event.set()
        self._news_event = asyncio.Event()


class BackgroundRuns:
    """The server's background responses whose events are in memory, ready to be streamed.

    These are all responses that are being computed, and the last ones that ended.
    """

    def __init__(self, max_bytes: int = MAX_LOG_BYTES) -> None:
        """Begin without responses; keep events of at most `max_bytes` bytes in memory."""
        self._max_bytes = max_bytes
        self._runs: dict[str, BackgroundRun] = {}  # by the response's id, the oldest first
        self._num_bytes = 0

    def begin(self, run: BackgroundRun) -> None:
        """Store a background response with the status `queued`, and log its first events."""
        self._runs[run.id] = run
        assert run.encoder is not None
        self.log(run, run.encoder.queue())

    def find(self, id_: str) -> BackgroundRun | None:
        """Return the background response with this id; None if its events are not in memory."""
        return self._runs.get(id_)

    def log(self, run: BackgroundRun, events: list[bytes]) -> None:
        """Append events to a background response, and free memory if the limit is exceeded.

        The oldest response that has ended loses all its events. If no response has ended, the
        response with the largest events loses the first half of them.
        """
        before = run.num_bytes
        run.add(events)
        self._num_bytes += run.num_bytes - before
        while self._num_bytes > self._max_bytes:
            ended_run = next((other for other in self._runs.values() if other.is_over), None)
            if ended_run is not None:
                self.forget(ended_run.id)
                continue
            largest = max(self._runs.values(), key=lambda other: other.num_bytes)
            before = largest.num_bytes
            largest.drop(max(1, largest.num_events // 2))
            self._num_bytes += largest.num_bytes - before

    def forget(self, id_: str) -> None:
        """Remove a background response that has ended, with its events, from memory."""
        run = self._runs.pop(id_, None)
        if run is not None:
            self._num_bytes -= run.num_bytes


class BackgroundResponse:
    """The ASGI response to a request with `background`.

    It sends the queued response, or a stream of its events, and computes the response to its end,
    even if the client disconnects. Until the end the request counts as running, for the limits and
    the usage of its key.
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
        """Prepare the response; nothing is computed before `__call__`.

        Args:
            start: queues the request in the engine.
            encoder: writes the response's events.
            options: the options of the server, for streams.
            runs: the background responses of the server.
            is_streamed: whether to send events instead of the queued response.
        """
        self._start = start
        self._encoder = encoder
        self._options = options
        self._runs = runs
        self._is_streamed = is_streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Queue the request in the engine, respond, and compute the response to its end.

        Raises the errors of `start`, such as a full queue.
        """
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
    """The HTTP response that streams the events of a background response to a client.

    If the client disconnects, the background response is still computed.
    """

    def __init__(self, run: BackgroundRun, after: int, options: ServeOptions) -> None:
        """Prepare to stream the events of `run` whose numbers are larger than `after`."""
        super().__init__(_never_started, None, options)
        self._run = run
        self._after = after

    async def _events(self, _scope: Scope) -> AsyncGenerator[bytes]:
        """Yield the background response's events as they come.

        If the client reads too slowly, so that events are dropped, the last event is an error.
        """
        try:
            async for data in self._run.follow(self._after):
                yield data
        except RequestError as error:  # the client reads too slowly
            if not self._has_begun:
                raise
            event = StreamError(error.code, to_message(error), error.field)
            event.sequence_number = (
                self._run.first_number - 1
            )  # the client can continue after this number
            yield named_sse(event)


def replay_stored(response: StoredResponse, after: int | None) -> bytes:
    """Return a short event stream for a stored response whose own events are not in memory.

    The last event has the complete response. `after` is the number of the last event that the
    client has; None if the client has no event.
    """
    body: dict[str, Any] = msgspec.json.decode(response.answer)
    names = {"completed": "completed", "failed": "failed"}
    last_type = f"response.{names.get(body['status'], 'incomplete')}"
    event_types = (
        ["response.created", "response.in_progress", last_type] if after is None else [last_type]
    )
    started_body = {
        **body,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "completed_at": None,
    }
    parts = []
    for number, event_type in enumerate(event_types, 0 if after is None else after + 1):
        snapshot = body if event_type == last_type else started_body
        event = {"type": event_type, "sequence_number": number, "response": snapshot}
        parts.append(b"event: %b\ndata: %b\n\n" % (event_type.encode(), encode_json(event)))
    return b"".join(parts)


def check_background(job: Job, request: ServedRequest) -> None:
    """Check that a request in a batch does not ask for a background response.

    Raises:
        RequestError: `background` is set in a batch request.
    """
    if job.in_background and request.service_tier is not None:
        reason = "cannot be set in a batch, which always runs in the background: leave it out."
        raise RequestError(reason, field="background")


def ended_by_restart(answer: bytes) -> bytes | None:
    """Mark a stored response as failed if it had not ended when the server stopped.

    The server calls this for each stored response when it starts. Returns the new JSON of the
    response; None for a response that had ended.
    """
    if not _QUEUED_RESPONSE.match(answer):
        return None
    body = _response_decoder.decode(answer)
    body.status = "failed"
    body.error = ResponseError("server_error", _STOPPED_MESSAGE)
    return encode_json(body)


async def _never_started() -> Started:
    raise AssertionError
