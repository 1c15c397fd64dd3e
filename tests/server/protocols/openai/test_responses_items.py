"""Items of the Responses API: conversations, tool calls, and stored responses."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.engines import tiny_client
from support.servers import live_server
from support.tiny import Tiny
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.middleware import create_app
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import LiveServer

Fields = dict[str, Any]

PATH = "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "weather", "description": "It.", "parameters": SCHEMA}
CLOCK = {"type": "function", "name": "clock", "parameters": SCHEMA, "strict": True}
CALL = {
    "type": "function_call",
    "call_id": "call_1",
    "name": "weather",
    "arguments": '{"city": "Oslo"}',
}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
HELLO = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server whose model has more context, since descriptions of tools are long."""
    with live_server(tmp_path_factory.mktemp("items"), tiny=Tiny(context_length=2048)) as live:
        yield live


def send_request(server: LiveServer, **fields: Any) -> httpx.Response:
    body = {"input": "hello", "max_output_tokens": 4, "temperature": 0, **fields}
    return server.http.post(PATH, json=body)


def answer(server: LiveServer, **fields: Any) -> Fields:
    response = send_request(server, **fields)
    assert response.status_code == 200, response.text
    body: Fields = response.json()
    return body


def stream(server: LiveServer, **fields: Any) -> list[Fields]:
    lines = send_request(server, stream=True, **fields).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def text_of(body: Fields) -> str:
    (item,) = body["output"]
    text: str = item["content"][0]["text"]
    return text


def same_as_chat(server: LiveServer, messages: list[Fields], **fields: Any) -> Fields:
    """Check that a response equals the chat protocol's answer to `messages`, and return it."""
    tools = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in fields.get("tools", ())
    ]
    chat = server.chat(messages=messages, tools=tools, max_tokens=4, temperature=0).json()
    body = answer(server, **fields)
    assert body["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert text_of(body) == chat["choices"][0]["message"]["content"]
    return body


def test_instructions_and_items_reach_the_template(server: LiveServer) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "the "}, _text("world")]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
        {"type": "message", "role": "user", "content": "c"},
    ]
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "the world"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    same_as_chat(server, messages, instructions="a", input=items)
    same_as_chat(server, messages, input=[{"role": "developer", "content": "a"}, *items])
    messages.insert(1, {"role": "system", "content": "z"})
    input_items = [{"role": "system", "content": "z"}, *items]
    same_as_chat(server, messages, instructions="a", input=input_items)


