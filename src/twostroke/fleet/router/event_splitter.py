"""Splits a replica's stream after whole events, and finds the error of an engine that has died."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from twostroke.core.errors import EngineDiedError
from twostroke.fleet.routing.prompt import JSON_ERRORS

if TYPE_CHECKING:
    from twostroke.fleet.router.usage_meter import UsageMeter

ENGINE_DIED: Final = EngineDiedError.SENTENCE.encode()
_MAX_HELD_BYTES: Final = 1 << 20  # of an incomplete event


class EventSplitter:
    """Splits a replica's stream after whole events, before they are sent to the client.

    If the replica is lost in the middle of an event, the client gets only whole events, and the
    router can add an event with the error.

    Attributes:
        event_ends: the byte strings that end an event; None if the response is no stream.
        has_died: whether an event has reported the death of the engine.
    """

    def __init__(self, event_ends: tuple[bytes, ...] | None, meter: UsageMeter | None) -> None:
        """Split at `event_ends`; `meter` counts the tokens of the events."""
        self.event_ends = event_ends
        self.has_died = False
        self._meter = meter
        self._held_data = b""

    def take(self, data: bytes, *, is_last: bool = False) -> bytes:
        """Return the part of a stream that may be sent to the client now; hold back a broken event.

        `data` are the bytes that have come now; with `is_last` nothing is held back. Spaces, the
        heartbeats of a response that is no stream, are never held back.
        """
        ends = self.event_ends
        if self._held_data:
            data = self._held_data + data
            self._held_data = b""
        if ends and not is_last and not data.endswith(ends) and not data.isspace():
            stop = max((data.rfind(end) + len(end) for end in ends if end in data), default=0)
            if len(data) - stop < _MAX_HELD_BYTES:
                data, self._held_data = data[:stop], data[stop:]
        if ends and ENGINE_DIED in data:
            self.has_died |= any(map(_reports_death, data.splitlines()))
        return self._meter.take(data) if data and self._meter is not None else data


def _reports_death(line: bytes) -> bool:
    """Return whether a line of a stream is the error that the replica's engine has died.

    An answer whose text quotes this error does not count.
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
