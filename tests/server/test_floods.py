"""A part of `make long SUITE=floods`: no request body of any path makes other requests wait."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from support.flood_bodies import Body
from support.floods import BODILESS, FORMS, KEYS, NEEDED, Flood
from support.replicas import FakeReplica, Loop, live_router
from support.servers import live_server
from support.waiting import wait_for
from twostroke.fleet.router.paths import COMPUTED_PATHS
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.options import ServeOptions
from twostroke.server.storage import Records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.replicas import Exchange
    from support.servers import LiveServer

_NUM_BYTES = 600_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("floods")
    options = ServeOptions(drain_s=1, api_keys=ApiKeys(dict(KEYS)))
    with (
        closing(Records(folder / "records")) as records,
        live_server(folder, options, records=records) as live,
    ):
        yield live


@pytest.fixture(scope="module")
def flood(server: LiveServer) -> Iterator[Flood]:
    assert server.thread.loop is not None
    with closing(Flood(server.url, server.thread.loop, server.api.description())) as server_flood:
        yield server_flood


def test_every_route_has_floods_or_reads_no_body(server: LiveServer) -> None:
    """A new route fails here until it is in a table of `support/floods.py`."""
    described = server.api.description()["paths"]
    for route in server.api.routes():
        has_body = "requestBody" in described.get(route.path, {}).get("post", {})
        if "POST" in (route.methods or ()) and has_body:
            assert route.path in {*NEEDED, *FORMS}, f"{route.path} has a body and no floods"
        elif route.path not in {*NEEDED, *FORMS}:
            assert route.path in BODILESS, f"{route.path} is in no table of floods"
    assert {*NEEDED, *FORMS} == {
        path for path, methods in described.items() if "requestBody" in methods.get("post", {})
    }
    assert set(COMPUTED_PATHS) - {"/v1/rerank", "/rerank"} <= set(NEEDED)


def test_no_body_of_any_path_keeps_others_waiting(server: LiveServer, flood: Flood) -> None:
    for path in (*NEEDED, *FORMS):
        flood.send(path, num_bytes=_NUM_BYTES, max_bodies=2)
    assert not flood.wrong, flood.wrong


def test_no_query_of_any_path_keeps_others_waiting(server: LiveServer, flood: Flood) -> None:
    for route in server.api.routes():
        for method in sorted(set(route.methods or ()) - {"HEAD"}):
            flood.send_request(method, route.path)
    assert not flood.wrong, flood.wrong


def test_work_ends_with_its_client_and_other_tenants_take_turns(
    server: LiveServer, flood: Flood
) -> None:
    path = "/tokenize"
    # Without `max_tokens` the word would be refused before it is merged.
    needed = {"prompt": "z" * 400_000, "max_tokens": 10_000_000}
    body = Body("a word", json.dumps(needed).encode())
    flood.send_body(path, body)
    flood.abandon(server, path, body)
    flood.take_turns(server, path, body)
    assert not flood.wrong, flood.wrong
    assert flood.num_competed == 1


def test_no_body_keeps_the_router_from_others(server: LiveServer) -> None:
    described = server.api.description()

    async def answer(exchange: Exchange) -> None:
        await exchange.answer({"ok": True})

    with closing(Loop()) as loop:
        replica = FakeReplica()
        replica.load, replica.behaviour = {}, answer
        loop.start(replica)
        with live_router(replica.url) as router:
            wait_for(lambda: bool(router.router.fleet.ready))
            with closing(Flood(router.url, router.loop, described)) as flood:
                for path in COMPUTED_PATHS:
                    if path in NEEDED:
                        flood.send(path, num_bytes=_NUM_BYTES, max_bodies=2)
    assert not flood.wrong, flood.wrong
