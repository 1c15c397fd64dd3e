"""Custom tools, whose input is a text, in the Responses API and in chats."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support import family_templates
from support.family_templates import say, talker
from support.refusals import refused
from twostroke.engine.chat.call_forms import HERMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer

Fields = dict[str, Any]

PATCH = '*** Begin Patch\n+print("é")\n*** End Patch'
REGEX = {"type": "grammar", "syntax": "regex", "definition": "^[a-c]{2,4}$"}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" /.+/'}
TOOLS: list[Fields] = [
    {"type": "custom", "name": "patch", "description": "Edit files.", "format": LARK},
    {"type": "custom", "name": "letters", "format": REGEX},
    {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False},
]
LETTERS = {"type": "custom", "name": "letters"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with talker(tmp_path_factory.mktemp("custom"), family_templates.HERMES) as live:
        yield live


def called(name: str, text: str) -> str:
    return HERMES.write([(name, json.dumps({"input": text}, ensure_ascii=False))])


def respond(server: LiveServer, **fields: Any) -> Any:
    body = {"input": "hello", "tools": TOOLS, "temperature": 0, "max_output_tokens": 300} | fields
    response = server.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    return response


def test_a_call_has_the_text_itself(server: LiveServer) -> None:
    say(server, called("patch", PATCH))
    body = respond(server).json()
    [item] = body["output"]
    assert item.pop("id").startswith("ctc_")
    assert item.pop("call_id").startswith("call_")
    assert item == {
        "type": "custom_tool_call",
        "name": "patch",
        "input": PATCH,
        "status": "completed",
    }
    assert [tool["type"] for tool in body["tools"]] == ["custom", "custom", "function"]
    assert body["tools"][0]["format"] == LARK


def test_a_call_is_streamed_as_its_text(server: LiveServer) -> None:
    say(server, called("patch", PATCH))
    lines = respond(server, stream=True).text.splitlines()
    sent = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    kinds = [event["type"].removeprefix("response.") for event in sent]
    first = kinds.index("custom_tool_call_input.delta")
    last = kinds.index("custom_tool_call_input.done")
    assert kinds[:first] == ["created", "in_progress", "output_item.added"]
    assert set(kinds[first:last]) == {"custom_tool_call_input.delta"}
    assert kinds[last + 1 :] == ["output_item.done", "completed"]
    assert "".join(event["delta"] for event in sent[first:last]) == PATCH
    assert sent[last]["input"] == PATCH == sent[last + 1]["item"]["input"]
    assert sent[first - 1]["item"]["input"] == ""
    ids = {event["item_id"] for event in sent[first : last + 1]}
    assert ids == {sent[first - 1]["item"]["id"]}


def test_a_regular_expression_is_kept_to(server: LiveServer) -> None:
    server.backend.script = None
    for seed in range(3):
        body = respond(server, tool_choice=LETTERS, temperature=1.5, seed=seed).json()
        [item] = body["output"]
        assert 2 <= len(item["input"]) <= 4
        assert {*item["input"]} <= {*"abc"}


def test_models_see_a_function_and_its_form(server: LiveServer) -> None:
    say(server, "Hm.")
    sizes = [
        respond(server, tools=[{"type": "custom", "name": "patch"} | text_fields]).json()["usage"]
        for text_fields in ({}, {"format": {"type": "text"}}, {"format": LARK})
    ]
    plain, text, lark = (usage["input_tokens"] for usage in sizes)
    assert plain == text < lark


def test_a_lark_grammar_is_reported_as_not_enforced(server: LiveServer) -> None:
    say(server, "Hm.")
    assert "tools[].format.syntax" in respond(server).headers["twostroke-ignored"]
    assert "twostroke-ignored" not in respond(server, tools=TOOLS[1:]).headers


def test_calls_and_results_can_be_sent_back(server: LiveServer) -> None:
    say(server, "Done.")
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": PATCH}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"}
    user = {"role": "user", "content": "hello"}
    first = respond(server, input=[user, call, result])
    assert first.json()["output"][0]["content"][0]["text"] == "Done."
    parts = [{"type": "input_text", "text": "ok"}]
    second = respond(server, input=[user, call, result | {"output": parts}]).json()
    assert second["usage"]["input_tokens"] == first.json()["usage"]["input_tokens"]
    say(server, called("patch", PATCH))
    answer = respond(server).json()
    say(server, "Done.")
    result["call_id"] = answer["output"][0]["call_id"]
    respond(server, input=[result], previous_response_id=answer["id"])


def test_tools_of_a_namespace_have_its_name(server: LiveServer) -> None:
    space = {"type": "namespace", "name": "git", "description": "Git.", "tools": TOOLS}
    say(server, called("git.patch", PATCH))
    [item] = respond(server, tools=[space]).json()["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("custom_tool_call", "git", "patch")
    say(server, HERMES.write([("git.shell", "{}")]))
    [item] = respond(server, tools=[space]).json()["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "git", "shell")
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
    respond(server, tools=[space], input=[{"role": "user", "content": "hello"}, item, result])


def test_a_request_of_a_coding_agent_is_answered(server: LiveServer) -> None:
    say(server, called("patch", PATCH))
    body: Fields = {
        "instructions": "You are a coding agent.",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Be careful."}],
            },
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "Print é."}],
            },
        ],
        "tools": [*TOOLS, {"type": "namespace", "name": "x", "description": "", "tools": TOOLS}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "low"},
        "client_metadata": {"x": "y"},
    }
    response = server.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert "response.custom_tool_call_input.done" in response.text


def test_chats_have_custom_tools(server: LiveServer) -> None:
    say(server, called("patch", PATCH))
    custom = {"name": "patch", "format": {"type": "grammar", "grammar": _inner(LARK)}}
    fields: Fields = {"tools": [{"type": "custom", "custom": custom}], "temperature": 0}
    fields["max_tokens"] = 300
    choice = server.chat(**fields).json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call.pop("id").startswith("call_")
    assert call == {"type": "custom", "custom": {"name": "patch", "input": PATCH}}
    lines = server.chat(**fields, stream=True).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [
        tool_call
        for chunk in chunks
        for tool_call in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert deltas[0]["type"] == "custom"
    assert deltas[0]["custom"] == {"input": "", "name": "patch"}
    assert "".join(delta["custom"]["input"] for delta in deltas) == PATCH
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call | {"id": "c1"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]
    assert server.chat(**fields | {"messages": messages}).status_code == 200
    named = {"type": "custom", "custom": {"name": "patch"}}
    assert server.chat(**fields, tool_choice=named).json()["choices"][0]["message"]["tool_calls"]


def _inner(form: Fields) -> Fields:
    return {name: value for name, value in form.items() if name != "type"}


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name", "must be unique"),
        (
            {"tools": [{**TOOLS[1], "format": REGEX | {"definition": r"(a)\1"}}]},
            "tools[0].format.definition",
            "look-around",
        ),
        (
            {"input": [{"type": "custom_tool_call_output", "call_id": "x", "output": ""}]},
            "input[0].call_id",
            "earlier custom_tool_call",
        ),
    ],
)
def test_invalid_requests_are_refused(
    server: LiveServer, fields: Fields, param: str, word: str
) -> None:
    body = {"input": "hello", "tools": TOOLS} | fields
    assert word in refused(server.http.post("/v1/responses", json=body), 400, param)
