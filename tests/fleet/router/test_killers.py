"""A request that ends engines is tried three times in a whole fleet, whichever way it is sent."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.replicas import Exchange, FakeReplica, Loop, live_router
from twostroke.core.errors import EngineDiedError, EngineKillerError
from twostroke.fleet.router import content_hash as content
from twostroke.fleet.router.content_hash import content_hash
from twostroke.fleet.router.engine_killers import (
    FORGET_DEATHS_S,
    FORGET_LOSSES_S,
    MAX_TRIES,
    Killers,
)
from twostroke.server.http.error_forms import error_form

if TYPE_CHECKING:
    from collections.abc import Callable

_DIED = EngineDiedError(f"{EngineDiedError.SENTENCE}, and is starting again.")
_NUM_REPLICAS = 6
_CHAT = "/v1/chat/completions"


def user_message(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def parts(text: str, kind: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind, "text": text}]}]


# The same text on each path that an engine computes, and in each form that the path takes.
BODIES: list[tuple[str, Callable[[str], dict[str, Any]]]] = [
    (_CHAT, lambda text: {"messages": user_message(text)}),
    (_CHAT, lambda text: {"messages": parts(text, "text"), "max_tokens": 3}),
    ("/v1/completions", lambda text: {"prompt": text}),
    ("/v1/completions", lambda text: {"prompt": [text], "temperature": 0.5}),
    ("/v1/responses", lambda text: {"input": text}),
    ("/v1/responses", lambda text: {"input": parts(text, "input_text")}),
    ("/v1/messages", lambda text: {"messages": user_message(text), "max_tokens": 5}),
    ("/completion", lambda text: {"prompt": text, "n_predict": 4}),
    ("/infill", lambda text: {"input_prefix": text, "input_suffix": ""}),
    ("/api/chat", lambda text: {"messages": user_message(text), "options": {"seed": 1}}),
    ("/api/generate", lambda text: {"prompt": text, "raw": True}),
    ("/v1/embeddings", lambda text: {"input": [text]}),
    ("/embeddings", lambda text: {"content": text}),
    ("/api/embed", lambda text: {"input": text}),
    ("/api/embeddings", lambda text: {"prompt": text}),
]
PATHS = list(dict(BODIES))


async def dies(exchange: Exchange) -> None:
    """Answer as a server whose engine has died, in the form of the path's protocol."""
    form = error_form({"path": exchange.path, "headers": []})
    await exchange.answer(form.body(_DIED, "1", str), form.status(_DIED))


async def dies_in_stream(exchange: Exchange) -> None:
    """Write an event, then the error of an engine that has died."""
    form = error_form({"path": exchange.path, "headers": []})
    await exchange.begin_events()
    await exchange.chunk(b'data: {"text":"a"}\n\n')
    await exchange.chunk(b"data: " + form.body(_DIED, "1", str) + b"\n\n")
    await exchange.say(b"0\r\n\r\n")


async def answers(exchange: Exchange) -> None:
    await exchange.answer({"text": EngineDiedError.SENTENCE})


def killed_by(word: bytes, death: Callable[[Exchange], Any] = dies) -> Callable[[Exchange], Any]:
    """Return the behaviour of a server whose engine dies of requests with a word."""

    async def behave(exchange: Exchange) -> None:
        await (death if word in exchange.body else answers)(exchange)

    return behave


def fleet(fakes: Loop, behaviour: Callable[[Exchange], Any]) -> list[FakeReplica]:
    replicas = [fakes.start(FakeReplica()) for _ in range(_NUM_REPLICAS)]
    for replica in replicas:
        replica.behaviour = behaviour
    return replicas


def num_seen(replicas: list[FakeReplica], word: bytes) -> int:
    return sum(word in seen.body for replica in replicas for seen in replica.seen)


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    body = {"model": "tiny", **body}
    # Certificates, which take long to load, are not needed.
    return httpx.post(url + path, json=body, timeout=20, trust_env=False)


def test_a_killer_ends_three_engines_on_any_path_and_none_afterwards(fakes: Loop) -> None:
    replicas = fleet(fakes, killed_by(b"KILL"))
    with live_router(*(replica.url for replica in replicas), wait_s=0.5) as router:
        for number, (path, body) in enumerate(BODIES):
            word = f"KILL{number}-"
            refused = post(router.url, path, body(word))
            assert refused.status_code == 400, (path, refused.text)
            form = error_form({"path": path, "headers": []})
            expected = form.body(_killer(), refused.headers["x-request-id"], str)
            assert refused.content == expected, path  # in the form of its protocol
            assert num_seen(replicas, word.encode()) == MAX_TRIES, path
            for other, same in BODIES:
                assert post(router.url, other, same(word)).status_code == 400, (path, other)
            assert num_seen(replicas, word.encode()) == MAX_TRIES, path
            assert post(router.url, path, body("harmless")).status_code == 200


