"""What is done next with a pool's replicas."""

from __future__ import annotations

import random

import pytest

from twostroke.fleet.cluster.choice import (
    AVOID_S,
    EndingMachines,
    Phase,
    ReplicaView,
    ScaleDownDelay,
    choose,
)

READY, STARTING, DRAINING = Phase.READY, Phase.STARTING, Phase.DRAINING


def views(*phases: Phase, is_current: bool = True) -> list[ReplicaView]:
    kind = "new" if is_current else "old"
    return [
        ReplicaView(f"{kind}{number}", phase, is_current) for number, phase in enumerate(phases)
    ]


def test_missing_replicas_are_started_together() -> None:
    assert choose(views(READY), 3).num_starts == 2
    assert choose(views(READY, DRAINING), 1).num_starts == 0


def test_the_least_useful_are_drained_first() -> None:
    busy, idle = ReplicaView("a", READY, True, 5), ReplicaView("b", READY, True, 1)
    assert choose([busy, idle, *views(STARTING)], 1).drains == ("new0", "b")


def test_an_update_starts_one_before_it_drains_one() -> None:
    old = views(READY, READY, is_current=False)
    assert choose(old, 2).num_starts == 1
    assert choose(old, 2).drains == ()
    assert choose([*old, *views(STARTING)], 2) == choose([], 0)
    assert choose([*old, *views(READY)], 2).drains == ("old0",)


def test_without_room_an_update_replaces_in_place() -> None:
    replicas = [*views(READY, READY, is_current=False), *views(STARTING)]
    assert choose(replicas, 2, has_room=False).drains == ("old0",)


@pytest.mark.seeds(60)
def test_every_pool_becomes_what_is_wanted(seed: int) -> None:
    """Replicas become ready, are lost and are drained at random; none is ready too few."""
    rng = random.Random(seed)
    num_wanted = rng.randint(1, 5)
    replicas = [
        ReplicaView(f"r{n}", rng.choice((READY, STARTING)), rng.random() < 0.5)
        for n in range(rng.randint(0, 7))
    ]
    count = len(replicas)
    for _ in range(200):
        actions = choose(replicas, num_wanted)
        before = sum(replica.phase is READY for replica in replicas)
        drained = [
            ReplicaView(replica.name, DRAINING, replica.is_current)
            if replica.name in actions.drains
            else replica
            for replica in replicas
        ]
        after = sum(view.phase is READY for view in drained)
        assert after >= min(before, num_wanted), "too many ready ones were drained at once"
        alive = sum(view.phase is not DRAINING for view in drained)
        assert alive + actions.num_starts <= max(num_wanted + 1, alive)
        for _ in range(actions.num_starts):
            drained.append(ReplicaView(f"r{count}", STARTING, is_current=True))
            count += 1
        replicas = [
            ReplicaView(view.name, READY, view.is_current)
            if view.phase is STARTING and rng.random() < 0.5
            else view
            for view in drained
            if not (view.phase is DRAINING and rng.random() < 0.5)
        ]
    assert [replica.phase for replica in replicas] == [READY] * num_wanted
    assert all(replica.is_current for replica in replicas)


def test_a_number_rises_at_once_and_falls_after_the_window() -> None:
    steady = ScaleDownDelay(10.0)
    assert [steady.update(n, at) for at, n in enumerate([1, 4, 2, 3])] == [1, 4, 4, 4]
    assert steady.update(1, 11.0) == 4
    assert steady.update(1, 11.5) == 3
    assert steady.update(1, 14.0) == 1
    assert steady.update(2, 14.1) == 2


@pytest.mark.seeds(20)
def test_the_window_holds_the_most_of_its_time(seed: int) -> None:
    rng, steady, seen, now = random.Random(seed), ScaleDownDelay(5.0), [], 0.0
    for _ in range(100):
        now += rng.random() * 2
        num_wanted = rng.randint(0, 9)
        seen.append((now, num_wanted))
        assert steady.update(num_wanted, now) == max(n for at, n in seen if at >= now - 5.0)


def test_a_machine_that_does_not_end_after_its_notice_is_used_again() -> None:
    now_s = 0.0
    machines = EndingMachines(lambda: now_s)
    machines.add("spot")
    assert machines.to_avoid({"spot", "other"}) == {"spot"}
    assert machines.to_avoid({"spot"}) == set()  # better there than nowhere
    now_s = AVOID_S + 1
    assert machines.to_avoid({"spot", "other"}) == set()
