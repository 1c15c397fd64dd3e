"""Requests for a model without a replica wait for its start, within bounds, and start nothing else.

Replicas are fake; a test lists them in the file that the router reads, as an autoscaler would.
"""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.replicas import Exchange, FakeReplica, LiveRouter, Loop, hello, live_router
from support.vendors import HELLO, overflow_file, start_vendor
from support.waiting import wait_for
from twostroke.core.errors import UsageError
from twostroke.fleet.cluster.router_link import (
    ListedModel,
    read_listed_models,
    write_listed_models,
)
from twostroke.fleet.router.model_starts import ModelStartingError, ModelStarts, WaitingRequest
from twostroke.fleet.router.options import RouteOptions
from twostroke.fleet.router.state import SCRAPE_S, wanted_replicas

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_CHAT = "/v1/chat/completions"
_REQUESTS: dict[str, dict[str, Any]] = {
    _CHAT: {"messages": [{"role": "user", "content": "Hi"}], "stream": True},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi", "previous_response_id": "resp_1"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/api/chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "/completion": {"prompt": "Hi"},
}


class Fleet:
    """A router whose models may have no replica, and the files that it reads."""

    def __init__(self, folder: Path, fakes: Loop) -> None:
        """Begin without replicas."""
        self.listing, self.model_listing = folder / "replicas", folder / "models"
        self.fakes, self.replicas = fakes, list[FakeReplica]()
        self.pool = ThreadPoolExecutor(16)
        self.live: LiveRouter
        self._write()

    def start(self, *models: str) -> FakeReplica:
        """Start a replica of the models, and list it."""
        replica = FakeReplica(*models)
        replica.load = {}
        self.replicas.append(self.fakes.start(replica))
        self._write()
        return replica

    def unlist(self, replica: FakeReplica) -> None:
        """Remove a replica from the list."""
        self.replicas.remove(replica)
        self._write()

    def say(self, *models: ListedModel) -> None:
        """List models as a fleet's manager does."""
        write_listed_models(self.model_listing, models)

    def send(self, model: str = "tiny", path: str = _CHAT) -> Future[httpx.Response]:
        """Send a request in another thread."""
        body = _REQUESTS[path] | {"model": model}
        url = f"{self.live.url}{path}"
        return self.pool.submit(httpx.post, url, json=body, timeout=20, trust_env=False)

    def num_waiting(self, model: str = "tiny") -> int:
        """Return how many requests wait for a model."""
        return len(self.live.router.fleet.starts.models[model].waiting)

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Get a page of the router."""
        return httpx.get(f"{self.live.url}{path}", headers=headers, timeout=20, trust_env=False)

    def _write(self) -> None:
        new = self.listing.with_suffix(".new")
        new.write_text("".join(f"{replica.url}\n" for replica in self.replicas))
        new.rename(self.listing)


@pytest.fixture
def fleet(tmp_path: Path, fakes: Loop, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Yield a fleet for the models `tiny` and `other`, with the options of the test's mark."""
    fleet = Fleet(tmp_path, fakes)
    options = {"startable_models": ("tiny", "other"), **getattr(request, "param", {})}
    if options.pop("listed", False):
        fleet.say()
        options["model_listing"] = fleet.model_listing
    with fleet.pool, live_router(listing=fleet.listing, **options) as fleet.live:
        yield fleet


def _metric(fleet: Fleet, name: str) -> float:
    lines = fleet.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).rsplit(" ", 1)[1])


def test_requests_of_all_protocols_wait_for_the_first_replica(fleet: Fleet) -> None:
    answers = [fleet.send(path=path) for path in _REQUESTS]
    wait_for(lambda: fleet.num_waiting() == len(_REQUESTS))
    assert _metric(fleet, 'twostroke_router_start_waiting_requests{model="tiny"}') == len(_REQUESTS)
    replica = fleet.start("tiny")
    assert [answer.result(10).status_code for answer in answers] == [200] * len(_REQUESTS)
    assert sorted(exchange.path for exchange in replica.seen) == sorted(_REQUESTS)
    served = 'twostroke_router_start_waited_requests_total{model="tiny",outcome="served"}'
    assert _metric(fleet, served) == len(_REQUESTS)
    assert _metric(fleet, 'twostroke_router_start_seconds{model="tiny"}') > 0


