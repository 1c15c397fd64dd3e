"""Checks the answers of upstream APIs: each event of a stream, or a complete JSON answer."""

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
    """The fields that show whether an event, or a complete answer, is an error or the end."""

    type: Any = None
    error: Raw = Raw()
    choices: Raw = Raw()
    content: Raw = Raw()


class _ApiChoice(msgspec.Struct):
    """An entry of `choices` in an event of OpenAI's protocol."""

    index: int = 0
    finish_reason: Any = None


_choices_decoder: Final = msgspec.json.Decoder(list[_ApiChoice])
_event_decoder: Final = msgspec.json.Decoder(_ApiEvent)


class ApiEvents:
    """Checks the events of an API's stream as they arrive.

    Attributes:
        has_content: whether an event with a part of the answer has arrived.
        fault: the error for the first event that reports an error or is malformed; None if all
            events were valid.
    """

    def __init__(self, protocol: Protocol) -> None:
        """Prepare to check a stream in OpenAI's or Anthropic's protocol."""
        self._is_anthropic = protocol == "anthropic"
        self._held_data = b""
        self._has_end_mark = False
        self._is_ended: dict[int, bool] = {}  # by the index of each choice
        self.has_content = False
        self.fault: UpstreamError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the answer has ended: by an end event, or because all choices have ended."""
        return self._has_end_mark or (bool(self._is_ended) and all(self._is_ended.values()))

    def take(self, data: bytes) -> bytes:
        """Add received bytes; return the complete events, up to the first event with a fault.

        An incomplete event is held back until its rest arrives. Empty `data` ends the stream.
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
        """Check one event; raise UpstreamError if it reports an error or is malformed."""
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
        """Note the choices in an event of OpenAI's protocol, and whether the event ends them."""
        with suppress(*JSON_ERRORS):  # other forms are for the client to judge
            for choice in _choices_decoder.decode(choices):
                has_ended = isinstance(choice.finish_reason, str)
                self._is_ended[choice.index] = has_ended or self._is_ended.get(choice.index, False)


def check_whole_answer(body: bytes, protocol: Protocol) -> None:
    """Check that a body is a complete JSON answer in OpenAI's or Anthropic's protocol.

    Raises:
        UpstreamError: the body is an error, or is not an answer.
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
    """Return the message in an error response, as one short line from which `key` is removed."""
    try:
        value = msgspec.json.decode(body)
    except JSON_ERRORS:
        value = None
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    if not isinstance(message, str) or not message:
        return "it gives no reason."
    return one_line(message.replace(key, "***")[:_MAX_MESSAGE_LENGTH])
