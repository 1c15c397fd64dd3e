"""Equal requests in flight meet at one replica."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from support.replicas import Exchange, FakeReplica, Loop, live_router
from support.waiting import wait_for
from twostroke.fleet.router.equal_requests import EqualRequests, equal_key

PATH = "/v1/chat/completions"


@pytest.mark.parametrize(
    "body",
    [
        b'{"temperature": 0, "prompt": "a"}',
        b'{"prompt": "a", "temperature":0.0}',
        b'{"seed": 7, "prompt": "a"}',
        b'{"prompt": "a", "options": {"seed" :1}}',
    ],
)
def test_requests_without_randomness_have_a_key(body: bytes) -> None:
    key = equal_key(PATH, "a", body)
    assert key == equal_key(PATH, "a", body)
    others = (equal_key(PATH, "b", body), equal_key("/v1/messages", "a", body))
    assert len({key, *others, equal_key(PATH, "a", body + b" ")}) == 4


@pytest.mark.parametrize(
    "body", [b'{"prompt": "a"}', b'{"temperature": 0.5}', b'{"seed": null}', b"{}"]
)
def test_random_requests_have_none(body: bytes) -> None:
    assert equal_key(PATH, "", body) == b""


@pytest.mark.parametrize(
    "header",
    [
        (b"cache-control", b"no-cache"),
        (b"cache-control", b"max-age=0, No-Store"),
        (b"x-request-timeout", b"5"),
    ],
)
def test_requests_that_share_no_computation_have_none(header: tuple[bytes, bytes]) -> None:
    body = b'{"temperature": 0, "prompt": "a"}'
    assert equal_key(PATH, "", body, [header]) == b""
    assert equal_key(PATH, "", body, [(b"cache-control", b"max-age=0")]) == equal_key(
        PATH, "", body
    )


def test_requests_are_counted_by_replica() -> None:
    equal = EqualRequests()
    equal.add(b"", 3)
    assert equal.replica_of(b"") is None
    for replica in (1, 2, 2):
        equal.add(b"a", replica)
    assert equal.replica_of(b"a") == 2
    equal.remove(b"a", 2)
    equal.remove(b"a", 2)
    assert equal.replica_of(b"a") == 1
    equal.remove(b"a", 1)
    assert equal.replica_of(b"a") is None


def posted_together(
    fakes: Loop,
    bodies: list[dict[str, Any]],
    *,
    is_foreign: bool = False,
    load: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> list[int]:
    """Send requests that are in flight together; return how many each of three replicas got."""
    may_answer = threading.Event()

    async def answer_later(exchange: Exchange) -> None:
        await asyncio.to_thread(may_answer.wait)
        await exchange.answer({"id": "chatcmpl-1"})

    replicas = [fakes.start(FakeReplica()) for _ in range(3)]
    for replica in replicas:
        replica.behaviour = answer_later
        replica.load = None if is_foreign else load or {}
    urls = [replica.url for replica in replicas]
    with (
        live_router(*urls, policy="round-robin") as router,
        ThreadPoolExecutor(len(bodies)) as threads,
    ):
        try:
            calls = [
                threads.submit(
                    httpx.post, f"{router.url}{PATH}", json=body, headers=headers, timeout=60
                )
                for body in bodies
            ]
            wait_for(lambda: sum(len(replica.seen) for replica in replicas) == len(bodies))
            counts = [len(replica.seen) for replica in replicas]
        finally:
            may_answer.set()
        assert all(call.result().status_code == 200 for call in calls)
        assert not router.router._forwarder._attempts.equal_requests._replicas
    return sorted(counts)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **fields}


def test_equal_requests_meet_at_one_replica(fakes: Loop) -> None:
    assert posted_together(fakes, [chat(temperature=0)] * 12) == [0, 0, 12]


def test_random_and_different_requests_are_spread(fakes: Loop) -> None:
    assert posted_together(fakes, [chat()] * 6 + [chat(seed=i) for i in range(6)]) == [4, 4, 4]


def test_equal_requests_that_share_no_computation_are_spread(fakes: Loop) -> None:
    bodies = [chat(temperature=0)] * 12
    assert posted_together(fakes, bodies, is_foreign=True) == [4, 4, 4]
    assert posted_together(fakes, bodies, load={"coalesces": False}) == [4, 4, 4]  # --no-coalesce
    assert posted_together(fakes, bodies, load={"coalesces": True}) == [0, 0, 12]
    assert posted_together(fakes, bodies, headers={"cache-control": "no-store"}) == [4, 4, 4]
