"""Answers that break their schemas are generated again, and marked if that does not help."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from support import family_templates
from support.family_templates import say, talker
from support.waiting import wait_for
from twostroke.core.sampling import MAX_SEED
from twostroke.engine.settling import MAX_REDRAWS
from twostroke.server.generation.checks import AnswerChecks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import LiveServer
    from twostroke.engine.structured_output.schema.verify import SchemaViolation

    Fields = dict[str, Any]

TALK = [{"role": "user", "content": "hello"}]
# What the grammar does not hold: items of any text that are distinct, in the second member.
TAGS: Fields = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    },
    "required": ["title", "tags"],
    "additionalProperties": False,
}
WRONG = '{"title": "One", "tags": ["One", "Ones", "One"]}'
DUPLICATES = '{"title": "One", "tags": ["One", "Ones", "Ones"]}'
RIGHT = '{"title": "One", "tags": ["One", "Ones", "Onesie"]}'
# As many wrong answers as are drawn at most: each repeats an item that is not excluded yet.
_ITEMS = ("One", "Ones", "Onesie", "Onto", "Oak", "Two", "Axe", "Bee", "Cap")
WRONGS = [json.dumps({"title": "One", "tags": [*_ITEMS, item]}) for item in _ITEMS]
MISS = "uniqueItems (/properties/tags)"


def _named(*, strict: bool | None) -> Fields:
    return {"name": "x", "schema": TAGS, "strict": strict}


# For each path, a request with the schema, and the same with a strict schema where it has one.
PROTOCOLS: dict[str, tuple[Fields | None, Fields | None]] = {
    "/v1/chat/completions": (
        {
            "messages": TALK,
            "response_format": {"type": "json_schema", "json_schema": _named(strict=None)},
        },
        {
            "messages": TALK,
            "response_format": {"type": "json_schema", "json_schema": _named(strict=True)},
        },
    ),
    "/v1/completions": (
        {"prompt": "hello", "guided_json": TAGS, "max_tokens": 200},
        {
            "prompt": "hello",
            "response_format": {"type": "json_schema", "json_schema": _named(strict=True)},
            "max_tokens": 200,
        },
    ),
    "/v1/responses": (
        {"input": "hello", "text": {"format": {"type": "json_schema", **_named(strict=False)}}},
        {"input": "hello", "text": {"format": {"type": "json_schema", **_named(strict=True)}}},
    ),
    "/v1/messages": (
        None,
        {
            "messages": TALK,
            "output_config": {"format": {"type": "json_schema", "schema": TAGS}},
            "max_tokens": 200,
        },
    ),
    "/api/chat": ({"messages": TALK, "format": TAGS}, None),
    "/api/generate": ({"prompt": "hello", "format": TAGS}, None),
    "/completion": ({"prompt": "hello", "json_schema": TAGS, "n_predict": 200}, None),
}
FREE = [(path, body) for path, (body, _) in PROTOCOLS.items() if body is not None]
STRICT = [(path, body) for path, (_, body) in PROTOCOLS.items() if body is not None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with talker(tmp_path_factory.mktemp("redraw"), family_templates.HERMES) as live:
        yield live


def send_request(server: LiveServer, path: str, body: Fields, *, stream: bool) -> Any:
    options = {"options": {"temperature": 0}} if path.startswith("/api") else {"temperature": 0}
    return server.http.post(path, json=body | options | {"stream": stream})


def documents(text: str) -> list[Any]:
    """Return all JSON objects of a response, whole or streamed."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def texts(path: str, text: str, *, stream: bool) -> str:
    """Return the text of an answer, whole or streamed."""
    results = []
    for document in documents(text):
        match path:
            case "/v1/chat/completions" if document["choices"]:
                choice = document["choices"][0]
                results.append(choice["delta" if stream else "message"].get("content") or "")
            case "/v1/completions" if document["choices"]:
                results.append(document["choices"][0]["text"])
            case "/v1/responses" if stream:
                results.append(
                    document["delta"] if document["type"] == "response.output_text.delta" else ""
                )
            case "/v1/responses":
                results.append(document["output"][0]["content"][0]["text"])
            case "/v1/messages" if stream:
                results.append(document.get("delta", {}).get("text", ""))
            case "/v1/messages":
                results.append(document["content"][0]["text"])
            case "/api/chat":
                results.append(document["message"]["content"])
            case "/api/generate":
                results.append(document["response"])
            case "/completion":
                results.append(document["content"])
    return "".join(results)


@pytest.mark.parametrize(("path", "body"), FREE + STRICT)
def test_a_wrong_answer_is_generated_again_from_its_first_wrong_value_on(
    server: LiveServer, path: str, body: Fields
) -> None:
    say(server, WRONG, DUPLICATES, RIGHT)
    for stream in (False, True):
        response = send_request(server, path, body, stream=stream)
        assert response.status_code == 200, response.text
        assert json.loads(texts(path, response.text, stream=stream)) == json.loads(RIGHT)
        assert "schema_miss" not in response.text
        assert "twostroke-schema-miss" not in response.headers