def test_models_without_replicas_are_listed_and_are_not_started_by_that(fleet: Fleet) -> None:
    rows = fleet.get("/v1/models").json()["data"]
    assert [row["id"] for row in rows] == ["tiny", "other"]
    fleet.start("tiny")
    wait_for(lambda: len(fleet.live.router.fleet.ready) == 1)
    rows = fleet.get("/v1/models", **{"anthropic-version": "2023-06-01"}).json()["data"]
    assert sorted(row["id"] for row in rows) == ["other", "tiny"]
    assert fleet.get("/v1/models/other").json()["id"] == "other"
    assert fleet.get("/health/ready").status_code == 200
    assert wanted_replicas(fleet.live.router.fleet, "other", used_within_s=SCRAPE_S) == 0


def test_a_router_without_replicas_is_ready_if_requests_may_wait(fleet: Fleet) -> None:
    assert fleet.get("/health/ready").status_code == 200


def test_a_request_waits_for_its_own_model_only(fleet: Fleet) -> None:
    other = fleet.start("other")
    wait_for(lambda: len(fleet.live.router.fleet.ready) == 1)
    answer = fleet.send("TINY:latest")
    wait_for(lambda: fleet.num_waiting() == 1)
    tiny = fleet.start("tiny")
    assert answer.result(10).status_code == 200
    assert (len(other.seen), len(tiny.seen)) == (0, 1)


def test_an_unknown_model_is_refused_with_the_names_that_can_start(fleet: Fleet) -> None:
    answer = fleet.send("tyni").result(10)
    assert answer.status_code == 404
    assert "Served: other, tiny." in answer.json()["error"]["message"]


@pytest.mark.parametrize("fleet", [{"start_wait_s": 0.3}], indirect=True)
def test_a_request_that_waited_long_enough_learns_when_to_come_again(fleet: Fleet) -> None:
    answer = fleet.send().result(10)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "model_starting"
    assert int(answer.headers["retry-after"]) >= 1
    model = fleet.live.router.fleet.starts.models["tiny"]
    model.start_s = 42.0
    answer = fleet.send().result(10)  # a start takes longer than it may wait
    assert 40 <= int(answer.headers["retry-after"]) <= 42
    assert wanted_replicas(fleet.live.router.fleet, "tiny") == 1, "it is started nevertheless"


@pytest.mark.parametrize("fleet", [{"listed": True, "startable_models": ()}], indirect=True)
def test_a_model_that_fails_again_and_again_is_told_to_waiting_requests(fleet: Fleet) -> None:
    fleet.say(ListedModel(name="tiny"))
    wait_for(lambda: "tiny" in fleet.live.router.fleet.starts.models)
    answer = fleet.send()
    wait_for(lambda: fleet.num_waiting() == 1)
    fleet.say(ListedModel(name="tiny", failure="the file is damaged"))
    refused = answer.result(10)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "model_not_started"
    assert fleet.send().result(10).json()["error"]["code"] == "model_not_started"
    fleet.say(ListedModel(name="tiny"))
    wait_for(lambda: not fleet.live.router.fleet.starts.models["tiny"].failure)
    answer = fleet.send()
    fleet.start("tiny")
    assert answer.result(10).status_code == 200


