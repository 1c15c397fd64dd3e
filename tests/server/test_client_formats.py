"""Forms of calls, texts and tool choices that clients send in place of the usual forms."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.refusals import refused
from support.servers import live_server
from support.tiny import Tiny

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer

Fields = dict[str, Any]

CHAT, RESPONSES, MESSAGES, OLLAMA = (
    *("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"),
)
USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server whose model has more context, since descriptions of tools are long."""
    with live_server(tmp_path_factory.mktemp("forms"), tiny=Tiny(context_length=2048)) as live:
        yield live


def send_request(server: LiveServer, path: str, **fields: Any) -> Any:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    limits = {"options": {"num_predict": 2}, "stream": False} if path == OLLAMA else {limit: 2}
    return server.http.post(path, json=limits | fields)


def num_prompt_tokens(server: LiveServer, path: str, conversation: list[Fields]) -> int:
    name = "input" if path == RESPONSES else "messages"
    response = send_request(server, path, **{name: conversation}, model="tiny")
    assert response.status_code == 200, response.text
    assert "twostroke-ignored" not in response.headers
    body = response.json()
    usage = body.get("usage", body)
    read = [usage.get(f"{name}_tokens", 0) for name in ("prompt", "input", "cache_read_input")]
    return sum(read) or int(body["prompt_eval_count"])


def called(path: str, arguments: dict[str, Any]) -> list[Fields]:
    """Return a conversation with one tool call.

    `arguments` has the call's field of arguments, or is empty.
    """
    if path == RESPONSES:
        call: Fields = {"type": "function_call", "call_id": "c", "name": "f", **arguments}
        return [USER, call, {"type": "function_call_output", "call_id": "c", "output": "x"}]
    if path == MESSAGES:
        input_fields = {"input": arguments["arguments"]} if arguments else {}
        block = {"type": "tool_use", "id": "c", "name": "f", **input_fields}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
        return [USER, {"role": "assistant", "content": [block]}, USER | {"content": [result]}]
    function = {"name": "f", **arguments}
    call = {"id": "c", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "c", "content": "x"}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, OLLAMA])
def test_arguments_of_calls_are_json_or_an_object_or_nothing(server: LiveServer, path: str) -> None:
    value = {"a": [1, "é"]}
    expected = num_prompt_tokens(server, path, called(path, {"arguments": value}))
    text = json.dumps(value, ensure_ascii=False)
    assert num_prompt_tokens(server, path, called(path, {"arguments": text})) == expected
    expected = num_prompt_tokens(server, path, called(path, {"arguments": {}}))
    for nothing in ({"arguments": "{}"}, {"arguments": None}, {}):
        assert num_prompt_tokens(server, path, called(path, nothing)) == expected, nothing


def test_arguments_of_the_older_call_may_be_an_object(server: LiveServer) -> None:
    result = {"role": "function", "name": "f", "content": "x"}
    counts = {
        num_prompt_tokens(
            server,
            CHAT,
            [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "f", "arguments": arguments},
                },
                result,
            ],
        )
        for arguments in ({"a": 1}, '{"a": 1}')
    }
    assert len(counts) == 1


def test_listed_items_have_arguments_as_json(server: LiveServer) -> None:
    [_, call, result] = called(RESPONSES, {"arguments": {"a": 1}})
    response = send_request(server, RESPONSES, input=[USER, call, result]).json()
    listed = server.http.get(f"{RESPONSES}/{response['id']}/input_items").json()["data"]
    [arguments] = [item["arguments"] for item in listed if item["type"] == "function_call"]
    assert json.loads(arguments) == {"a": 1}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer"])
def test_texts_have_any_of_their_names(server: LiveServer, path: str, kind: str, role: str) -> None:
    """If the server dropped a text part for its type, it would lose what the user said."""
    plain = num_prompt_tokens(server, path, [{"role": role, "content": "said"}, USER])
    parts = [{"type": kind, "text": "said"}]
    assert num_prompt_tokens(server, path, [{"role": role, "content": parts}, USER]) == plain


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_results_in_parts_have_any_of_their_names(server: LiveServer, kind: str) -> None:
    [user, call, result] = called(RESPONSES, {"arguments": "{}"})
    plain = num_prompt_tokens(server, RESPONSES, [user, call, result])
    parts = result | {"output": [{"type": kind, "text": "x"}]}
    assert num_prompt_tokens(server, RESPONSES, [user, call, parts]) == plain


@pytest.mark.parametrize("kind", ["reasoning_text", "text"])
def test_reasoning_has_any_of_its_names(server: LiveServer, kind: str) -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": kind, "text": "well"}]}
    num_prompt_tokens(server, RESPONSES, [thought, {"role": "assistant", "content": "x"}, USER])


