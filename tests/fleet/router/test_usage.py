"""A router with records: usage as replicas report it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.accounts import (
    BODY,
    CHAT,
    SECRET,
    USAGE,
    accounting,
    asleep,
    post,
    used,
    whole_response,
)
from support.keys import add
from support.replicas import Exchange, FakeReplica, Loop
from support.servers import live_server
from support.waiting import wait_for
from twostroke.fleet.router.usage_meter import with_usage_option
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.servers import LiveServer


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of ours that trusts the router."""
    keys = ApiKeys.read(None, None, router=SECRET)
    folder = tmp_path_factory.mktemp("trusting")
    with live_server(folder, ServeOptions(drain_s=1, api_keys=keys)) as server:
        yield server


def answer_with_usage(
    *events: bytes, usage: str = "9 3 4", last: bytes = b""
) -> Callable[[Exchange], Any]:
    """A stream as a server of ours sends it, in pieces that split its last line."""

    async def behave(exchange: Exchange) -> None:
        await exchange.say(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"x-twostroke-usage: 9 3 0\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        line = last or f": twostroke-usage {usage}\n\n".encode()
        for data in (*events, line[:20], line[20:]):
            if data:
                await exchange.chunk(data)
                await asyncio.sleep(0.01)
        await exchange.say(b"0\r\n\r\n")

    return behave


def streamed(*events: bytes) -> Callable[[Exchange], Any]:
    """A stream of another server."""

    async def behave(exchange: Exchange) -> None:
        await exchange.begin_events()
        for data in events:
            await exchange.chunk(data)
        await exchange.say(b"0\r\n\r\n")

    return behave


_BEGIN = {"input_tokens": 5, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 1}
_ANTHROPIC = (
    f'event: x\ndata: {{"message":{{"usage":{json.dumps(_BEGIN)}}}}}\n\n'.encode(),
    b'event: x\ndata: {"type":"content_block_delta","delta":{"text":"\\"usage\\": {"}}\n\n',
    b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":4}}\n\n',
)
_CHOICES_END = b'data: {"choices":[],"timings":{},"usage":' + json.dumps(USAGE).encode() + b"}\n\n"
_FOREIGN: dict[str, tuple[str, Callable[[Exchange], Any], tuple[int, int, int]]] = {
    "a whole chat": (CHAT, whole_response({"choices": [], "usage": USAGE}), (9, 0, 4)),
    "cached": (
        "/v1/responses",
        whole_response(
            {
                "output": [{"arguments": '{"usage": {"input_tokens": 1}}'}],
                "usage": {
                    "input_tokens": 9,
                    "input_tokens_details": {"cached_tokens": 2},
                    "output_tokens": 4,
                },
            }
        ),
        (9, 2, 4),
    ),
    "Anthropic's stream": ("/v1/messages", streamed(*_ANTHROPIC), (9, 3, 4)),
    "llama-server's end": (
        "/completion",
        streamed(
            b'data: {"content":"a","stop":false,"tokens_predicted":1,"tokens_evaluated":9}\n\n',
            b'data: {"content":"","stop":true,"tokens_predicted":4,"tokens_evaluated":9}\n\n',
        ),
        (9, 0, 4),
    ),
    "several of llama-server's": (
        "/completion",
        whole_response([{"tokens_predicted": 1, "tokens_evaluated": 3}] * 2),
        (6, 0, 2),
    ),
    "a stream of several of llama-server's": (
        "/completion",
        streamed(
            b'data: {"index":0,"stop":true,"tokens_predicted":4,"tokens_evaluated":9,'
            b'"timings":{"prompt_n":9}}\n\n',
            b'data: {"index":1,"stop":false,"tokens_predicted":1,"tokens_evaluated":5}\n\n',
            b'data: {"index":1,"stop":true,"tokens_predicted":2,"tokens_evaluated":5,'
            b'"timings":{"prompt_n":5}}\n\n',
        ),
        (14, 0, 6),
    ),
    "llama-server's stream of several choices": (
        CHAT,
        streamed(*[_CHOICES_END] * 2, b"data: [DONE]\n\n"),
        (18, 0, 8),
    ),
    "several choices of llama-server's, which says the first one's": (
        "/v1/completions",
        whole_response(
            {
                "choices": [{"text": "x" * 45, "finish_reason": "length"}] * 2,
                "usage": USAGE,
                "timings": {"prompt_n": 9},
            }
        ),
        (6, 0, 74),
    ),
    "a path below": (
        f"{CHAT}/batch",
        whole_response({"usage": {**USAGE, "prompt_tokens": -1}}),
        (0, 0, 4),
    ),
    "a sum alone": ("/rerank", whole_response({"usage": {"total_tokens": 8}}), (8, 0, 0)),
    "an absurd count": (CHAT, whole_response({"usage": {"prompt_tokens": 10**19}}), (10**12, 0, 0)),
    "nothing said": ("/v1/completions", whole_response({"text": "x" * 69}), (6, 0, 20)),
    "a stream without": (CHAT, streamed(*[b'data: {"n":1}\n\n'] * 7), (15, 0, 7)),
}


@pytest.mark.parametrize("case", _FOREIGN)
def test_usage_of_other_servers_is_that_of_their_answers(
    case: str, fakes: Loop, tmp_path: Path
) -> None:
    path, behaviour, expected = _FOREIGN[case]
    replica = fakes.start(FakeReplica())
    replica.behaviour = behaviour
    key, text = add(tmp_path)
    with accounting(tmp_path, replica.url) as router:
        answer = post(router, text, path, **({} if path == CHAT else {"prompt": "hello hello"}))
        assert answer.status_code == 200
    assert used(tmp_path) == [(key.id, "anna", "tiny", 1, *expected)]


def test_a_stream_is_asked_for_its_usage_and_its_client_sees_nothing_of_it(
    fakes: Loop, tmp_path: Path
) -> None:
    replica = fakes.start(FakeReplica())
    usage = b'data: {"choices":[],"usage":' + json.dumps(USAGE).encode() + b"}\n\n"
    events = [b'data: {"choices":[{"delta":{"content":"\\"usage\\":{"}}]}\n\n', usage]
    replica.behaviour = streamed(events[0], usage + b"data: [DONE]\n\n")
    key, text = add(tmp_path)
    with accounting(tmp_path, replica.url) as router:
        plain = post(router, text, stream=True)
        response = post(router, text, stream=True, stream_options={"include_usage": True})
        post(router, text, stream=True, stream_options={"include_usage": False, "x": 1})
    assert plain.content == events[0] + b"data: [DONE]\n\n"
    assert response.content == events[0] + usage + b"data: [DONE]\n\n"
    bodies = [json.loads(exchange.body) for exchange in replica.seen]
    assert bodies[0] == {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    assert bodies[2]["stream_options"] == {"include_usage": True, "x": 1}
    assert used(tmp_path) == [(key.id, "anna", "tiny", 3, 27, 0, 12)]


def test_only_streams_that_do_not_ask_are_made_to() -> None:
    stream = b'{"stream": true, "big": 12345678901234567890, "stream_options": null}'
    assert json.loads(with_usage_option(stream, CHAT) or b"") == {
        "stream": True, "big": 12345678901234567890, "stream_options": {"include_usage": True}
    }  # fmt: skip
    for body in (
        b"{}",
        b"[1]",
        b"x",
        b'{"stream": false}',
        b'{"stream": true, "stream_options": 3}',
    ):
        assert with_usage_option(body, CHAT) is None
    assert with_usage_option(stream, "/v1/messages") is None
    assert (
        with_usage_option(stream.replace(b"true", b"1"), CHAT) is not None
    )  # as some servers take it


def test_a_told_usage_is_taken_out_of_the_stream(fakes: Loop, tmp_path: Path) -> None:
    replica = fakes.start(FakeReplica())
    event = b'data: {"text": "a\\n: twostroke-usage 1 1 1"}\n\n'
    replica.behaviour = answer_with_usage(event, event)
    key, text = add(tmp_path)
    with accounting(tmp_path, replica.url) as router:
        answer = post(router, text, stream=True)
    assert answer.content == event + event
    assert "x-twostroke-usage" not in answer.headers
    assert used(tmp_path) == [(key.id, "anna", "tiny", 1, 9, 3, 4)]


def test_a_stream_that_fails_or_is_refused_is_not_counted(fakes: Loop, tmp_path: Path) -> None:
    replica = fakes.start(FakeReplica())
    _, text = add(tmp_path)

    async def refuse(exchange: Exchange) -> None:
        await exchange.answer({"error": {}, "usage": USAGE}, 400)

    async def busy(exchange: Exchange) -> None:
        await exchange.answer({"error": {}}, 429)

    with accounting(tmp_path, replica.url) as router:
        for behaviour in (answer_with_usage(b'data: {"error": {}}\n\n', last=b"\n"), refuse, busy):
            replica.behaviour = behaviour
            post(router, text, stream=True)
    assert used(tmp_path) == []


def test_what_a_client_left_counts_with_its_events(fakes: Loop, tmp_path: Path) -> None:
    replica = fakes.start(FakeReplica())

    async def slow(exchange: Exchange) -> None:
        await exchange.say(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"x-twostroke-usage: 9 3 0\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for _ in range(5):
            await exchange.chunk(b"data: {}\n\n")
        await asyncio.sleep(30)

    replica.behaviour = slow
    key, text = add(tmp_path)
    with accounting(tmp_path, replica.url) as router:
        url, headers = router.url + CHAT, {"x-api-key": text}
        with httpx.stream("POST", url, json=BODY, headers=headers, trust_env=False) as answer:
            seen = b""
            for part in answer.iter_bytes():
                seen += part
                if len(seen) == 50:
                    break
        wait_for(lambda: router.router.num_running == 0)
    assert used(tmp_path) == [(key.id, "anna", "tiny", 1, 9, 3, 5)]


def test_what_is_computed_unseen_is_charged_by_the_time_it_took(
    fakes: Loop, tmp_path: Path
) -> None:
    replica = fakes.start(FakeReplica())
    _, text = add(tmp_path)

    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.2)
        await exchange.answer({"usage": {"prompt_tokens": 9, "completion_tokens": 40}})

    replica.behaviour = slow
    with accounting(tmp_path, replica.url) as router:
        assert post(router, text).status_code == 200
        replica.behaviour = asleep
        for max_tokens in (1000, 5):
            body, headers = {**BODY, "max_tokens": max_tokens}, {"x-api-key": text}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(router.url + CHAT, json=body, headers=headers, timeout=1)
        wait_for(lambda: router.router.num_running == 0)
    [(*_, requests, _, _, output)] = used(tmp_path)
    assert requests == 3
    assert 40 + 5 + 20 < output < 40 + 5 + 250  # about 200 tokens a second


def test_ours_tell_what_their_own_accounts_have(trusting: LiveServer, tmp_path: Path) -> None:
    key, text = add(tmp_path)
    long = "hello " * 40
    cases: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"max_tokens": 5}),
        (CHAT, {"max_tokens": 5, "stream": True}),
        (CHAT, {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": [long, "hello"], "max_tokens": 3, "n": 2, "stream": True}),
        ("/v1/messages", {"messages": BODY["messages"], "max_tokens": 5, "stream": True}),
        ("/v1/responses", {"input": long, "max_output_tokens": 16, "stream": True}),
        ("/completion", {"prompt": long, "n_predict": 4, "stream": True}),
        ("/api/generate", {"prompt": long, "options": {"num_predict": 4}}),
        ("/api/chat", {"messages": BODY["messages"], "stream": False}),
        ("/v1/embeddings", {"input": [long, "hello"]}),
        ("/tokenize", {"content": long}),
        ("/api/plan", {"model": "tiny"}),
        (CHAT, {"max_tokens": "many"}),
    ]
    expected, seen = [0, 0, 0, 0], trusting.api.observers
    usage_book = Sums(expected)
    seen.append(usage_book)
    with accounting(tmp_path, trusting.url) as router:
        wait_for(lambda: bool(router.router.fleet.ready))
        assert router.router.fleet.context_length == trusting.client.card.context_length
        for path, fields in cases:
            answer = post(router, text, path, **fields)
            assert "twostroke-usage" not in answer.text + str(answer.headers), path
            if '"stream": true' in json.dumps(fields) and "v1/c" in path:
                assert answer.text.endswith("data: [DONE]\n\n")
    seen.remove(usage_book)
    assert used(tmp_path) == [(key.id, "anna", "tiny", *expected)]


def test_ours_tell_usage_also_after_a_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response begins before the constraint is compiled and the prompt's length known."""
    key, text = add(tmp_path)
    keys = ApiKeys.read(None, None, router=SECRET)
    options = ServeOptions(drain_s=1, keep_alive_s=0.1, api_keys=keys)
    with live_server(tmp_path, options) as server, accounting(tmp_path, server.url) as router:
        compile_ = server.client.grammars._compile

        def slow(*arguments: Any, **named: Any) -> Any:
            time.sleep(0.5)
            return compile_(*arguments, **named)

        monkeypatch.setattr(server.client.grammars, "_compile", slow)
        wait_for(lambda: bool(router.router.fleet.ready))
        body = {"include_usage": True}
        answer = post(router, text, stream=True, stream_options=body, guided_regex="a{3}")
    assert answer.text.startswith(": keep-alive")
    assert "twostroke-usage" not in answer.text
    usage = json.loads(answer.text.split("data: ")[-2])["usage"]
    counts = (usage["prompt_tokens"], 0, usage["completion_tokens"])
    assert used(tmp_path) == [(key.id, "anna", "tiny", 1, *counts)]


def test_tenants_have_prefixes_of_their_own_behind_a_router(
    trusting: LiveServer, tmp_path: Path
) -> None:
    body = {"prompt": "begin " * 40, "max_tokens": 1}
    names = {"one": "anna", "two": "anna", "three": "ben"}
    keys = [add(tmp_path, name, tenant)[1] for name, tenant in names.items()]
    with accounting(tmp_path, trusting.url) as router:
        wait_for(lambda: bool(router.router.fleet.ready))
        results = [post(router, key, "/v1/completions", **body).json()["usage"] for key in keys]
    cached = [result["prompt_tokens_details"]["cached_tokens"] for result in results]
    assert cached[0] == cached[2] == 0 < cached[1]


class Sums:
    """Adds up what a server has counted."""

    def __init__(self, sums: list[int]) -> None:
        self.sums = sums

    def observe(self, usage_entry: Any) -> None:
        counts = usage_entry.used
        if counts is not None and usage_entry.error is None:
            each = (1, counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens)
            self.sums[:] = [old + new for old, new in zip(self.sums, each, strict=True)]

    def close(self) -> None:
        pass
