"""How many replicas the router's metrics and state ask for."""

from __future__ import annotations

import re

import pytest

from twostroke.fleet.router.metrics import RouterMetrics
from twostroke.fleet.router.options import RouteOptions
from twostroke.fleet.router.replica_registry import ReplicaFacts, ReplicaRegistry, ReplicaState
from twostroke.fleet.router.state import wanted_replicas
from twostroke.fleet.router.upstream import Address
from twostroke.fleet.routing.dispatch import RoutingKey


def _fleet(*models: str) -> ReplicaRegistry:
    """Return a fleet with a ready replica of each model, of which more are wanted above 2 s."""
    fleet = ReplicaRegistry(RouteOptions(replicas=("http://x",), busy_s=2.0, mixed=True))
    for number, model in enumerate(models):
        replica = fleet.add(Address.of(f"http://r{number}:8000"))
        fleet.set_facts(replica, ReplicaFacts((model,), "1"))
        fleet.set_state(replica, ReplicaState.READY)
    return fleet


def _metric(fleet: ReplicaRegistry) -> float:
    text = RouterMetrics(fleet).expose("")[0].decode()
    match = re.search(r"^twostroke_router_wanted_replicas (\S+)$", text, re.MULTILINE)
    assert match is not None
    return float(match[1])


@pytest.mark.parametrize(
    ("work_s", "count"),
    [
        ((0, 0, 0, 0), 1),
        ((2, 2, 2, 2), 4),
        ((2, 2, 2, 2.5), 5),
        ((20, 0, 0, 0), 10),
        ((1, 1, 1, 2), 4),  # three would do, but barely
        ((2, 0, 0, 0), 2),  # half of them would do
    ],
)
def test_work_says_how_many_replicas_are_wanted(work_s: tuple[float, ...], count: int) -> None:
    fleet = _fleet("m", "m", "m", "m")
    for index, seconds in enumerate(work_s):
        fleet.dispatcher.report(index, seconds, None)
    assert fleet.dispatcher.decide(RoutingKey((), 0, 0)) is not None
    assert _metric(fleet) == wanted_replicas(fleet) == wanted_replicas(fleet, "m") == count


def test_requests_that_write_answers_keep_replicas() -> None:
    fleet = _fleet("m", "m", "m", "m")
    for _ in range(17):
        assert fleet.dispatcher.decide(RoutingKey((), 0, 0)) is not None
    assert wanted_replicas(fleet) == 3
    for _ in range(83):
        assert fleet.dispatcher.decide(RoutingKey((), 0, 0)) is not None
    assert wanted_replicas(fleet) == 4


def test_an_idle_fleet_wants_one() -> None:
    assert _metric(_fleet("m", "m", "m")) == 1


def test_each_model_wants_for_itself() -> None:
    fleet = _fleet("busy", "idle", "idle")
    fleet.dispatcher.report(0, 9.0, None)
    assert wanted_replicas(fleet, "busy") == 5
    assert wanted_replicas(fleet, "idle") == 1


def test_a_replica_that_says_its_work_is_believed() -> None:
    fleet = _fleet("m", "m")
    fleet.dispatcher.report(0, 9.0, None)
    fleet.by_index(0).work_s = 1.0
    assert fleet.dispatcher.decide(RoutingKey((), 0, 0)) is not None
    assert wanted_replicas(fleet) == 2
    fleet.by_index(0).work_s = 7.0
    assert wanted_replicas(fleet) == 4


def test_a_replica_that_is_down_is_not_counted() -> None:
    fleet = _fleet("m", "m")
    fleet.dispatcher.report(0, 9.0, None)
    fleet.set_state(fleet.by_index(0), ReplicaState.DOWN, "It is gone.")
    assert wanted_replicas(fleet) == 1
