"""Costs of several routers: one ceiling holds for all, and no cost is lost or counted twice."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from support.overflowing import NOBODY, begin, overflow_state, post, side
from support.shared_routers import add_key, sharing_router
from support.vendors import CHAT_COST, PRICES, FakeVendor, overflow_file, start_vendor
from support.waiting import wait_for
from twostroke.fleet.shared_records import stored_costs
from twostroke.fleet.shared_records.script import PREFIX
from twostroke.fleet.shared_records.store import StoreError, open_store
from twostroke.server.auth.costs import NANOS, REPLICAS_SIDE

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    from support.replicas import Exchange, LiveRouter, Loop
    from support.stores import Store

DAYS = ("0000", "9999")


@pytest.fixture
def vendor(fakes: Loop) -> FakeVendor:
    return start_vendor(fakes)


def routers(
    stack: ExitStack, store: Store, file: Path, count: int = 2, **options: Any
) -> list[LiveRouter]:
    options = {"overflow": file, "wait_s": 0.05, **options}
    return [stack.enter_context(sharing_router(store, NOBODY, **options)) for _ in range(count)]


def costs(store: Store) -> list[tuple[Any, ...]]:
    with open_store(store.url) as client:
        amounts = stored_costs.amounts(client, *DAYS)
    return [(amount.owner.upstream, amount.owner.model, *amount[1:]) for amount in amounts]


def cost_sums(store: Store) -> str:
    [name] = [name.decode() for name in store.client().keys(PREFIX + "cost-sums:*")]
    return name


def test_a_ceiling_holds_for_all_routers_and_outlives_them(
    redis_store: Store, vendor: FakeVendor, stack: ExitStack, tmp_path: Path
) -> None:
    headers = {"x-api-key": add_key(redis_store)[1]}
    file = overflow_file(tmp_path, vendor, upstream={"max_cost_per_day": 2.5 * CHAT_COST})
    with stack:
        first, second = routers(stack, redis_store, file)
        statuses = []
        for number, router in enumerate((first, second, first, second, first), 1):
            statuses.append(post(router, headers=headers, max_tokens=5).status_code)
            wait_for(lambda: costs(redis_store)[0][2] == min(number, 3))  # noqa: B023
        wait_for(lambda: all(side(router)["state"] == "spent" for router in (first, second)))
        sums = [(side(router)["requests"], side(router)["cost"]) for router in (first, second)]
    assert statuses == [200, 200, 200, 503, 503]
    assert sums == [(3, pytest.approx(3 * CHAT_COST))] * 2
    assert costs(redis_store) == [
        ("vendor1", "big-1", 3, 3000, 1200, 300, round(3 * CHAT_COST * NANOS), 0, 0)
    ]
    with sharing_router(redis_store, NOBODY, overflow=file, wait_s=0.05) as router:
        assert side(router)["state"] == "spent"
        assert post(router, headers=headers).status_code == 503
    assert len(vendor.seen) == 3


def test_costs_that_running_requests_may_reach_count_at_all_routers(
    redis_store: Store, vendor: FakeVendor, fakes: Loop, stack: ExitStack, tmp_path: Path
) -> None:
    release = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await release.wait()
        await vendor.answer(exchange)

    vendor.behaviour = slow
    headers = {"x-api-key": add_key(redis_store)[1]}
    most = 1000 * PRICES["output"] / 1e6
    file = overflow_file(tmp_path, vendor, upstream={"max_cost_per_day": 0.9 * most})
    with stack:
        first, second = routers(stack, redis_store, file)
        status = begin(first, headers=headers, max_tokens=1000)
        wait_for(lambda: len(vendor.seen) == 1)
        assert post(second, headers=headers, max_tokens=1).status_code == 503
        assert len(vendor.seen) == 1
        fakes.loop.call_soon_threadsafe(release.set)
        assert status() == 200
        wait_for(lambda: side(second)["state"] == "ready")
        assert post(second, headers=headers, max_tokens=1).status_code == 200


def test_many_requests_at_all_routers_pass_the_ceiling_by_one_at_most(
    redis_store: Store, vendor: FakeVendor, stack: ExitStack, tmp_path: Path
) -> None:
    headers = {"x-api-key": add_key(redis_store)[1]}
    most = 1000 * PRICES["output"] / 1e6  # a request costs less in the end
    file = overflow_file(tmp_path, vendor, upstream={"max_cost_per_day": 2.5 * most})
    with stack:
        both = routers(stack, redis_store, file)
        waiting = [
            begin(both[number % 2], headers=headers, max_tokens=1000) for number in range(40)
        ]
        statuses = [status() for status in waiting]
        wait_for(lambda: side(both[0])["running"] == side(both[1])["running"] == 0)
        for router in both:
            post(router, headers=headers, max_tokens=1000)
    [row] = costs(redis_store)
    assert 0 < statuses.count(200) < len(statuses)
    assert row[2] == len(vendor.seen)
    assert row[6] < 3.5 * most * NANOS


def test_costs_that_a_dead_router_has_reserved_stay_reserved_until_it_comes_back(
    redis_store: Store,
    vendor: FakeVendor,
    fakes: Loop,
    stack: ExitStack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await release.wait()
        await vendor.answer(exchange)

    async def cut_off(_: object) -> None:
        raise StoreError("It is cut off.")

    vendor.behaviour = slow
    headers = {"x-api-key": add_key(redis_store)[1]}
    most = 1000 * PRICES["output"] / 1e6
    file = overflow_file(tmp_path, vendor, upstream={"max_cost_per_day": 0.9 * most})
    with stack, monkeypatch.context() as patch:
        first, second = routers(stack, redis_store, file)
        dead, living = (router.router.shared_records for router in (first, second))
        status = begin(first, headers=headers, max_tokens=1000)
        wait_for(lambda: len(vendor.seen) == 1)
        patch.setattr(dead._store, "run", cut_off)
        wait_for(lambda: dead.is_away)
        redis_store.client().delete(f"{PREFIX}lease:{dead._router}")
        wait_for(lambda: living.costs.num_routers == 1)
        assert post(second, headers=headers, max_tokens=1).status_code == 503
        assert len(vendor.seen) == 1
        fakes.loop.call_soon_threadsafe(release.set)
        assert status() == 200
        patch.undo()
        wait_for(lambda: side(second)["requests"] == 1)
        wait_for(lambda: side(second)["state"] == "ready")
        assert post(second, headers=headers, max_tokens=1).status_code == 200
    [row] = costs(redis_store)
    assert (row[2], row[6]) == (2, round(2 * CHAT_COST * NANOS))


def test_reservations_of_earlier_days_and_of_routers_that_stopped_are_removed(
    redis_store: Store, vendor: FakeVendor, stack: ExitStack, tmp_path: Path
) -> None:
    headers = {"x-api-key": add_key(redis_store)[1]}
    file = overflow_file(tmp_path, vendor)
    with stack:
        [router] = routers(stack, redis_store, file, 1)
        day, nanos = router.router.overflow.costs.day, 100 * NANOS
        values = {"old": f"{nanos} 2000-01-01", "stopped": f"0 {day}", "damaged": "x"}
        client, name = redis_store.client(), PREFIX + "reserved"
        client.hset(name, mapping={f"{key} vendor1 USD": text for key, text in values.items()})
        wait_for(lambda: client.hlen(name) <= 1)
        assert post(router, headers=headers).status_code == 200
    with sharing_router(redis_store, NOBODY, overflow=file, wait_s=0.05) as router:
        wait_for(lambda: not client.exists(name))  # the first router has stopped
        assert post(router, headers=headers).status_code == 200


def test_while_the_store_is_away_each_router_spends_its_part(
    redis_store: Store, vendor: FakeVendor, stack: ExitStack, tmp_path: Path
) -> None:
    headers = {"x-api-key": add_key(redis_store)[1]}
    file = overflow_file(tmp_path, vendor, upstream={"max_cost_per_day": 3.9 * CHAT_COST})
    with stack:
        both = routers(stack, redis_store, file, max_wait_s=0.2)
        books = [router.router.overflow.costs for router in both]
        wait_for(lambda: all(book._shared_records.costs.num_routers == 2 for book in books))
        with redis_store.frozen():
            statuses = [
                post(router, headers=headers, max_tokens=1).status_code
                for router in both
                for _ in range(4)
            ]
        wait_for(lambda: side(both[0])["requests"] == side(both[1])["requests"] == 4)
    assert statuses == [200, 200, 503, 503] * 2
    assert costs(redis_store)[0][2] == 4


def test_sums_that_the_store_has_lost_come_back_from_a_router(
    redis_store: Store, vendor: FakeVendor, stack: ExitStack, tmp_path: Path
) -> None:
    headers = {"x-api-key": add_key(redis_store)[1]}
    file = overflow_file(tmp_path, vendor, upstream={"max_cost_per_day": 0.9 * CHAT_COST})
    with stack:
        [router] = routers(stack, redis_store, file, 1)
        assert post(router, headers=headers).status_code == 200
        client = redis_store.client()
        wait_for(lambda: bool(client.keys(PREFIX + "cost-sums:*")))
        name, field = cost_sums(redis_store), "nanos vendor1 USD"
        wait_for(lambda: client.hget(name, field) is not None)
        for damage in (client.flushall, lambda: client.hset(name, field, "damaged")):
            before = side(router)["cost"]
            damage()
            wait_for(lambda: client.hget(name, field) == b"%d" % round(CHAT_COST * NANOS))
            assert side(router)["cost"] == before == pytest.approx(CHAT_COST)
        assert post(router, headers=headers).status_code == 503


def test_a_damaged_sum_that_no_router_knows_keeps_the_upstream_out_of_use(
    redis_store: Store,
    vendor: FakeVendor,
    stack: ExitStack,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    headers = {"x-api-key": add_key(redis_store)[1]}
    file = overflow_file(tmp_path, vendor)
    with sharing_router(redis_store, NOBODY, overflow=file, wait_s=0.05) as router:
        assert post(router, headers=headers).status_code == 200
    redis_store.client().hset(cost_sums(redis_store), "nanos vendor1 USD", "damaged")
    with stack:
        [router] = routers(stack, redis_store, file, 1)
        assert post(router, headers=headers).status_code == 503
        assert "is damaged" in side(router)["reason"]
    assert caplog.text.count("is damaged: it is not used") == 1


def test_replicas_that_several_routers_see_cost_once(
    redis_store: Store, fakes: Loop, vendor: FakeVendor, stack: ExitStack, tmp_path: Path
) -> None:
    from support.replicas import FakeReplica

    replica = FakeReplica()
    fakes.start(replica)
    file = overflow_file(tmp_path, vendor, replicas={"price_per_hour": 3600})
    with stack:
        both = [
            stack.enter_context(sharing_router(redis_store, replica.url, overflow=file))
            for _ in range(2)
        ]
        shared = [router.router.shared_records.costs for router in both]
        wait_for(lambda: all(costs.num_routers == 2 for costs in shared))
        books = [router.router.overflow.costs for router in both]
        for book in books:
            book._hours_counted_s -= 100  # of both, in the next count
        wait_for(lambda: overflow_state(both[0])["here"]["cost"] > 90)
        cost = overflow_state(both[0])["here"]["cost"]
        assert cost < 150  # not 200, since each counts a half
        wait_for(lambda: overflow_state(both[1])["here"]["cost"] > 90)
    assert {row[0] for row in costs(redis_store)} == {REPLICAS_SIDE}


def test_rows_of_costs_in_the_store_are_read_and_damage_is_named(redis_store: Store) -> None:
    client, owner = redis_store.client(), json.dumps(["vendor", "big-1", "USD"])
    client.sadd(PREFIX + "cost-days", "2026-11-30")
    name = PREFIX + "costs:2026-11-30"
    client.hset(name, mapping={f"requests {owner}": 2, f"nanos {owner}": 7})
    client.hset(name, mapping={'requests ["other","m","USD"]': "x", "nonsense": 1})
    assert costs(redis_store) == [("vendor", "big-1", 2, 0, 0, 0, 7, 0, 0)]
    with open_store(redis_store.url) as connection:
        damaged = stored_costs.damaged_owners(connection, *DAYS)
    assert [damage.upstream for damage in damaged] == ["", "other"]
