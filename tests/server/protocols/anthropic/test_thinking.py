"""Reasoning in Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support import family_templates
from support.family_templates import say, talker

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from support.servers import LiveServer

Fields = dict[str, Any]

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "hello"}]
THOUGHT = "Well.\n\nSo"
THOUGHT_ANSWER = f"<think>\n{THOUGHT}\n</think>\n\nIt is."
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"const": 1}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server whose model begins with reasoning, unless a request turns it off."""
    with talker(tmp_path_factory.mktemp("thinks"), family_templates.THINKS) as live:
        yield live


def send_request(server: LiveServer, **fields: Any) -> httpx.Response:
    return server.http.post(PATH, json={"messages": HELLO, "max_tokens": 200, **fields})


def streamed(server: LiveServer, **fields: Any) -> list[Fields]:
    """Return the content blocks of a streamed message, joined from its events."""
    lines = send_request(server, stream=True, **fields).text.splitlines()
    blocks: list[Fields] = []
    for event in (json.loads(line[6:]) for line in lines if line.startswith("data: ")):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            key = {"thinking_delta": "thinking", "signature_delta": "signature"}.get(
                delta["type"], "text"
            )
            if delta["type"] == "input_json_delta":
                blocks[-1]["json"] = blocks[-1].get("json", "") + delta["partial_json"]
            else:
                assert not blocks[-1].get("signature")
                blocks[-1][key] += delta[key]
        elif event["type"] == "content_block_stop":
            assert event["index"] == len(blocks) - 1
    return blocks


def test_reasoning_is_a_block_of_its_own(server: LiveServer) -> None:
    say(server, THOUGHT_ANSWER)
    for thinking in (None, {"type": "enabled", "budget_tokens": 100}, {"type": "adaptive"}):
        body = send_request(server, thinking=thinking).json()
        thought, text = body["content"]
        assert thought["type"] == "thinking"
        assert thought["thinking"] == THOUGHT
        assert thought["signature"]
        assert text == {"type": "text", "text": "It is."}
        assert body["stop_reason"] == "end_turn"
        assert streamed(server, thinking=thinking) == body["content"]


def test_reasoning_that_is_cut_is_all_there_is(server: LiveServer) -> None:
    say(server, THOUGHT_ANSWER)
    body = send_request(server, max_tokens=12).json()
    assert body["stop_reason"] == "max_tokens"
    [thought] = body["content"]
    assert THOUGHT.startswith(thought["thinking"])
    assert streamed(server, max_tokens=12) == [thought]


def test_reasoning_can_be_switched_off(server: LiveServer) -> None:
    say(server, "It is.")
    off = {"thinking": {"type": "disabled"}}
    assert send_request(server, **off).json()["content"] == [{"type": "text", "text": "It is."}]
    counts = [
        server.http.post(COUNT, json={"messages": HELLO, **fields}).json()["input_tokens"]
        for fields in ({}, off)
    ]
    assert counts[0] < counts[1]  # the prompt has it closed


def test_stop_sequences_do_not_end_the_reasoning(server: LiveServer) -> None:
    say(server, THOUGHT_ANSWER)
    body = send_request(server, stop_sequences=["S", " is"]).json()
    assert [block.get("text") for block in body["content"]] == [None, "It"]
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", " is")


def test_calls_come_behind_the_reasoning(server: LiveServer) -> None:
    say(server, f"<think>hm</think>\n\nLook:\n{CALL}")
    body = send_request(server, tools=[TOOL]).json()
    thought, text, call = body["content"]
    assert thought["thinking"] == "hm"
    assert text["text"] == "Look:"
    assert (call["name"], call["input"]) == ("f", {"a": 1})
    assert body["stop_reason"] == "tool_use"
    blocks = streamed(server, tools=[TOOL])
    assert blocks[:2] == [thought, text]
    assert json.loads(blocks[2]["json"]) == {"a": 1}
    cut = send_request(server, tools=[TOOL], stop_sequences=['"a"']).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", '"a"')
    assert [block["type"] for block in cut["content"]] == ["thinking", "text"]


def test_earlier_reasoning_reaches_the_template(server: LiveServer) -> None:
    def count(*blocks: Fields) -> int:
        text = {"type": "text", "text": "b"}
        answer = {"role": "assistant", "content": [*blocks, text]}
        request = {"messages": [*HELLO, answer, *HELLO]}
        body: int = server.http.post(COUNT, json=request).json()["input_tokens"]
        return body

    plain = count()
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    assert count(thought) > plain
    assert count({"type": "redacted_thinking", "data": "x"}) == plain
    assert count({"type": "thinking", "thinking": "hm"}) == count(thought)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"thinking": {"type": "enabled", "budget_tokens": 200}},
            "thinking.budget_tokens must be at least 1 and less than max_tokens, got 200.",
        ),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing."),
        (
            {"thinking": {"type": "some"}},
            "thinking.type must be one of enabled, adaptive, disabled, got 'some'.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
            "messages[0].content[0] cannot be part of a message of the role user.",
        ),
    ],
)
def test_invalid_requests_are_refused(server: LiveServer, fields: Fields, sentence: str) -> None:
    response = send_request(server, **fields)
    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]


def test_models_that_do_not_reason_say_so(tmp_path: Any) -> None:
    with talker(tmp_path, family_templates.HERMES) as server:
        say(server, "x")
        on = {"type": "enabled", "budget_tokens": 100}
        for thinking in (on, {"type": "disabled"}, {"type": "adaptive"}):
            response = send_request(server, thinking=thinking)
            assert response.json()["content"][0]["text"] == "x"
            assert ("twostroke-ignored" in response.headers) == (thinking is on)


@pytest.mark.parametrize("kind", ["enabled", "adaptive"])
def test_reasoning_is_omitted_where_the_request_says_so(server: LiveServer, kind: str) -> None:
    budget = {"budget_tokens": 100} if kind == "enabled" else {}
    thinking = {"type": kind, "display": "omitted", **budget}
    say(server, THOUGHT_ANSWER)
    expected = send_request(server, thinking=thinking | {"display": "summarized"}).json()["content"]
    assert expected[0]["thinking"]
    sent = send_request(server, thinking=thinking).json()["content"]
    assert streamed(server, thinking=thinking) == sent
    assert sent[0]["thinking"] == ""
    assert sent[1:] == expected[1:]

    def count(*blocks: Fields) -> int:
        messages = [*HELLO, {"role": "assistant", "content": [*blocks, expected[1]]}, *HELLO]
        body: int = server.http.post(COUNT, json={"messages": messages}).json()["input_tokens"]
        return body

    assert count(sent[0]) == count(expected[0]) > count()  # the signature has the reasoning
