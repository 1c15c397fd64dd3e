"""Tools in chat requests, as clients see them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.refusals import refused
from support.servers import events, live_server
from support.tiny import Tiny
from twostroke.server.protocols.common.tools import MAX_TOOLS, FunctionBody, to_tools

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer

Fields = dict[str, Any]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "description": "The time."}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server whose model has more context, since descriptions of tools are long."""
    with live_server(tmp_path_factory.mktemp("tools"), tiny=Tiny(context_length=2048)) as live:
        yield live


CALLED = [
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }
]


def answer_of(server: LiveServer, **fields: object) -> Fields:
    all_fields: Fields = {"max_tokens": 150, "temperature": 1.0, "seed": 1, "tools": TOOLS} | fields
    response = server.chat(**all_fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_a_forced_call_fits_its_schema(server: LiveServer) -> None:
    for seed in range(5):
        answer = answer_of(server, tool_choice=NAMED, seed=seed)
        assert answer["finish_reason"] == "tool_calls"
        assert answer["message"]["content"] is None
        [call] = answer["message"]["tool_calls"]
        assert call["type"] == "function"
        assert call["id"].startswith("call_")
        assert "index" not in call
        assert call["function"]["name"] == "weather"
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["city"] in {"Paris", "Rome"}
        assert arguments["days"] in {1, 2}


@pytest.mark.parametrize(
    "none", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}], ids=str
)
def test_a_function_is_called_with_arguments_that_it_names(
    server: LiveServer, none: Fields | None
) -> None:
    """JSON Schema would allow any other arguments, and the function would fail on them."""
    tools = [{"type": "function", "function": {"name": "now", "parameters": none}}]
    for seed in range(3):
        answer = answer_of(server, tools=tools, tool_choice="required", seed=seed, temperature=2.0)
        for call in answer["message"]["tool_calls"]:
            assert json.loads(call["function"]["arguments"]) == {}


@pytest.mark.parametrize(
    "keywords",
    [
        {"additionalProperties": True},
        {"patternProperties": {"^x": {}}},
        {"minProperties": 2},
        {"allOf": [{"properties": {"b": {}}}]},
        {"required": ["b"]},
        {"required": [{}]},
        {"required": 3},
    ],
    ids=str,
)
def test_schemas_that_speak_of_other_arguments_stay_as_they_are(keywords: Fields) -> None:
    schema: Fields = {"type": "object", "properties": {"a": {}}}
    parameters = schema | keywords
    tools = to_tools([FunctionBody(name="f", parameters=parameters)], "auto", parallel=None)
    assert tools is not None
    assert "additionalProperties" not in (set(tools.functions[0].schema) - set(parameters))


def test_required_calls_some_function(server: LiveServer) -> None:
    calls = [
        answer_of(server, tool_choice="required", seed=seed, parallel_tool_calls=False, tools=some)
        for seed in range(3)
        for some in (TOOLS, TOOLS[:1])
    ]
    for answer in calls:
        if answer["finish_reason"] == "length":
            continue
        [call] = answer["message"]["tool_calls"]
        assert call["function"]["name"] in {"weather", "time"}
    assert any(answer["finish_reason"] == "tool_calls" for answer in calls)


def test_a_streamed_call_comes_in_pieces(server: LiveServer) -> None:
    fields: Fields = {"tool_choice": NAMED, "max_tokens": 150, "seed": 1, "tools": TOOLS}
    whole_call = server.chat(**fields).json()["choices"][0]["message"]["tool_calls"][0]["function"]
    chunks = events(server.chat(stream=True, **fields).text)[:-1]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": None, "refusal": None}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert deltas[-1] == {}
    [first, *later_parts] = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert first["id"].startswith("call_")
    assert (first["index"], first["type"]) == (0, "function")
    assert first["function"] == {"arguments": "", "name": "weather"}
    assert all(set(call) == {"function", "index"} for call in later_parts)
    assert all(set(call["function"]) == {"arguments"} for call in later_parts)
    assert "".join(call["function"]["arguments"] for call in later_parts) == whole_call["arguments"]


def test_a_call_that_is_cut_ends_by_its_length(server: LiveServer) -> None:
    answer = answer_of(server, tool_choice=NAMED, max_tokens=40)
    assert answer["finish_reason"] == "length"


def test_text_stays_text_where_nothing_must_be_called(server: LiveServer, hello: Fields) -> None:
    for choice in ("auto", "none", None):
        fields = {"tool_choice": choice} if choice else {}
        answer = answer_of(server, max_tokens=3, **hello, **fields)
        assert answer["message"]["content"] == "hellohellohello"
        assert "tool_calls" not in answer["message"]
        assert answer["finish_reason"] == "length"


