"""Ollama's /api/chat and /api/generate, as clients see them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from support import family_templates
from support.family_templates import say, talker
from twostroke.core.json_io import encode_json
from twostroke.server.generation.response_store import ResponseStore, Tenant
from twostroke.server.options import ServeOptions
from twostroke.server.protocols.common.tools import decode_arguments
from twostroke.server.protocols.ollama.request import (
    OllamaGenerateRequest,
    OllamaOptions,
    read_generate,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from support.servers import LiveServer

Fields = dict[str, Any]

HELLO = [{"role": "user", "content": "hello"}]
THOUGHT = "<think>\nWell.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"const": 1}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
NOBODY = Tenant("", ResponseStore(0, 0))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server whose model begins with reasoning, unless a request turns it off."""
    with talker(tmp_path_factory.mktemp("thinks"), family_templates.THINKS) as live:
        yield live


def send_request(server: LiveServer, path: str = "chat", **fields: Any) -> httpx.Response:
    content: Fields = {"messages": HELLO} if path == "chat" else {"prompt": "hello"}
    return server.http.post(f"/api/{path}", json=content | fields)


def lines(response: httpx.Response) -> list[Fields]:
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("}\n")
    return [json.loads(line) for line in response.text.splitlines()]


def message(server: LiveServer, **fields: Any) -> Fields:
    """Return the message of a complete answer, after comparing it with the streamed answer."""
    body = send_request(server, stream=False, **fields).json()
    chunks = lines(send_request(server, **fields))
    assert [line["done"] for line in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["done_reason"] == body["done_reason"]
    for key in ("content", "thinking"):
        parts = [line["message"].get(key, "") for line in chunks]
        assert "".join(parts) == body["message"].get(key, "")
    calls = [call for line in chunks for call in line["message"].get("tool_calls", [])]
    for call in (*calls, *body["message"].get("tool_calls", [])):
        assert call.pop("id").startswith("call_")
    assert calls == body["message"].get("tool_calls", [])
    return {**body["message"], "done_reason": body["done_reason"]}


def test_whole_answer_has_ollamas_shape(server: LiveServer) -> None:
    say(server, "It is.")
    body = send_request(server, stream=False, think=False).json()
    assert datetime.fromisoformat(body.pop("created_at")).year >= 2026
    assert all(isinstance(body.pop(name), int) for name in DURATIONS)
    count = body.pop("prompt_eval_count")
    assert count > 5
    assert body == {
        "model": "tiny",
        "message": {"role": "assistant", "content": "It is."},
        "done": True,
        "done_reason": "stop",
        "eval_count": len(server.backend.script),
    }


def test_streamed_pieces_make_the_whole_answer(server: LiveServer) -> None:
    say(server, f"{THOUGHT}It is.")
    results = {"role": "assistant", "content": "It is.", "thinking": "Well.", "done_reason": "stop"}
    assert message(server) == message(server, think=True) == results
    cut = message(server, options={"num_predict": len(server.backend.script) - 3})
    assert cut["done_reason"] == "length"
    assert "It is.".startswith(cut["content"])
    chunks = lines(send_request(server, "generate"))
    assert "".join(chunk["response"] for chunk in chunks) == "It is."
    assert "".join(chunk.get("thinking", "") for chunk in chunks) == "Well."


def test_calls_come_whole_with_their_arguments_as_objects(server: LiveServer) -> None:
    say(server, f"{THOUGHT}Look:\n{CALL}{CALL}")
    result = message(server, tools=TOOLS)
    functions = [{"function": {"index": i, "name": "f", "arguments": {"a": 1}}} for i in (0, 1)]
    assert result["tool_calls"] == functions
    assert (result["content"], result["done_reason"]) == ("Look:", "stop")
    say(server, "rain")
    earlier = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": functions[:1]},
        {"role": "tool", "tool_name": "f", "content": "rain"},
    ]
    assert message(server, messages=earlier, tools=TOOLS)["content"] == "rain"


def test_a_number_too_large_for_a_float_is_sent_as_it_was_written(server: LiveServer) -> None:
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "number"}}}}
    tools = [{"type": "function", "function": function}]
    say(server, CALL.replace('"a": 1', '"a": 1e999'))
    for is_stream in (True, False):
        response = send_request(
            server, stream=is_stream, think=False, tools=tools, options={"num_predict": 100}
        )
        assert '"arguments":{"a":1e999}' in response.text
    fields = {"tools": [{"name": "f", "input_schema": function["parameters"]}], "max_tokens": 100}
    response = server.http.post("/v1/messages", json={"messages": HELLO, **fields})
    assert '"input":{"a":1e999}' in response.text


def test_arguments_with_line_breaks_are_one_line() -> None:
    text = '{"a": {\n  "b": 1e999,\r\n "c": "d  e"}, "f": [1,\n2]}'
    arguments = encode_json(decode_arguments(text))
    assert arguments == b'{"a":{"b":1e999,"c":"d  e"},"f":[1,2]}'


def test_a_call_that_is_cut_is_not_shown(server: LiveServer) -> None:
    num_tokens = len(say(server, f"<think></think>{CALL}")) - 18
    result = message(server, tools=TOOLS, options={"num_predict": num_tokens})
    assert "tool_calls" not in result
    assert not result["content"]
    assert result["done_reason"] == "length"


