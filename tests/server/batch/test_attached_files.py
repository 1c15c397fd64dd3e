"""Files attached to the messages of requests, which the model reads as text."""

from __future__ import annotations

import base64
import tracemalloc
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from twostroke.server.body.attached_files import with_file_texts

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.servers import LiveServer
    from twostroke.server.body.attached_files import AttachedFile
    from twostroke.server.storage import Records

Fields = dict[str, Any]

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNTS = {
    CHAT: f"{CHAT}/input_tokens",
    RESPONSES: f"{RESPONSES}/input_tokens",
    MESSAGES: f"{MESSAGES}/count_tokens",
}


def encoded(data: bytes) -> str:
    return f"data:text/plain;base64,{base64.b64encode(data).decode()}"


def store(server: LiveServer, data: bytes, name: str = "notes.txt") -> str:
    form = {"file": (name, data)}
    response = server.http.post("/v1/files", data={"purpose": "user_data"}, files=form)
    return str(response.json()["id"])


def with_part(path: str, part: Fields) -> Fields:
    """Return a request with one message, whose content has `part`."""
    messages = [{"role": "user", "content": [part]}]
    if path == RESPONSES:
        return {"input": messages, "max_output_tokens": 2, "temperature": 0}
    return {"messages": messages, "max_tokens": 2, "temperature": 0}


def text_part(path: str, text: str) -> Fields:
    return {"type": "input_text" if path == RESPONSES else "text", "text": text}


def parts_with(server: LiveServer, data: bytes) -> list[tuple[str, Fields]]:
    """Return message parts with a file, for each protocol and each way to attach a file."""
    id_ = store(server, data)
    inline = {"filename": "notes.txt", "file_data": encoded(data)}
    raw = base64.b64encode(data).decode()
    base64_source = {"type": "base64", "media_type": "text/plain", "data": raw}
    return [
        (CHAT, {"type": "file", "file": inline}),
        (CHAT, {"type": "file", "file": {"file_id": id_}}),
        (RESPONSES, {"type": "input_file", **inline}),
        (RESPONSES, {"type": "input_file", "file_id": id_}),
        (MESSAGES, {"type": "document", "title": "notes.txt", "source": base64_source}),
        (MESSAGES, {"type": "document", "source": {"type": "file", "file_id": id_}}),
    ]


def response_text(body: Fields) -> Any:
    """Return the response without the fields that differ between equal requests."""
    for name in ("choices", "content"):
        if name in body:
            return body[name]
    return body["output"][0]["content"]


def test_text_of_a_file_is_read_in_each_protocol(server: LiveServer) -> None:
    for path, part in parts_with(server, b"hello world"):
        response = server.http.post(path, json=with_part(path, part))
        assert response.status_code == 200, response.text
        plain = with_part(
            path, text_part(path, "notes.txt\nhello world" + ("" if path == MESSAGES else "\n"))
        )
        expected = server.http.post(path, json=plain)
        assert response_text(response.json()) == response_text(expected.json()), (path, part)
        bodies = [with_part(path, part), plain]
        for body in bodies:
            for name in ("max_tokens", "temperature"):
                body.pop(name, None)  # not all counts take them
        counts = [server.http.post(COUNTS[path], json=body).json() for body in bodies]
        assert counts[0] == counts[1]
        assert counts[0]["input_tokens"] > 0


NOT_TEXT = [
    (b"%PDF-1.7 x", "PDF"),
    (b"\x89PNG\r\n", "is not text"),
    (b"a\0b", "is not text"),
]


@pytest.mark.parametrize(("data", "reason"), NOT_TEXT)
def test_file_that_is_not_text_is_refused_by_its_place(
    server: LiveServer, data: bytes, reason: str
) -> None:
    for path, part in parts_with(server, data):
        refused = server.http.post(path, json=with_part(path, part))
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert reason in message
        name = "input" if path == RESPONSES else "messages"
        assert message.startswith(f"{name}[0].content[0]."), message


def test_wrong_base64_is_named(server: LiveServer) -> None:
    for data in ("hello!", "data:text/plain;base64,%%%"):
        part = {"type": "input_file", "file_data": data}
        refused = server.http.post(RESPONSES, json=with_part(RESPONSES, part)).json()
        assert refused["error"]["param"] == "input[0].content[0].file_data"


def test_files_of_others_missing_and_damaged_ones_are_not_found(
    server: LiveServer, records: Records
) -> None:
    id_ = store(server, b"hello")
    body = with_part(CHAT, {"type": "file", "file": {"file_id": id_}})
    ben = {"authorization": "Bearer other"}
    assert server.http.post(CHAT, json=body, headers=ben).status_code == 404
    records.files.path(id_).write_bytes(b"hel")
    damaged = server.http.post(CHAT, json=body)
    assert "damaged" in damaged.json()["error"]["message"]
    unknown = with_part(CHAT, {"type": "file", "file": {"file_id": "file-none"}})
    assert server.http.post(CHAT, json=unknown).json()["error"]["code"] == "file_not_found"


def test_files_of_one_request_are_bounded_together(server: LiveServer) -> None:
    id_ = store(server, b"hello " * 300)  # 1,800 bytes, of 4,000
    part = {"type": "file", "file": {"file_id": id_}}
    body = with_part(CHAT, part)
    body["messages"] *= 3
    refused = server.http.post(CHAT, json=body)
    assert refused.status_code == 413
    assert "4000 bytes" in refused.json()["error"]["message"]


def test_server_without_records_says_how_it_keeps_files(
    shared_server: LiveServer,
) -> None:
    part = {"type": "input_file", "file_id": "file-1"}
    refused = shared_server.http.post(RESPONSES, json=with_part(RESPONSES, part))
    assert "--records DIR" in refused.json()["error"]["message"]
    inline = {"type": "input_file", "file_data": encoded(b"hello")}
    answered = shared_server.http.post(RESPONSES, json=with_part(RESPONSES, inline))
    assert answered.status_code == 200


def test_files_in_conversations_and_results_of_tools_are_read(server: LiveServer) -> None:
    part = {"type": "input_file", "file_id": store(server, b"hello")}
    items = [
        {"role": "user", "content": [part]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [part]},
    ]
    body = server.http.post("/v1/conversations", json={"items": items}).json()
    listed = server.http.get(f"/v1/conversations/{body['id']}/items").json()["data"]
    text = {"type": "input_text", "text": "notes.txt\nhello\n"}
    assert listed[0]["output"] == [text]
    assert listed[2]["content"] == [text]


@pytest.mark.parametrize("body", [b'{"file_id"', b'["file_data"]', b'{"input": "\xff"file_id"}'])
def test_body_that_is_not_valid_gets_the_usual_error(server: LiveServer, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert server.http.post(RESPONSES, content=body, headers=headers).status_code == 400


@pytest.mark.parametrize("depth", [1, 60])
def test_looking_for_files_takes_little_memory(depth: int) -> None:
    lists = b"[" * depth + b",".join([b"[]"] * 50_000) + b"]" * depth
    body = b'{"file_data": 1, "input": ' + lists + b"}"

    def peak_of(work: Callable[[], object]) -> int:
        tracemalloc.start()
        work()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    decoding = peak_of(lambda: msgspec.json.decode(body))
    assert peak_of(lambda: with_file_texts(body, no_file)) < 1.5 * decoding


def no_file(_id: str) -> AttachedFile:
    raise AssertionError
