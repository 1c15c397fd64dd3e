"""`twostroke keys` and `twostroke usage` with the store that routers share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.accounts import USAGE, post, whole_response
from support.replicas import FakeReplica, Loop
from support.shared_routers import sharing_router
from support.stores import missing, store
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Ran
    from support.stores import Store

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def redis_store(tmp_path: Path) -> Iterator[Store]:
    with store(tmp_path) as running_store:
        yield running_store


@pytest.fixture
def replica() -> Iterator[FakeReplica]:
    loop, fake = Loop(), FakeReplica()
    fake.behaviour = whole_response({"choices": [], "usage": USAGE})
    yield loop.start(fake)
    loop.close()


def test_keys_in_the_store_are_made_listed_and_revoked(
    redis_store: Store, replica: FakeReplica, cli: Callable[..., Ran]
) -> None:
    where = ("--store", redis_store.url)
    added = cli("keys", "add", "app", "--requests-per-minute", "60", *where)
    assert added.code == 0
    key = added.out.strip()
    assert cli("keys", "add", "app", *where).code == 2  # the name is taken
    with sharing_router(redis_store, replica.url) as router:
        statuses = [post(router, key).status_code]
        assert cli("keys", "revoke", "app", *where).code == 0

        def is_refused() -> bool:
            statuses.append(post(router, key).status_code)
            return statuses[-1] == 401

        wait_for(is_refused)
    count = statuses.count(200)
    assert count == len(statuses) - 1
    assert cli("keys", "limit", "app", "--parallel", "3", *where).code == 2
    [listed] = json.loads(cli("keys", "list", "--all", "--json", *where).out)
    assert (listed["name"], listed["state"]) == ("app", "revoked")
    assert listed["limits"]["requests_per_minute"] == 60
    assert listed["last_used"] is not None
    [row] = json.loads(cli("usage", "--json", *where).out)
    assert (row["name"], row["requests"], row["input"], row["output"]) == (
        "app", count, 9 * count, 4 * count,
    )  # fmt: skip


def test_the_store_learns_no_key(redis_store: Store, cli: Callable[..., Ran]) -> None:
    key = cli("keys", "add", "app", "--store", redis_store.url).out.strip()
    client: Any = redis_store.client()
    *texts, keys = sorted(client.scan_iter("*"))
    prefix = b"twostroke:router:"
    assert texts == [prefix + name for name in (b"begun", b"change", b"identity")]
    assert keys == prefix + b"keys"
    content = b"".join([*client.hvals(keys), *(client.get(name) for name in texts)])
    assert key.split("-")[1].encode() in content  # the id
    assert key.rpartition("-")[2].encode() not in content


def test_damaged_usage_in_the_store_is_named(redis_store: Store, cli: Callable[..., Ran]) -> None:
    client: Any = redis_store.client()
    client.sadd("twostroke:router:usage-days", "2026-11-30")
    counts = {'requests ["k","anna","tiny",false]': "many", 'input ["k","anna","tiny",false]': 2}
    client.hset("twostroke:router:usage:2026-11-30", mapping=counts)
    ran = cli("usage", "--store", redis_store.url)
    assert (ran.code, ran.out) == (1, "Nothing was used.\n")
    assert "tenant 'anna', model 'tiny' in the store is damaged" in ran.err


@pytest.mark.parametrize("words", [("keys", "list"), ("usage",)])
def test_either_the_records_or_the_store_is_named(
    words: tuple[str, ...], cli: Callable[..., Ran]
) -> None:
    for places in ((), ("--records", "here", "--store", "redis://127.0.0.1:1")):
        ran = cli(*words, *places)
        assert ran.code == 2
        assert "Give either --records DIR or --store URL." in ran.err


def test_a_router_with_a_store_that_is_away_does_not_start(
    cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_REPLICA_KEY", "router-secret")
    replica = ("--replica", "http://127.0.0.1:1", "--port", "0")
    ran = cli("route", *replica, "--store", "redis://user:word@127.0.0.1:1")
    assert ran.code == 1
    assert ran.err.startswith("twostroke: The store 127.0.0.1:1 does not answer")
    assert ran.err.count("\n") == 1
    both = cli("route", *replica, "--store", "redis://127.0.0.1:1", "--records", "here")
    assert (both.code, "Give either --records" in both.err) == (2, True)
