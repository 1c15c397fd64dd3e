"""What servers of others do that ours do not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.replicas import Exchange, FakeReplica, Loop, live_router
from support.waiting import wait_for

if TYPE_CHECKING:
    from support.replicas import LiveRouter

_CHAT = "/v1/chat/completions"
_BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def post(router: LiveRouter) -> httpx.Response:
    return httpx.post(router.url + _CHAT, json=_BODY, timeout=20, trust_env=False)


def test_errors_of_a_server_whose_engine_has_died_are_not_passed_on(fakes: Loop) -> None:
    bad, good = fakes.start(FakeReplica()), fakes.start(FakeReplica())

    async def fail(exchange: Exchange) -> None:
        bad.health = (500 + len(bad.seen), {})
        await exchange.answer({"error": {"message": "EngineCore encountered an issue."}}, 500)

    bad.behaviour = fail
    with live_router(bad.url, good.url, policy="round-robin") as router:
        assert [post(router).status_code for _ in range(4)] == [200] * 4
        assert len(bad.seen) == 1
        good.behaviour = bad.behaviour  # and is well: its error is this request's
        assert "EngineCore" in post(router).text


def test_an_error_that_comes_after_its_server_is_known_to_be_down_is_not_passed_on(
    fakes: Loop,
) -> None:
    bad, good = fakes.start(FakeReplica()), fakes.start(FakeReplica())
    with live_router(bad.url, good.url, policy="round-robin") as router:
        fleet = router.router.fleet

        async def fail(exchange: Exchange) -> None:
            bad.health = (503, {})
            await asyncio.to_thread(wait_for, lambda: len(fleet.ready) == 1)
            await exchange.answer({"error": {"message": "EngineCore encountered an issue."}}, 500)

        bad.behaviour = fail
        assert [post(router).status_code for _ in range(2)] == [200] * 2
        assert len(bad.seen) == 1


def test_a_sign_of_life_is_no_first_token(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())

    async def slow(exchange: Exchange) -> None:
        await exchange.begin_events()
        for data in (b":\n\n", b": again\n\n", b"data: 1\n\n", b"data: [DONE]\n\n"):
            await exchange.chunk(data)
            await asyncio.sleep(0.1)
        await exchange.say(b"0\r\n\r\n")

    replica.behaviour = slow
    with live_router(replica.url) as router:
        dispatcher = router.router.fleet.dispatcher
        with httpx.stream("POST", router.url + _CHAT, json=_BODY, trust_env=False) as answer:
            waits = [(part[:1], dispatcher.wait_s(0) > 0) for part in answer.iter_bytes()]
    assert waits == [(b":", True), (b":", True), (b"d", False), (b"d", False)]


def test_a_queued_background_response_is_no_first_token(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())

    async def queue(exchange: Exchange) -> None:
        await exchange.begin_events()
        for kind in (b"response.created", b"response.queued", b"response.completed"):
            await exchange.chunk(b'data: {"type":"%s"}\n\n' % kind)
            await asyncio.sleep(0.1)
        await exchange.say(b"0\r\n\r\n")

    replica.behaviour = queue
    body = {"model": "tiny", "input": "Hi", "background": True, "stream": True}
    with live_router(replica.url) as router:
        dispatcher = router.router.fleet.dispatcher
        url = f"{router.url}/v1/responses"
        with httpx.stream("POST", url, json=body, trust_env=False) as answer:
            waits = [dispatcher.wait_s(0) > 0 for _ in answer.iter_bytes()]
    assert waits[:2] == [True, True]


@pytest.mark.parametrize("row", [{"max_model_len": 2048}, {"meta": {"n_ctx": 2048}}, {"meta": 1}])
def test_a_context_is_as_long_as_other_servers_say(row: dict[str, Any], fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    replica.row = row
    with live_router(replica.url) as router:
        result = router.router.fleet.context_length
    assert result == (4096 if row == {"meta": 1} else 2048)
