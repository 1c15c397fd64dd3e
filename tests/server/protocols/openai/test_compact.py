"""Conversations that are replaced by a summary, as clients see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from twostroke.server.protocols.common.fields import (
    OPAQUE_SUMMARY,
    decode_opaque_text,
    encode_opaque_text,
)

if TYPE_CHECKING:
    from support.servers import LiveServer

Fields = dict[str, Any]

PATH = "/v1/responses"
TURNS = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "the world"},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "17"},
]


def compact(server: LiveServer, **fields: Any) -> Fields:
    response = server.http.post(f"{PATH}/compact", json=fields)
    assert response.status_code == 200, response.text
    body: Fields = response.json()
    return body


def test_compacted_conversation_takes_the_place_of_its_items(server: LiveServer) -> None:
    compacted = compact(server, input=TURNS)
    assert compacted["object"] == "response.compaction"
    [item] = compacted["output"]
    assert item["type"] == "compaction"
    summary = decode_opaque_text(item["encrypted_content"], OPAQUE_SUMMARY)
    assert summary
    assert compacted["usage"]["output_tokens"] > 0
    body = {"role": "user", "content": "again"}
    later = {"max_output_tokens": 2, "temperature": 0}
    answer = server.http.post(PATH, json={"input": [item, body], **later}).json()
    summary_text = f"Summary of the conversation so far:\n\n{summary}"
    spelled = [{"role": "user", "content": summary_text}, body]
    same = server.http.post(PATH, json={"input": spelled, **later}).json()
    assert answer["usage"]["input_tokens"] == same["usage"]["input_tokens"]
    listed = server.http.get(f"{PATH}/{answer['id']}/input_items").json()["data"]
    assert [item["type"] for item in listed] == ["message", "compaction"]


def test_stored_answers_are_compacted_with_their_conversation(server: LiveServer) -> None:
    first = server.http.post(PATH, json={"input": "hello", "max_output_tokens": 2}).json()
    short = compact(server, previous_response_id=first["id"])
    long = compact(server, previous_response_id=first["id"], input="and the world")
    assert long["usage"]["input_tokens"] > short["usage"]["input_tokens"]
    conversation = server.http.get(f"{PATH}/{long['id']}")
    assert conversation.status_code == 404  # nothing of it is stored


def test_compaction_of_another_server_is_left_out(server: LiveServer) -> None:
    later = {"max_output_tokens": 2, "temperature": 0}
    body = {"role": "user", "content": "again"}
    for content in ("gAAAAABo", encode_opaque_text("x", OPAQUE_SUMMARY)[:-3] + "!"):
        other = {"type": "compaction", "encrypted_content": content}
        answer = server.http.post(PATH, json={"input": [other, body], **later}).json()
        plain = server.http.post(PATH, json={"input": [body], **later}).json()
        assert answer["usage"]["input_tokens"] == plain["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": [{"type": "nothing"}]}, 400, "input"),
        ({"previous_response_id": "resp_none"}, 400, "previous_response_id"),
        ({"model": "none", "input": "a"}, 404, "model"),
    ],
)
def test_wrong_field_of_a_compaction_is_named(
    server: LiveServer, fields: Fields, status: int, param: str
) -> None:
    response = server.http.post(f"{PATH}/compact", json=fields)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