def test_calls_and_results_can_be_sent_back(server: LiveServer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call | {"id": "call_2"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
    ]
    with_tools = server.chat(messages=messages, max_tokens=2, tools=TOOLS).json()["usage"]
    without = server.chat(messages=messages, max_tokens=2).json()["usage"]
    assert with_tools["prompt_tokens"] > without["prompt_tokens"] + 100  # these describe the tools


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name", "must be unique"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "letters",
        ),
        ({"tools": TOOLS * (MAX_TOOLS // 2 + 1)}, "tools", "at most 128"),
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice", "perhaps"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
            "'x'",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tools": [], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "needs tools",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]},
            "messages[0].tool_call_id",
            "role tool",
        ),
        (
            {"messages": [*CALLED, {"role": "tool", "content": "a", "tool_call_id": "c2"}]},
            "messages[1].tool_call_id",
            "must be the id of an earlier call",
        ),
        (
            {"messages": [{"role": "tool", "content": "a", "tool_call_id": "c1"}, *CALLED]},
            "messages[0].tool_call_id",
            "must be the id of an earlier call",
        ),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            "messages[0]",
            "no earlier message calls a tool",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0].function",
            "missing",
        ),
    ],
)
def test_invalid_requests_are_refused(
    server: LiveServer, fields: Fields, param: str, word: str
) -> None:
    assert word in refused(server.chat(**fields), 400, param)


@pytest.mark.parametrize("id_", ["c1", None])
def test_a_result_answers_a_call_by_its_id_or_without_ids(
    server: LiveServer, id_: str | None
) -> None:
    result = {"role": "tool", "content": "noon"} | ({"tool_call_id": id_} if id_ else {})
    next_message = {"role": "user", "content": "And now?"}
    assert server.chat(messages=[*CALLED, next_message, result], max_tokens=1).status_code == 200


@pytest.mark.parametrize("num_tokens", [1, 3, 12])
def test_the_beginning_of_a_forced_call_is_no_text(server: LiveServer, num_tokens: int) -> None:
    fields: Fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": num_tokens}
    choice = server.chat(**fields).json()["choices"][0]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "length"
    text = server.chat(**fields, stream=True).text
    assert '"content":"' not in text


def test_a_strict_function_needs_an_enforceable_schema(server: LiveServer) -> None:
    for parameters, why in (
        ({"type": "string"}, "its type must be object."),
        ({"type": "object", "not": {}}, "no value fits it: type (#), not (#) exclude every value."),
    ):
        function = {"name": "f", "strict": True, "parameters": parameters}
        tools = [{"type": "function", "function": function}]
        output = refused(server.chat(tools=tools), 400, "tools[0].function.parameters")
        assert output.endswith(why)
        assert not output.endswith("..")
    many = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}  # checked after
    strict_function = {"name": "f", "strict": True, "parameters": {"properties": {"a": many}}}
    tools = [{"type": "function", "function": strict_function}]
    assert server.chat(tools=tools, max_tokens=4).status_code == 200


def test_a_schema_of_no_object_frees_the_arguments_unless_strict() -> None:
    parameters = {"type": "array", "items": {}}
    function = {"name": "f", "parameters": parameters}
    bodies = [FunctionBody(**function)]
    tools = to_tools(bodies, "auto", parallel=None)
    assert tools is not None
    assert [function.schema for function in tools.functions] == [{"type": "object"}]
    assert tools.prompt_tools[0]["function"]["parameters"] == parameters


ELSEWHERE = {"type": "object", "properties": {"a": {"$ref": "https://example.com/a"}}}
ODD_TYPE = {"type": "object", "properties": {"a": {"type": "strnig"}}}
NO_SCHEMA = {"type": "object", "properties": {"a": "text"}}


@pytest.mark.parametrize("schema", [ELSEWHERE, ODD_TYPE, NO_SCHEMA])
def test_a_schema_that_the_grammar_refuses_frees_its_function_and_no_other(
    server: LiveServer, schema: Fields
) -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": schema}}
    tools = [odd, *TOOLS]
    for choice in ("auto", "required", "auto"):  # the second time it is known
        answer_of(server, tools=tools, tool_choice=choice, max_tokens=1)
    answer = answer_of(server, tools=tools, tool_choice=NAMED)
    arguments = json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"])
    assert arguments["days"] in {1, 2}
    odd_one = {"type": "function", "function": {"name": "odd"}}
    answer = answer_of(server, tools=tools, tool_choice=odd_one, max_tokens=60)
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "odd"


@pytest.mark.parametrize(
    ("schema", "word"),
    [(ELSEWHERE, "names nothing"), (ODD_TYPE, "strnig"), (NO_SCHEMA, "must be a schema")],
)
def test_a_strict_function_whose_schema_the_grammar_refuses_is_named(
    server: LiveServer, schema: Fields, word: str
) -> None:
    function = {"name": "odd", "parameters": schema, "strict": True}
    tools = [*TOOLS, {"type": "function", "function": function}]
    for _ in range(2):
        message = refused(server.chat(tools=tools), 400, "tools[2].function.parameters")
        assert "tools[2].function.parameters of the function 'odd'" in message
        assert word in message
    tool = {"name": "odd", "input_schema": schema, "strict": True}
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "tools": [tool]}
    response = server.http.post("/v1/messages", json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("tools[0].input_schema of the function 'odd'")


def test_a_call_that_a_stop_string_cut_is_not_to_be_made(server: LiveServer) -> None:
    fields: Fields = {"tool_choice": NAMED, "stop": ['"days"']}
    answer = answer_of(server, **fields)
    assert answer["finish_reason"] == "stop"
    [call] = answer["message"]["tool_calls"]
    assert '"days"' not in call["function"]["arguments"]
    chunks = events(server.chat(stream=True, tools=TOOLS, seed=1, **fields).text)[:-1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    answer = answer_of(server, tool_choice=NAMED, stop=["</tool_call>"])
    assert answer["finish_reason"] == "tool_calls"  # nothing of the call is missing
