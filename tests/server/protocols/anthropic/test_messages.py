"""Anthropic's Messages API, as clients see it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import events, live_server, post_bytes
from support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from support.servers import LiveServer

Fields = dict[str, Any]

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "hello"}]
CONST = {"output_config": {"format": {"type": "json_schema", "schema": {"const": "hello"}}}}
LONG_TEXT = {"type": "string", "minLength": 1000}
LONG = {"output_config": {"format": {"type": "json_schema", "schema": LONG_TEXT}}}


def send_request(server: LiveServer, **fields: Any) -> httpx.Response:
    body = {"messages": HELLO, "max_tokens": 4, "temperature": 0, **fields}
    return server.http.post(PATH, json=body)


def text_of(response: httpx.Response) -> str:
    text: str = response.json()["content"][0]["text"]
    return text


def test_answer_has_anthropics_shape_and_openais_text(server: LiveServer) -> None:
    openai = server.chat(max_tokens=4, temperature=0).json()
    headers = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
    fields = {"messages": HELLO, "max_tokens": 4, "temperature": 0, "model": "tiny"}
    response = server.http.post(PATH, json=fields, headers=headers)
    body = response.json()
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": openai["choices"][0]["message"]["content"]}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 16,
            "output_tokens": 4,
        },
    }


def test_stream_is_right_byte_by_byte(server: LiveServer) -> None:
    send_request(server)  # from here on the prompt is cached
    chunks = events(server.chat(max_tokens=4, temperature=0, stream=True).text)[:-1]
    texts = [text for c in chunks if (text := c["choices"][0]["delta"].get("content"))]
    response = send_request(server, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["request-id"]
    id_ = response.text.partition('"id":"')[2].partition('"')[0]
    usage = '"usage":{"input_tokens":2,"cache_creation_input_tokens":0,"cache_read_input_tokens":16'
    expected = (
        'event: message_start\ndata: {"type":"message_start","message":{"type":"message",'
        f'"id":"{id_}","role":"assistant","model":"tiny","content":[],"stop_reason":null,'
        f'"stop_sequence":null,{usage},"output_tokens":1}}}}}}\n\n'
        'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
        '"content_block":{"type":"text","text":""}}\n\n'
        'event: ping\ndata: {"type":"ping"}\n\n'
    )
    for piece in texts:
        text = json.dumps(piece, ensure_ascii=False)
        expected += (
            'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
            f'"delta":{{"type":"text_delta","text":{text}}}}}\n\n'
        )
    expected += (
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"max_tokens",'
        f'"stop_sequence":null}},{usage},"output_tokens":4}}}}\n\n'
        'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )
    assert response.text == expected


@pytest.mark.parametrize("stream", [False, True])
def test_reasons_of_the_end_are_anthropics(server: LiveServer, stream: bool) -> None:
    fields: Fields = {"max_tokens": 30, "stream": stream, **CONST}
    assert _answer_end(send_request(server, **fields)) == ('"hello"', "end_turn", None)
    stopped = send_request(server, stop_sequences=["zz", "llo"], **fields)
    assert _answer_end(stopped) == ('"he', "stop_sequence", "llo")
    assert _answer_end(send_request(server, **fields | {"max_tokens": 1}))[1] == "max_tokens"


def test_blocks_and_system_reach_the_template(server: LiveServer) -> None:
    blocks = [{"type": "text", "text": "the "}, {"type": "text", "text": "world", "citations": []}]
    messages = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
    ]
    openai = [
        {"role": "system", "content": "a\nd"},
        {"role": "user", "content": "the \nworld"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    expected = server.chat(messages=openai, max_tokens=1).json()["usage"]["prompt_tokens"]
    for system in ("a\nd", [{"type": "text", "text": "a"}, {"type": "text", "text": "d"}]):
        body = server.http.post(COUNT, json={"messages": messages, "system": system}).json()
        assert body == {"input_tokens": expected}
    leading = [{"role": "system", "content": [{"type": "text", "text": "d"}]}, *messages]
    openai[:1] = [{"role": "system", "content": "a"}, {"role": "system", "content": "d"}]
    expected = server.chat(messages=openai, max_tokens=1).json()["usage"]["prompt_tokens"]
    body = server.http.post(COUNT, json={"messages": leading, "system": "a"}).json()
    assert body == {"input_tokens": expected}
    later = [*openai[2:4], {"role": "system", "content": "e"}, openai[4]]
    expected = server.chat(messages=later, max_tokens=1).json()["usage"]["prompt_tokens"]
    assert server.http.post(COUNT, json={"messages": later}).json() == {"input_tokens": expected}


def test_count_agrees_with_usage_cached_or_not(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "is the world in the world " * 6}]
    num_counted = server.http.post(COUNT, json={"messages": messages}).json()["input_tokens"]
    for is_cached in (False, True):
        usage = send_request(server, messages=messages).json()["usage"]
        assert (usage["cache_read_input_tokens"] > 0) is is_cached
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_counted


def test_last_message_of_the_assistant_is_continued(server: LiveServer) -> None:
    whole_text = text_of(send_request(server, max_tokens=6))
    start, rest = whole_text[:1], whole_text[1:]
    assert start.isascii()
    ids = server.http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    ids += server.http.post("/tokenize", json={"prompt": start}).json()["tokens"]
    expected = server.complete(prompt=ids, max_tokens=5, temperature=0).json()["choices"][0]
    answer = send_request(
        server, messages=[*HELLO, {"role": "assistant", "content": start}], max_tokens=5
    )
    assert text_of(answer) == expected["text"]
    assert rest
    empty = send_request(
        server, messages=[*HELLO, {"role": "assistant", "content": ""}], max_tokens=6
    )
    assert text_of(empty) == whole_text


def test_harmless_fields_are_accepted(server: LiveServer) -> None:
    harmless: Fields = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "thinking": {"type": "disabled"},
        "tools": [],
        "tool_choice": {"type": "auto"},
        "top_k": 5,
        "top_p": 0.9,
        "stop_sequences": [],
        "system": None,
        "speed": "standard",
    }
    assert send_request(server, **harmless).status_code == 200
    body = {"messages": HELLO, "max_tokens": 1}
    assert server.http.post(f"{PATH}?beta=true", json=body).is_success
    assert send_request(server, max_tokens=2**63, stop_sequences=["e"]).is_success


REFUSED: list[tuple[Fields, str]] = [
    *[({"max_tokens": value}, "max_tokens") for value in (0, -1, True, 1.5, "9", None)],
    *[({"temperature": value}, "temperature must be") for value in (-0.1, 1.01, True, "1")],
    *[({"top_p": value}, "top_p") for value in (-1, 1.5, "x")],
    *[({"top_k": value}, "top_k") for value in (-2, 2**63, True)],
    *[({"stop_sequences": value}, "stop_sequences") for value in (["a"] * 17, ["x" * 1001])],
    ({"stop_sequences": "a"}, "stop_sequences must be a list, got a string."),
    ({"stream": 1}, "stream must be a boolean"),
    ({"messages": []}, "messages must have from 1 to 10000 items, got 0."),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing."),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].role must be one of assistant, system, user, got 'tool'.",
    ),
    ({"messages": [*HELLO, {"role": "assistant", "content": "x "}]}, "must not end with a space"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].type must be one of text, thinking",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
        "messages[0].content[0] cannot be part of a message of the role user.",
    ),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
        "output_config.format.schema",
    ),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_invalid_requests_are_refused_in_anthropics_form(
    server: LiveServer, fields: Fields, sentence: str
) -> None:
    response = send_request(server, **fields)
    error = refused(response, 400, "invalid_request_error")
    assert sentence in error


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (PATH, {"messages": HELLO}),
        (COUNT, {"messages": []}),
    ],
)
def test_each_path_has_its_own_fields(server: LiveServer, path: str, fields: Fields) -> None:
    refused(server.http.post(path, json=fields), 400, "invalid_request_error")


def test_clients_that_want_a_thread_learn_how_to_go_on(server: LiveServer) -> None:
    error = send_request(server, thread={"type": "create"}).json()["error"]
    assert error == {
        "type": "invalid_request_error",
        "message": "thread is not supported yet: leave it out.",
        "details": {"error_code": "thread_unsupported_request"},
    }


def test_too_long_a_prompt_is_refused_in_anthropics_words(
    server: LiveServer, strict: LiveServer
) -> None:
    long = [{"role": "user", "content": "x" * 600}]
    count = server.http.post(COUNT, json={"messages": long}).json()["input_tokens"]
    output = refused(send_request(server, messages=long), 400, "invalid_request_error")
    assert output == f"prompt is too long: {count} tokens > 511 maximum"
    output = refused(send_request(strict, max_tokens=500), 400, "invalid_request_error")
    assert output == (
        "input length and `max_tokens` exceed context limit: 18 + 500 > 512, "
        "decrease input length or `max_tokens` and try again"
    )


def test_other_errors_have_anthropics_types(server: LiveServer) -> None:
    refused(send_request(server, model="claude"), 404, "not_found_error")
    refused(server.http.post(COUNT, json={"messages": HELLO, "model": "x"}), 404, "not_found_error")
    refused(server.http.get(PATH), 405, "invalid_request_error")
    text_type = {"content-type": "text/plain"}
    refused(server.http.post(PATH, content=b"x", headers=text_type), 415, "invalid_request_error")
    refused(server.http.get(f"{PATH}/batches"), 404, "not_found_error")
    huge = b'"' + b"x" * (9 << 20) + b'"'
    refused(server.http.post(PATH, content=huge), 413, "request_too_large")
    with server.connect() as connection:
        connection.sendall(post_bytes(PATH, {}, headers=f"x-a: {'x' * 40000}\r\n"))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'{"type":"error","error":{"type":"invalid_request_error","message":' in answer


def test_anthropics_clients_read_errors_of_any_path_and_others_keep_openais(
    server: LiveServer,
) -> None:
    version = {"anthropic-version": "2023-06-01"}
    refused(server.http.get("/v1/models/x", headers=version), 404, "not_found_error")
    assert server.http.get("/v1/models/x").json().keys() == {"error"}
    assert "request-id" not in server.http.get("/v1/models").headers


def test_full_queue_is_529_with_retry_after(tmp_path: Path) -> None:
    with live_server(tmp_path, max_running=1, max_waiting_requests=1) as server:
        server.backend.gate.clear()
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(send_request, server)
            wait_for(lambda: server.client.loop.snapshot().scheduler.num_running == 1)
            second = pool.submit(send_request, server)
            wait_for(lambda: server.num_busy == 2)
            for stream in (False, True):
                response = send_request(server, stream=stream)
                refused(response, 529, "overloaded_error")
                assert response.headers["retry-after"] == "1"
            server.backend.gate.set()
            assert first.result().status_code == second.result().status_code == 200


def test_failures_are_reported_before_and_in_mid_stream(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        first = server.client.card.tokenizer.encode("hello")[0]
        server.backend.poison = first
        for stream in (False, True):
            output = refused(send_request(server, stream=stream), 500, "api_error")
            assert output == "The engine failed on this request."
        server.backend.poison = None
        body = {"messages": HELLO, "max_tokens": 400, "stream": True, **LONG}
        with server.http.stream("POST", PATH, json=body) as response:
            lines = response.iter_lines()
            while next(lines) != "event: content_block_delta":
                pass
            server.backend.poison = first
            rest = [line for line in lines if line]
        assert rest[-2] == "event: error"
        detail = {"type": "api_error", "message": "The engine failed on this request."}
        assert json.loads(rest[-1].removeprefix("data: ")) == {
            "type": "error",
            "error": detail,
            "request_id": response.headers["request-id"],
        }
        server.wait_idle()


def test_aborted_stream_ends_with_an_error(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        body = {"messages": HELLO, "max_tokens": 400, "stream": True, **LONG}
        with server.http.stream("POST", PATH, json=body) as response:
            lines = response.iter_lines()
            while next(lines) != "event: content_block_delta":
                pass
            server.abort()
            rest = [line for line in lines if line]
        assert rest[-2] == "event: error"
        assert "message_stop" not in str(rest)
        server.wait_idle()


def test_client_that_leaves_in_mid_stream_is_cancelled(tmp_path: Path) -> None:
    with live_server(tmp_path) as server:
        with server.connect() as connection:
            body = {"messages": HELLO, "max_tokens": 400, "stream": True, **LONG}
            connection.sendall(post_bytes(PATH, body))
            got = b""
            while b"content_block_delta" not in got:
                got += connection.recv(65536)
            assert server.num_busy == 1
            server.backend.gate.clear()
        wait_for(lambda: server.num_busy == 0)
        server.backend.gate.set()
        server.wait_idle()


def test_metrics_name_the_routes(server: LiveServer) -> None:
    send_request(server, max_tokens=0)
    server.http.post(COUNT, json={"messages": HELLO})
    text = server.http.get("/metrics").text
    assert f'twostroke_http_responses_total{{endpoint="{PATH}",status="400"}}' in text
    assert f'twostroke_http_responses_total{{endpoint="{COUNT}",status="200"}}' in text
    assert {PATH, COUNT} <= set(server.http.get("/").json()["endpoints"])


def refused(response: httpx.Response, status: int, kind: str) -> str:
    """Check an error response's form, and return its message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["type", "error", "request_id"]
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"]
    assert body["error"].keys() == {"type", "message"}
    assert body["error"]["type"] == kind
    message: str = body["error"]["message"]
    assert message.isprintable()
    assert ".py" not in message
    return message


def _answer_end(response: httpx.Response) -> tuple[str, str, str | None]:
    """Return the text, the stop reason and the stop sequence of a response."""
    if response.headers["content-type"] == "application/json":
        body = response.json()
        return body["content"][0]["text"], body["stop_reason"], body["stop_sequence"]
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if "data: " in line]
    results = [json.loads(line) for line in data]
    text = "".join(e["delta"]["text"] for e in results if e["type"] == "content_block_delta")
    (end,) = [event["delta"] for event in results if event["type"] == "message_delta"]
    return text, end["stop_reason"], end["stop_sequence"]


def test_cache_control_does_not_change_the_answer(server: LiveServer) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    text = {"type": "text", "text": "Be brief."}
    plain = {"system": [text], "messages": [{"role": "user", "content": [text]}]}
    marked = {
        "system": [text | mark],
        "messages": [{"role": "user", "content": [text | mark]}],
        "tools": [],
        **mark,
    }
    answers = [
        send_request(server, max_tokens=3, temperature=0, **fields).json()["content"]
        for fields in (plain, marked)
    ]
    assert answers[0] == answers[1]
