"""Splits a replica's stream into whole events, and notices the error of a dead engine."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

from twostroke.core.errors import EngineDiedError
from twostroke.fleet.routing.prompt import JSON_ERRORS

if TYPE_CHECKING:
    from twostroke.fleet.router.kept_stream import KeptStream
    from twostroke.fleet.router.usage_meter import UsageMeter

# An event with which streams of OpenAI, Anthropic, Ollama and llama-server end. Inside JSON, quotes
# and line breaks of an answer are escaped.
_END_MARK: Final = re.compile(
    rb"^(?:data: ?\[DONE\]|event: ?(?:message_stop|response\.(?:completed|incomplete|failed)))"
    rb'|"(?:done|stop)": ?true',
    re.MULTILINE,
)
ENGINE_DIED: Final = EngineDiedError.SENTENCE.encode()
_MAX_HELD_BYTES: Final = 1 << 20  # of an incomplete event


class EventSplitter:
    """Splits a replica's stream so that only whole events are sent to the client.

    If the replica is lost in the middle of an event, the router can then add an event with the
    error.

    Attributes:
        event_ends: the byte strings that end an event; None if the response is no stream.
        has_died: whether an event has reported the death of the engine.
        held_end: the end of the stream, which is held back.
    """

    def __init__(
        self,
        event_ends: tuple[bytes, ...] | None,
        meter: UsageMeter | None,
        kept_stream: KeptStream | None = None,
        *,
        holds_end: bool = False,
        held_end: bytes = b"",
    ) -> None:
        """Prepare to split a stream.

        Args:
            event_ends: the byte strings that end an event; None if the response is no stream.
            meter: counts the tokens.
            kept_stream: keeps the stream's records, with which another replica can continue it.
            holds_end: whether events that end the answer are held back until the stream has ended,
                since its usage must be stored before the client has the whole answer.
            held_end: bytes that were held back of the stream of another replica, which this stream
                continues.
        """
        self.event_ends = event_ends
        self.held_end = held_end
        self._holds_end = holds_end
        self._kept_stream = kept_stream
        self.has_died = False
        self._meter = meter
        self._held_data = b""

    def take(self, data: bytes, *, is_last: bool = False) -> bytes:
        """Return the part of a stream that may be sent now; hold back an incomplete event.

        `data` are the newly received bytes; with `is_last` nothing is held back. White space, which
        a server sends as heartbeats before a response that is not streamed, is never held back.
        """
        ends = self.event_ends
        if self._kept_stream is not None:
            data = self._kept_stream.take(data, is_last=is_last)
        if self._held_data:
            data = self._held_data + data
            self._held_data = b""
        if ends and not is_last and not data.endswith(ends) and not data.isspace():
            stop = max((data.rfind(end) + len(end) for end in ends if end in data), default=0)
            if len(data) - stop < _MAX_HELD_BYTES:
                data, self._held_data = data[:stop], data[stop:]
        if ends and ENGINE_DIED in data:
            self.has_died |= any(map(_reports_death, data.splitlines()))
        if data and self._meter is not None:
            data = self._meter.take(data)
        return self._hold_end(data, is_last=is_last) if self._holds_end and ends else data

    def _hold_end(self, data: bytes, *, is_last: bool) -> bytes:
        """Hold back bytes with the end of an answer, until more bytes come or the stream ends."""
        if is_last:
            data, self.held_end = self.held_end + data, b""
        elif data:
            data, held_data = self.held_end + data, data
            self.held_end = b""
            if _END_MARK.search(held_data):
                data, self.held_end = data[: -len(held_data)], held_data
        return data


def _reports_death(line: bytes) -> bool:
    """Return whether a line of a stream reports that the replica's engine has died.

    False for an answer whose text merely quotes this error.
    """
    if ENGINE_DIED not in line:
        return False
    try:
        event = msgspec.json.decode(line.removeprefix(b"data:"))
    except JSON_ERRORS:
        return False
    if not isinstance(event, dict):
        return False
    response = event.get("response")
    errors = [event.get("error"), response.get("error") if isinstance(response, dict) else None]
    errors += [event.get("message")] if event.get("type") == "error" else []
    return ENGINE_DIED in msgspec.json.encode(errors)
