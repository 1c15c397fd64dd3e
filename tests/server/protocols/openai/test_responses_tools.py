"""Tools in the Responses API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import live_server
from support.tiny import Tiny

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from support.servers import LiveServer

Fields = dict[str, Any]

PATH = "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "weather", "description": "It.", "parameters": SCHEMA}
CLOCK = {"type": "function", "name": "clock", "parameters": SCHEMA, "strict": True}
TOOLS: Fields = {"tools": [WEATHER, CLOCK], "max_output_tokens": 150}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server whose model has more context, since descriptions of tools are long."""
    with live_server(tmp_path_factory.mktemp("tools"), tiny=Tiny(context_length=2048)) as live:
        yield live


def send_request(server: LiveServer, **fields: Any) -> httpx.Response:
    body = {"input": "hello", "temperature": 1.0, "seed": 1, **TOOLS, **fields}
    return server.http.post(PATH, json=body)


def allowed(mode: str, *names: str) -> Fields:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "clock"}, {"clock"}),
        ("required", {"clock", "weather"}),
        (allowed("required", "weather"), {"weather"}),
    ],
)
def test_a_forced_call_is_an_item(server: LiveServer, choice: Any, names: set[str]) -> None:
    for seed in range(4):
        body = send_request(server, tool_choice=choice, parallel_tool_calls=False, seed=seed).json()
        (call,) = body["output"]
        assert body["status"] == "completed"
        assert call.pop("id").startswith("fc_")
        assert call.pop("call_id").startswith("call_")
        assert call.pop("name") in names
        assert json.loads(call.pop("arguments"))["city"] in {"Oslo", "Rome"}
        assert call == {"type": "function_call", "status": "completed"}
        assert body["tool_choice"] == choice
        assert body["tools"] == [{"strict": None, "description": None} | t for t in TOOLS["tools"]]


def test_a_streamed_call_comes_in_its_order_and_makes_up_the_whole(server: LiveServer) -> None:
    fields: Fields = {"tool_choice": "required", "parallel_tool_calls": False}
    (whole_call,) = send_request(server, **fields).json()["output"]
    lines = send_request(server, stream=True, **fields).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    end = ["function_call_arguments.done", "output_item.done", "completed"]
    assert kinds[-3:] == end
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    added, *deltas, done, item_done, last = events[2:]
    assert (added["item"]["arguments"], added["item"]["status"]) == ("", "in_progress")
    joined = "".join(event["delta"] for event in deltas)
    assert joined == done["arguments"] == item_done["item"]["arguments"] == whole_call["arguments"]
    assert done["name"] == whole_call["name"]
    assert last["response"]["output"] == [item_done["item"]]
    assert {event["item_id"] for event in (*deltas, done)} == {item_done["item"]["id"]}
    assert added["item"]["call_id"] == item_done["item"]["call_id"]


def test_parallel_calls_are_items_one_behind_the_other(server: LiveServer) -> None:
    for seed in range(30):
        fields: Fields = {"tool_choice": "required", "seed": seed, "max_output_tokens": 300}
        body = send_request(server, **fields).json()
        if len(body["output"]) > 1:
            break
    assert len(body["output"]) > 1
    lines = send_request(server, stream=True, **fields).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == list(range(len(added)))
    names = [item["name"] for item in body["output"]]
    assert [event["item"]["name"] for event in added] == names
    assert len({event["item"]["id"] for event in added}) == len(added)
    assert len({item["call_id"] for item in body["output"]}) == len(added)
    for index, item in enumerate(events[-1]["response"]["output"]):
        deltas = [e["delta"] for e in events if e.get("output_index") == index and "delta" in e]
        assert "".join(deltas) == item["arguments"] == body["output"][index]["arguments"]


def test_a_call_that_is_cut_is_incomplete(server: LiveServer) -> None:
    choice = {"type": "function", "name": "clock"}
    full = send_request(server, tool_choice=choice).json()["usage"]["output_tokens"]
    body = send_request(server, tool_choice=choice, max_output_tokens=full - 12).json()
    assert body["status"] == "incomplete"
    (call,) = body["output"]
    assert (call["type"], call["status"]) == ("function_call", "incomplete")


def test_without_a_choice_there_may_be_text(server: LiveServer) -> None:
    for choice in ("none", "auto", allowed("auto", "clock")):
        body = send_request(server, tool_choice=choice, max_output_tokens=5).json()
        assert [item["type"] for item in body["output"]] == ["message"]


def test_calls_and_results_go_on_from_a_response(server: LiveServer) -> None:
    first = send_request(server, tool_choice="required", parallel_tool_calls=False).json()
    (call,) = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    stored_answer = send_request(server, previous_response_id=first["id"], input=[result]).json()
    resent = [{"role": "user", "content": "hello"}, call, result]
    resent_answer = send_request(server, input=resent).json()
    assert stored_answer["usage"]["input_tokens"] == resent_answer["usage"]["input_tokens"]
    assert stored_answer["output"][0].get("content") == resent_answer["output"][0].get("content")


@pytest.mark.parametrize(
    ("fields", "sentence", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "must be unique", "tools[1].name"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name must be", "tools[0].name"),
        (
            {"tools": [CLOCK | {"parameters": {"not": {}}}]},
            "cannot be followed. The JSON schema",
            "tools[0].parameters",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice needs tools.", "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "got 'x'", "tool_choice.name"),
        ({"tool_choice": {"type": "web_search"}}, "got 'web_search'", "tool_choice.type"),
        (
            {"tool_choice": allowed("required")},
            "must have a tool that can be called here",
            "tool_choice.tools",
        ),
        (
            {"tool_choice": allowed("auto", "clok")},
            "must be the name of one of the tools, got 'clok'. Did you mean 'clock'?",
            "tool_choice.tools[0].name",
        ),
        ({"include": ["message.output_text.logprobs"]}, "cannot have", "include"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]},
            "input[0].call_id is not the id of an earlier function_call.",
            "input[0].call_id",
        ),
        (
            {"input": [{"type": "web_search_call", "id": "x"}]},
            "has no items that are known here",
            "input",
        ),
        ({"input": [{"role": "tool", "content": ""}]}, "function_call_output", "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "got 'input_image'",
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user", "cont": ""}]}, "mean 'content'?", "input[0].cont"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "one message", "input"),
    ],
)
def test_wrong_tools_and_items_are_refused(
    server: LiveServer, fields: Fields, sentence: str, param: str
) -> None:
    response = send_request(server, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert sentence in error["message"]
    assert error["param"] == param
