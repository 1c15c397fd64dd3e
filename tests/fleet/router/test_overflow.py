"""Requests that overflow to an API: exactly by the rules, in their own protocol, counted apart."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.accounts import accounting
from support.keys import add
from support.overflowing import NOBODY, begin, overflow_router, overflow_state, post, side
from support.replicas import Exchange, FakeReplica, LiveRouter, Loop, live_router
from support.servers import events
from support.vendors import (
    CHAT,
    CHAT_COST,
    CHAT_USAGE,
    HELLO,
    KEY,
    MESSAGE_COST,
    MESSAGES,
    FakeVendor,
    overflow_file,
    start_vendor,
    with_status,
)
from support.waiting import wait_for
from twostroke.server.auth.costs import NANOS, amounts
from twostroke.server.storage import open_database

if TYPE_CHECKING:
    from pathlib import Path

ANTHROPIC = {"protocol": "anthropic"}


@pytest.fixture
def replica(fakes: Loop) -> FakeReplica:
    """A replica of ours with the model `tiny`, without queued work."""
    replica = FakeReplica()
    replica.load = {}
    fakes.start(replica)
    return replica


def report(router: LiveRouter, replica: FakeReplica, **load: Any) -> None:
    """Let a replica report a load, and wait until the router has it."""
    replica.load = load
    [known] = router.router.fleet.replicas.values()
    wait_for(lambda: known.work_s == load.get("work_s", 0.0))


def test_without_a_rule_that_applies_nothing_leaves(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    rules = ("no_replica", "objective", "unknown_model")
    with overflow_router(tmp_path, vendor, when=rules, objective=2, urls=(replica.url,)) as router:
        report(router, replica, work_s=1.0)
        answer = post(router, stream=True)
    assert (answer.status_code, len(replica.seen), vendor.seen) == (200, 1, [])
    assert "x-twostroke-upstream" not in answer.headers


def test_the_objective_decides_whether_a_request_waits_here(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    with overflow_router(
        tmp_path, vendor, when=("objective",), objective=2, urls=(replica.url,)
    ) as router:
        report(router, replica, work_s=9.0)
        answer = post(router)
        flexible = post(router, service_tier="flex", stream=True)
    assert answer.json()["choices"][0]["message"]["content"] == "bought"
    assert answer.headers["x-twostroke-upstream"] == "vendor1"
    assert flexible.text.endswith("data: [DONE]\n\n")
    assert (len(replica.seen), len(vendor.seen)) == (1, 1)  # who can wait, waits


@pytest.mark.parametrize("when", ["objective", "unknown_model"])
def test_a_rule_that_an_upstream_does_not_have_sends_nothing_there(
    when: str, vendor: FakeVendor, tmp_path: Path
) -> None:
    with overflow_router(tmp_path, vendor, when=(when,), objective=2) as router:
        assert post(router).status_code == 503
    assert vendor.seen == []


def test_nothing_ready_overflows_without_waiting(vendor: FakeVendor, tmp_path: Path) -> None:
    with overflow_router(tmp_path, vendor, wait_s=600) as router:
        assert post(router).status_code == 200
        assert side(router)["answered"] == {"no_replica": 1}
        health = httpx.get(f"{router.url}/health", trust_env=False)
        assert (health.status_code, health.json()["status"]) == (200, "overflow")


@pytest.mark.parametrize("status", [429, 503])
def test_what_all_replicas_refuse_overflows(
    status: int, vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    replica.behaviour = with_status(status)
    with overflow_router(tmp_path, vendor, urls=(replica.url,)) as router:
        assert post(router).headers["x-twostroke-upstream"] == "vendor1"
    assert (len(replica.seen), len(vendor.seen)) == (1, 1)


def test_what_replicas_lose_overflows(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    async def cut(exchange: Exchange) -> None:
        exchange.cut()

    replica.behaviour = cut
    with overflow_router(tmp_path, vendor, urls=(replica.url,)) as router:
        assert post(router).headers["x-twostroke-upstream"] == "vendor1"


def test_a_limit_of_the_key_at_a_replica_is_not_bought_off(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    replica.behaviour = with_status(429, {"error": {"code": "rate_limit_exceeded"}})
    with overflow_router(tmp_path, vendor, urls=(replica.url,)) as router:
        assert post(router).status_code == 429
    assert vendor.seen == []


def test_a_model_that_is_not_here_is_bought_if_the_map_has_it(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    replica.load = {"takes_any_name": False}
    models = {"huge": {"model": "big-1", "input": 1, "output": 1}}
    with overflow_router(
        tmp_path, vendor, when=("unknown_model",), upstream={"models": models}, urls=(replica.url,)
    ) as router:
        bought = post(router, model="Huge")  # another spelling
        missing = post(router, model="huger")
    assert bought.json()["model"] == "big-1"  # as the vendor says
    assert [body["model"] for body in vendor.bodies] == ["big-1"]
    assert missing.status_code == 404
    assert replica.seen == []


def test_a_model_that_a_replica_takes_under_any_name_is_bought_if_the_map_has_it(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    replica.load = {"takes_any_name": True}
    models = {"huge": {"model": "big-1", "input": 1, "output": 1}}
    with overflow_router(
        tmp_path,
        vendor,
        when=("unknown_model",),
        upstream={"models": models},
        urls=(replica.url, NOBODY),
    ) as router:
        assert post(router, model="huge").headers["x-twostroke-upstream"] == "vendor1"
        assert post(router, model="huger", stream=True).status_code == 200
    assert len(replica.seen) == 1


def test_streams_of_chats_pass_and_their_usage_is_not_shown_unasked(
    vendor: FakeVendor, tmp_path: Path
) -> None:
    with overflow_router(tmp_path, vendor) as router:
        plain = events(post(router, stream=True).text)
        told = events(post(router, stream=True, stream_options={"include_usage": True}).text)
        wait_for(lambda: side(router)["requests"] == 2)
        sums = side(router)
    texts = [choice["delta"].get("content") for event in plain[:-1] for choice in event["choices"]]
    assert texts == ["bou", "ght", None]
    assert [event.get("usage") for event in plain[:-1]] == [None] * 3
    assert told[-2]["usage"] == CHAT_USAGE
    assert (sums["input_tokens"], sums["cached_tokens"], sums["output_tokens"]) == (2000, 800, 200)
    assert sums["cost"] == pytest.approx(2 * CHAT_COST)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_messages_pass_to_an_upstream_of_their_protocol(
    is_streamed: bool, vendor: FakeVendor, tmp_path: Path
) -> None:
    path = overflow_file(tmp_path, vendor, upstream=ANTHROPIC)
    headers = {"anthropic-version": "2023-01-01", "anthropic-beta": "b1", "x-api-key": "client"}
    headers |= {"cookie": "c=1", "x-request-id": "id-1"}
    with live_router(NOBODY, overflow=path, wait_s=0.1) as router:
        answer = post(router, MESSAGES, headers, stream=is_streamed, max_tokens=5)
        other = post(router, CHAT)
        wait_for(lambda: side(router)["requests"] == 1)
        sums = side(router)
    assert "bought" in answer.text
    assert other.status_code == 503  # of another protocol
    [exchange] = vendor.seen
    assert exchange.path == "/v1/messages"
    assert exchange.headers["x-api-key"] == KEY
    assert exchange.headers["anthropic-version"] == "2023-01-01"
    assert exchange.headers["anthropic-beta"] == "b1"
    assert "client" not in "".join(exchange.headers.values())
    assert not {"cookie", "x-request-id"} & exchange.headers.keys()
    assert (sums["input_tokens"], sums["cached_tokens"], sums["output_tokens"]) == (1000, 400, 100)
    assert sums["cost"] == pytest.approx(MESSAGE_COST)


def test_a_vendor_learns_nothing_but_the_request(vendor: FakeVendor, tmp_path: Path) -> None:
    path = overflow_file(tmp_path, vendor)
    headers = {
        "authorization": "Bearer client-key",
        "cookie": "c=1",
        "x-request-id": "id-1",
        "x-forwarded-for": "10.1.1.1",
        "traceparent": "00-1",
    }
    with live_router(NOBODY, overflow=path) as router:
        post(router, headers=headers, user="anna", priority=3, top_k=5)
    [exchange] = vendor.seen
    names = {"host", "content-length", "content-type", "accept", "accept-encoding"}
    assert exchange.headers.keys() == names | {"user-agent", "via", "authorization"}
    assert exchange.headers["authorization"] == f"Bearer {KEY}"
    assert vendor.bodies == [{**HELLO, "model": "big-1"}]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/responses", {"input": "hello", "previous_response_id": "resp_1"}),
        ("/v1/embeddings", {"input": "hello"}),
        ("/tokenize", {"content": "hello"}),
        ("/infill", {"input_prefix": "hello"}),
        ("/v1/batches", {"input_file_id": "file-1"}),
        ("/v1/files", {}),
        (CHAT, {"grammar": "root ::= 'a'"}),
        (CHAT, {"store": True}),
        (CHAT, {"messages": [{"role": "user", "content": [{"file": {"file_id": "file-1"}}]}]}),
        (MESSAGES, {"messages": [{"role": "assistant", "content": "twostroke-reasoning:abc"}]}),
    ],
)
def test_requests_that_must_stay_here_never_leave(
    path: str, fields: dict[str, Any], fakes: Loop, tmp_path: Path
) -> None:
    chat_vendor, message_vendor = start_vendor(fakes), start_vendor(fakes)
    rules = ("no_replica", "objective", "unknown_model")
    file = overflow_file(tmp_path, chat_vendor, message_vendor, when=rules, objective=2)
    values = json.loads(file.read_text())
    values["upstreams"][1]["protocol"] = "anthropic"
    file.write_text(json.dumps(values))
    with live_router(NOBODY, overflow=file, wait_s=0.1) as router:
        assert post(router, path, **fields).status_code >= 400
    assert chat_vendor.seen + message_vendor.seen == []


@pytest.mark.parametrize("value", ["never", "no", "0", "Allowed", ""])
def test_a_request_may_forbid_to_leave(value: str, vendor: FakeVendor, tmp_path: Path) -> None:
    with overflow_router(tmp_path, vendor) as router:
        assert post(router, headers={"x-twostroke-overflow": value}).status_code == 503
        assert vendor.seen == []
        assert post(router, headers={"x-twostroke-overflow": "allow"}).status_code == 200


def test_keys_and_tenants_that_forbid_it_never_leave(vendor: FakeVendor, tmp_path: Path) -> None:
    keys = {
        "free": add(tmp_path, "free", "anna")[1],
        "closed": add(tmp_path, "closed", "anna", overflow=False)[1],
        "listed": add(tmp_path, "listed", "ben")[1],
    }
    path = overflow_file(tmp_path, vendor, never_for=["ben"])
    with accounting(tmp_path, NOBODY, overflow=path, wait_s=0.1) as router:
        statuses = {
            name: post(router, headers={"x-api-key": key, "x-twostroke-overflow": "allow"})
            for name, key in keys.items()
        }
    assert {name: answer.status_code for name, answer in statuses.items()} == {
        "free": 200,
        "closed": 503,
        "listed": 503,
    }
    assert len(vendor.seen) == 1


def test_limits_hold_and_usage_and_costs_are_kept(vendor: FakeVendor, tmp_path: Path) -> None:
    from support.accounts import used
    from twostroke.server.http.api_key import KeyLimits

    key, text = add(tmp_path, limits=KeyLimits(tokens_per_minute=1200))
    path = overflow_file(tmp_path, vendor)
    with accounting(tmp_path, NOBODY, overflow=path, wait_s=0.1) as router:
        first = post(router, headers={"x-api-key": text}, max_tokens=5)
        second = post(router, headers={"x-api-key": text}, max_tokens=5)
        third = post(router, headers={"x-api-key": text}, max_tokens=5)
    assert [answer.status_code for answer in (first, second, third)] == [200, 200, 429]
    assert used(tmp_path) == [(key.id, "anna", "vendor1/big-1", 2, 2000, 800, 200)]
    with open_database(tmp_path) as db:
        [amount] = amounts(db, "0000", "9999")
    assert amount.owner[1:] == ("vendor1", "big-1", "USD")
    assert amount[1:] == (2, 2000, 800, 200, round(2 * CHAT_COST * NANOS), 0, 0)


def test_spending_of_the_day_outlives_the_router(vendor: FakeVendor, tmp_path: Path) -> None:
    _, text = add(tmp_path)
    ceiling = {"max_cost_per_day": 1.5 * CHAT_COST}
    path = overflow_file(tmp_path, vendor, upstream=ceiling)
    statuses = []
    for _ in range(3):
        with accounting(tmp_path, NOBODY, overflow=path, wait_s=0.1) as router:
            statuses.append(post(router, headers={"x-api-key": text}).status_code)
    assert statuses == [200, 200, 503]  # at most one request passes the ceiling


def test_a_running_request_reserves_its_cost(
    vendor: FakeVendor, fakes: Loop, tmp_path: Path
) -> None:
    release = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await release.wait()
        await vendor.answer(exchange)

    vendor.behaviour = slow
    most = 1000 * 8 / 1e6  # of a request with 1,000 tokens of answer
    with overflow_router(tmp_path, vendor, upstream={"max_cost_per_day": 0.9 * most}) as router:
        first = begin(router, max_tokens=1000)
        wait_for(lambda: len(vendor.seen) == 1)
        assert post(router, max_tokens=1).status_code == 503
        assert side(router)["state"] == "full"
        fakes.loop.call_soon_threadsafe(release.set)
        assert first() == 200
        assert side(router)["state"] == "ready"


def test_parallel_requests_are_bounded(vendor: FakeVendor, fakes: Loop, tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await release.wait()
        await vendor.answer(exchange)

    vendor.behaviour = slow
    with overflow_router(tmp_path, vendor, upstream={"max_parallel": 1}) as router:
        first = begin(router)
        wait_for(lambda: len(vendor.seen) == 1)
        assert post(router).status_code == 503
        fakes.loop.call_soon_threadsafe(release.set)
        assert first() == 200
        assert post(router).status_code == 200


def test_tokens_of_both_sides_are_counted_with_their_costs(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    async def answer(exchange: Exchange) -> None:
        choice = {"index": 0, "message": {"content": "here"}, "finish_reason": "stop"}
        headers = "x-twostroke-usage: 1000 400 100\r\n"
        await exchange.answer({"choices": [choice], "usage": CHAT_USAGE}, headers=headers)

    replica.behaviour = answer
    costs = {"models": {"tiny": {"input": 1, "output": 4}}}
    models = {name: {"model": "big-1", "input": 2, "output": 8} for name in ("tiny", "huge")}
    with overflow_router(
        tmp_path,
        vendor,
        when=("unknown_model",),
        replicas=costs,
        upstream={"models": models},
        urls=(replica.url,),
    ) as router:
        post(router)
        post(router)
        post(router, model="huge")
        wait_for(
            lambda: (
                side(router)["requests"] == 1 and overflow_state(router)["here"]["requests"] == 2
            )
        )
        sums = overflow_state(router)["here"]
        text = httpx.get(f"{router.url}/metrics", trust_env=False).text
    assert (sums["input_tokens"], sums["cached_tokens"], sums["output_tokens"]) == (2000, 800, 200)
    assert sums["cost"] == pytest.approx(2 * (1000 * 1 + 100 * 4) / 1e6)
    assert sums["cost_elsewhere"] == pytest.approx(2 * (1000 * 2 + 100 * 8) / 1e6)
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("twostroke"))
    tokens = 'twostroke_router_tokens_total{kind="output",upstream="%s"}'
    assert (float(lines[tokens % "here"]), float(lines[tokens % "vendor1"])) == (200, 100)
    cost = 'twostroke_router_cost_total{currency="USD",upstream="here"}'
    assert float(lines[cost]) == pytest.approx(sums["cost"])


def test_replicas_cost_by_the_hour_whether_or_not_they_compute(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    with overflow_router(
        tmp_path, vendor, replicas={"price_per_hour": 3600}, urls=(replica.url, NOBODY)
    ) as router:
        wait_for(lambda: overflow_state(router)["here"]["cost"] > 0)
        cost = overflow_state(router)["here"]["cost"]
    assert 1 < cost < 30  # one unit a second, for the one replica that runs


def test_the_log_says_which_side_has_answered(vendor: FakeVendor, tmp_path: Path) -> None:
    path, lines = overflow_file(tmp_path, vendor), list[Any]()

    class Log:
        def observe(self, served_request: Any) -> None:
            lines.append(served_request.figures())

        def close(self) -> None:
            pass

    with live_router(NOBODY, overflow=path) as router:
        router.router.observers.append(Log())
        post(router)
        wait_for(lambda: bool(lines))
    assert lines[0]["upstream"] == "vendor1"
    assert "replica" not in lines[0]
    assert lines[0]["prompt_tokens"] == 1000


def test_a_request_tries_another_upstream_before_it_waits(fakes: Loop, tmp_path: Path) -> None:
    vendors = [start_vendor(fakes), start_vendor(fakes)]
    vendors[0].behaviour = with_status(500)
    with overflow_router(tmp_path, *vendors) as router:
        assert post(router).headers["x-twostroke-upstream"] == "vendor2"
        assert side(router)["failed"] == {"status": 1}


def test_a_request_that_no_upstream_answers_waits_for_a_replica(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    replica.health = (503, {})
    replica.load = None
    vendor.behaviour = with_status(500)
    with overflow_router(tmp_path, vendor, urls=(replica.url,), wait_s=30) as router:
        first = begin(router, stream=True)
        wait_for(lambda: len(vendor.seen) == 1)
        replica.health = (200, {"status": "ok"})
        assert first() == 200
    assert (len(replica.seen), len(vendor.seen)) == (1, 1)


def test_an_upstream_that_is_slower_than_the_queue_here_is_not_used(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    with overflow_router(
        tmp_path, vendor, when=("objective",), objective=2, urls=(replica.url,)
    ) as router:
        report(router, replica, work_s=9.0)
        upstream = router.router.overflow.upstreams[0]
        upstream.record_first_token(1.0)
        assert "x-twostroke-upstream" in post(router, stream=True).headers
        upstream.record_first_token(600.0)
        assert "x-twostroke-upstream" not in post(router, stream=True).headers


def test_a_router_without_the_option_shows_nothing_of_it(replica: FakeReplica) -> None:
    with live_router(replica.url) as router:
        assert "overflow" not in httpx.get(f"{router.url}/api/state", trust_env=False).json()
        assert "overflow" not in httpx.get(f"{router.url}/metrics", trust_env=False).text


def test_a_model_without_a_replica_overflows_and_is_started_nevertheless(
    vendor: FakeVendor, tmp_path: Path
) -> None:
    path = overflow_file(tmp_path, vendor)
    options = {"overflow": path, "startable_models": ("tiny",)}
    with live_router(NOBODY, **options) as router:
        model = router.router.fleet.starts.models["tiny"]
        assert not model.is_used()
        assert post(router).headers["x-twostroke-upstream"] == "vendor1"
        assert model.is_used()
        assert not model.waiting
    assert len(vendor.seen) == 1


def test_models_that_only_upstreams_have_are_listed_for_those_whose_requests_may_leave(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    prices = {"input": 1, "output": 1}
    models = {name: {"model": "big-1", **prices} for name in ("huge", "Tiny")}
    path = overflow_file(tmp_path, vendor, when=("unknown_model",), upstream={"models": models})
    never = {"x-twostroke-overflow": "never"}
    with live_router(replica.url, overflow=path) as router:
        url = f"{router.url}/v1/models"
        rows = httpx.get(url, trust_env=False).json()["data"]
        kept_rows = httpx.get(url, headers=never, trust_env=False).json()["data"]
        one = httpx.get(f"{url}/huge", trust_env=False)
        form = {"anthropic-version": "2023-06-01"}
        other_form = httpx.get(f"{url}/huge", headers=form, trust_env=False).json()
    assert [(row["id"], row.get("owned_by")) for row in rows] == [
        ("tiny", None),
        ("huge", "vendor1"),
    ]
    assert [row["id"] for row in kept_rows] == ["tiny"]
    assert one.json() == rows[1]
    assert (other_form["type"], other_form["display_name"]) == ("model", "huge")
    with live_router(NOBODY, overflow=path) as router:
        url = f"{router.url}/v1/models"
        names = [row["id"] for row in httpx.get(url, trust_env=False).json()["data"]]
        assert names == ["huge", "Tiny"]
        assert httpx.get(url, headers=never, trust_env=False).status_code == 503