def test_calls_results_and_thoughts_reach_the_template(server: LiveServer) -> None:
    second = {"call_id": "call_2", "output": [_text("1"), _text("2")]}
    items = [
        HELLO,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"role": "assistant", "content": "so "},
        CALL | {"id": "fc_1", "status": "completed"},
        CALL | {"call_id": "call_2"},
        RESULT,
        RESULT | second,
    ]
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    calls = [{"id": f"call_{n}", "type": "function", "function": function} for n in (1, 2)]
    messages = [
        HELLO,
        {"role": "assistant", "content": "so ", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": "12"},
    ]
    same_as_chat(server, messages, input=items, tools=[WEATHER])
    items[2], items[3] = items[3], items[2]  # a text behind a call begins another message
    first: Fields = {"role": "assistant", "content": "", "tool_calls": calls[:1]}
    messages[1:2] = [first, messages[1] | {"tool_calls": calls[1:]}]
    same_as_chat(server, messages, input=items, tools=[WEATHER])


def test_a_conversation_goes_on_from_a_response(server: LiveServer) -> None:
    first = answer(server, instructions="a")
    messages = [HELLO, {"role": "assistant", "content": text_of(first)}]
    second_turn = [{"role": "user", "content": "again"}]
    second = same_as_chat(
        server, [*messages, *second_turn], input="again", previous_response_id=first["id"]
    )  # instructions are each response's own
    assert second["previous_response_id"] == first["id"]
    messages += [*second_turn, {"role": "assistant", "content": text_of(second)}]
    third = [{"role": "system", "content": "b"}, *messages, {"role": "user", "content": "c"}]
    events = stream(server, instructions="b", input="c", previous_response_id=second["id"])
    chat = server.chat(messages=third, max_tokens=4, temperature=0).json()
    assert text_of(events[-1]["response"]) == chat["choices"][0]["message"]["content"]
    assert server.http.delete(f"{PATH}/{first['id']}").json()["deleted"]
    same_as_chat(server, third, instructions="b", input="c", previous_response_id=second["id"])


def test_a_streamed_response_is_stored_as_it_was_sent(server: LiveServer) -> None:
    last = stream(server)[-1]["response"]
    assert server.http.get(f"{PATH}/{last['id']}").json() == last
    whole_response = answer(server)
    response = server.http.get(
        f"{PATH}/{whole_response['id']}", params={"include[]": "reasoning.encrypted_content"}
    )
    assert response.json() == whole_response


def test_items_are_referred_to_by_their_ids(server: LiveServer) -> None:
    first = answer(server)
    ids = [_items(server, first["id"])[0]["id"], first["output"][0]["id"]]
    references = [{"type": "item_reference", "id": ids[0]}, {"id": ids[1]}]
    messages = [HELLO, {"role": "assistant", "content": text_of(first)}, HELLO]
    second = same_as_chat(server, messages, input=[*references, HELLO])
    listed = _items(server, second["id"], order="asc")
    assert [item["id"] for item in listed[:2]] == ids
    unknown = send_request(server, input=[{"id": "msg_0"}])
    assert unknown.status_code == 400
    assert "no items that are known here" in unknown.json()["error"]["message"]


def test_input_items_are_listed_in_pages(server: LiveServer) -> None:
    first = answer(server, input=[HELLO, {"role": "assistant", "content": "x"}, HELLO])
    second = answer(server, input="more", previous_response_id=first["id"])
    path = f"{PATH}/{second['id']}/input_items"
    item_list = server.http.get(path, params={"order": "asc"}).json()
    messages = [(item["role"], item["content"][0]["text"]) for item in item_list["data"]]
    expected = [("user", "hello"), ("assistant", "x"), ("user", "hello")]
    assert messages == [*expected, ("assistant", text_of(first)), ("user", "more")]
    assert item_list["object"] == "list"
    assert not item_list["has_more"]
    ids = [item["id"] for item in item_list["data"]]
    assert (item_list["first_id"], item_list["last_id"]) == (ids[0], ids[-1])
    result: list[str] = []
    page = {"has_more": True}
    while page["has_more"]:
        body = {"limit": 2} | ({"after": result[-1]} if result else {})
        page = server.http.get(path, params=body).json()
        result += [item["id"] for item in page["data"]]
    assert result == ids[::-1]
    kinds = [item["content"][0]["type"] for item in item_list["data"]]
    assert kinds == ["input_text", "output_text", "input_text", "output_text", "input_text"]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/input_items?limit=0", "limit must be from 1 to 100."),
        ("/input_items?limit=101", "limit must be from 1 to 100."),
        ("/input_items?order=up", "order must be asc or desc."),
        ("/input_items?after=msg_0", "must be the id of an item of this list, got 'msg_0'."),
        ("/input_items?ater=x", "Did you mean 'after'?"),
        ("?include[]=all", "does not support 'all'"),
    ],
)
def test_wrong_questions_about_a_response_are_refused(
    server: LiveServer, path: str, sentence: str
) -> None:
    id_ = answer(server)["id"]
    response = server.http.get(f"{PATH}/{id_}{path}")
    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]


def test_neutral_queries_about_a_response_are_accepted(server: LiveServer) -> None:
    id_ = answer(server)["id"]
    response = server.http.get(f"{PATH}/{id_}?stream=false&include_obfuscation=true")
    assert response.json()["id"] == id_


def test_a_response_that_is_not_stored_is_not_found(server: LiveServer) -> None:
    deleted_id = answer(server)["id"]
    deleted = server.http.delete(f"{PATH}/{deleted_id}").json()
    assert deleted == {"id": deleted_id, "object": "response", "deleted": True}
    for id_ in (
        deleted_id,
        "resp_0",
        answer(server, store=False)["id"],
        stream(server, store=False)[0],
    ):
        name = id_ if isinstance(id_, str) else id_["response"]["id"]
        responses = [server.http.get(f"{PATH}/{name}{suffix}") for suffix in ("", "/input_items")]
        responses += [
            server.http.delete(f"{PATH}/{name}"),
            server.http.post(f"{PATH}/{name}/cancel"),
        ]
        for response in responses:
            assert response.status_code == 404
            message = f"Response with id '{name}' not found."
            assert response.json()["error"]["message"] == message
        follower = send_request(server, previous_response_id=name)
        assert follower.status_code == 400
        assert follower.json()["error"] == {
            "message": f"Previous response with id '{name}' not found.",
            "type": "invalid_request_error",
            "param": "previous_response_id",
            "code": "previous_response_not_found",
        }


