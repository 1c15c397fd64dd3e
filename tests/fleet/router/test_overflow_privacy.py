"""Requests that must not leave the router, and names that vendors must not see."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.accounts import SECRET, accounting
from support.keys import add
from support.overflowing import NOBODY, begin, overflow_router, post
from support.replicas import Exchange, FakeReplica, Loop, live_router
from support.vendors import (
    MESSAGES,
    FakeVendor,
    overflow_file,
    start_vendor,
    with_status,
)
from support.waiting import wait_for
from twostroke.core.errors import UsageError
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.auth.stored_keys import change
from twostroke.server.storage import open_database

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def replica(fakes: Loop) -> FakeReplica:
    replica = FakeReplica()
    replica.load = {}
    fakes.start(replica)
    return replica


def test_a_limit_in_the_form_of_anthropic_is_not_bought_off(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    error = {"type": "rate_limit_error", "message": "Rate limit reached: 5 requests per minute."}
    replica.behaviour = with_status(429, {"type": "error", "error": error})
    with overflow_router(
        tmp_path, vendor, upstream={"protocol": "anthropic"}, urls=(replica.url,)
    ) as router:
        assert post(router, MESSAGES).status_code == 429
        replica.behaviour = with_status(
            529, {"type": "error", "error": {"type": "overloaded_error"}}
        )
        assert post(router, MESSAGES).status_code == 200
    assert len(vendor.seen) == 1


@pytest.mark.parametrize(
    "fields", [{"previous_response_id": "resp_1"}, {"metadata": {"file_id": "file-1"}}]
)
def test_what_names_stored_objects_stays_while_a_first_replica_starts(
    fields: dict[str, Any], vendor: FakeVendor, tmp_path: Path
) -> None:
    path, listing = overflow_file(tmp_path, vendor), tmp_path / "replicas"
    listing.write_text("")
    options = {"startable_models": ("tiny",), "start_wait_s": 0.1}
    with live_router(listing=listing, overflow=path, **options) as router:
        assert post(router, **fields).status_code == 503
    assert vendor.seen == []


def test_a_vendor_learns_no_names_of_proxies(vendor: FakeVendor, tmp_path: Path) -> None:
    path = overflow_file(tmp_path, vendor)
    passed = "1.1 twostroke-0123456789abcdef"
    headers = {"via": f"1.1 proxy-7.internal:8443, {passed}, 2 twostroke-proxy.internal"}
    with live_router(NOBODY, overflow=path) as router:
        assert post(router, headers=headers).status_code == 200
        own = f"1.1 twostroke-{router.router.fleet.router_id}"
    [exchange] = vendor.seen
    assert exchange.headers["via"] == f"{passed}, {own}"


def test_a_router_behind_this_one_learns_which_keys_forbid_it(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    closed, free = (
        add(tmp_path, "closed", "anna", overflow=False)[1],
        add(tmp_path, "free", "ben")[1],
    )
    with accounting(tmp_path, replica.url) as router:
        for key in (closed, free):
            post(router, headers={"x-api-key": key})
    assert [each.headers.get("x-twostroke-overflow") for each in replica.seen] == ["never", None]


def test_tenants_that_never_leave_must_be_known(
    vendor: FakeVendor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "twostroke.router")
    path = overflow_file(tmp_path, vendor, never_for=["anna", "Ben"])
    with (
        pytest.raises(UsageError, match="only by their API keys"),
        live_router(NOBODY, overflow=path),
    ):
        pass
    keys = ApiKeys({"key-of-anna": "anna", "key-of-ben": "ben"})
    with live_router(NOBODY, overflow=path, api_keys=keys):
        pass
    assert "the tenant 'Ben'" in caplog.text
    assert "'anna'" not in caplog.text


def test_a_router_behind_this_one_learns_which_tenants_never_leave(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    keys = {name: add(tmp_path, name, name)[1] for name in ("anna", "ben")}
    path = overflow_file(tmp_path, vendor, never_for=["anna"])
    with accounting(tmp_path, replica.url, overflow=path) as router:
        for key in keys.values():
            post(router, headers={"x-api-key": key})
            headers = {"x-api-key": key}
            httpx.get(f"{router.url}/v1/models", headers=headers, trust_env=False)
    listed = [each for each in replica.lists if "x-twostroke-tenant" in each.headers]
    for exchanges in (replica.seen, listed):
        told = [each.headers.get("x-twostroke-overflow") for each in exchanges]
        assert told == ["never", None]


def test_a_tenant_that_never_leaves_does_not_leave_through_a_second_router(
    vendor: FakeVendor, tmp_path: Path
) -> None:
    keys = {name: add(tmp_path, name, name)[1] for name in ("anna", "ben")}
    inner_file = overflow_file(tmp_path, vendor, when=("no_replica", "unknown_model"))
    inner = live_router(NOBODY, overflow=inner_file, replica_key=SECRET, wait_s=0.05)
    (outer_folder := tmp_path / "outer").mkdir()
    outer_file = overflow_file(outer_folder, vendor, when=("objective",), objective=600)
    values = json.loads(outer_file.read_text()) | {"never_for": ["anna"]}
    outer_file.write_text(json.dumps(values))
    with inner as behind, accounting(tmp_path, behind.url, overflow=outer_file) as router:
        statuses = {
            name: post(router, headers={"x-api-key": key}).status_code for name, key in keys.items()
        }
    assert statuses == {"anna": 503, "ben": 200}
    assert len(vendor.seen) == 1


def test_a_key_that_is_forbidden_to_leave_while_its_request_waits_stays(
    vendor: FakeVendor, replica: FakeReplica, tmp_path: Path
) -> None:
    stored_key, key = add(tmp_path, "app", "anna")
    replica.health = (503, {})
    replica.load = None
    vendor.behaviour = with_status(500)
    path = overflow_file(tmp_path, vendor, vendor)
    with accounting(tmp_path, replica.url, overflow=path, wait_s=30) as router:
        first = begin(router, headers={"x-api-key": key}, stream=True)
        wait_for(lambda: len(vendor.seen) == 2)
        with open_database(tmp_path, writes=True) as db:
            change(db, stored_key, overflow=False)
        known = router.router.options.api_keys
        wait_for(lambda: not known.with_id(stored_key.id).overflow)
        replica.health = (200, {"status": "ok"})
        assert first() == 200
    [exchange] = replica.seen
    assert exchange.headers["x-twostroke-overflow"] == "never"


def test_a_key_that_is_forbidden_to_leave_while_an_upstream_fails_is_not_sent_to_the_next(
    fakes: Loop, tmp_path: Path
) -> None:
    release = asyncio.Event()
    refuse = with_status(500)

    async def refuse_late(exchange: Exchange) -> None:
        await release.wait()
        await refuse(exchange)

    vendors = [start_vendor(fakes), start_vendor(fakes)]
    vendors[0].behaviour = refuse_late
    stored_key, key = add(tmp_path, "app", "anna")
    path = overflow_file(tmp_path, *vendors)
    with accounting(tmp_path, NOBODY, overflow=path, wait_s=0.05) as router:
        status = begin(router, headers={"x-api-key": key})
        wait_for(lambda: len(vendors[0].seen) == 1)
        with open_database(tmp_path, writes=True) as db:
            change(db, stored_key, overflow=False)
        known = router.router.options.api_keys
        wait_for(lambda: not known.with_id(stored_key.id).overflow)
        fakes.loop.call_soon_threadsafe(release.set)
        assert status() == 503
    assert vendors[1].seen == []