@pytest.mark.parametrize("others", [(), ("other",)])
@pytest.mark.parametrize("fleet", [{"listed": True, "startable_models": ()}], indirect=True)
def test_requests_for_a_model_that_is_removed_are_refused_at_once(
    fleet: Fleet, others: tuple[str, ...]
) -> None:
    rest = [ListedModel(name=name) for name in others]
    fleet.say(ListedModel(name="tiny"), *rest)
    wait_for(lambda: "tiny" in fleet.live.router.fleet.starts.models, 5)
    answers = {path: fleet.send(path=path) for path in _REQUESTS}
    wait_for(lambda: fleet.num_waiting() == len(_REQUESTS), 5)
    kept = [fleet.send(name) for name in others]
    fleet.say(*rest)
    for path, answer in answers.items():
        refused = answer.result(10)
        assert refused.status_code == 404, path
        error = refused.json()["error"]
        if path == "/api/chat":
            assert "model 'tiny' not found" in error
            continue
        assert "The model 'tiny' does not exist." in error["message"]
        if path == "/v1/messages":
            assert (refused.json()["type"], error["type"]) == ("error", "not_found_error")
        elif path.startswith("/v1/"):
            assert error["code"] == "model_not_found"
    if others:
        fleet.start(*others)
    assert [answer.result(10).status_code for answer in kept] == [200] * len(others)


@pytest.mark.parametrize("fleet", [{"listed": True, "startable_models": ()}], indirect=True)
def test_requests_go_to_a_model_for_any_name_if_their_own_is_removed(fleet: Fleet) -> None:
    other = ListedModel(name="other", takes_any_name=True)
    fleet.say(ListedModel(name="tiny"), other)
    wait_for(lambda: "tiny" in fleet.live.router.fleet.starts.models, 5)
    answer = fleet.send()
    wait_for(lambda: fleet.num_waiting() == 1, 5)
    fleet.say(other)
    wait_for(lambda: fleet.num_waiting("other") == 1, 5)
    replica = fleet.start("other")
    replica.load = {"takes_any_name": True}
    assert answer.result(10).status_code == 200


@pytest.mark.parametrize("fleet", [{"listed": True, "startable_models": ()}], indirect=True)
def test_requests_go_on_waiting_for_a_model_that_is_listed_again(fleet: Fleet) -> None:
    fleet.say(ListedModel(name="tiny"))
    wait_for(lambda: "tiny" in fleet.live.router.fleet.starts.models, 5)
    answer, starts = fleet.send(), fleet.live.router.fleet.starts
    wait_for(lambda: fleet.num_waiting() == 1, 5)
    loop, listed = fleet.live.loop, [ListedModel(name="tiny")]
    assert loop is not None
    loop.call_soon_threadsafe(lambda: (starts.follow([]), starts.follow(listed)))
    wait_for(lambda: fleet.num_waiting() == 1, 5)  # at the model's new entry
    fleet.start("tiny")
    assert answer.result(10).status_code == 200


def test_a_client_that_leaves_frees_its_place(fleet: Fleet) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{fleet.live.url}{_CHAT}",
            json=_REQUESTS[_CHAT] | {"model": "tiny"},
            timeout=0.3,
            trust_env=False,
        )
    wait_for(lambda: fleet.num_waiting() == 0)
    left = 'twostroke_router_start_waited_requests_total{model="tiny",outcome="left"}'
    assert _metric(fleet, left) == 1


@pytest.mark.parametrize("fleet", [{"start_queue": 2}], indirect=True)
def test_a_full_queue_refuses_with_the_expected_wait(fleet: Fleet) -> None:
    waiting = [fleet.send(), fleet.send("other")]
    wait_for(lambda: fleet.num_waiting() + fleet.num_waiting("other") == 2)
    refused = fleet.send().result(10)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    fleet.start("tiny", "other")
    assert [answer.result(10).status_code for answer in waiting] == [200, 200]