def _killer() -> EngineKillerError:
    killers = Killers(lambda: 0.0)
    for number in range(MAX_TRIES):
        killers.note_death(b"x", str(number), 0.0, is_alone=True)
    with pytest.raises(EngineKillerError) as caught:
        killers.check(b"x")
    return caught.value


@pytest.mark.parametrize("count", [1, 2])
def test_a_small_fleet_is_not_asked_more_often(fakes: Loop, count: int) -> None:
    replicas = fleet(fakes, killed_by(b"KILL"))[:count]
    with live_router(*(replica.url for replica in replicas), wait_s=20.0) as router:
        assert post(router.url, _CHAT, {"messages": user_message("KILL")}).status_code == 400
        assert num_seen(replicas, b"KILL") == MAX_TRIES


@pytest.mark.parametrize("path", PATHS[:8])
def test_a_killer_in_streams_is_known_by_their_errors(fakes: Loop, path: str) -> None:
    replicas = fleet(fakes, killed_by(b"KILL", dies_in_stream))
    body = dict(BODIES)[path]("KILL") | {"stream": True}
    with live_router(*(replica.url for replica in replicas)) as router:
        for _ in range(MAX_TRIES):
            answer = post(router.url, path, body)
            assert EngineDiedError.SENTENCE in answer.text.splitlines()[-2]
        assert post(router.url, path, body).status_code == 400
        assert num_seen(replicas, b"KILL") == MAX_TRIES


@pytest.mark.parametrize("is_streamed", [False, True])
def test_only_a_computed_answer_clears_the_deaths(fakes: Loop, is_streamed: bool) -> None:
    """A background response that is not streamed comes before anything is computed."""

    async def behave(exchange: Exchange) -> None:
        body = json.loads(exchange.body)
        if not body.get("background"):
            await dies_in_stream(exchange)
        elif is_streamed:
            await exchange.begin_events()
            await exchange.chunk(b'data: {"type":"response.completed"}\n\n')
            await exchange.say(b"0\r\n\r\n")
        else:
            await exchange.answer({"id": "resp_1", "status": "queued"})

    replicas = fleet(fakes, behave)
    killer = {"input": "KILL", "stream": True}
    background = {"input": "KILL", "background": True, "stream": is_streamed}
    with live_router(*(replica.url for replica in replicas)) as router:
        for _ in range(MAX_TRIES - 1):
            post(router.url, "/v1/responses", killer)
        assert post(router.url, "/v1/responses", background).status_code == 200
        post(router.url, "/v1/responses", killer)
        refused = post(router.url, "/v1/responses", killer)
        assert refused.status_code == (200 if is_streamed else 400)


def test_a_text_with_the_words_of_the_error_is_no_death(fakes: Loop) -> None:
    async def quotes(exchange: Exchange) -> None:
        await exchange.begin_events()
        text = EngineDiedError.SENTENCE.encode()
        await exchange.chunk(b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % text)
        await exchange.say(b"0\r\n\r\n")

    replicas = fleet(fakes, quotes)
    with live_router(*(replica.url for replica in replicas)) as router:
        for _ in range(2 * MAX_TRIES):
            assert post(router.url, _CHAT, {"messages": user_message("Hi")}).status_code == 200


def test_servers_that_have_no_room_are_no_deaths(fakes: Loop) -> None:
    async def full(exchange: Exchange) -> None:
        await exchange.answer({"error": {"message": "stopping"}}, 503)

    replicas = fleet(fakes, full)
    with live_router(*(replica.url for replica in replicas), wait_s=0.1) as router:
        for _ in range(2):
            answer = post(router.url, _CHAT, {"messages": user_message("Hi")})
            assert (answer.status_code, "stopping" in answer.text) == (503, True)
        assert num_seen(replicas, b"Hi") >= 2 * _NUM_REPLICAS


def test_servers_that_end_with_a_request_are_known_for_a_minute(fakes: Loop) -> None:
    async def cut(exchange: Exchange) -> None:
        exchange.cut()

    replicas = fleet(fakes, killed_by(b"KILL", cut))
    with live_router(*(replica.url for replica in replicas)) as router:
        statuses = [post(router.url, _CHAT, {"messages": user_message("KILL")}) for _ in range(3)]
        assert [status.status_code for status in statuses] == [502, 400, 400]
        assert num_seen(replicas, b"KILL") == MAX_TRIES


