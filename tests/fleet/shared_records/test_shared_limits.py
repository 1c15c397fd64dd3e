"""Two routers that share limits and usage."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.accounts import BODY, CHAT, USAGE, post, whole_response
from support.replicas import FakeReplica
from support.shared_routers import add_key, sharing_router, used
from support.waiting import wait_for
from twostroke.server.http.api_key import KeyLimits

if TYPE_CHECKING:
    from contextlib import ExitStack

    from support.replicas import Exchange, LiveRouter, Loop
    from support.stores import Store


def two_routers(
    store: Store, fakes: Loop, stack: ExitStack, behaviour: Any = None
) -> list[LiveRouter]:
    replica = FakeReplica()
    replica.behaviour = behaviour or whole_response({"choices": [], "usage": USAGE})
    fakes.start(replica)
    return [stack.enter_context(sharing_router(store, replica.url)) for _ in range(2)]


def statuses(routers: list[LiveRouter], key: str, count: int, **fields: Any) -> list[int]:
    """Send requests to the routers in turn, all at once, and return their statuses."""
    with ThreadPoolExecutor(count) as pool:
        calls = [
            pool.submit(post, routers[number % len(routers)], key, **fields)
            for number in range(count)
        ]
        return sorted(call.result().status_code for call in calls)


def test_two_routers_admit_the_requests_of_one_limit(
    redis_store: Store, fakes: Loop, stack: ExitStack
) -> None:
    _, key = add_key(redis_store, limits=KeyLimits(requests_per_minute=5))
    routers = two_routers(redis_store, fakes, stack)
    assert statuses(routers, key, 16) == [200] * 5 + [429] * 11
    refused = post(routers[0], key)
    assert "this key may use 5 requests a minute" in refused.json()["error"]["message"]
    assert 5 <= int(refused.headers["retry-after"]) <= 12
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


def test_tokens_that_one_router_holds_are_missing_at_the_other(
    redis_store: Store, fakes: Loop, stack: ExitStack
) -> None:
    _, key = add_key(redis_store, limits=KeyLimits(tokens_per_minute=1000))
    may_end = threading.Event()

    async def wait(exchange: Exchange) -> None:
        await asyncio.to_thread(may_end.wait, 60)
        await exchange.answer({"choices": [], "usage": USAGE})

    routers = two_routers(redis_store, fakes, stack, wait)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, routers[0], key, max_tokens=2000)
        wait_for(lambda: redis_store.client().keys("*limits*") != [])
        assert post(routers[1], key, max_tokens=1).status_code == 429
        may_end.set()
        assert first.result().status_code == 200
    # 13 tokens were used, and the others were given back.
    after = post(routers[1], key, max_tokens=1)
    assert after.status_code == 200
    assert int(after.headers["x-ratelimit-remaining-tokens"]) > 900


def test_two_routers_run_as_many_requests_at_once_as_one(
    redis_store: Store, fakes: Loop, stack: ExitStack
) -> None:
    _, key = add_key(redis_store, limits=KeyLimits(parallel=3))
    may_end = threading.Event()

    async def wait(exchange: Exchange) -> None:
        await asyncio.to_thread(may_end.wait, 60)
        await exchange.answer({"choices": [], "usage": USAGE})

    routers = two_routers(redis_store, fakes, stack, wait)
    with ThreadPoolExecutor(10) as pool:
        calls = [pool.submit(post, routers[number % 2], key) for number in range(10)]
        wait_for(lambda: sum(call.done() for call in calls) == 7)
        may_end.set()
        assert sorted(call.result().status_code for call in calls) == [200] * 3 + [429] * 7
    assert statuses(routers, key, 3) == [200] * 3


def test_usage_is_in_the_store_before_the_client_has_the_answer(
    redis_store: Store, fakes: Loop, stack: ExitStack
) -> None:
    stored_key, key = add_key(redis_store)
    routers = two_routers(redis_store, fakes, stack)
    for count in range(1, 5):
        assert post(routers[count % 2], key).status_code == 200
        assert used(redis_store) == [(stored_key.id, count, 9 * count, 0, 4 * count)]


@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", b"event: message_stop\ndata: {}\n\n"])
def test_the_end_of_a_stream_waits_for_its_usage(
    end: bytes, redis_store: Store, fakes: Loop, stack: ExitStack
) -> None:
    stored_key, key = add_key(redis_store)

    async def stream(exchange: Exchange) -> None:
        await exchange.say(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"x-twostroke-usage: 9 3 0\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        await exchange.chunk(b'data: {"a":1}\n\n')
        await exchange.chunk(end)
        await asyncio.sleep(0.3)
        await exchange.chunk(b": twostroke-usage 9 3 4\n\n")
        await asyncio.sleep(0.1)
        await exchange.say(b"0\r\n\r\n")

    routers = two_routers(redis_store, fakes, stack, stream)
    headers = {"x-api-key": key}
    with httpx.stream("POST", routers[0].url + CHAT, json=BODY, headers=headers) as response:
        text = b""
        for data in response.iter_raw():
            text += data
            if end in text:
                assert used(redis_store) == [(stored_key.id, 1, 9, 3, 4)]
    assert text == b'data: {"a":1}\n\n' + end


def test_a_changed_key_is_known_to_all_routers(
    redis_store: Store, fakes: Loop, stack: ExitStack
) -> None:
    routers = two_routers(redis_store, fakes, stack)
    assert post(routers[0], "ts-unknown").status_code == 401
    _, key = add_key(redis_store)
    for router in routers:
        wait_for(lambda router=router: post(router, key).status_code == 200)
