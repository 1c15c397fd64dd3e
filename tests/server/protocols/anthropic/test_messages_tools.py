"""Tools in Anthropic's Messages API."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import live_server
from support.tiny import Tiny
from twostroke.server.generation.job import Conversation
from twostroke.server.generation.response_store import ResponseStore, Tenant
from twostroke.server.protocols.anthropic.messages import AnthropicMessage, MessagesRequest, read

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from support.servers import LiveServer

Fields = dict[str, Any]

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
FORCED: Fields = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
TALK = [
    *HELLO,
    {"role": "assistant", "content": [{"type": "text", "text": "the "}, CALL]},
    {"role": "user", "content": [RESULT, {"type": "text", "text": "and?"}]},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server whose model has more context, since descriptions of tools are long."""
    with live_server(tmp_path_factory.mktemp("tools"), tiny=Tiny(context_length=2048)) as live:
        yield live


def send_request(server: LiveServer, **fields: Any) -> httpx.Response:
    body = {"messages": HELLO, "max_tokens": 100, "temperature": 0, **fields}
    return server.http.post(PATH, json=body)


def test_a_text_is_not_looked_through_for_blocks() -> None:
    class Text(str):
        __slots__ = ()

        def __iter__(self) -> Iterator[str]:
            raise AssertionError

    message = AnthropicMessage(role="user", content=Text("hello"))
    body = MessagesRequest(messages=[message], max_tokens=5)
    job = read(body, Tenant("", ResponseStore(0, 0)))
    (prompt,) = job.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.messages == ({"role": "user", "content": "hello"},)


def test_forced_call_is_a_block_with_its_input(server: LiveServer) -> None:
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, FORCED["tool_choice"]):
        body = send_request(server, tools=[TOOL], tool_choice=choice).json()
        assert body["stop_reason"] == "tool_use"
        (block,) = body["content"]
        assert block.pop("id").startswith("toolu_")
        assert block == {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}


def test_streamed_call_comes_in_pieces_of_json(server: LiveServer) -> None:
    response = send_request(server, stream=True, **FORCED)
    result = _events(response)
    kinds = [event["type"] for event in result]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    block = result[1]["content_block"]
    assert block.pop("id").startswith("toolu_")
    assert block == {"type": "tool_use", "name": "weather", "input": {}}
    deltas = [event["delta"] for event in result[3:-3]]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    assert "".join(delta["partial_json"] for delta in deltas) == '{"city": "Oslo"}'
    assert result[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert re.search(r'event: ping\ndata: {"type":"ping"}\n\n', response.text)


def test_several_calls_are_blocks_one_behind_the_other(server: LiveServer) -> None:
    many = {"type": "any"}
    other = {**TOOL, "name": "other"}
    for seed_text in ("a", "b", "c", "d"):
        messages = [{"role": "user", "content": seed_text}]
        fields = {"tools": [TOOL, other], "tool_choice": many, "messages": messages}
        whole_answer = send_request(server, max_tokens=200, **fields).json()
        result = _events(send_request(server, max_tokens=200, stream=True, **fields))
        starts = [event for event in result if event["type"] == "content_block_start"]
        assert [event["index"] for event in starts] == list(range(len(starts)))
        stops = [event["index"] for event in result if event["type"] == "content_block_stop"]
        assert stops == list(range(len(starts)))
        names = [event["content_block"]["name"] for event in starts]
        calls = [block for block in whole_answer["content"] if block["type"] == "tool_use"]
        assert [call["name"] for call in calls] == names[: len(calls)]
        assert result[-2]["delta"]["stop_reason"] == whole_answer["stop_reason"]


def test_text_with_tools_is_text(server: LiveServer) -> None:
    whole_answer = send_request(server, tools=[TOOL], max_tokens=5).json()
    result = _events(send_request(server, tools=[TOOL], max_tokens=5, stream=True))
    text = "".join(e["delta"]["text"] for e in result if e["type"] == "content_block_delta")
    assert whole_answer["content"] == [{"type": "text", "text": text}]
    assert whole_answer["stop_reason"] == "max_tokens"
    assert result[-3] == {"type": "content_block_stop", "index": 0}


def test_call_that_is_cut_is_no_call(server: LiveServer) -> None:
    count = send_request(server, **FORCED).json()["usage"]["output_tokens"]
    for cut in range(1, count - 1):
        body = send_request(server, **FORCED | {"max_tokens": cut}).json()
        assert body["stop_reason"] == "max_tokens"
        for block in body["content"]:
            assert block["type"] == "text" or block["input"] == {"city": "Oslo"}


def test_calls_and_results_reach_the_template_as_in_openais_protocol(server: LiveServer) -> None:
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    call = {"id": "toolu_1", "type": "function", "function": function}
    openai = [
        *HELLO,
        {"role": "assistant", "content": "the ", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "user", "content": "and?"},
    ]
    described = {k: v for k, v in TOOL.items() if k != "input_schema"} | {"parameters": SCHEMA}
    tools = [{"type": "function", "function": described}]
    expected = server.http.post("/tokenize", json={"messages": openai, "tools": tools}).json()
    body = server.http.post(COUNT, json={"messages": TALK, "tools": [TOOL]}).json()
    assert body == {"input_tokens": expected["count"]}
    blocks = [{**RESULT, "content": [{"type": "text", "text": "rain"}], "is_error": False}]
    talk = [*TALK[:2], {"role": "user", "content": [*blocks, {"type": "text", "text": "and?"}]}]
    assert server.http.post(COUNT, json={"messages": talk, "tools": [TOOL]}).json() == body
    assert send_request(server, messages=TALK, tools=[TOOL], max_tokens=2).status_code == 200


def test_no_tools_are_shown_where_none_may_be_called(server: LiveServer) -> None:
    plain = server.http.post(COUNT, json={"messages": HELLO}).json()
    for fields in ({"tools": []}, {"tools": [TOOL], "tool_choice": {"type": "none"}}):
        assert server.http.post(COUNT, json={"messages": HELLO, **fields}).json() == plain


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing."),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name must be 1 to 128 letters"),
        (
            {"tools": [TOOL, TOOL]},
            "tools[1].name must be unique",
        ),
        ({"tools": [TOOL] * 129}, "tools must have at most 128 items, got 129."),
        (
            {"tools": [{**TOOL, "strict": True, "input_schema": {"not": {}}}]},
            "cannot be followed. The JSON schema",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools."),
        (
            {"tool_choice": {"type": "some"}},
            "tool_choice.type must be one of auto, any, tool, none, got 'some'.",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}},
            "tool_choice.name must be the name of one of the tools, got 'f'.",
        ),
        ({"messages": TALK[:2]}, "must not end with a tool call"),
        (
            {"messages": [TALK[0], TALK[2]]},
            "messages[1].content[0].tool_use_id must be the id of",
        ),
        (
            {"messages": [{"role": "user", "content": [CALL]}]},
            "messages[0].content[0] cannot be part of a message of the role user.",
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [RESULT]}]},
            "messages[1].content[0] cannot be part of a message of the role assistant.",
        ),
    ],
)
def test_invalid_requests_are_refused(server: LiveServer, fields: Fields, sentence: str) -> None:
    response = send_request(server, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert sentence in error["message"]


def _events(response: httpx.Response) -> list[Any]:
    lines = response.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
