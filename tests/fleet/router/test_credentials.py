"""Who a router says that a request is from, and the file that lists its replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.replicas import FakeReplica, Loop, live_router
from support.servers import LiveServer, live_server
from support.waiting import wait_for
from twostroke.core.errors import UsageError
from twostroke.core.message_text import counted_noun
from twostroke.fleet.router.options import RouteOptions
from twostroke.fleet.router.replica_registry import ReplicaRegistry, ReplicaState
from twostroke.fleet.router.upstream import Address
from twostroke.fleet.routing.policy import POLICIES, RoutingState
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_CHAT = "/v1/chat/completions"
_BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
SECRET = "router-secret"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that trusts a router."""
    keys = ApiKeys.read(None, None, router=SECRET)
    options = ServeOptions(drain_s=1, api_keys=keys)
    with live_server(tmp_path_factory.mktemp("trust"), options) as server:
        yield server


def test_a_router_speaks_for_its_clients_tenants(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    keys = ApiKeys({"sk-anna": "anna", "sk-bare": ""})
    with live_router(replica.url, api_keys=keys, replica_key=SECRET) as router:
        for key in ("sk-anna", "sk-bare"):
            headers = {"x-api-key": key, "x-twostroke-tenant": "ben 100"}
            assert httpx.post(router.url + _CHAT, json=_BODY, headers=headers).status_code == 200
    anna, bare = [exchange.headers for exchange in replica.seen]
    assert anna["authorization"] == bare["authorization"] == f"Bearer {SECRET}"
    assert anna["x-twostroke-tenant"] == "anna 1"
    assert "x-twostroke-tenant" not in bare
    assert "x-api-key" not in anna


def test_without_a_secret_a_clients_key_is_passed_on_and_no_tenant(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    headers = {"authorization": "Bearer sk-1", "x-twostroke-tenant": "ben 100"}
    with live_router(replica.url) as router:
        httpx.post(router.url + _CHAT, json=_BODY, headers=headers)
    assert replica.seen[0].headers["authorization"] == "Bearer sk-1"
    assert "x-twostroke-tenant" not in replica.seen[0].headers


def test_the_state_is_shown_to_whoever_has_the_secret(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    with live_router(replica.url, replica_key=SECRET, dashboard=False) as router:
        assert httpx.get(f"{router.url}/api/state").status_code == 404
        headers = {"authorization": f"Bearer {SECRET}"}
        state = httpx.get(f"{router.url}/api/state", headers=headers).json()
    assert state["wanted_by_model"] == {"tiny": 1}


def test_a_server_believes_its_router_alone(guarded: LiveServer) -> None:
    with httpx.Client(base_url=guarded.url, trust_env=False) as http:
        assert http.get("/v1/models").status_code == 401
        wrong = {"authorization": "Bearer other", "x-twostroke-tenant": "anna 1"}
        assert http.get("/v1/models", headers=wrong).status_code == 401
        right = {"authorization": f"Bearer {SECRET}"}
        assert http.get("/v1/models", headers=right).status_code == 200
        for value in ("anna x", "anna -1", "an na 1"):
            response = http.get("/v1/models", headers={**right, "x-twostroke-tenant": value})
            assert response.status_code == 400, value


def test_tenants_behind_a_router_see_nothing_of_each_other(guarded: LiveServer) -> None:
    with httpx.Client(base_url=guarded.url, trust_env=False, timeout=30) as http:
        right = {"authorization": f"Bearer {SECRET}"}
        anna, ben = ({**right, "x-twostroke-tenant": name} for name in ("anna 1", "ben 2"))
        body = {"input": "hello", "max_output_tokens": 2}
        response = http.post("/v1/responses", json=body, headers=anna).json()
        path = f"/v1/responses/{response['id']}"
        assert http.get(path, headers=ben).status_code == 404
        assert http.get(path, headers=anna).status_code == 200


def test_a_server_that_ignores_tenants_is_named_once(
    guarded: LiveServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys({"sk-anna": "anna", "sk-bare": ""})
    with live_server(tmp_path, ServeOptions(drain_s=1)) as open_:
        for secret in (SECRET, None):
            urls = (guarded.url, open_.url) if secret else (open_.url,)
            caplog.clear()
            with live_router(*urls, api_keys=keys, replica_key=secret) as router:
                health = httpx.get(f"{router.url}/health", trust_env=False).json()
                state = httpx.get(
                    f"{router.url}/api/state", headers={"x-api-key": "sk-anna"}, trust_env=False
                ).json()
                fleet = router.router.fleet
                fleet.replicas[open_.url].check_now.set()
                wait_for(lambda: not fleet.replicas[open_.url].check_now.is_set())  # noqa: B023
            assert health["ready"] == len(urls)
            assert health["warning"] == state["warning"]
            replicas = counted_noun(len(urls), "replica")
            assert f"At 1 of {replicas} tenants share cached prompts" in state["warning"]
            trusting = {replica["url"]: replica["trusts_router"] for replica in state["replicas"]}
            assert trusting == dict.fromkeys(urls, True) | {open_.url: False}
            [warning] = [
                record.message for record in caplog.records if "ignores tenants" in record.message
            ]
            assert open_.url in warning
        for own_keys in (ApiKeys({"sk-bare": ""}), None):  # nobody's prompts are to be kept apart
            with live_router(open_.url, api_keys=own_keys, replica_key=SECRET) as router:
                assert "warning" not in httpx.get(f"{router.url}/health", trust_env=False).json()


def test_a_server_with_another_secret_says_what_to_do(guarded: LiveServer) -> None:
    for secret, reason in (("other", "does not accept"), (None, "It wants a key")):
        with live_router(guarded.url, replica_key=secret) as router:
            [replica] = router.router.fleet.replicas.values()
            assert reason in replica.reason
            assert "TWOSTROKE_REPLICA_KEY" in replica.reason


def test_a_secret_is_a_word() -> None:
    with pytest.raises(UsageError, match="TWOSTROKE_REPLICA_KEY must be"):
        ApiKeys.read(None, None, router="two words")


def test_the_file_of_replicas_is_followed(fakes: Loop, tmp_path: Path) -> None:
    first, second = fakes.start(FakeReplica()), fakes.start(FakeReplica())
    path = tmp_path / "replicas"
    path.write_text(f"# one\n{first.url}\n\n")
    with live_router(listing=path) as router:
        ready = lambda: {replica.url for replica in router.router.fleet.ready}  # noqa: E731
        wait_for(lambda: ready() == {first.url})
        path.write_text(f"{first.url}\n{second.url}\n")
        wait_for(lambda: ready() == {first.url, second.url})
        path.unlink()
        path.with_suffix(".new").write_text(f"{second.url}\n")
        path.with_suffix(".new").replace(path)
        wait_for(lambda: ready() == {second.url})
        path.write_text("ftp://nowhere\n")
        wait_for(lambda: httpx.post(router.url + _CHAT, json=_BODY).status_code == 200)
        assert ready() == {second.url}, "a file that cannot be read changes nothing"


def test_a_file_that_is_not_there_is_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "none"
    with pytest.raises(UsageError, match="cannot be read: No such file"), live_router(listing=path):
        pass
    path.write_text("# ours\n\nhttp://127.0.0.1:80O2\n")
    with (
        pytest.raises(UsageError, match=r"none, line 3: 'http://.*80O2'"),
        live_router(listing=path),
    ):
        pass


def test_a_router_can_be_a_replica_of_another(fakes: Loop) -> None:
    replica = fakes.start(FakeReplica())
    replica.load = {"work_s": 9.0}
    with live_router(replica.url) as inner, live_router(inner.url) as outer:
        assert httpx.post(outer.url + _CHAT, json=_BODY).status_code == 200
        [inner_router] = outer.router.fleet.replicas.values()
        assert (inner_router.is_foreign, inner_router.facts.models) == (True, ("tiny",))
        replica.health, replica.load = (503, {}), None
        wait_for(lambda: "no replica" in inner_router.reason)


def test_the_policy_learns_how_many_requests_wait_at_a_replica(fakes: Loop, monkeypatch) -> None:
    busy, idle = fakes.start(FakeReplica()), fakes.start(FakeReplica())
    busy.load, idle.load = {"waiting": 7}, {"waiting": 0}
    states: list[RoutingState] = []

    def fewest_waiting(state: RoutingState) -> int:
        states.append(state)
        return int(state.num_waiting.argmin())

    monkeypatch.setitem(POLICIES, "least-work", fewest_waiting)
    with live_router(busy.url, idle.url, policy="least-work") as router:

        def num_waiting() -> list[float]:
            assert httpx.post(router.url + _CHAT, json=_BODY).status_code == 200
            return sorted(states[-1].num_waiting.tolist())

        wait_for(lambda: num_waiting() == [0, 7])


def test_a_router_is_no_replica_of_itself(fakes: Loop, tmp_path: Path) -> None:
    replica, listing = fakes.start(FakeReplica()), tmp_path / "replicas"
    listing.write_text("")
    with live_router(replica.url, listing=listing) as router:
        listing.write_text(f"{router.url}\n")
        replicas = router.router.fleet.replicas
        wait_for(lambda: router.url in replicas and "itself" in replicas[router.url].reason)
        assert router.router.fleet.ready == [replicas[replica.url]]


def test_a_replica_that_would_answer_otherwise_is_refused(fakes: Loop) -> None:
    first, second, other = (fakes.start(FakeReplica(name)) for name in ("tiny", "tiny", "big"))
    first.load, second.load, other.load = {}, {"numerics": "2"}, {"numerics": "3"}
    urls = [server.url for server in (first, second, other)]
    with live_router(*urls) as router:
        replicas = router.router.fleet.replicas
        wait_for(lambda: len(router.router.fleet.ready) == 2)
        assert replicas[other.url] in router.router.fleet.ready  # it has another name
        assert any(
            "another model file, settings" in replica.reason for replica in replicas.values()
        )
        second.load = {}
        wait_for(lambda: len(router.router.fleet.ready) == 3)
        second.load = {"version": "2"}
        wait_for(lambda: any("another version" in replica.reason for replica in replicas.values()))
    with live_router(*urls, mixed=True) as router:
        wait_for(lambda: len(router.router.fleet.ready) == 3)


def test_each_model_of_several_must_be_computed_alike(fakes: Loop) -> None:
    first, second = (fakes.start(FakeReplica("a", "b")) for _ in range(2))
    first.load = {"numerics_by_model": {"a": "1", "b": "1"}}
    second.load = {"numerics": "2", "numerics_by_model": {"b": "1"}}  # `a` is not loaded yet
    with live_router(first.url, second.url) as router:
        fleet = router.router.fleet
        wait_for(lambda: len(fleet.ready) == 2)
        second.load = {"numerics": "1", "numerics_by_model": {"a": "1", "b": "2"}}
        wait_for(lambda: len(fleet.ready) == 1)
        assert "another model file, settings" in fleet.replicas[second.url].reason


def test_what_a_replica_stores_is_found_when_it_is_listed_again() -> None:
    address = Address.of("http://127.0.0.1:1")
    fleet = ReplicaRegistry(RouteOptions(replicas=(address.url,)))
    before = fleet.add(address)
    fleet.set_stored_at("resp_1", before)
    fleet.set_state(before, ReplicaState.DOWN)
    fleet.remove(before)
    assert fleet.stored_at("resp_1") is None
    after = fleet.add(address)
    assert after is not before
    assert fleet.stored_at("resp_1") is after
