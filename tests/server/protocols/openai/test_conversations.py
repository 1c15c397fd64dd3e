"""OpenAI's conversations, as clients see them."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import live_server
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.options import ServeOptions
from twostroke.server.storage import Records

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import LiveServer

Fields = dict[str, Any]

PATH = "/v1/conversations"
USER: Fields = {"role": "user", "content": "hello"}
CALL: Fields = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}


def begin(server: LiveServer, **fields: Any) -> str:
    response = server.http.post(PATH, json=fields)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def items_of(server: LiveServer, conversation: str, **query: Any) -> list[Fields]:
    response = server.http.get(f"{PATH}/{conversation}/items", params={"order": "asc", **query})
    assert response.status_code == 200, response.text
    items: list[Fields] = response.json()["data"]
    return items


def answer(server: LiveServer, **fields: Any) -> Fields:
    body = {"max_output_tokens": 3, "temperature": 0, **fields}
    response = server.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    payload: Fields = response.json()
    return payload


def texts_of(items: list[Fields]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


def test_conversation_is_made_labelled_and_deleted(server: LiveServer) -> None:
    body = server.http.post(PATH, json={"metadata": {"a": "1"}, "items": [USER]}).json()
    assert body["object"] == "conversation"
    assert body["metadata"] == {"a": "1"}
    path = f"{PATH}/{body['id']}"
    assert server.http.get(path).json() == body
    relabelled = server.http.post(path, json={"metadata": {"b": "2"}}).json()
    assert relabelled == {**body, "metadata": {"b": "2"}}
    assert texts_of(items_of(server, body["id"])) == ["hello"]
    assert server.http.delete(path).json() == {
        "id": body["id"],
        "object": "conversation.deleted",
        "deleted": True,
    }
    for response in (server.http.get(path), server.http.get(f"{path}/items")):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "conversation_not_found"


def test_items_are_added_listed_found_and_deleted(server: LiveServer) -> None:
    id_ = begin(server)
    path = f"{PATH}/{id_}/items"
    added = server.http.post(path, json={"items": [USER, CALL, {"role": "user", "content": "b"}]})
    first, call, last = added.json()["data"]
    assert added.json()["first_id"] == first["id"]
    assert first["content"] == [{"type": "input_text", "text": "hello"}]
    assert server.http.get(f"{path}/{call['id']}").json() == call
    newest_first = server.http.get(path, params={"limit": 2}).json()
    assert [item["id"] for item in newest_first["data"]] == [last["id"], call["id"]]
    assert newest_first["has_more"]
    rest = server.http.get(path, params={"after": call["id"]}).json()
    assert [item["id"] for item in rest["data"]] == [first["id"]]
    assert server.http.delete(f"{path}/{call['id']}").json()["id"] == id_
    assert items_of(server, id_) == [first, last]
    missing = server.http.delete(f"{path}/{call['id']}")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "item_not_found")


def test_responses_continue_a_conversation_and_join_it(server: LiveServer) -> None:
    id_ = begin(server, items=[USER])
    first = answer(server, conversation=id_, input="the world")
    assert first["conversation"] == {"id": id_}
    second = answer(server, conversation={"id": id_}, input="again", store=False)
    all_texts = [*texts_of(items_of(server, id_))]
    answer_texts = [body["output"][0]["content"][0]["text"] for body in (first, second)]
    assert all_texts == ["hello", "the world", answer_texts[0], "again", answer_texts[1]]
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "user", "content": "the world"},
        {"role": "assistant", "content": answer_texts[0]},
        {"role": "user", "content": "again"},
    ]
    same = server.chat(messages=messages, max_tokens=3, temperature=0).json()
    assert same["choices"][0]["message"]["content"] == answer_texts[1]
    third = answer(server, previous_response_id=first["id"], input="again")
    assert third["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    listed = server.http.get(f"/v1/responses/{first['id']}/input_items").json()
    assert texts_of(listed["data"]) == ["the world", "hello"]


def test_streams_join_a_conversation_and_count_it(server: LiveServer) -> None:
    id_ = begin(server, items=[USER])
    body = {"input": "a", "conversation": id_}
    input_count = server.http.post("/v1/responses/input_tokens", json=body).json()
    streamed = server.http.post(
        "/v1/responses", json={**body, "stream": True, "max_output_tokens": 2}
    )
    assert "response.incomplete" in streamed.text or "response.completed" in streamed.text
    assert len(items_of(server, id_)) == 3
    assert input_count["input_tokens"] > answer(server, input="a")["usage"]["input_tokens"]


WRONG: list[tuple[Fields, str]] = [
    ({"items": [{"role": "nobody", "content": "a"}]}, "items[0].role"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"metadata": {"x" * 65: "a"}}, "metadata"),
    ({"metadata": {f"{i}": "a" for i in range(17)}}, "metadata"),
    ({"items": "hello"}, "items"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_wrong_field_of_a_conversation_is_named(
    server: LiveServer, fields: Fields, param: str
) -> None:
    response = server.http.post(PATH, json=fields)
    assert response.status_code == 400
    assert str(response.json()["error"]["param"]).startswith(param)


def test_wrong_use_of_a_conversation_is_named(server: LiveServer) -> None:
    id_ = begin(server)
    path = "/v1/responses"
    unknown = server.http.post(path, json={"input": "a", "conversation": "conv_none"})
    assert unknown.status_code == 404
    assert "conv_none" in unknown.json()["error"]["message"]
    both = {"input": "a", "conversation": id_, "previous_response_id": "resp_1"}
    assert server.http.post(path, json=both).json()["error"]["param"] == "conversation"
    empty = server.http.post(path, json={"conversation": id_})
    assert empty.json()["error"]["param"] == "input"
    unlabelled = server.http.post(f"{PATH}/{id_}", json={})
    assert unlabelled.json()["error"]["param"] == "metadata"


def test_conversation_that_becomes_too_large_says_so(tmp_path: Path) -> None:
    options = ServeOptions(drain_s=1, max_stored_bytes=10_000)
    with live_server(tmp_path, options) as server:
        long = {"role": "user", "content": "a " * 2000}
        id_ = begin(server, items=[long])
        for response in (
            server.http.post(f"{PATH}/{id_}/items", json={"items": [long, long]}),
            server.http.post("/v1/responses", json={"conversation": id_, "input": [long, long]}),
        ):
            assert response.status_code == 400
            assert "at most 10000 bytes" in response.json()["error"]["message"]
    with live_server(tmp_path, ServeOptions(drain_s=1, max_stored=0)) as server:
        refused = server.http.post(PATH, json={})
        assert "--keep-responses" in refused.json()["error"]["message"]


def test_conversations_survive_a_restart_and_belong_to_their_key(tmp_path: Path) -> None:
    keys = ApiKeys({"k": "anna", "other": "ben"})
    options = ServeOptions(drain_s=1, api_keys=keys)
    anna, ben = ({"authorization": f"Bearer {key}"} for key in ("k", "other"))
    with closing(Records(tmp_path / "records")) as records:
        with live_server(tmp_path, options, records=records) as server:
            server.http.headers.update(anna)
            id_ = begin(server, items=[USER, USER])
            answer(server, conversation=id_, input="a")
            removed = items_of(server, id_)[1]["id"]
            server.http.delete(f"{PATH}/{id_}/items/{removed}")
            answer(server, conversation=id_, input="b", store=False)
            server.http.post(f"{PATH}/{id_}", json={"metadata": {"a": "1"}})
            items = items_of(server, id_)
            deleted = begin(server, items=[USER])
            server.http.delete(f"{PATH}/{deleted}")
        with live_server(tmp_path, options, records=records) as server:
            server.http.headers.update(anna)
            assert items_of(server, id_) == items
            assert len(items) == 5
            assert server.http.get(f"{PATH}/{id_}").json()["metadata"] == {"a": "1"}
            assert server.http.get(f"{PATH}/{deleted}").status_code == 404
            answer(server, conversation=id_, input="c")
            assert len(items_of(server, id_)) == 7
            server.http.headers.update(ben)
            path = f"{PATH}/{id_}"
            for response in (
                server.http.get(path),
                server.http.get(f"{path}/items"),
                server.http.post(path, json={"metadata": {}}),
                server.http.post(f"{path}/items", json={"items": [USER]}),
                server.http.delete(f"{path}/items/{items[0]['id']}"),
                server.http.delete(path),
                server.http.post("/v1/responses", json={"input": "a", "conversation": id_}),
            ):
                assert response.status_code == 404
            server.http.headers.update(anna)
            server.http.delete(path)
            for item in items:
                body = {"input": [{"type": "item_reference", "id": item["id"]}, USER]}
                server.http.post("/v1/responses", json={**body, "max_output_tokens": 1})
        rows = asyncio.run(
            records.read(lambda db: db.execute("SELECT kind FROM answers").fetchall())
        )
        assert {kind for (kind,) in rows} == {"response"}


def test_result_whose_call_was_deleted_is_named(server: LiveServer) -> None:
    result = {"type": "function_call_output", "call_id": "c1", "output": "a"}
    conversation = begin(server, items=[USER, CALL, result])
    call, stored_result = items_of(server, conversation)[1:]
    server.http.delete(f"{PATH}/{conversation}/items/{call['id']}")
    body = {"input": "hello", "conversation": conversation, "max_output_tokens": 1}
    refused = server.http.post("/v1/responses", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "conversation"
    assert stored_result["id"] in error["message"]
    server.http.delete(f"{PATH}/{conversation}/items/{stored_result['id']}")
    assert server.http.post("/v1/responses", json=body).status_code == 200
