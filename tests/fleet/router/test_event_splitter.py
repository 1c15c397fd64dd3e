"""The end of a stream is held back until its usage is safe."""

from __future__ import annotations

import pytest

from twostroke.fleet.router.event_splitter import EventSplitter

_ENDS = (b"\n\n",)
_TEXT = b'data: {"text": "\\"done\\": true, data: [DONE]"}\n\n'


def splitter(held_end: bytes = b"") -> EventSplitter:
    return EventSplitter(_ENDS, None, holds_end=True, held_end=held_end)


@pytest.mark.parametrize(
    "end",
    [
        b"data: [DONE]\n\n",
        b"event: message_stop\ndata: {}\n\n",
        b'event: response.completed\ndata: {"a":1}\n\n',
        b'data: {"content":"","stop":true}\n\n',
    ],
)
def test_the_last_event_comes_with_the_end_of_the_stream(end: bytes) -> None:
    events = splitter()
    assert events.take(_TEXT) == _TEXT
    assert events.take(_TEXT + end) == b""
    assert events.take(b"", is_last=True) == _TEXT + end


def test_an_end_that_another_event_follows_is_sent_with_this_event() -> None:
    events = splitter()
    end = b'data: {"index":0,"stop":true}\n\n'
    assert events.take(end) == b""
    assert events.take(_TEXT) == end + _TEXT
    assert events.take(b"", is_last=True) == b""


def test_an_end_that_a_lost_replica_has_sent_is_not_lost() -> None:
    first = splitter()
    assert first.take(b"data: [DONE]\n\n") == b""
    assert splitter(first.held_end).take(b"", is_last=True) == b"data: [DONE]\n\n"
