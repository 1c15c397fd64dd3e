"""Tools combined with an answer format, in every protocol, whole and streamed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support import family_templates
from support.family_templates import say, talker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer

Fields = dict[str, Any]

CITY: Fields = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FORM: Fields = {"type": "json_schema", "schema": CITY}
ANSWER = '{"city": "Rome"}'
ARGUMENTS = '{"city": "Oslo"}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
FENCED = f"```json\n{CALL}\n```"
MARKED = f"<tool_call>\n{CALL}\n</tool_call>"
TALK = [{"role": "user", "content": "hello"}]
FUNCTION = {"name": "weather", "parameters": CITY}
REQUIRED: Fields = {"chat": "required", "responses": "required", "messages": {"type": "any"}}

REQUESTS: dict[str, tuple[str, Fields]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": TALK,
            "tools": [{"type": "function", "function": FUNCTION}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": CITY},
            },
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "input": "hello",
            "tools": [{"type": "function", **FUNCTION}],
            "text": {"format": FORM | {"name": "x"}},
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": TALK,
            "tools": [{"name": "weather", "input_schema": CITY}],
            "output_config": {"format": FORM},
            "max_tokens": 200,
        },
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server whose model answers as the test says, if the grammar allows it."""
    with talker(tmp_path_factory.mktemp("both"), family_templates.HERMES) as live:
        yield live


def send_request(server: LiveServer, protocol: str, **fields: Any) -> Any:
    path, body = REQUESTS[protocol]
    response = server.http.post(path, json=body | {"temperature": 0} | fields)
    assert response.status_code == 200, response.text
    return response


def whole_answer(
    server: LiveServer, protocol: str, **fields: Any
) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the tool calls of an answer without a stream."""
    body = send_request(server, protocol, **fields).json()
    if protocol == "chat":
        message = body["choices"][0]["message"]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [(function["name"], function["arguments"]) for function in functions]
        assert body["choices"][0]["finish_reason"] == ("tool_calls" if calls else "stop")
        return message["content"] or "", calls
    if protocol == "responses":
        items = body["output"]
        text = [
            part["text"] for item in items if item["type"] == "message" for part in item["content"]
        ]
        called = [item for item in items if item["type"] == "function_call"]
        return "".join(text), [(function["name"], function["arguments"]) for function in called]
    assert body["stop_reason"] in {"end_turn", "tool_use"}
    blocks = body["content"]
    text = [block["text"] for block in blocks if block["type"] == "text"]
    used = [block for block in blocks if block["type"] == "tool_use"]
    return "".join(text), [(block["name"], json.dumps(block["input"])) for block in used]


def streamed(server: LiveServer, protocol: str, **fields: Any) -> tuple[str, str]:
    """Return the text and the tool arguments of a streamed answer."""
    text = arguments = ""
    lines = send_request(server, protocol, stream=True, **fields).text.splitlines()
    sent = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    for event in map(json.loads, sent):
        if protocol == "chat":
            delta = event["choices"][0]["delta"]
            text += delta.get("content") or ""
            arguments += "".join(
                call["function"]["arguments"] for call in delta.get("tool_calls", ())
            )
        elif event["type"].endswith("output_text.delta"):
            text += event["delta"]
        elif event["type"].endswith("function_call_arguments.delta"):
            arguments += event["delta"]
        elif event["type"] == "content_block_delta":
            text += event["delta"].get("text", "")
            arguments += event["delta"].get("partial_json", "")
    return text, arguments


@pytest.mark.parametrize("protocol", REQUESTS)
@pytest.mark.parametrize("written", [MARKED, FENCED, f"```{{{CALL}}}```"])
def test_the_answer_may_be_a_call(server: LiveServer, protocol: str, written: str) -> None:
    say(server, written)
    assert whole_answer(server, protocol) == ("", [("weather", ARGUMENTS)])
    assert streamed(server, protocol) == ("", ARGUMENTS)


@pytest.mark.parametrize("protocol", REQUESTS)
def test_the_answer_may_have_the_form(server: LiveServer, protocol: str) -> None:
    say(server, ANSWER)
    assert whole_answer(server, protocol) == (ANSWER, [])
    assert streamed(server, protocol) == (ANSWER, "")


@pytest.mark.parametrize("protocol", REQUESTS)
def test_the_tool_choice_decides_between_text_and_calls(server: LiveServer, protocol: str) -> None:
    say(server, MARKED)
    assert whole_answer(server, protocol, tool_choice=REQUIRED[protocol]) == (
        "",
        [("weather", ARGUMENTS)],
    )
    none = {"type": "none"} if protocol == "messages" else "none"
    say(server, ANSWER)
    assert whole_answer(server, protocol, tool_choice=none) == (ANSWER, [])


@pytest.mark.parametrize("protocol", ["chat", "responses"])  # the third has no seed
def test_no_other_text_is_drawn(server: LiveServer, protocol: str) -> None:
    server.backend.script = None
    for seed in range(3):
        text, calls = whole_answer(
            server, protocol, temperature=1.0, seed=seed, parallel_tool_calls=False
        )
        assert bool(text) is not bool(calls)
        for text_part in (text, *(arguments for _, arguments in calls)):
            assert not text_part or json.loads(text_part)["city"] in {"Oslo", "Rome"}


def test_a_form_that_cannot_be_followed_is_named(server: LiveServer) -> None:
    path, body = REQUESTS["chat"]
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = server.http.post(path, json=body | {"response_format": named}).json()["error"]
    assert error["param"] == "response_format.json_schema.schema"


def test_text_in_a_form_may_look_like_a_call_after_a_result(server: LiveServer) -> None:
    path, body = REQUESTS["chat"]
    function = {"name": "weather", "arguments": ARGUMENTS}
    call = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "17"}
    body = body | {"messages": [*TALK, call, result]}
    form = {"guided_json": {"type": "object"}, "response_format": None}
    for text in (json.dumps({"text": MARKED}), CALL):
        say(server, text)
        answer = server.http.post(path, json=body | form | {"temperature": 0}).json()["choices"][0]
        assert answer["message"]["content"] == text
        assert answer["finish_reason"] == "stop"