def test_a_wrong_method_gets_the_allowed_methods(server: LiveServer) -> None:
    response = server.http.put(f"{PATH}/resp_1")
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == {"DELETE", "GET", "HEAD"}


@pytest.mark.parametrize("is_small", [False, True])
def test_the_oldest_responses_leave(tmp_path: Path, is_small: bool) -> None:
    size = {"max_stored_bytes": 7000} if is_small else {"max_stored": 2}
    with live_server(tmp_path, ServeOptions(drain_s=1, **size)) as server:
        ids = [answer(server)["id"] for _ in range(4)]
        results = [server.http.get(f"{PATH}/{id_}").status_code for id_ in ids]
        assert results == [404, 404, 200, 200]


def test_a_server_that_keeps_nothing_says_so(tmp_path: Path) -> None:
    with live_server(tmp_path, ServeOptions(drain_s=1, max_stored=0)) as server:
        body = answer(server, store=True)
        assert body["store"] is False
        assert send_request(server, previous_response_id=body["id"]).status_code == 400


def test_tenants_do_not_see_each_other_s_responses(tmp_path: Path) -> None:
    async def run() -> None:
        with tiny_client(tmp_path) as (client, _):
            options = ServeOptions(api_keys=ApiKeys({"me": "me", "other": "other"}))
            transport = httpx.ASGITransport(create_app(client, options))
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
                mine, other = {"x-api-key": "me"}, {"x-api-key": "other"}
                payload: Fields = {"input": "hello " * 20, "max_output_tokens": 2}
                body = (await http.post(PATH, json=payload, headers=mine)).json()
                path, next_payload = (
                    f"{PATH}/{body['id']}",
                    payload | {"previous_response_id": body["id"]},
                )
                item = payload | {"input": [{"id": body["output"][0]["id"]}, HELLO]}
                assert (await http.get(path, headers=other)).status_code == 404
                assert (await http.delete(path, headers=other)).status_code == 404
                assert (await http.post(PATH, json=next_payload, headers=other)).status_code == 400
                left_out = await http.post(PATH, json=item, headers=other)
                assert left_out.headers["twostroke-ignored"] == "input[].item_reference"
                for field in (next_payload, item):
                    response = await http.post(PATH, json=field, headers=mine)
                    assert response.status_code == 200
                    assert "twostroke-ignored" not in response.headers
                for key_headers, is_cached in ((other, False), (mine, True)):
                    usage = (await http.post(PATH, json=payload, headers=key_headers)).json()[
                        "usage"
                    ]
                    assert bool(usage["input_tokens_details"]["cached_tokens"]) is is_cached

    asyncio.run(run())


def test_the_oldest_exchanges_leave_a_prompt_that_is_too_long(strict: LiveServer) -> None:
    server, talk = strict, list[Fields]()
    for number in range(6):
        talk += [{"role": "user", "content": f"{number} the world"}, CALL, RESULT]
        talk += [{"role": "assistant", "content": "is in the world"}]
    fields: Fields = {"instructions": "a", "input": [*talk, HELLO], "max_output_tokens": 40}
    refused = send_request(server, **fields)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    newest = answer(server, truncation="auto", **fields)["usage"]["input_tokens"]
    assert newest <= 512 - 40
    cuts = [
        send_request(server, **fields | {"input": [*talk[start:], HELLO]}).json()
        for start in range(0, len(talk) + 1, 4)
    ]
    fitting = [cut["usage"]["input_tokens"] for cut in cuts if "usage" in cut]
    assert 2 < len(fitting) < len(cuts)
    assert newest == max(fitting)
    short = answer(server, truncation="auto", input="hello")["usage"]["input_tokens"]
    assert short == answer(server, input="hello")["usage"]["input_tokens"]
    too_long = send_request(server, truncation="auto", input="the world" * 500)
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


def _text(text: str) -> Fields:
    return {"type": "input_text", "text": text}


def _items(server: LiveServer, id_: str, **params: str) -> list[Fields]:
    listed: list[Fields] = server.http.get(f"{PATH}/{id_}/input_items", params=params).json()[
        "data"
    ]
    return listed
