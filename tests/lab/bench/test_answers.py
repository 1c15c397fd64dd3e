"""Streams of several servers, read in parts of any size."""

from __future__ import annotations

import json

import pytest

from twostroke.fleet.router.response import Head
from twostroke.lab.bench.answers import EMPTY, INCOMPLETE, NO_STREAM, ReceivedAnswer
from twostroke.lab.bench.request_form import PlannedRequest
from twostroke.lab.measure.requests import COMPLETED, FAILED, REFUSED

STREAM = Head(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
PLANNED = PlannedRequest(number=3, body=b"{}", num_prompt=40, num_output=4)


def delta(**fields):
    return {"choices": [{"index": 0, "delta": fields}]}


def end(reason="length"):
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


def usage(count, cached=None, prompt=41):
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": count, **details}


def read(*events, head=STREAM, is_done=True, size=None, line_end="\n"):
    """Return the measured answer of a stream whose n-th event came at n seconds."""
    stream = ReceivedAnswer(keeps_text=True)
    stream.begin(head)
    for at_s, event in enumerate([*events, *(["[DONE]"] if is_done else [])], 1):
        text = event if isinstance(event, str) else json.dumps(event)
        data = f"data: {text}{line_end}{line_end}".encode()
        for first in range(0, len(data), size or len(data)):
            stream.take(data[first : first + (size or len(data))], float(at_s))
    return stream.measured(PLANNED, scheduled_s=0.25, sent_s=0.5)


@pytest.mark.parametrize("size", [None, 1, 7])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_chat_is_read_in_parts_of_any_size(size, line_end):
    events = [
        delta(role="assistant", content=""),
        delta(content="Hé"),
        delta(content=" you"),
        end(),
        {"choices": [], "usage": usage(4, cached=16)},
    ]
    answer = read(*events, size=size, line_end=line_end)
    log = answer.log
    assert answer.chunk_times_s == (2.0, 3.0), "a role is no token"
    assert (log.timings.arrival_s, log.sent_s) == (0.25, 0.5)
    assert (log.timings.first_token_s, log.timings.last_token_s) == (2.0, 3.0)
    assert (log.num_prompt, log.num_output, log.num_cached) == (41, 4, 16)
    assert answer.tokens_by_chunk == (2.0, 2.0)
    assert (answer.text, answer.finish_reason, answer.has_usage) == ("Hé you", "length", True)
    assert (log.outcome, answer.failure, answer.number) == (COMPLETED, "", 3)


def test_first_tokens_of_reasoning_and_of_content_are_apart():
    for name in ("reasoning_content", "reasoning"):
        answer = read(delta(**{name: "Hm"}), delta(**{name: "."}), delta(content="Yes"), end())
        assert (answer.first_reasoning_s, answer.first_content_s) == (1.0, 3.0)
        assert answer.log.timings.first_token_s == 1.0
    assert read(delta(content="Yes"), end()).first_reasoning_s is None


def test_a_running_count_gives_the_tokens_of_each_chunk():
    chunks = [delta(content=text) | {"usage": usage(count)} for text, count in (("a", 3), ("b", 5))]
    answer = read(*chunks, end() | {"usage": usage(5)}, {"choices": [], "usage": usage(5)})
    assert answer.chunk_tokens == (3, 2)


def test_a_count_in_the_last_chunk_is_no_token():
    answer = read(delta(content="a"), delta(content="b"), end() | {"usage": usage(2)})
    assert answer.chunk_times_s == (1.0, 2.0)
    assert answer.chunk_tokens == ()
    assert answer.log.num_output == 2


def test_without_usage_each_chunk_is_a_token():
    answer = read(delta(content="a"), delta(content="b"), end())
    assert (answer.log.num_output, answer.log.num_prompt, answer.has_usage) == (2, 40, False)


def test_completions_and_tool_calls_have_tokens():
    assert read({"choices": [{"text": "a"}]}, {"choices": [{"text": ""}]}).chunk_times_s == (1.0,)
    assert read(delta(tool_calls=[{"index": 0}]), end("tool_calls")).first_content_s == 1.0


def test_failures_have_their_kind():
    json_head = Head(200, [(b"content-type", b"application/json")])
    refusal = Head(429, [(b"content-type", b"application/json")])
    error = {"error": {"message": "The engine died."}}
    for answer, failure in (
        (read(delta(content="a"), is_done=False), INCOMPLETE),
        (read(end()), EMPTY),
        (read(delta(content="a"), head=json_head), NO_STREAM),
        (read(delta(content="a"), error, is_done=False), "error in the stream"),
        (read(delta(content="a"), "{broken", end()), "invalid event"),
    ):
        assert (answer.failure, answer.log.outcome) == (failure, FAILED)
    stream = ReceivedAnswer(keeps_text=False)
    stream.begin(refusal)
    stream.take(b'{"error": {"message": "Too  many."}}', 1.0)
    answer = stream.measured(PLANNED, scheduled_s=0.0, sent_s=0.0)
    assert (answer.failure, answer.message) == ("HTTP 429", "Too many.")
    assert answer.log.outcome == REFUSED
    assert read(delta(content="a"), error).message == "The engine died."
