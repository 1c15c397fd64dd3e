"""Stored responses of the Responses API, how references find their items, and their limits."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import live_server
from support.waiting import wait_for
from twostroke.core.errors import RequestError
from twostroke.core.json_io import encode_json
from twostroke.server.generation import response_store as store_module
from twostroke.server.generation.response_store import ResponseStore, StoredResponse, Tenant
from twostroke.server.options import ServeOptions
from twostroke.server.protocols.responses import recall, routes
from twostroke.server.protocols.responses.exchange import read
from twostroke.server.protocols.responses.request import ResponsesRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import httpx

    from support.servers import LiveServer
    from twostroke.server.protocols.responses.recall import RawItem

Fields = dict[str, Any]

PATH = "/v1/responses"
HELLO = {"role": "user", "content": "hello"}


def send_request(server: LiveServer, **fields: Any) -> httpx.Response:
    body = {"input": "hello", "max_output_tokens": 4, "temperature": 0, **fields}
    return server.http.post(PATH, json=body)


def tenant_with(items: list[RawItem]) -> Tenant:
    """Return a tenant that has these items in one stored response."""
    tenant = Tenant("", ResponseStore(10, 10**8))
    ids = tuple(item["id"] for item in items)
    assert tenant.put(StoredResponse("resp_1", encode_json(items), b'{"output": []}', ids))
    return tenant


def messages(input_items: list[Fields], tenant: Tenant | None = None) -> list[Fields]:
    """Return the messages that the chat template gets for a request with these items."""
    job = read(ResponsesRequest(input=input_items), tenant or Tenant("", ResponseStore(10, 10**6)))
    return list(job.prompts[0].messages)  # type: ignore[union-attr]


def counting_items_of(calls: list[str]) -> Callable[[StoredResponse], list[RawItem]]:
    """Return a reader of stored responses that notes in `calls` which thread reads."""

    def items_of(response: StoredResponse) -> list[RawItem]:
        calls.append(threading.current_thread().name)
        return original(response)

    original = recall.items_of
    return items_of


def test_an_answer_is_read_once_for_all_references_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = tenant_with([_message_item(f"msg_{n}", str(n)) for n in range(100)])
    calls: list[str] = []
    monkeypatch.setattr(recall, "items_of", counting_items_of(calls))
    input_items = [{"type": "item_reference", "id": f"msg_{n % 100}"} for n in range(200)]
    assert [message["content"] for message in messages(input_items, tenant)] == [
        str(n % 100) for n in range(200)
    ]
    assert len(calls) == 1


def test_references_are_bounded() -> None:
    tenant = tenant_with([_message_item("msg_1", "x"), _message_item("msg_2", "x" * 2_000_000)])
    assert len(messages([{"id": "msg_1"}] * recall.MAX_REFERENCES, tenant)) == 1024
    with pytest.raises(RequestError, match="input takes at most 1024 items of type item_reference"):
        messages([{"id": "msg_1"}] * (recall.MAX_REFERENCES + 1), tenant)
    assert len(messages([{"id": "msg_2"}] * 4, tenant)) == 4
    with pytest.raises(RequestError, match="refers to items of more than 8388608 bytes together"):
        messages([{"id": "msg_2"}] * 5, tenant)


def test_thoughts_of_a_turn_are_all_shown() -> None:
    input_items = [HELLO, _thought("T1"), _call(1), _thought("T2"), _call(2)]
    turn = messages(input_items)[1]
    assert turn["reasoning_content"] == "T1\n\nT2"
    assert [call["id"] for call in turn["tool_calls"]] == ["call_1", "call_2"]


def test_a_text_behind_a_call_is_a_message_of_its_own() -> None:
    text = {"role": "assistant", "content": "so"}
    _, calling, telling = messages([HELLO, _thought("T1"), _call(1), _thought("T2"), text])
    assert (calling["content"], calling["reasoning_content"]) == ("", "T1")
    assert telling == text | {"reasoning_content": "T2"}


def test_every_item_of_a_conversation_has_an_id_of_its_own(server: LiveServer) -> None:
    mine = {"type": "message", "id": "msg_mine", **HELLO}
    first = send_request(server, input=[mine, mine]).json()
    input_items = [{"id": "msg_mine"}, mine, {"id": first["output"][0]["id"]}, {"id": "msg_mine"}]
    second = send_request(server, input=input_items, previous_response_id=first["id"]).json()
    path = f"{PATH}/{second['id']}/input_items"
    result: list[str] = []
    page: Fields = {"has_more": True}
    while page["has_more"] and len(result) < 20:
        body = {"limit": 1, "order": "asc"} | ({"after": result[-1]} if result else {})
        page = server.http.get(path, params=body).json()
        result += [item["id"] for item in page["data"]]
    assert len(result) == len(set(result)) == 7
    assert (result[0], result[2]) == ("msg_mine", first["output"][0]["id"])
    assert send_request(server, input=[{"id": result[-1]}]).status_code == 200


def test_items_are_not_read_where_streams_are_written(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = send_request(server).json()
    second = send_request(server, previous_response_id=first["id"]).json()
    calls: list[str] = []
    monkeypatch.setattr(routes, "items_of", counting_items_of(calls))
    assert server.http.get(f"{PATH}/{second['id']}/input_items").status_code == 200
    assert [name.split("_")[0] for name in calls] == ["asyncio"]


def test_too_long_a_conversation_is_answered_and_not_stored(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_CONVERSATION_ITEMS", 3)
    first = send_request(server).json()
    assert first["store"] is True
    for messages in ([HELLO], [HELLO, HELLO]):  # too much with the answer, and without
        fields: Fields = {"input": messages, "previous_response_id": first["id"]}
        body = send_request(server, **fields).json()
        assert body["store"] is False
        assert body["output"][0]["content"][0]["text"]
        assert server.http.get(f"{PATH}/{body['id']}").status_code == 404
        streamed = send_request(server, stream=True, **fields).text
        assert '"store":false' in streamed.rstrip().rsplit("event:", 1)[1]
    assert server.http.get(f"{PATH}/{first['id']}").json() == first


def test_an_answer_that_is_too_large_says_that_it_is_not_stored(tmp_path: Path) -> None:
    with live_server(tmp_path, ServeOptions(drain_s=1, max_stored_bytes=6000)) as server:
        small = send_request(server).json()
        large = send_request(
            server, instructions="x" * 20, metadata={str(n): "x" * 512 for n in range(9)}
        )
        assert (small["store"], large.json()["store"]) == (True, False)
        assert server.http.get(f"{PATH}/{small['id']}").json() == small


def test_options_just_within_the_limits_are_returned(server: LiveServer) -> None:
    labels = dict.fromkeys(("user", "prompt_cache_key", "safety_identifier"), "u" * 512)
    body = send_request(server, max_tool_calls=1, **labels).json()
    assert {name: body[name] for name in labels} == labels
    options = {"include_usage": False}
    assert send_request(server, stream=True, stream_options=options).status_code == 200


def _message_item(id_: str, text: str) -> Fields:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "id": id_, "role": "user", "content": content}


def _thought(text: str) -> Fields:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


def _call(number: int) -> Fields:
    call = {"call_id": f"call_{number}", "name": "weather", "arguments": "{}"}
    return {"type": "function_call", **call}


def test_a_client_that_leaves_cancels_and_keeps_nothing(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        body = {"input": "a", "stream": True, "ignore_eos": True}
        with server.http.stream("POST", PATH, json=body) as response:
            next(response.iter_text())
        wait_for(lambda: server.num_busy == 0)
        server.wait_idle()
        assert len(server.api.response_store) == 0


def test_tokens_of_a_request_are_counted_as_they_will_be(server: LiveServer) -> None:
    first = server.http.post(PATH, json={"input": "hello", "max_output_tokens": 2}).json()
    later = {"input": "and?", "previous_response_id": first["id"], "instructions": "the"}
    body = server.http.post(f"{PATH}/input_tokens", json=later).json()
    answer = server.http.post(PATH, json={**later, "max_output_tokens": 1}).json()
    assert body == {
        "object": "response.input_tokens",
        "input_tokens": answer["usage"]["input_tokens"],
    }
    assert server.http.post(f"{PATH}/input_tokens", json={}).json()["input_tokens"] == 0
