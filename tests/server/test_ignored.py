"""Fields without effect fail no request: they are named, counted and logged; `--strict` refuses."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from support.refusals import refused
from support.servers import chat_body, live_server
from twostroke.server.body.decode import BodyDecoder
from twostroke.server.http.ignored import MAX_IGNORED
from twostroke.server.protocols.openai.chat import ChatRequest

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import LiveServer

Fields = dict[str, Any]

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "strictly": 1}}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
MINIMAL_FIELDS: dict[str, Fields] = {
    CHAT: {"messages": HELLO, "max_tokens": 1},
    "/v1/completions": {"prompt": "hello", "max_tokens": 1},
    MESSAGES: {"messages": HELLO, "max_tokens": 1},
    RESPONSES: {"input": "hello", "max_output_tokens": 1},
    "/v1/embeddings": {"input": "hello"},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5]},
}
# By path: the fields, their names in the header, and what a strict server says (empty: nothing).
IGNORED: list[tuple[str, Fields, str, str]] = [
    *[(path, {"none": 1}, "none", "none is not a known field") for path in MINIMAL_FIELDS],
    (CHAT, {"temprature": 1}, "temprature", "temprature is not a known field. Did you mean 'temp"),
    (CHAT, {"a b,\r\nx: é": 1}, "a%20b%2C%0D%0Ax%3A%20%C3%A9", "is not a known field."),
    (CHAT, {"": 1}, "''", "'' is not a known field."),
    (CHAT, {"messages": [HELLO[0] | {"x": 1}] * 2}, "messages[].x", "messages[0].x is not a known"),
    (CHAT, {"tools": [TOOL]}, "tools[].function.strictly", "mean 'strict'?"),
    (CHAT, {"response_format": {"type": "text", "x": 1}}, "response_format.x", "not a known field"),
    (CHAT, {"verbosity": "low", "user": "u"}, "user, verbosity", "verbosity is not supported yet"),
    (CHAT, {"verbosity": "medium", "metadata": {}, "store": False, "user": None}, "", ""),
    *[(CHAT, {"metadata": value}, "metadata", "metadata") for value in ("", ["x"], {"k": 1})],
    (CHAT, {"service_tier": "best"}, "service_tier", "service_tier must be one of auto"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "when stream is true."),
    (CHAT, {"stream_options": {}, "stream": True}, "", ""),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort", "does not support reasoning"),
    (CHAT, {"reasoning_effort": "some"}, "reasoning_effort", "must be one of none, minimal"),
    (CHAT, {"reasoning_effort": "none"}, "", ""),
    (CHAT, {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", "x is not a variable"),
    (CHAT, {"logit_bias": {"a": 1, "-1": 2}}, "logit_bias", "key of logit_bias must be a token"),
    (CHAT, {"logit_bias": {"5": 1, "999999": 2}}, "logit_bias", "ids outside 0 to"),
    (CHAT, {"top_k": -1, "audio": {"voice": "x"}}, "audio", "audio is not supported"),
    (CHAT, {"functions": [{"name": "f"}], "function_call": "none", "best_of": 0}, "", ""),
    (CHAT, {"provider": {"order": []}}, "provider", "provider is not a known field"),
    (CHAT, {"images": None, "system": ""}, "images, system", "is not a known field"),
    ("/v1/completions", {"length_penalty": True}, "length_penalty", "not supported yet"),
    (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort", "has no effect"),
    (MESSAGES, {"max_token": 1}, "max_token", "Did you mean 'max_tokens'?"),
    (MESSAGES, {"metadata": 1, "service_tier": 1}, "metadata, service_tier", ""),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity", "not supported yet"),
    (RESPONSES, {"reasoning": {"efort": "x"}}, "reasoning.efort", "Did you mean 'effort'?"),
    (RESPONSES, {"metadata": {"k": "v" * 513}}, "metadata", "metadata[...] must have at most 512"),
    (RESPONSES, {"max_tool_calls": 0, "user": 5}, "user, max_tool_calls", "user must be a string"),
    (RESPONSES, {"include": ["some", "more"]}, "include[]", "does not support 'some'"),
    (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort", "does not support reasoning"),
    (MESSAGES, {"thinking": {"type": "adaptive"}, "top_k": -1}, "", ""),
    (RESPONSES, {"input": [{"role": "user", "content": "a", "x": 1}]}, "input[].x", "not a known"),
    (RESPONSES, {"stream_options": {"include_usage": True}, "stream": True}, "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "names", "sentence"), IGNORED)
def test_field_without_effect_is_named_and_a_strict_server_refuses_it(
    server: LiveServer, strict: LiveServer, path: str, fields: Fields, names: str, sentence: str
) -> None:
    body = MINIMAL_FIELDS[path] | fields
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers.get("twostroke-ignored", "") == names
    response = strict.http.post(path, json=body)
    assert response.status_code == (400 if sentence else 200)
    if sentence:
        assert sentence in response.json()["error"]["message"]


def test_answer_is_the_one_without_the_ignored_fields(server: LiveServer) -> None:
    seeded = chat_body(max_tokens=8, seed=3)
    ignored_fields = {
        "messages": [seeded["messages"][0] | {"x": [{"y": 1}]}],
        "z": {},
        "max_tokens": 8.0,
    }
    plain, ignoring = (
        server.http.post(CHAT, json=seeded | fields).json() for fields in ({}, ignored_fields)
    )
    assert ignoring["choices"] == plain["choices"]


def test_stream_has_the_header(server: LiveServer) -> None:
    response = server.chat(stream=True, max_tokens=1, nothing=1)
    assert response.headers["twostroke-ignored"] == "nothing"


def test_header_is_bounded_and_cannot_be_broken(server: LiveServer) -> None:
    fields = {f"\r\nX-Evil: {n}" + "é" * 500: n for n in range(100)}
    response = server.chat(max_tokens=1, **fields)
    header = response.headers["twostroke-ignored"]
    assert response.status_code == 200
    assert len(header) < 2000
    assert header.endswith(", ...")
    assert "x-evil" not in response.headers


def test_ignored_fields_are_counted_by_known_names_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with live_server(tmp_path) as server, caplog.at_level(logging.INFO, "twostroke.serve"):
        for _ in range(2):
            server.chat(max_tokens=1, user="u", temprature=1, whatever=1)
        metrics = server.http.get("/metrics").text
    assert 'twostroke_ignored_fields_total{field="user"} 2.0' in metrics
    assert 'twostroke_ignored_fields_total{field="other"} 4.0' in metrics
    assert "temprature" not in metrics
    messages = [
        record.getMessage() for record in caplog.records if "Ignored" in record.getMessage()
    ]
    assert len(messages) == 3
    assert "temprature is not a known field. Did you mean 'temperature'?" in messages[0]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *[(CHAT, {name: ["x"]}) for name in ("images", "plugins", "system", "stop_sequences")],
        *[(MESSAGES, {name: 2}) for name in ("n", "stop", "response_format", "input")],
        (CHAT, {"messages": [HELLO[0] | {"images": ["x"]}]}),
        ("/v1/embeddings", {"image": "x"}),
    ],
)
def test_unknown_field_that_would_change_the_answer_is_refused(
    server: LiveServer, path: str, fields: Fields
) -> None:
    response = server.http.post(path, json=MINIMAL_FIELDS[path] | fields)
    assert response.status_code == 400
    assert "is not a known field, and the answer depends" in response.json()["error"]["message"]


def test_minus_one_is_no_limit(server: LiveServer) -> None:
    for path, field in ((CHAT, "max_tokens"), ("/v1/completions", "max_tokens")):
        body = MINIMAL_FIELDS[path] | {field: -1, "ignore_eos": True}
        assert server.http.post(path, json=body).json()["usage"]["total_tokens"] == 512


def test_misspelt_field_that_is_needed_is_named(server: LiveServer) -> None:
    response = server.http.post(CHAT, json={"mesages": HELLO})
    output = refused(response, 400, "mesages", "unknown_parameter")
    assert output == "mesages is not a known field. Did you mean 'messages'?"


@pytest.mark.parametrize("fields", [{"max_tokens": 2.0, "top_k": 3.0, "n": 2.0}, {"seed": 1.0}])
def test_whole_numbers_may_have_a_fraction(server: LiveServer, fields: Fields) -> None:
    assert server.chat(**{"max_tokens": 1, **fields}).status_code == 200
    assert server.chat(**dict.fromkeys(fields, 2.5)).status_code == 400
    assert server.complete(prompt=[5.0, 6.0], max_tokens=1).status_code == 200


@pytest.mark.parametrize("unit", ['"%d": 0', '"x": {"%d": []}', '"messages": [{"%d": 0}]'])
def test_many_unknown_fields_leave_a_short_report(unit: str) -> None:
    unknown_fields = ", ".join(unit % n for n in range(100_000))
    body = f'{{{unknown_fields}, "messages": {json.dumps(HELLO)}}}'.encode()
    _, ignored = BodyDecoder(ChatRequest, 16).decode(body)
    assert len(ignored) <= MAX_IGNORED


def test_field_of_many_messages_is_reported_once(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "", "x": 1}] * 9_999 + HELLO
    body = {"messages": messages, "max_tokens": 1_000_000}
    response = server.http.post("/tokenize", json=body)
    assert response.headers["twostroke-ignored"] == "messages[].x"