def test_what_ran_beside_a_killer_is_answered(fakes: Loop) -> None:
    """Engines die with all that they compute: the others must not be taken for killers."""
    arrived, all_are_there = 0, asyncio.Event()

    async def shared(exchange: Exchange) -> None:
        nonlocal arrived
        arrived += 1
        if arrived <= 8:  # the killer and the others are at one engine when it dies
            if arrived == 8:
                all_are_there.set()
            await all_are_there.wait()
            await dies(exchange)
        else:
            await killed_by(b"KILL")(exchange)

    replicas = fleet(fakes, shared)
    texts = ["KILL", *(f"harmless {number}" for number in range(7))]
    with (
        live_router(*(replica.url for replica in replicas), wait_s=20.0) as router,
        ThreadPoolExecutor(8) as pool,
    ):
        requests = [
            pool.submit(post, router.url, _CHAT, {"messages": user_message(t)}) for t in texts
        ]
        assert [request.result(30).status_code for request in requests] == [400] + [200] * 7
        assert num_seen(replicas, b"KILL") == MAX_TRIES


def test_several_requests_that_were_at_one_death_count_once() -> None:
    now_s = 100.0
    killers = Killers(lambda: now_s)
    for _ in range(5):
        killers.note_death(b"x", "here", 99.0, is_alone=False)
        killers.note_loss(b"x", "here", 99.0, is_alone=False)
    assert killers.count(b"x") == 1
    killers.note_death(b"x", "there", 99.0, is_alone=False)
    killers.note_death(b"x", "here", 101.0, is_alone=False)  # sent after the first death
    assert killers.count(b"x") == 3


def test_deaths_are_forgotten_after_an_hour_and_losses_after_a_minute() -> None:
    now_s = 0.0
    killers = Killers(lambda: now_s)
    killers.note_death(b"x", "here", 0.0, is_alone=True)
    killers.note_loss(b"x", "there", 0.0, is_alone=True)
    killers.note_loss(b"y", "there", 0.0, is_alone=True)
    now_s = FORGET_LOSSES_S + 1
    assert (killers.count(b"x"), killers.count(b"y")) == (1, 0)
    now_s = FORGET_DEATHS_S + 1
    assert killers.count(b"x") == 0


def test_an_answer_clears_a_suspect_and_few_are_known() -> None:
    killers = Killers()
    killers.note_loss(b"x", "here", 0.0, is_alone=True)
    killers.clear(b"x")
    assert killers.count(b"x") == 0
    for number in range(10_000):
        killers.note_loss(b"%d" % number, "here", 0.0, is_alone=True)
    assert sum(killers.count(b"%d" % number) for number in range(10_000)) == 4096


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("first_body", "other"),
    [
        ({"messages": user_message("a")}, {"messages": user_message("b")}),
        (
            {"messages": user_message("a")},
            {"messages": user_message("a"), "tools": [{"name": "f"}]},
        ),
        ({"messages": user_message("a")}, {"messages": user_message("a"), "json_schema": SCHEMA}),
        ({"prompt": [1, 2]}, {"prompt": [1, 3]}),
        ({"input": "a"}, {"input": "a", "previous_response_id": "resp_1"}),
        ({"input": "a"}, {"input": "a", "instructions": "b"}),
    ],
)
def test_another_content_has_another_hash(
    first_body: dict[str, Any], other: dict[str, Any]
) -> None:
    assert hash_of(first_body) != hash_of(other)


def hash_of(body: dict[str, Any]) -> bytes:
    return content_hash(json.dumps(body).encode(), "tiny")


def test_texts_inside_deep_lists_are_read_one_by_one() -> None:
    nested: Any = ["a", {"role": "user", "content": "b"}]
    for _ in range(100_000):
        nested = [nested]
    assert list(content._texts(nested)) == ["a", "b"]


def test_a_schema_and_tools_have_one_hash_in_all_protocols() -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    flat = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    forms: list[dict[str, Any]] = [
        {"response_format": wrapped},
        {"text": {"format": flat}},
        {"output_config": {"format": flat}},
        {"format": SCHEMA},
        {"json_schema": SCHEMA},
    ]
    assert len({hash_of({"prompt": "a"} | form) for form in forms}) == 1
    function = {"name": "f", "description": "F.", "parameters": SCHEMA}
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": function},
        {"type": "function", **function},
        {"name": "f", "input_schema": SCHEMA},
    ]
    assert len({hash_of({"prompt": "a", "tools": [tool]}) for tool in tools}) == 1
    plain = [{}, {"response_format": {"type": "text"}}, {"text": {"verbosity": "low"}}]
    assert len({hash_of({"prompt": "a"} | form) for form in plain}) == 1


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"[" * 100_000, b'{"prompt": 1e999}'])
def test_a_body_that_is_not_an_object_has_a_hash(body: bytes) -> None:
    assert len(content_hash(body, "")) == 16