def allowing(path: str, mode: str, names: list[str], *others: str) -> Fields:
    """Return fields with the tools f and g, and a tool choice that allows only `names`.

    `others` are the types of further allowed tools.
    """
    functions: list[Fields] = [{"name": name, "parameters": SCHEMA} for name in ("f", "g")]
    wrapped = [{"type": kind} for kind in others]
    if path == CHAT:
        tools = [{"type": "function", "function": function} for function in functions]
        allowed = [{"type": "function", "function": {"name": name}} for name in names]
        inner: Fields = {"mode": mode, "tools": [*allowed, *wrapped]}
        choice: Fields = {"type": "allowed_tools", "allowed_tools": inner}
        return {"messages": [USER], "tools": tools, "tool_choice": choice, "max_tokens": 64}
    tools = [{"type": "function", **function} for function in functions]
    allowed = [{"type": "function", "name": name} for name in names]
    choice = {"type": "allowed_tools", "mode": mode, "tools": [*allowed, *wrapped]}
    return {"input": [USER], "tools": tools, "tool_choice": choice, "max_output_tokens": 64}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_only_allowed_tools_are_called(server: LiveServer, path: str) -> None:
    for seed in range(4):
        sampled = {} if path == RESPONSES else {"seed": seed}
        body = send_request(server, path, **allowing(path, "required", ["g"]), **sampled).json()
        if path == CHAT:
            [choice] = body["choices"]
            calls = [call["function"] for call in choice["message"]["tool_calls"]]
        else:
            calls = [item for item in body["output"] if item["type"] == "function_call"]
        assert {call["name"] for call in calls} == {"g"}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_allowed_tools_that_cannot_run_are_left_out(server: LiveServer, path: str) -> None:
    prefix = "tool_choice.allowed_tools" if path == CHAT else "tool_choice"
    for names in (["f"], []):
        response = send_request(server, path, **allowing(path, "auto", names, "web_search"))
        assert response.status_code == 200, response.text
        assert response.headers["twostroke-ignored"] == f"{prefix}.tools[].web_search"
    wrong = allowing(path, "required", [], "web_search")
    refused(send_request(server, path, **wrong), 400, f"{prefix}.tools")
    output = refused(send_request(server, path, **allowing(path, "auto", ["h"])), 400, _name(path))
    assert "must be the name of one of the tools, got 'h'" in output


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_allowed_and_forced_functions_are_not_custom_tools(server: LiveServer, path: str) -> None:
    body = allowing(path, "auto", ["f"])
    named = {"custom": {"name": "f"}} if path == CHAT else {"name": "f"}
    custom: Fields = {"type": "custom", **named}
    field = "tool_choice.type"
    output = refused(send_request(server, path, **body | {"tool_choice": custom}), 400, field)
    assert "must be 'function', the type of the tool 'f', got 'custom'" in output
    choice = body["tool_choice"]
    allowed = choice["allowed_tools"] if path == CHAT else choice
    allowed["tools"] = [custom]
    prefix = "tool_choice.allowed_tools" if path == CHAT else "tool_choice"
    refused(send_request(server, path, **body), 400, f"{prefix}.tools[0].type")


def _name(path: str) -> str:
    if path == CHAT:
        return "tool_choice.allowed_tools.tools[0].function.name"
    return "tool_choice.tools[0].name"


def test_errors_about_tools_of_namespaces_name_their_places(server: LiveServer) -> None:
    good = {"type": "function", "name": "f", "parameters": SCHEMA}
    namespace = {"type": "namespace", "name": "n", "tools": [good, good | {"name": "g"}]}
    inner = {"type": "namespace", "name": "m", "tools": [good, good | {"name": "a b"}]}
    for tools, param in (
        ([namespace, good | {"name": "a b"}], "tools[1].name"),
        ([namespace, inner], "tools[1].tools[1].name"),
        ([namespace, namespace], "tools[1].tools[0].name"),
        ([namespace | {"name": "a b"}], "tools[0].name"),
    ):
        refused(send_request(server, RESPONSES, input=[USER], tools=tools), 400, param)


def test_names_of_a_namespace_and_its_tools_may_both_be_long(server: LiveServer) -> None:
    tool = {"type": "function", "name": "f" * 128, "parameters": SCHEMA}
    namespace = {"type": "namespace", "name": "n" * 128, "tools": [tool]}
    fields = {"tools": [namespace], "tool_choice": "required", "max_output_tokens": 512}
    response = send_request(server, RESPONSES, input=[USER], **fields)
    assert response.status_code == 200, response.text
    call = response.json()["output"][0]
    assert (call["name"], call["namespace"]) == ("f" * 128, "n" * 128)


def test_anthropics_older_field_holds_the_form_of_the_answer(server: LiveServer) -> None:
    form = {"type": "json_schema", "schema": {"const": "a"}}
    fields = {"messages": [USER], "output_format": form, "max_tokens": 20}
    response = send_request(server, MESSAGES, **fields)
    assert response.json()["content"] == [{"type": "text", "text": '"a"'}]
    wrong = form | {"schema": {"type": "string", "pattern": "("}}
    response = send_request(server, MESSAGES, **fields | {"output_format": wrong})
    assert response.status_code == 400
    assert "output_format.schema" in response.json()["error"]["message"]
