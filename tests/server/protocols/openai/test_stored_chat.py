"""Stored chat completions."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import events, live_server
from support.waiting import wait_for
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.options import ServeOptions
from twostroke.server.protocols.openai import stored_chat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer

PATH = "/v1/chat/completions"


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server for two tenants, with no stored completions."""
    options = ServeOptions(drain_s=1, api_keys=ApiKeys({"k": "anna", "other": "ben"}))
    with live_server(tmp_path_factory.mktemp("stored"), options) as live:
        live.http.headers["authorization"] = "Bearer k"
        yield live


def store(server: LiveServer, **fields: Any) -> Any:
    return server.chat(store=True, max_tokens=3, **fields).json()


def ids(server: LiveServer, **query: Any) -> list[str]:
    return [completion["id"] for completion in server.http.get(PATH, params=query).json()["data"]]


def test_only_completions_with_store_can_be_read_again(server: LiveServer) -> None:
    assert "choices" in server.chat(max_tokens=1, metadata={"a": "b"}).json()
    assert ids(server) == []
    completion = store(server, metadata={"a": "b"})
    payload = server.http.get(f"{PATH}/{completion['id']}").json()
    assert payload == {**completion, "metadata": {"a": "b"}}
    assert server.http.get(f"/v1/responses/{completion['id']}").status_code == 404
    body = {"input": "x", "previous_response_id": completion["id"]}
    assert server.http.post("/v1/responses", json=body).status_code == 400
    assert server.http.get(f"{PATH}/chatcmpl-none").json()["error"]["code"] == (
        "completion_not_found"
    )


def test_streamed_answers_are_stored_whole(server: LiveServer) -> None:
    fields: dict[str, Any] = {"temperature": 0, "n": 2, "logprobs": True}
    *chunks, _ = events(store_stream(server, **fields))
    body = server.http.get(f"{PATH}/{chunks[0]['id']}").json()
    whole_answer = server.chat(max_tokens=3, **fields).json()
    for stored_choice, choice in zip(body["choices"], whole_answer["choices"], strict=True):
        assert stored_choice["message"] == choice["message"]
        tokens = [
            [token["token"] for token in choice_body["logprobs"]["content"]]
            for choice_body in (stored_choice, choice)
        ]
        assert tokens[0] == tokens[1]
    assert body["usage"]["completion_tokens"] == whole_answer["usage"]["completion_tokens"]


def store_stream(server: LiveServer, **fields: Any) -> str:
    return server.chat(store=True, stream=True, max_tokens=3, **fields).text


def test_lists_have_pages_orders_and_filters(server: LiveServer) -> None:
    first, second, third = (
        store(server, metadata={"n": str(number % 2), "all": "x"})["id"] for number in range(3)
    )
    assert ids(server) == ids(server, model="tiny") == [first, second, third]
    assert ids(server, order="desc", limit=2) == [third, second]
    assert ids(server, after=first, limit=1) == [second]
    assert ids(server, **{"metadata[n]": "0", "metadata[all]": "x"}) == [first, third]
    assert ids(server, model="other") == []
    page = server.http.get(PATH, params={"limit": 2}).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == (first, second, True)
    wrong = server.http.get(PATH, params={"after": "none"})
    assert wrong.json()["error"]["param"] == "after"


def test_metadata_is_replaced_and_messages_are_listed(server: LiveServer) -> None:
    messages = [{"role": "system", "content": "the"}, {"role": "user", "content": "hello"}]
    id_ = store(server, messages=messages, metadata={"a": "b"})["id"]
    body = {"metadata": {"c": "d"}, "unknown": 1}
    response = server.http.post(f"{PATH}/{id_}", json=body)
    changed = response.json()
    assert changed["metadata"] == {"c": "d"}
    assert response.headers["twostroke-ignored"] == "unknown"
    assert server.http.get(f"{PATH}/{id_}").json() == changed
    listed = server.http.get(f"{PATH}/{id_}/messages").json()["data"]
    assert [message["content"] for message in listed] == ["the", "hello"]
    assert len({message["id"] for message in listed}) == 2


def test_tenants_do_not_see_each_others(server: LiveServer) -> None:
    id_ = store(server)["id"]
    headers = {"authorization": "Bearer other"}
    assert server.http.get(PATH, headers=headers).json()["data"] == []
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/messages")):
        response = server.http.request(method, f"{PATH}/{id_}{path}", headers=headers)
        assert response.status_code == 404
    deleted = server.http.delete(f"{PATH}/{id_}").json()
    assert deleted == {"id": id_, "object": "chat.completion.deleted", "deleted": True}
    assert ids(server) == []


def test_long_lists_of_one_tenant_wait_for_other_tenants(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(server)
    begun, may_end, page = list[int](), threading.Event(), stored_chat._list_completions

    def slow(stored: list[Any], query: dict[str, str]) -> Any:
        begun.append(len(stored))
        assert may_end.wait(60)
        return page(stored, query)

    monkeypatch.setattr(stored_chat, "_list_completions", slow)
    line = server.api._readers._queue
    with ThreadPoolExecutor(4) as threads:
        try:
            lists = [threads.submit(ids, server) for _ in range(3)]
            wait_for(lambda: len(begun) == 1 and line.num_waiting("anna") == 2)
            headers = {"authorization": "Bearer other"}
            other = threads.submit(server.http.get, PATH, headers=headers)
            wait_for(lambda: len(begun) == 2)  # a tenant leaves a thread to the others
        finally:
            may_end.set()
        assert other.result().json()["data"] == []
        assert all(len(result.result()) == 1 for result in lists)
    assert begun == [1, 0, 1, 1]
