"""Events of APIs: however their bytes are split, the same events pass and the same is known."""

from __future__ import annotations

import random

import pytest

from support.vendors import chat_events, message_events
from twostroke.fleet.router.api_events import ApiEvents, error_message

CHAT = b"".join(
    [
        b": OPENROUTER PROCESSING\n\n",
        *chat_events(
            {"choices": [{"delta": {"content": 'a "finish_reason":"b'}, "finish_reason": None}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {}},
        ),
        b"data: [DONE]\n\n",
    ]
)
MESSAGE = b"".join(message_events())


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_any_split_of_a_stream_passes_the_same_events(protocol: str, line_end: bytes) -> None:
    stream = (CHAT if protocol == "openai" else MESSAGE).replace(b"\n", line_end)
    randomness = random.Random(1)
    for size in [1, 2, *(randomness.randint(1, 90) for _ in range(60))]:
        events = ApiEvents("openai" if protocol == "openai" else "anthropic")
        parts = [events.take(stream[i : i + size]) for i in range(0, len(stream), size)]
        assert all(part == b"" or part.endswith(line_end * 2) for part in parts)
        assert b"".join(parts) == stream
        assert events.take(b"") == b""
        assert (events.has_content, events.is_complete, events.fault) == (True, True, None)


def test_a_text_that_looks_like_the_end_is_not_the_end() -> None:
    events = ApiEvents("openai")
    events.take(CHAT.partition(b'"stop"')[0].rpartition(b"data: ")[0])
    assert (events.has_content, events.is_complete) == (True, False)


def test_comments_and_preparations_are_no_content() -> None:
    events = ApiEvents("openai")
    assert events.take(b": waiting\n\n") == b": waiting\n\n"
    assert not events.has_content
    message = ApiEvents("anthropic")
    message.take(message_events()[0] + b'event: ping\ndata: {"type": "ping"}\n\n')
    assert not message.has_content


def test_a_last_event_without_an_empty_line_counts() -> None:
    events = ApiEvents("openai")
    assert events.take(b"data: [DONE]") == b""
    assert events.take(b"") == b"data: [DONE]\n\n"
    assert events.is_complete


@pytest.mark.parametrize("data", [b"<html>\n\n", b"data: x\n\n", b"data: []\n\n", b"\xff: a\n\n"])
def test_events_before_a_fault_pass(data: bytes) -> None:
    [event] = chat_events({"choices": []})
    events = ApiEvents("openai")
    assert events.take(event + data + event) == event
    assert events.fault is not None
    assert events.fault.kind == "nonsense"


def test_a_stream_is_complete_once_all_its_choices_have_ended() -> None:
    def event(index: int, reason: str | None) -> bytes:
        [data] = chat_events({"choices": [{"index": index, "finish_reason": reason}]})
        return data

    events = ApiEvents("openai")
    states = []
    for index, reason in ((0, None), (0, "stop"), (1, None), (0, None), (1, "length")):
        events.take(event(index, reason))
        states.append(events.is_complete)
    assert states == [False, True, False, False, True]
    for choices in (None, [], [3], "x"):
        odd = ApiEvents("openai")
        odd.take(b"".join(chat_events({"choices": choices})))
        assert odd.fault is None
        assert not odd.is_complete
        odd.take(b"data: [DONE]\n\n")
        assert odd.is_complete


def test_an_event_without_an_end_is_not_kept_for_ever() -> None:
    events = ApiEvents("openai")
    for _ in range(9):
        assert events.take(b"x" * (1 << 20)) == b""
    assert events.fault is not None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "No sk-1 here,\\nnever"}}', "No *** here,\\nnever"),
        (b'{"error": "plain"}', "plain"),
        (b'{"error": {"message": 3}}', "it gives no reason."),
        (b"<html>", "it gives no reason."),
        (b"[]", "it gives no reason."),
    ],
)
def test_reasons_are_one_line_without_the_key(body: bytes, message: str) -> None:
    assert error_message(body, "sk-1") == message