@pytest.mark.parametrize(("path", "body"), FREE)
def test_an_answer_that_stays_wrong_is_marked(server: LiveServer, path: str, body: Fields) -> None:
    say(server, *WRONGS)
    for stream in (False, True):
        response = send_request(server, path, body, stream=stream)
        assert response.status_code == 200, response.text
        answer = texts(path, response.text, stream=stream)
        assert answer == WRONGS[MAX_REDRAWS]
        assert response.text.count(f'"schema_miss":"{MISS}"') == 1
        assert stream or response.headers["twostroke-schema-miss"] == MISS


@pytest.mark.parametrize(("path", "body"), STRICT)
def test_a_strict_answer_that_stays_wrong_is_an_error(
    server: LiveServer, path: str, body: Fields
) -> None:
    say(server, *WRONGS)
    response = send_request(server, path, body, stream=False)
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert MISS in response.json()["error"]["message"]
    streamed = send_request(server, path, body, stream=True)
    *earlier, last = documents(streamed.text)
    assert MISS in json.dumps(last)
    assert "error" in json.dumps(last)
    assert MISS not in json.dumps(earlier)
    sent = texts(path, "\n".join(map(json.dumps, earlier)), stream=True)
    assert sent == WRONG[: WRONG.index('"tags"')]  # the array was never shown
    assert "length" not in streamed.text
    assert '"stop"' not in streamed.text


def test_wrong_arguments_of_calls_are_generated_again_or_reported(server: LiveServer) -> None:
    for is_strict, stream, is_mended in product((False, True), (False, True), (False, True)):
        function = {"name": "note", "parameters": TAGS, "strict": is_strict}
        tools = [{"type": "function", "function": function}]
        answers = [
            f'<tool_call>\n{{"name": "note", "arguments": {{"title": "a", "tags": ["b"]}}}}\n'
            f'</tool_call>\n<tool_call>\n{{"name": "note", "arguments": {arguments}}}\n</tool_call>'
            for arguments in ([WRONG, DUPLICATES, RIGHT] if is_mended else WRONGS)
        ]
        say(server, *answers)
        body = {"messages": TALK, "tools": tools}
        response = send_request(server, "/v1/chat/completions", body, stream=stream)
        assert response.status_code == (500 if is_strict and not stream and not is_mended else 200)
        if is_mended:
            assert MISS not in response.text
            calls: dict[int, str] = {}
            for document in documents(response.text):
                for choice in document["choices"]:
                    for call in choice["delta" if stream else "message"].get("tool_calls", ()):
                        index = call.get("index", len(calls))
                        calls[index] = calls.get(index, "") + call["function"]["arguments"]
            assert json.loads(calls[1]) == json.loads(RIGHT)
            assert '"finish_reason":"tool_calls"' in response.text
        else:
            assert response.text.count(MISS) == 1
            assert ('"schema_miss":"' in response.text) is not is_strict


def test_a_stream_goes_on_until_the_first_value_that_may_change(server: LiveServer) -> None:
    say(server, WRONG, DUPLICATES, RIGHT)
    _, body = STRICT[0]
    events = documents(send_request(server, "/v1/chat/completions", body, stream=True).text)
    chunks = [
        event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]
    ]
    chunks = [chunk for chunk in chunks if chunk]
    assert len(chunks) > 10
    first_held = RIGHT.index('"tags"')
    assert "".join(chunks[:-1]) == RIGHT[:first_held]
    assert chunks[-1] == RIGHT[first_held:]


def test_names_are_streamed_unless_they_repeat(server: LiveServer) -> None:
    repeated, other = '{"a": 1, "b": 2, "a": 3}', '{"a": 1, "b": 2, "ab": 3}'
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    say(server, repeated, other)
    body = {"messages": TALK, "guided_json": schema}
    events = documents(send_request(server, "/v1/chat/completions", body, stream=True).text)
    chunks = [
        event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]
    ]
    assert "".join(chunks) == other
    assert "".join(chunks).startswith("".join(chunks[:6]))
    assert len([chunk for chunk in chunks if chunk]) > 8