def test_format_is_kept_to(server: LiveServer) -> None:
    server.backend.script = ()
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    for path, field in (("chat", "message"), ("generate", "response")):
        body = send_request(server, path, stream=False, think=False, format=schema).json()
        text = body[field]["content"] if field == "message" else body[field]
        assert json.loads(text) == {"a": "b"}
    any_object = read_generate(OllamaGenerateRequest(prompt="a", format="json"), NOBODY)
    assert any_object.params.constraint is not None
    assert send_request(server, format="xml").json() == {
        "error": "format must be 'json' or a JSON schema, got 'xml'."
    }


def test_logprobs_come_with_their_pieces(server: LiveServer) -> None:
    server.backend.script = ()
    fields: Fields = {"options": {"num_predict": 3, "temperature": 0}, "think": False}
    fields |= {"logprobs": True, "top_logprobs": 2}
    whole_logprobs = send_request(server, stream=False, **fields).json()["logprobs"]
    assert [set(token) for token in whole_logprobs] == [
        {"token", "logprob", "bytes", "top_logprobs"}
    ] * 3
    assert all(len(token["top_logprobs"]) == 2 for token in whole_logprobs)
    chunks = lines(send_request(server, **fields))
    assert [token for line in chunks for token in line.get("logprobs", [])] == whole_logprobs


def test_options_become_the_engines(server: LiveServer) -> None:
    options = OllamaOptions(num_predict=7, top_k=-1, repeat_penalty=1.1, seed=-1, stop=["x"])
    params = read_generate(OllamaGenerateRequest(prompt="a", options=options), NOBODY).params
    assert (params.max_tokens, params.top_k, params.repetition_penalty) == (7, 0, 1.1)
    assert (params.seed, params.stop) == (None, ("x",))
    for options, message_start in (
        ({"temperature": -1}, "options.temperature must be from 0 to 100, got -1."),
        ({"repeat_penalty": -1}, "options.repeat_penalty must be greater than 0"),
    ):
        body = send_request(server, options=options).json()
        assert body["error"].startswith(message_start)


def test_a_request_without_content_finds_the_model_loaded(server: LiveServer) -> None:
    for path, content, reason in (
        ("chat", {"messages": []}, "load"),
        ("generate", {"prompt": "", "keep_alive": "10m"}, "load"),
        ("generate", {"prompt": "", "keep_alive": 0}, "unload"),
    ):
        body = send_request(server, path, **content).json()
        assert (body["done"], body["done_reason"], body["model"]) == (True, reason, "tiny")
    assert send_request(server, "generate", prompt=None).json()["response"] == ""


def test_context_goes_on_from_an_earlier_answer(server: LiveServer) -> None:
    output = say(server, "It is.")
    first = send_request(server, "generate", stream=False, think=False, system="Be brief.").json()
    tokenizer = server.client.card.tokenizer
    text = tokenizer.decode(first["context"], skip_special=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello")
    assert text.endswith("It is.<|endoftext|>")
    assert first["eval_count"] == len(output) + 1
    second = send_request(
        server, "generate", stream=False, think=False, context=first["context"]
    ).json()
    assert second["context"][: len(first["context"])] == first["context"]
    assert second["prompt_eval_count"] > len(first["context"])


def test_raw_prompts_have_special_tokens_and_no_template(server: LiveServer) -> None:
    say(server, "It is.")
    body = send_request(server, "generate", stream=False, raw=True, prompt="<|im_start|>a").json()
    tokens = server.client.card.tokenizer.encode("<|im_start|>a", parse_special=True)
    assert body["prompt_eval_count"] == len(tokens) < 5
    assert "context" not in body
    body = send_request(server, "generate", raw=True, system="x").json()
    assert body["error"] == "system cannot be combined with raw: leave one of them out."


def test_last_assistant_message_is_continued(server: LiveServer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "It"}]
    say(server, " is.")
    assert message(server, messages=messages)["content"] == " is."


def test_long_conversation_loses_its_oldest_exchanges(server: LiveServer) -> None:
    say(server, "It is.")
    long = [{"role": "user", "content": 3000 * "a"}, {"role": "assistant", "content": "b"}]
    whole_conversation = message(server, messages=[*long, *long, *HELLO])
    assert whole_conversation["content"] == "It is."
    response = send_request(server, messages=[*long, *long, *HELLO], truncate=False)
    assert response.status_code == 400
    assert "maximum context length is 4096 tokens" in response.json()["error"]


def test_errors_have_ollamas_form(server: LiveServer) -> None:
    response = send_request(server, model="llama3")
    assert response.status_code == 404
    assert response.json()["error"].startswith("model 'llama3' not found")
    for fields, word in (
        ({"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "images"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
    ):
        response = send_request(server, **fields)
        assert response.status_code == 400
        assert word in response.json()["error"]
    assert "template" in send_request(server, "generate", template="{{ .Prompt }}").json()["error"]
    assert send_request(server, "nothing").json()["error"].startswith("The path /api/nothing")


def test_a_silent_stream_sends_spaces_and_a_failure_is_a_line(tmp_path: Path) -> None:
    options = ServeOptions(drain_s=1, keep_alive_s=0.1)
    with talker(tmp_path, family_templates.THINKS, options=options) as server:
        server.backend.gate.clear()
        with server.http.stream("POST", "/api/chat", json={"messages": HELLO}) as response:
            chunks = response.iter_text()
            assert [next(chunks) for _ in range(2)] == [" ", " "]
            server.backend.is_broken = True
            server.backend.gate.set()
            last = "".join(chunks)
        assert response.status_code == 200
        assert json.loads(last)["error"].startswith("The engine")
