"""Clients and replicas that send what nobody should, and names that are none."""

from __future__ import annotations

import json

import httpx
import pytest

from support.replicas import LOAD, Exchange, FakeReplica, Loop, live_router
from support.waiting import wait_for
from twostroke.core.errors import UsageError
from twostroke.fleet.router.health_checker import HealthChecker
from twostroke.fleet.router.options import RouteOptions
from twostroke.fleet.router.replica_registry import ReplicaRegistry, ReplicaState
from twostroke.fleet.router.upstream import Address
from twostroke.fleet.router.usage_meter import with_usage_option
from twostroke.fleet.routing.prompt import read_prompt

_DEEP = b'{"data":' + b"[" * 100_000


class Odd(FakeReplica):
    """A replica that answers GETs of some paths with bytes of the test's."""

    def __init__(self, *models: str) -> None:
        """Begin as any other."""
        super().__init__(*models)
        self.bodies: dict[str, bytes] = {}
        self.num_odd = 0  # such answers

    async def _answer(self, exchange: Exchange) -> None:
        if exchange.path in self.bodies:
            self.num_odd += 1
            await exchange.answer(self.bodies[exchange.path])
        else:
            await super()._answer(exchange)


@pytest.mark.parametrize("field", ["model", "prompt_cache_key", "previous_response_id"])
def test_a_text_that_is_not_utf8_is_the_replicas_to_refuse(fakes: Loop, field: str) -> None:
    replica = fakes.start(FakeReplica())
    with live_router(replica.url) as router:
        body = b'{"%s": "\xff", "messages": []}' % field.encode()
        response = httpx.post(router.url + "/v1/chat/completions", content=body, trust_env=False)
    assert (response.status_code, [exchange.body for exchange in replica.seen]) == (200, [body])


def test_bodies_that_are_not_utf8_are_not_made_to_ask_for_usage() -> None:
    assert with_usage_option(b'{"stream": true, "\xff": 1}', "/v1/chat/completions") is None
    assert read_prompt(b'{"options": {"num_predict": "\xff", "\xff": 1}}', b"").limits == {}


@pytest.mark.parametrize(
    "body", [_DEEP, b"\xff", b"[]", b'{"data": [3, {}, {"id": [1]}]}', b'{"data": "x"}']
)
def test_a_list_of_models_that_is_none_spoils_no_other(fakes: Loop, body: bytes) -> None:
    odd, well = fakes.start(Odd("a")), fakes.start(FakeReplica("b"))
    with live_router(odd.url, well.url) as router:
        wait_for(lambda: len(router.router.fleet.ready) == 2)
        odd.bodies = {"/v1/models": body}
        response = httpx.get(router.url + "/v1/models", trust_env=False)
    assert [row["id"] for row in response.json()["data"]] == ["b"]


def test_anthropics_list_of_models_names_the_first_and_the_last_of_all(fakes: Loop) -> None:
    replicas = [fakes.start(Odd(name)) for name in "ab"]
    with live_router(*(replica.url for replica in replicas)) as router:
        wait_for(lambda: len(router.router.fleet.ready) == 2)
        for name, replica in zip("ab", replicas, strict=True):
            row = '{"data":[{"id":"%s"}],"first_id":"%s","last_id":"%s"}'
            replica.bodies = {"/v1/models": (row % (name, name, name)).encode()}
        body = httpx.get(router.url + "/v1/models", trust_env=False).json()
    ids = [row["id"] for row in body["data"]]
    assert (sorted(ids), [body["first_id"], body["last_id"]]) == (["a", "b"], ids)


@pytest.mark.parametrize("path", ["/api/load", "/health"])
def test_an_answer_that_cannot_be_read_does_not_end_the_watch(fakes: Loop, path: str) -> None:
    replica = fakes.start(Odd())
    replica.load = {} if path == "/api/load" else None
    with live_router(replica.url) as router:
        wait_for(lambda: len(router.router.fleet.ready) == 1)
        replica.bodies = {path: _DEEP}
        wait_for(lambda: replica.num_odd > 1)
        replica.bodies, replica.load, replica.health = {}, None, (200, {"status": "draining"})
        wait_for(lambda: router.router.fleet.replicas[replica.url].state is ReplicaState.DRAINING)


def test_work_beyond_all_measure_is_not_counted(fakes: Loop) -> None:
    replica = fakes.start(Odd())
    replica.load = {}
    with live_router(replica.url) as router:
        wait_for(lambda: len(router.router.fleet.ready) == 1)
        for work_s in (1e308, -1.0):
            replica.bodies = {
                "/api/load": json.dumps(LOAD | {"models": [], "work_s": work_s}).encode()
            }
            seen = replica.num_odd
            wait_for(lambda seen=seen: replica.num_odd > seen + 1)
            for path in ("/metrics", "/api/state"):
                response = httpx.get(router.url + path, trust_env=False)
                assert response.status_code == 200
            assert response.json()["wanted_replicas"] == 1


@pytest.mark.parametrize("name", ["a" * 64, "a..b", f"b.{'a' * 64}.c"])
def test_names_that_cannot_be_looked_up_are_refused_at_once(name: str) -> None:
    with pytest.raises(UsageError, match="must be a URL such as"):
        Address.of(f"http://{name}:80")
    with pytest.raises(UsageError, match="must be a DNS name and a port"):
        HealthChecker(ReplicaRegistry(RouteOptions(discover=f"{name}:80")))


def test_a_url_with_a_slash_too_few_is_no_host_called_http() -> None:
    with pytest.raises(UsageError, match="must be a URL such as"):
        Address.of("http:/127.0.0.1:8000")


@pytest.mark.parametrize("url", ["http://[::1]:80", "http://127.0.0.1", "http://a_b.c.:8000"])
def test_addresses_and_names_with_a_last_dot_are_taken(url: str) -> None:
    assert Address.of(url).url == url


def test_a_server_of_ours_is_known_where_another_one_was(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    with live_router(replica.url) as router:
        replica_state = router.router.fleet.replicas[replica.url]
        wait_for(lambda: replica_state.is_foreign and replica_state.state is ReplicaState.READY)
        replica.health = (503, {})
        wait_for(lambda: replica_state.state is ReplicaState.DOWN)
        replica.load = {"version": "9"}
        wait_for(lambda: replica_state.facts.version == "9")
        assert not replica_state.is_foreign
