"""Requests go to replicas that have their model; of others the error names those of the fleet."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.replicas import FakeReplica, Loop, live_router
from support.waiting import wait_for

_BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def post(url: str, body: object) -> httpx.Response:
    return httpx.post(url + "/v1/chat/completions", json=body, trust_env=False)


def test_a_model_whose_replicas_are_down_is_named(fakes: Loop) -> None:
    first, other = fakes.start(FakeReplica("a")), fakes.start(FakeReplica("b"))
    with live_router(first.url, other.url, wait_s=0.0) as router:
        wait_for(lambda: len(router.router.fleet.ready) == 2)
        other.health = (503, {})
        wait_for(lambda: len(router.router.fleet.ready) == 1)
        result = post(router.url, _BODY | {"model": "b"})
    text = "No replica of the model 'b' can answer now: of 1, 1 down."
    assert (result.status_code, result.json()["error"]["message"]) == (503, text)


def test_models_are_those_of_all_and_requests_go_to_who_has_theirs(fakes: Loop) -> None:
    first, other = fakes.start(FakeReplica("a", "b")), fakes.start(FakeReplica("c"))
    with live_router(first.url, other.url) as router:
        body = httpx.get(router.url + "/v1/models", trust_env=False).json()
        for _ in range(3):
            assert post(router.url, _BODY | {"model": "c"}).status_code == 200
        httpx.get(router.url + "/v1/models/b", trust_env=False)
    assert {row["id"] for row in body["data"]} == {"a", "b", "c"}
    assert ([row.path for row in first.seen], len(other.seen)) == (["/v1/models/b"], 3)


def test_a_model_is_found_under_all_its_names(fakes: Loop) -> None:
    first, other = fakes.start(FakeReplica("a", "b")), fakes.start(FakeReplica("c", "org/D"))
    third = fakes.start(FakeReplica("my/C"))
    with live_router(first.url, other.url, third.url) as router:
        listed = httpx.get(router.url + "/v1/models", trust_env=False).json()["data"]
        assert {row["id"] for row in listed} == {"a", "b", "c", "org/D", "my/C"}
        for name in ("c", "c", "org/D", "D", "openai/d:latest", "d:latest"):
            assert post(router.url, _BODY | {"model": name}).status_code == 200
        assert len(other.seen) == 6
        httpx.get(router.url + "/v1/models/openai/B:latest", trust_env=False)
        post(router.url, _BODY | {"model": "my/C"})
    assert [row.path for row in first.seen] == ["/v1/models/openai/B:latest"]
    assert (len(other.seen), len(third.seen)) == (6, 1)


def test_a_name_that_no_replica_has_is_answered_with_those_of_all(fakes: Loop) -> None:
    replicas = [fakes.start(FakeReplica(name)) for name in ("alpha", "beta")]
    for replica in replicas:
        replica.load = {"takes_any_name": False}
    with live_router(*(replica.url for replica in replicas)) as router:
        wait_for(lambda: len(router.router.fleet.ready) == 2)
        result = post(router.url, _BODY | {"model": "alpa"})
        text = "The model 'alpa' does not exist. Did you mean 'alpha'? Served: alpha, beta."
        assert (result.status_code, result.json()["error"]["message"]) == (404, text)
        assert httpx.get(router.url + "/v1/models/gamma", trust_env=False).status_code == 404
        assert not any(replica.seen for replica in replicas)
        assert post(router.url, {"messages": []}).status_code == 200, "it names none"


@pytest.mark.parametrize("load", [None, {}, {"takes_any_name": True}])
def test_a_name_that_no_replica_lists_goes_to_who_may_take_it(
    fakes: Loop, load: dict[str, Any] | None
) -> None:
    strict, free = fakes.start(FakeReplica("alpha")), fakes.start(FakeReplica("beta"))
    strict.load, free.load = {"takes_any_name": False}, load
    with live_router(strict.url, free.url, policy="round-robin") as router:
        wait_for(lambda: len(router.router.fleet.ready) == 2)
        for _ in range(3):
            assert post(router.url, _BODY | {"model": "gpt-4o"}).status_code == 200
    assert (len(strict.seen), len(free.seen)) == (0, 3)


@pytest.mark.parametrize("path", ["/props", "/tokenizer_info", "/slots"])
def test_a_model_in_the_query_is_asked_of_its_replica(fakes: Loop, path: str) -> None:
    first, other = fakes.start(FakeReplica("a")), fakes.start(FakeReplica("c", "org/D"))
    with live_router(first.url, other.url) as router:
        for name in ("c", "c", "org%2FD"):
            httpx.get(f"{router.url}{path}?model={name}", trust_env=False)
    assert (len(first.seen), len(other.seen)) == (0, 3)
