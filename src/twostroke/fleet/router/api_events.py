"""Checks the answers of APIs: the events of a stream one by one, or a whole answer."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw

from twostroke.fleet.router.upstream_state import UpstreamError
from twostroke.fleet.routing.prompt import JSON_ERRORS
from twostroke.server.http.errors import one_line

if TYPE_CHECKING:
    from twostroke.fleet.router.overflow_file import Protocol

_EVENT_END: Final = re.compile(rb"\r?\n\r?\n")
_MAX_END_BYTES: Final = 4
_FIELD_NAMES: Final = (b"data", b"event", b"id", b"retry")
_DONE: Final = b"[DONE]"
_MAX_EVENT_BYTES: Final = 8 << 20
_MAX_MESSAGE_LENGTH: Final = 300
_PREPARING_TYPES: Final = ("message_start", "ping")  # events before any content
_NOT_EVENTS: Final = "Its stream has lines that are no events."


class _ApiEvent(msgspec.Struct):
    """The fields that show whether an event, or a whole answer, is an error or an end."""

    type: Any = None
    error: Raw = Raw()
    choices: Raw = Raw()
    content: Raw = Raw()


class _ApiChoice(msgspec.Struct):
    """A choice of an event of OpenAI's protocol."""

    index: int = 0
    finish_reason: Any = None


_choices_decoder: Final = msgspec.json.Decoder(list[_ApiChoice])
_event_decoder: Final = msgspec.json.Decoder(_ApiEvent)


class ApiEvents:
    """Checks the events of a stream as they come.

    Attributes:
        has_content: whether an event has come that has a part of the answer.
        fault: the error for the first event that reports an error or is malformed; None without
            one.
    """

    def __init__(self, protocol: Protocol) -> None:
        """Check a stream of a protocol."""
        self._is_anthropic = protocol == "anthropic"
        self._held_data = b""
        self._has_end_mark = False
        self._is_ended: dict[int, bool] = {}  # by the index of each choice
        self.has_content = False
        self.fault: UpstreamError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the answer has ended: by an end mark, or by the ends of all choices so far."""
        return self._has_end_mark or (bool(self._is_ended) and all(self._is_ended.values()))

    def take(self, data: bytes) -> bytes:
        """Add received bytes, and return the complete events, up to the first faulty event.

        An incomplete event waits for the rest; empty bytes end the stream.
        """
        if not data and self._held_data.strip():
            data = b"\n\n"  # the last event had no empty line after it
        start = max(0, len(self._held_data) - _MAX_END_BYTES)  # earlier bytes were searched
        data = self._held_data + data
        end = 0
        try:
            for match in _EVENT_END.finditer(data, start):
                self._check(data[end : match.start()])
                end = match.end()
        except UpstreamError as error:
            self.fault = error
            return data[:end]
        self._held_data = data[end:]
        if len(self._held_data) > _MAX_EVENT_BYTES:
            self.fault = UpstreamError("Its stream has an event that is too long.", "nonsense")
        return data[:end]

    def _check(self, text: bytes) -> None:
        """Read an event; raise UpstreamError if it reports an error or is malformed."""
        parts: list[bytes] = []
        for line in text.splitlines():
            name, colon, value = line.partition(b":")
            if line and (not colon or (name and name not in _FIELD_NAMES)):
                raise UpstreamError(_NOT_EVENTS, "nonsense")
            if name == b"data":
                parts.append(value.strip())
        payload = b"\n".join(parts)
        if not payload:  # a comment
            return
        if payload == _DONE:
            self._has_end_mark = True
            return
        try:
            event = _event_decoder.decode(payload)
        except JSON_ERRORS:
            raise UpstreamError(_NOT_EVENTS, "nonsense") from None
        if event.type == "error" or bytes(event.error) not in {b"", b"null"}:
            raise UpstreamError("Its stream has an error.", "stream")
        if self._is_anthropic:
            self._has_end_mark |= event.type == "message_stop"
            self.has_content |= event.type not in _PREPARING_TYPES
        else:
            self._read_choices(bytes(event.choices))
            self.has_content = True

    def _read_choices(self, choices: bytes) -> None:
        """Note which choices an event of OpenAI's protocol has, and which of them it ends."""
        with suppress(*JSON_ERRORS):  # other forms are for the client to judge
            for choice in _choices_decoder.decode(choices):
                has_ended = isinstance(choice.finish_reason, str)
                self._is_ended[choice.index] = has_ended or self._is_ended.get(choice.index, False)


def check_whole_answer(body: bytes, protocol: Protocol) -> None:
    """Check that a body is a whole answer of a protocol.

    Raises:
        UpstreamError: it is an error, or no answer.
    """
    try:
        answer = _event_decoder.decode(body)
    except JSON_ERRORS:
        raise UpstreamError("Its answer is not JSON.", "nonsense") from None
    if answer.type == "error" or bytes(answer.error) not in {b"", b"null"}:
        raise UpstreamError("Its answer is an error with status 200.", "nonsense")
    items = answer.content if protocol == "anthropic" else answer.choices
    if bytes(items)[:1] != b"[":
        raise UpstreamError("Its answer has no choices or content.", "nonsense")


def error_message(body: bytes, key: str) -> str:
    """Return the message in an error response, as one short line without the key."""
    try:
        value = msgspec.json.decode(body)
    except JSON_ERRORS:
        value = None
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    if not isinstance(message, str) or not message:
        return "it gives no reason."
    return one_line(message.replace(key, "***")[:_MAX_MESSAGE_LENGTH])
