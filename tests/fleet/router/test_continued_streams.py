"""A router lets another replica continue a stream whose replica was lost."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from support.replicas import Exchange, FakeReplica, Loop, live_router

BODY = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
FIRST = b'data: {"id":"chatcmpl-1"}\n\n: twostroke-record QQ==\n\n'
SECOND = b"data: two\n\n: twostroke-record Qg==\n\n"
LAST = b"data: [DONE]\n\n: twostroke-record Qw==\n\n"
WHOLE = 'data: {"id":"chatcmpl-1"}\n\ndata: two\n\ndata: [DONE]\n\n'
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"x-twostroke-resume: 1\r\ntransfer-encoding: chunked\r\n\r\n"
)

Behaviour = "Callable[[Exchange], Awaitable[None]]"


def sends(*parts: bytes, cuts: bool = False) -> Any:
    """Return what sends a stream with records; with `cuts`, the connection breaks at its end."""

    async def behave(exchange: Exchange) -> None:
        await exchange.say(HEAD)
        for part in parts:
            await exchange.chunk(part)
            await asyncio.sleep(0.02)
        if cuts:
            exchange.cut()
        else:
            await exchange.say(b"0\r\n\r\n")

    return behave


def refuses(status: int) -> Any:
    async def behave(exchange: Exchange) -> None:
        await exchange.answer({"error": {"message": "no"}}, status)

    return behave


def post(url: str, **headers: str) -> httpx.Response:
    path = f"{url}/v1/chat/completions"
    return httpx.post(path, json=BODY, headers=headers, trust_env=False, timeout=30)


def start(fakes: Loop, *numerics: str) -> list[FakeReplica]:
    """Start replicas with these numerics, which all answer as the last one that was set."""
    replicas = []
    for text in numerics:
        replica = fakes.start(FakeReplica())
        replica.load = {"numerics": text}
        replicas.append(replica)
    return replicas


def let(replicas: list[FakeReplica], first: Any, then: Any) -> list[FakeReplica]:
    """Let the first request be answered in one way, and all later ones in another.

    Returns the replicas in the order in which they are asked.
    """
    asked: list[FakeReplica] = []

    def behaviour_of(replica: FakeReplica) -> Any:
        async def behave(exchange: Exchange) -> None:
            asked.append(replica)
            await (first if len(asked) == 1 else then)(exchange)

        return behave

    for replica in replicas:
        replica.behaviour = behaviour_of(replica)
    return asked


@pytest.mark.parametrize(
    "lost", [sends(FIRST, b"data: tw", cuts=True), sends(FIRST, b"data: two\n\n", cuts=True)]
)
def test_a_stream_that_breaks_is_continued_once(lost: Any, fakes: Loop) -> None:
    replicas = start(fakes, "1", "1")
    asked = let(replicas, lost, sends(SECOND, LAST))
    with live_router(*(replica.url for replica in replicas)) as router:
        answer = post(router.url, **{"x-twostroke-resume": "3"})
        assert answer.text == WHOLE
        assert "x-twostroke-resume" not in answer.headers
        assert router.router.fleet.num_continued == 1
    assert asked[0] is not asked[1]
    first, second = asked[0].seen[0], asked[1].seen[0]
    assert first.headers["x-twostroke-resume"] == "new"
    assert int(second.headers["x-twostroke-resume"]) == len(first.body)
    assert second.body == first.body + b"\nQQ=="


def test_the_error_of_a_replica_that_stops_is_dropped(fakes: Loop) -> None:
    replicas = start(fakes, "1", "1")
    lost = b'data: {"error":{}}\n\n: twostroke-lost engine_stopped\n\n'
    asked = let(replicas, sends(FIRST + lost), sends(SECOND, LAST))
    with live_router(*(replica.url for replica in replicas)) as router:
        assert post(router.url).text == WHOLE
    assert len(asked) == 2


def test_a_replica_with_other_arithmetic_never_continues_a_stream(fakes: Loop) -> None:
    """The stream waits for the replica that began it."""
    replicas = start(fakes, "1", "2")
    asked = let(replicas, sends(FIRST, cuts=True), sends(SECOND, LAST))
    with live_router(*(replica.url for replica in replicas), mixed=True) as router:
        assert post(router.url).text == WHOLE
    assert len(asked) == 2
    assert asked[0] is asked[1]


def test_a_stream_ends_with_an_error_if_no_suitable_replica_comes_back(fakes: Loop) -> None:
    replicas = start(fakes, "1", "2")

    async def leave(exchange: Exchange) -> None:
        for replica in replicas:
            replica.health = (503, {"status": "stopped"})
            replica.load = {"status": "stopped"}
        await sends(FIRST, cuts=True)(exchange)

    asked = let(replicas, leave, sends(SECOND, LAST))
    urls = [replica.url for replica in replicas]
    with live_router(*urls, mixed=True, resume_wait_s=0.5) as router:
        text = post(router.url).text
    assert text.startswith('data: {"id":"chatcmpl-1"}\n\ndata: {"error":')
    assert len(asked) == 1


def test_a_replica_that_cannot_continue_is_passed_over(fakes: Loop) -> None:
    replicas = start(fakes, "1", "1", "1")
    refusals = [refuses(409)]

    async def later(exchange: Exchange) -> None:
        await (refusals.pop() if refusals else sends(SECOND, LAST))(exchange)

    asked = let(replicas, sends(FIRST, cuts=True), later)
    with live_router(*(replica.url for replica in replicas)) as router:
        assert post(router.url).text == WHOLE
    assert len(set(map(id, asked))) == 3


def test_a_stream_with_nothing_but_heartbeats_begins_again(fakes: Loop) -> None:
    replicas = start(fakes, "1", "1")
    asked = let(replicas, sends(b": keep-alive\n\n", cuts=True), sends(FIRST + SECOND, LAST))
    with live_router(*(replica.url for replica in replicas)) as router:
        assert post(router.url).text == ": keep-alive\n\n" + WHOLE
    assert asked[1].seen[0].headers["x-twostroke-resume"] == "new"


def test_without_a_wait_a_stream_is_not_continued(fakes: Loop) -> None:
    replicas = start(fakes, "1", "1")
    asked = let(replicas, sends(FIRST, cuts=True), sends(SECOND, LAST))
    with live_router(*(replica.url for replica in replicas), resume_wait_s=0.0) as router:
        assert "error" in post(router.url).text
    assert len(asked) == 1
    assert asked[0].seen[0].headers["x-twostroke-resume"] == "none"
