"""Items of other servers in a history are left out and reported, and the conversation continues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.refusals import refused

if TYPE_CHECKING:
    from support.servers import LiveServer

Fields = dict[str, Any]

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hello"}
FUNCTION: Fields = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOL: Fields = {"type": "function", "function": FUNCTION}
TOOL: Fields = {"type": "function", **FUNCTION}
ANTHROPIC_TOOL: Fields = {"name": "f", "input_schema": {"type": "object"}}
TEXT = {"type": "text", "text": "said"}
SERVER_TOOLS = ("web_search", "mcp", "local_shell", "tool_search", "code_interpreter", "new_one")
ITEMS = (
    *("tool_search_call", "web_search_call", "local_shell_call", "local_shell_call_output"),
    *("file_search_call", "computer_call", "computer_call_output", "code_interpreter_call"),
    *("image_generation_call", "mcp_list_tools", "mcp_call", "mcp_approval_request"),
    *("apply_patch_call", "shell_call", "compaction_trigger", "agent_message", "new_one"),
)
BLOCKS = (
    *("server_tool_use", "web_search_tool_result", "mcp_tool_use", "mcp_tool_result"),
    *("container_upload", "code_execution_tool_result", "tool_reference", "new_one"),
)
LIMITS = {
    RESPONSES: {"max_output_tokens": 2},
    "/api/chat": {"stream": False},
    "/apply-template": {},
}


def send_request(server: LiveServer, path: str, **fields: Any) -> Any:
    return server.http.post(path, json=LIMITS.get(path, {"max_tokens": 2}) | fields)


def num_prompt_tokens(server: LiveServer, path: str, **fields: Any) -> int:
    if path == MESSAGES:
        response = server.http.post(f"{MESSAGES}/count_tokens", json=fields)
        return int(response.json()["input_tokens"])
    usage = send_request(server, path, **fields).json()["usage"]
    return int(usage.get("prompt_tokens") or usage["input_tokens"])


def ignored(response: Any) -> set[str]:
    assert response.status_code == 200, response.text
    return set(response.headers.get("twostroke-ignored", "").split(", ")) - {""}


@pytest.mark.parametrize("kind", ITEMS)
def test_items_of_other_servers_are_left_out_and_named(server: LiveServer, kind: str) -> None:
    item = {"type": kind, "id": "x_1", "status": "completed", "action": {"query": "q"}}
    assert ignored(send_request(server, RESPONSES, input=[USER, item])) == {f"input[].{kind}"}
    with_item = num_prompt_tokens(server, RESPONSES, input=[item, USER, item])
    assert with_item == num_prompt_tokens(server, RESPONSES, input=[USER])


def test_results_of_calls_that_were_left_out_are_left_out(server: LiveServer) -> None:
    call = {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}}
    result = {"type": "function_call_output", "call_id": "c", "output": "a"}
    names = ignored(send_request(server, RESPONSES, input=[call, result, USER]))
    assert names == {"input[].local_shell_call", "input[].function_call_output"}
    other = result | {"call_id": "other"}
    refused(send_request(server, RESPONSES, input=[call, other, USER]), 400, "input[0].call_id")


@pytest.mark.parametrize("path", [RESPONSES, f"{RESPONSES}/input_tokens", "/v1/conversations"])
@pytest.mark.parametrize("value", [["x"], {"a": 1}, 5, True])
def test_items_whose_type_or_call_is_not_a_text_are_refused(
    server: LiveServer, path: str, value: Any
) -> None:
    name = "items" if path == "/v1/conversations" else "input"
    result = {"type": "function_call_output", "call_id": value, "output": "a"}
    for items, param in (
        ([USER, {"type": value}], f"{name}[1].type"),
        ([{"type": "new_one", "call_id": "a"}, USER, result], ".call_id"),
    ):
        response = server.http.post(path, json={name: items})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].endswith(param)
    unknown = {"type": "new_one", "call_id": value}
    response = server.http.post(path, json={name: [unknown, USER]})
    assert response.status_code == 200, response.text


def test_references_to_unknown_items_are_left_out(server: LiveServer) -> None:
    items = [
        {"type": "item_reference", "id": "msg_none"},
        {"id": "rs_none"},
        {"type": "function_call_output", "call_id": "none", "output": "x"},
        USER,
    ]
    names = ignored(send_request(server, RESPONSES, input=items))
    assert names == {"input[].item_reference", "input[].function_call_output"}


def test_a_compaction_of_another_server_is_left_out(server: LiveServer) -> None:
    item = {"type": "compaction", "encrypted_content": "gAAAA"}
    assert ignored(send_request(server, RESPONSES, input=[item, USER])) == {"input[].compaction"}


def test_only_unknown_items_are_no_conversation(server: LiveServer) -> None:
    output = refused(
        send_request(server, RESPONSES, input=[{"type": "web_search_call"}]), 400, "input"
    )
    assert "no items that are known here" in output


@pytest.mark.parametrize("kind", ["additional_tools", "tool_search_output"])
def test_tools_of_items_join_the_requests(server: LiveServer, kind: str) -> None:
    other = TOOL | {"name": "g"}
    item = {"type": kind, "role": "developer", "tools": [TOOL, other, {"type": "web_search"}]}
    fields: Fields = {"input": [item, USER], "tool_choice": {"type": "function", "name": "f"}}
    response = send_request(server, RESPONSES, **fields, max_output_tokens=64)
    assert "input[].tools[].web_search" in ignored(response)
    assert response.json()["output"][0]["name"] == "f"
    with_item = num_prompt_tokens(server, RESPONSES, input=[item, USER], tools=[TOOL])
    assert with_item == num_prompt_tokens(server, RESPONSES, input=[USER], tools=[TOOL, other])
    first = send_request(server, RESPONSES, input=[item, USER]).json()
    continued = send_request(server, RESPONSES, input=[USER], previous_response_id=first["id"])
    assert [tool["name"] for tool in continued.json()["tools"]] == ["f", "g"]


@pytest.mark.parametrize(
    ("path", "messages", "same"),
    [
        (CHAT, [{"role": "assistant", "content": None, "refusal": "said"}], ["said"]),
        (CHAT, [{"role": "assistant", "refusal": "said"}], ["said"]),
        (
            CHAT,
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "said"}]}],
            ["said"],
        ),
        (CHAT, [{"role": "assistant", "content": None}], [""]),
        (CHAT, [{"role": "assistant", "content": [{"type": "thinking"}, TEXT]}], ["said"]),
        (
            CHAT,
            [{"role": "assistant", "content": [{"type": "output_text", "text": "said"}]}],
            ["said"],
        ),
        (
            MESSAGES,
            [
                {
                    "role": "assistant",
                    "content": [*({"type": kind, "id": "x"} for kind in BLOCKS), TEXT],
                }
            ],
            ["said"],
        ),
    ],
)
def test_refusals_are_text_and_unknown_parts_are_left_out(
    server: LiveServer, path: str, messages: list[Fields], same: list[str]
) -> None:
    plain = [{"role": "assistant", "content": text} for text in same]
    with_parts = num_prompt_tokens(server, path, messages=[USER, *messages, USER])
    assert with_parts == num_prompt_tokens(server, CHAT, messages=[USER, *plain, USER])


def test_unknown_blocks_are_named(server: LiveServer) -> None:
    blocks = [TEXT, *({"type": kind, "tool_use_id": "x"} for kind in BLOCKS)]
    response = send_request(server, MESSAGES, messages=[{"role": "user", "content": blocks}])
    assert ignored(response) == {f"messages[].content[].{kind}" for kind in BLOCKS}


def test_documents_and_search_results_of_text_are_text(server: LiveServer) -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "D"}}
    in_blocks = {"type": "document", "source": {"type": "content", "content": [TEXT]}}
    results = {"type": "search_result", "source": "S", "title": "T", "content": [TEXT]}
    blocks = [document, in_blocks, results]
    text = "T\nD\nsaid\nT\nS\nsaid"
    expected = num_prompt_tokens(server, CHAT, messages=[{"role": "user", "content": text}])
    messages = [{"role": "user", "content": blocks}]
    assert num_prompt_tokens(server, MESSAGES, messages=messages) == expected


@pytest.mark.parametrize("kind", SERVER_TOOLS)
def test_tools_that_cannot_run_here_are_left_out_and_named(server: LiveServer, kind: str) -> None:
    tool = {"type": kind, "name": "other"}
    requests: dict[str, Fields] = {
        CHAT: {"messages": [USER], "tools": [tool, CHAT_TOOL]},
        RESPONSES: {"input": [USER], "tools": [tool, TOOL]},
        MESSAGES: {"messages": [USER], "tools": [tool, ANTHROPIC_TOOL]},
        "/api/chat": {"model": "tiny", "messages": [USER], "tools": [tool, CHAT_TOOL]},
        "/apply-template": {"messages": [USER], "tools": [tool, CHAT_TOOL]},
    }
    for path, fields in requests.items():
        assert ignored(send_request(server, path, **fields)) == {f"tools[].{kind}"}, path


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (
            CHAT,
            {"tools": [CHAT_TOOL], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
        ),
        (RESPONSES, {"tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice"),
        (RESPONSES, {"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ],
)
def test_a_tool_that_is_forced_and_cannot_run_is_refused(
    server: LiveServer, path: str, fields: Fields, param: str
) -> None:
    conversation: Fields = {"input": [USER]} if path == RESPONSES else {"messages": [USER]}
    refused(send_request(server, path, **conversation, **fields), 400, param)


def test_anthropics_tools_that_are_forced_are_refused(server: LiveServer) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    for choice in ({"type": "any"}, {"type": "tool", "name": "web_search"}):
        fields = {"messages": [USER], "tools": [search], "tool_choice": choice}
        response = send_request(server, MESSAGES, **fields)
        assert response.status_code == 400
        assert "tool_choice" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (CHAT, {"type": "image_url", "image_url": {"url": "data:,"}}),
        (CHAT, {"type": "input_audio", "input_audio": {"data": ""}}),
        (CHAT, {"type": "video_url", "video_url": {"url": "data:,"}}),
        (RESPONSES, {"type": "input_image", "image_url": "data:,"}),
        (MESSAGES, {"type": "image", "source": {"type": "url", "url": "x"}}),
        (MESSAGES, {"type": "document", "source": {"type": "url", "url": "x"}}),
        (MESSAGES, {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}),
    ],
)
def test_pictures_sound_and_files_are_refused(server: LiveServer, path: str, part: Fields) -> None:
    messages = [{"role": "user", "content": [part]}]
    name = "input" if path == RESPONSES else "messages"
    response = send_request(server, path, **{name: messages})
    assert response.status_code == 400
    assert "Models here read text only." in response.json()["error"]["message"]


def test_a_strict_server_refuses_items_that_others_leave_out(strict: LiveServer) -> None:
    item = {"type": "web_search_call", "id": "x"}
    refused(send_request(strict, RESPONSES, input=[USER, item]), 400, "input[1].type")
    tools = [CHAT_TOOL, {"type": "web_search"}]
    refused(send_request(strict, CHAT, messages=[USER], tools=tools), 400, "tools[1].type")


def test_many_unknown_items_take_little_time_and_a_short_header(server: LiveServer) -> None:
    items = [{"type": f"kind_{number}"} for number in range(9_000)]
    response = send_request(server, RESPONSES, input=[*items, USER])
    assert len(response.headers["twostroke-ignored"]) < 4_000


def test_calls_of_other_servers_tools_are_left_out_with_their_results(server: LiveServer) -> None:
    call = {"id": "c1", "type": "web_search", "web_search": {"query": "q"}}
    function_call = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    results = [{"role": "tool", "tool_call_id": id_, "content": "found"} for id_ in ("c1", "c2")]
    messages = [USER, {"role": "assistant", "tool_calls": [call, function_call]}, *results, USER]
    plain = [USER, {"role": "assistant", "tool_calls": [function_call]}, results[1], USER]
    response = send_request(server, CHAT, messages=messages)
    assert ignored(response) == {"messages[].tool_calls[].web_search"}
    expected = num_prompt_tokens(server, CHAT, messages=plain)
    assert response.json()["usage"]["prompt_tokens"] == expected
    only = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, results[0], USER]
    assert ignored(send_request(server, CHAT, messages=only)) == {
        "messages[].tool_calls[].web_search"
    }


def test_functions_of_older_clients_are_tools(server: LiveServer) -> None:
    function = {"name": "f", "arguments": "{}"}
    older = [
        USER,
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "f", "content": "found"},
    ]
    newer = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
        {"role": "tool", "name": "f", "content": "found"},
    ]
    expected = num_prompt_tokens(server, CHAT, messages=newer)
    assert num_prompt_tokens(server, CHAT, messages=older) == expected
