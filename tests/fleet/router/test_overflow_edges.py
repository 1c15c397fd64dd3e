"""Edges of requests to APIs: ends of streams, keys that change, and the most that may be spent."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.overflowing import begin, overflow_router, post, side
from support.vendors import (
    CHAT,
    HELLO,
    FakeVendor,
    chat_events,
    with_status,
)
from support.waiting import wait_for
from twostroke.fleet.router.api_events import ApiEvents
from twostroke.fleet.router.api_request import api_body, api_headers, fields_of
from twostroke.fleet.router.overflow_file import BoughtModel, UpstreamSpec

if TYPE_CHECKING:
    from pathlib import Path

    from support.replicas import Exchange, Loop

PRICE = BoughtModel(model="big-1", input=1, output=1)
LAST = {"id": "chatcmpl-v", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def test_a_stream_that_is_cut_after_its_last_event_is_whole(
    vendor: FakeVendor, tmp_path: Path
) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.begin_events()
        await exchange.chunk(chat_events(LAST)[0] + b"data: [DONE]\n\n")
        exchange.writer.close()  # without the last chunk

    vendor.behaviour = behave
    with overflow_router(tmp_path, vendor) as router:
        answer = post(router, stream=True)
        assert answer.content == chat_events(LAST)[0] + b"data: [DONE]\n\n"
        assert side(router)["failed"] == {}


def test_a_stream_without_content_is_given_up(vendor: FakeVendor, tmp_path: Path) -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.begin_events()
        while True:
            await exchange.chunk(b": waiting\n\n" * 1000)

    vendor.behaviour = endless
    with overflow_router(tmp_path, vendor) as router:
        assert post(router, stream=True).status_code == 503
        assert side(router)["failed"] == {"nonsense": 1}


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_events_are_found_wherever_the_bytes_are_split(end: bytes) -> None:
    event = chat_events(LAST)[0].strip() + end
    events = ApiEvents("openai")
    parts = [events.take(bytes([byte])) for byte in event * 3]
    assert [part for part in parts if part] == [event] * 3
    assert events.is_complete


def test_a_key_that_was_replaced_meanwhile_pauses_nothing(
    vendor: FakeVendor, fakes: Loop, tmp_path: Path
) -> None:
    release = asyncio.Event()

    async def refuse_later(exchange: Exchange) -> None:
        if len(vendor.seen) == 1:
            await release.wait()
        await vendor.answer(exchange)

    vendor.behaviour = refuse_later
    with overflow_router(tmp_path, vendor) as router:
        first = begin(router)
        wait_for(lambda: len(vendor.seen) == 1)
        (tmp_path / "vendor.key").write_text("new-key")
        vendor.key = "new-key"  # the old key is revoked at once
        time.sleep(1.1)  # the file is looked at once a second
        assert post(router).status_code == 200
        fakes.loop.call_soon_threadsafe(release.set)
        assert first() == 503
        assert post(router).status_code == 200


def test_a_request_whose_client_left_before_the_answer_is_charged(
    vendor: FakeVendor, tmp_path: Path
) -> None:
    async def silent(_: Exchange) -> None:
        await asyncio.sleep(20)

    vendor.behaviour = silent
    with overflow_router(tmp_path, vendor) as router:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(router.url + CHAT, json=HELLO, timeout=0.5, trust_env=False)
        wait_for(lambda: side(router)["requests"] == 1)
        assert side(router)["cost"] > 0


def test_a_request_that_an_upstream_refuses_costs_nothing(
    vendor: FakeVendor, tmp_path: Path
) -> None:
    vendor.behaviour = with_status(500)
    with overflow_router(tmp_path, vendor) as router:
        assert post(router).status_code == 503
        assert (side(router)["requests"], side(router)["cost"]) == (0, 0)


def test_a_long_limit_of_an_answer_is_reserved_whole(
    vendor: FakeVendor, fakes: Loop, tmp_path: Path
) -> None:
    release = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await release.wait()
        await vendor.answer(exchange)

    vendor.behaviour = slow
    price = 8 / 1e6  # of a token of the answer
    models = {"huge": {"model": "big-1", "input": 2, "output": 8}}
    upstream = {"max_cost_per_day": 50_000 * price, "models": models}
    with overflow_router(tmp_path, vendor, when=("no_replica",), upstream=upstream) as router:
        first = begin(router, model="huge", max_tokens=60_000)
        wait_for(lambda: len(vendor.seen) == 1)
        [known] = router.router.overflow.upstreams
        assert side(router)["state"] == "full"
        assert known.wait_s(known.spec.models["huge"]) == 1.0  # not the time until midnight
        fakes.loop.call_soon_threadsafe(release.set)
        assert first() == 200
        assert side(router)["state"] == "ready"


def spec_of(**fields: Any) -> UpstreamSpec:
    facts = {
        "name": "vendor",
        "url": "https://vendor.example/v1",
        "protocol": "openai",
        "key_file": "vendor.key",
        "models": {"tiny": PRICE},
        "when": ("no_replica",),
        "max_cost_per_day": 1,
    }
    return UpstreamSpec(**(facts | fields))


def test_all_headers_of_anthropics_versions_are_passed_on() -> None:
    betas = [(b"anthropic-beta", b"first-2026"), (b"anthropic-beta", b"second-2026")]
    scope: Any = {"headers": [(b"cookie", b"c=1"), *betas]}
    headers = api_headers(scope, spec_of(protocol="anthropic"), "key", b"1.1 router")
    assert [pair for pair in headers if pair[0] == b"anthropic-beta"] == betas
    assert [value for name, value in headers if name == b"anthropic-version"] == [b"2023-06-01"]


def test_messages_that_are_not_valid_are_left_to_the_api() -> None:
    body = b'{"messages": [{"role": "user", "content": "\x80 reasoning"}]}'
    fields = fields_of(body, CHAT)
    assert fields is not None
    assert bytes(fields["messages"]) in api_body(fields, CHAT, spec_of(), PRICE)