def test_a_tenant_with_most_requests_gives_its_newest_place_to_another() -> None:
    options = RouteOptions(replicas=("http://x",), startable_models=("tiny",), start_queue=3)
    starts = ModelStarts(options)
    model = starts.models["tiny"]
    places = [WaitingRequest("a", 1) for _ in range(3)]
    for place in places:
        starts._make_room(place, model)
        model.add(place)
    newcomer = WaitingRequest("b", 1)
    starts._make_room(newcomer, model)
    model.add(newcomer)
    assert [place.is_displaced for place in places] == [False, False, True]
    for tenant in ("a", "b"):  # two of the three places are a's
        with pytest.raises(ModelStartingError):
            starts._make_room(WaitingRequest(tenant, 1), model)


def test_a_request_that_comes_while_the_last_replica_drains_waits_for_the_next(
    fleet: Fleet,
) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.answer({"error": {"message": "stopping"}}, 503)

    last = fleet.start("tiny")
    wait_for(lambda: len(fleet.live.router.fleet.ready) == 1)
    last.behaviour = refuse
    answer = fleet.send()
    wait_for(lambda: len(last.seen) == 1)
    last.load = {"status": "draining"}
    wait_for(lambda: fleet.num_waiting() == 1)
    fleet.unlist(last)
    time.sleep(1.5)  # longer than `wait_s`
    fleet.start("tiny")
    assert answer.result(10).status_code == 200


def test_replicas_are_wanted_while_requests_wait_or_run(fleet: Fleet) -> None:
    registry, gate = fleet.live.router.fleet, asyncio.Event()

    async def hold(exchange: Exchange) -> None:
        await gate.wait()
        await hello(exchange)

    def count() -> int:
        return wanted_replicas(registry, "tiny", used_within_s=0.0)

    assert (count(), wanted_replicas(registry)) == (0, 0)
    answer = fleet.send()
    wait_for(lambda: fleet.num_waiting() == 1)
    assert (count(), wanted_replicas(registry, "other")) == (1, 0)
    replica = fleet.start("tiny")
    replica.behaviour = hold
    wait_for(lambda: len(replica.seen) == 1)
    assert count() == 1
    fleet.fakes.loop.call_soon_threadsafe(gate.set)
    assert answer.result(10).status_code == 200
    wait_for(lambda: count() == 0)
    replica.load = {"running": 1}  # for another client
    wait_for(lambda: count() == 1)
    replica.load = {"running": 1, "status": "dead"}  # what it reported last is not true any more
    wait_for(lambda: count() == 0)


def test_an_upstream_may_answer_while_the_first_replica_starts(fakes: Loop, tmp_path: Path) -> None:
    vendor, listing = start_vendor(fakes), tmp_path / "replicas"
    path = overflow_file(tmp_path, vendor, when=("no_replica",))
    listing.write_text("")
    model = HELLO["model"]
    with live_router(listing=listing, overflow=path, startable_models=(model,)) as live:
        url = f"{live.url}{_CHAT}"
        answer = httpx.post(url, json=HELLO, timeout=20, trust_env=False)
        assert answer.headers["x-twostroke-upstream"] == "vendor1"
        assert wanted_replicas(live.router.fleet, model) == 1, "it is started nevertheless"


def test_a_model_that_comes_back_different_is_logged(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    first = fleet.start("tiny")
    wait_for(lambda: len(fleet.live.router.fleet.ready) == 1)
    fleet.unlist(first)
    wait_for(lambda: not fleet.live.router.fleet.ready)
    second = FakeReplica("tiny")
    second.load = {"numerics": "2"}
    fleet.replicas.append(fleet.fakes.start(second))
    fleet._write()
    wait_for(lambda: len(fleet.live.router.fleet.ready) == 1)
    assert "The model tiny has come back with another model file" in caplog.text


@pytest.mark.parametrize(
    "text", ["", "{}", '[{"name": ""}]', '[{"name": 1}]', '[{"name": "a", "nam": "b"}]']
)
def test_a_wrong_list_of_models_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "models"
    path.write_text(text)
    with pytest.raises(UsageError, match="cannot be read"):
        read_listed_models(path)
    path.write_text(json.dumps([{"name": "a"}]))
    assert read_listed_models(path) == (ListedModel(name="a"),)