@pytest.mark.parametrize("stream", [False, True])
def test_scores_and_usage_belong_to_the_answer_that_is_sent(
    server: LiveServer, stream: bool
) -> None:
    say(server, WRONG, RIGHT)
    tokens = server.client.card.tokenizer.encode(RIGHT)
    body = FREE[0][1] | {"logprobs": True, "stream_options": {"include_usage": True}}
    if not stream:
        del body["stream_options"]
    result = documents(send_request(server, "/v1/chat/completions", body, stream=stream).text)
    scored = [
        score["token"]
        for chunk in result
        for choice in chunk["choices"]
        for score in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert "".join(scored) == RIGHT
    assert result[-1]["usage"]["completion_tokens"] == len(tokens) + 1


def test_each_of_several_answers_is_settled(server: LiveServer) -> None:
    say(server, WRONG, RIGHT)
    for stream in (False, True):
        body = {"messages": TALK, "guided_json": TAGS, "n": 3, "seed": MAX_SEED}
        result = documents(send_request(server, "/v1/chat/completions", body, stream=stream).text)
        answers = ["", "", ""]
        for chunk in result:
            for choice in chunk["choices"]:
                delta = choice["delta" if stream else "message"]
                answers[choice["index"]] += delta.get("content") or ""
        assert answers == [RIGHT] * 3


def test_a_cut_off_answer_is_not_generated_again(server: LiveServer) -> None:
    say(server, WRONG, RIGHT)
    for stream in (False, True):
        body = STRICT[0][1] | {"max_tokens": len(WRONG) - 2}
        response = send_request(server, "/v1/chat/completions", body, stream=stream)
        text = texts("/v1/chat/completions", response.text, stream=stream)
        assert WRONG.startswith(text)
        assert text
        assert '"finish_reason":"length"' in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/chat/completions", {"max_tokens": ...}),
        ("/v1/responses", {"max_output_tokens": ...}),
        ("/api/chat", {"options": {"temperature": 0, "num_predict": ...}}),
        ("/completion", {"n_predict": ...}),
    ],
)
def test_a_complete_value_is_checked_though_the_limit_leaves_no_token_for_the_end(
    server: LiveServer, path: str, limit: Fields, stream: bool
) -> None:
    say(server, WRONG, DUPLICATES)
    num_tokens = len(server.client.card.tokenizer.encode(WRONG))
    fields = json.loads(json.dumps(limit, default=lambda _: num_tokens))
    body = PROTOCOLS[path][0]
    assert body is not None
    response = server.http.post(path, json={"temperature": 0, **body, **fields, "stream": stream})
    assert texts(path, response.text, stream=stream) == DUPLICATES[: len(WRONG)]
    assert "schema_miss" not in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_complete_call_before_the_cut_is_checked(server: LiveServer, stream: bool) -> None:
    call = '<tool_call>\n{{"name": "note", "arguments": {}}}\n</tool_call>'.format
    function = {"name": "note", "parameters": TAGS, "strict": True}
    body = {"messages": TALK, "tools": [{"type": "function", "function": function}]}
    num_tokens = len(server.client.card.tokenizer.encode(call(WRONG), parse_special=True)) + 40
    limited = body | {"max_tokens": num_tokens}
    say(server, *(f"{call(wrong)}\n{call(RIGHT)}" for wrong in (WRONG, DUPLICATES, RIGHT)))
    response = send_request(server, "/v1/chat/completions", limited, stream=stream)
    assert '"finish_reason":"length"' in response.text
    assert "Onesie" in response.text
    assert MISS not in response.text


def test_a_cancelled_answer_is_not_generated_again(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(server, WRONG, RIGHT)
    path, check_fault = "/v1/responses", AnswerChecks.find_violation
    runs = server.api._background

    async def find_violation(
        checks: AnswerChecks, schema: str, text: str
    ) -> SchemaViolation | None:
        result = await check_fault(checks, schema, text)
        [run] = (run for run in runs._runs.values() if not run.is_over)
        cancelling.append(asyncio.create_task(run.cancel()))
        await asyncio.sleep(0)
        return result

    cancelling: list[asyncio.Task[None]] = []
    monkeypatch.setattr(AnswerChecks, "find_violation", find_violation)
    body, _ = PROTOCOLS[path]
    assert body is not None
    id_ = send_request(server, path, {**body, "background": True}, stream=False).json()["id"]
    server.wait_idle()
    wait_for(lambda: server.http.get(f"{path}/{id_}").json()["status"] == "cancelled")
    assert len(cancelling) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_a_stop_token_cut_is_not_checked(server: LiveServer, stream: bool) -> None:
    """The text before the stop token is not JSON."""
    say(server, WRONG)
    stop_id = server.client.card.tokenizer.encode(WRONG)[-3]
    response = send_request(
        server, "/v1/chat/completions", STRICT[0][1] | {"stop_token_ids": [stop_id]}, stream=stream
    )
    assert response.status_code == 200, response.text
    assert '"finish_reason":"stop"' in response.text
    text = texts("/v1/chat/completions", response.text, stream=stream)
    assert text
    assert WRONG.startswith(text)


def test_an_answer_without_alternative_is_marked(tmp_path: Path) -> None:
    """A real sampler finds no other token, so the first answer is used and marked."""
    row = {"type": "array", "items": {"enum": ["a"]}, "minItems": 1, "maxItems": 1}
    rows = {"type": "array", "items": row, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    body = {"messages": TALK, "guided_json": rows}
    with talker(tmp_path, family_templates.HERMES) as live:
        for stream in (False, True):
            response = send_request(live, "/v1/chat/completions", body, stream=stream)
            assert response.status_code == 200, response.text
            text = texts("/v1/chat/completions", response.text, stream=stream)
            assert json.loads(text) == [["a"], ["a"]]
            assert "uniqueItems" in response.text
