"""Routing policies: what each chooses, from views alone."""

from __future__ import annotations

from collections import Counter

from twostroke.schedule.routing import ROUTES, ReplicaView

IDLE = [ReplicaView(0, 0)] * 4


def views(*tokens, hits=(0, 0, 0, 0)):
    return [ReplicaView(1, count, hit) for count, hit in zip(tokens, hits, strict=False)]


def test_idle_replicas_get_requests_in_turn():
    for name in ("round-robin", "least-work", "prefix"):
        assert [ROUTES[name](n, IDLE) for n in range(8)] == [0, 1, 2, 3] * 2
    chosen = Counter(ROUTES["two-choices"](n, IDLE) for n in range(4000))
    assert all(900 < count < 1100 for count in chosen.values())


def test_the_least_work_is_chosen():
    assert ROUTES["round-robin"](2, views(9, 9, 900, 9)) == 2
    assert ROUTES["least-work"](0, views(30, 20, 10, 40)) == 2
    chosen = Counter(ROUTES["two-choices"](n, views(30, 20, 10, 40)) for n in range(4000))
    assert chosen[3] == 0, "of two replicas it has always more"
    assert chosen[2] > chosen[1] > chosen[0] > 0
    assert ROUTES["two-choices"](7, views(5)) == 0


def test_a_prefix_counts_as_long_as_its_replica_is_not_busier_by_more():
    prefix = ROUTES["prefix"]
    assert prefix(0, views(500, 0, 0, 0, hits=(600, 0, 0, 0))) == 0
    assert prefix(1, views(700, 0, 0, 0, hits=(600, 0, 0, 0))) == 1
