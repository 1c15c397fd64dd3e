"""A fleet becomes what its file asks, whatever happens to its servers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from twostroke.fleet.cluster.manager import ROUTER, Manager
from twostroke.fleet.cluster.process import ServerState
from twostroke.fleet.cluster.router_link import RouterView
from twostroke.fleet.cluster.spec import FleetSpec, ReplicaPool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.fleet.cluster.router_link import ListedModel


class FakeCluster:
    """Machines with `room` places; servers become ready, and drain, when `pass_time` says so.

    Those of the model `broken` never become ready.
    """

    def __init__(self, room: int = 100, broken: str = "") -> None:
        self.broken = broken
        self.room, self.servers, self.pools = (
            room,
            dict[str, ServerState](),
            dict[str, ReplicaPool](),
        )

    def start(self, name: str, pool: ReplicaPool | None) -> None:
        assert name not in self.servers, "two servers would have one name"
        self.servers[name] = ServerState()
        if pool is not None:
            self.pools[name] = pool

    def states(self) -> Mapping[str, ServerState]:
        return dict(self.servers)

    def stop(self, name: str) -> None:
        url = self.servers[name].url
        if url:
            self.servers[name] = ServerState(url, is_ending=True)
        else:
            del self.servers[name]

    def set_prefill_addresses(self, name: str, addresses: tuple[str, ...]) -> None:
        self.servers[name] = replace(self.servers[name], prefill_addresses=addresses)

    def pass_time(self) -> None:
        for name, state in list(self.servers.items()):
            placed = sum(bool(server.url) for server in self.servers.values())
            if state.is_ending:
                del self.servers[name]
            elif state.url:
                is_ready = name.split("/")[0] != self.broken
                self.servers[name] = replace(state, is_ready=is_ready)
            elif name == ROUTER or placed <= self.room:
                self.servers[name] = ServerState(f"http://{name}")

    @property
    def ready(self) -> list[str]:
        """The replicas that answer, by name."""
        return sorted(
            name for name, server in self.servers.items() if server.is_ready and name != ROUTER
        )


class FakeRouter:
    """Wants `wanted` replicas of each model, and notes what it is told."""

    def __init__(self, num_wanted: int = 1) -> None:
        self.num_wanted = num_wanted
        self.readers: dict[str, float | None] = {}
        self.replica_models: dict[str, Sequence[str]] = {}
        self.startable: dict[str, str] = {}
        self.running: dict[str, int] = {}
        self.num_requests = 0

    def set_replicas(self, replicas: Mapping[str, Sequence[str]]) -> None:
        self.replica_models = dict(replicas)

    def set_startable(self, models: Sequence[ListedModel]) -> None:
        self.startable = {model.name: model.failure for model in models}

    def views(self) -> Mapping[str, RouterView]:
        return {
            name: RouterView(self.num_wanted, self.running, self.num_requests, self.readers)
            for name in self.replica_models
        }


class Clock:
    """Virtual time."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def play(manager: Manager, cluster: FakeCluster, clock: Clock, steps: int = 60) -> None:
    for _ in range(steps):
        manager.step()
        cluster.pass_time()
        clock.now_s += 1.0


def make(spec: FleetSpec, cluster: FakeCluster, router: FakeRouter) -> tuple[Manager, Clock]:
    clock = Clock()
    return Manager(spec, cluster, router, clock), clock


def test_a_fleet_starts_and_the_router_knows_its_replicas() -> None:
    cluster, router = FakeCluster(), FakeRouter()
    spec = FleetSpec(models=(ReplicaPool(model="a", replicas=2), ReplicaPool(model="b")))
    manager, clock = make(spec, cluster, router)
    play(manager, cluster, clock)
    assert manager.status.is_up
    assert {name: len(urls) for name, urls in router.replica_models.items()} == {"a": 2, "b": 1}
    assert ROUTER in cluster.servers


def test_an_update_never_has_fewer_replicas_ready() -> None:
    cluster, router = FakeCluster(), FakeRouter()
    old = FleetSpec(models=(ReplicaPool(model="a", replicas=3),))
    manager, clock = make(old, cluster, router)
    play(manager, cluster, clock)
    new = FleetSpec(models=(ReplicaPool(model="a", replicas=3, options={"context-length": 512}),))
    manager, clock = make(new, cluster, router)
    for _ in range(60):
        play(manager, cluster, clock, 1)
        assert len(cluster.ready) >= 3
    assert len(cluster.ready) == 3
    assert all(cluster.pools[name] == new.models[0] for name in cluster.ready)


def test_an_update_without_room_replaces_in_place() -> None:
    cluster, router = FakeCluster(room=3), FakeRouter()
    manager, clock = make(FleetSpec(models=(ReplicaPool(model="a", replicas=3),)), cluster, router)
    play(manager, cluster, clock)
    new = ReplicaPool(model="a", replicas=3, options={"context-length": 512})
    manager, clock = make(FleetSpec(models=(new,)), cluster, router)
    for _ in range(200):
        play(manager, cluster, clock, 1)
        assert len(cluster.ready) >= 2, "one at a time"
    assert all(cluster.pools[name] == new for name in cluster.ready)
    assert len(cluster.ready) == 3


def test_work_decides_between_the_bounds_and_falls_slowly() -> None:
    cluster, router = FakeCluster(), FakeRouter(num_wanted=9)
    pool = ReplicaPool(model="a", min_replicas=1, max_replicas=4, scale_down_after=30)
    manager, clock = make(FleetSpec(models=(pool,)), cluster, router)
    play(manager, cluster, clock, 20)
    assert len(cluster.ready) == 4
    router.num_wanted = 0
    play(manager, cluster, clock, 20)
    assert len(cluster.ready) == 4, "half a minute has not passed"
    play(manager, cluster, clock, 30)
    assert len(cluster.ready) == 1


def test_a_pool_has_no_replica_until_one_is_wanted_and_again_when_none_is() -> None:
    cluster, router = FakeCluster(), FakeRouter(num_wanted=0)
    pool = ReplicaPool(model="a", min_replicas=0, max_replicas=2, scale_down_after=30)
    manager, clock = make(FleetSpec(models=(pool, ReplicaPool(model="b"))), cluster, router)
    play(manager, cluster, clock)
    assert manager.status.is_up
    assert [name.split("/")[0] for name in cluster.ready] == ["b"]
    assert router.startable == {"a": ""}
    router.num_wanted = 1
    play(manager, cluster, clock, 10)
    assert len(cluster.ready) == 2
    router.num_wanted = 0
    play(manager, cluster, clock, 20)
    assert len(cluster.ready) == 2, "half a minute has not passed"
    play(manager, cluster, clock, 30)
    assert [name.split("/")[0] for name in cluster.ready] == ["b"]


def test_a_new_manager_lets_replicas_stay_for_a_while() -> None:
    cluster, router = FakeCluster(), FakeRouter(num_wanted=1)
    spec = FleetSpec(models=(ReplicaPool(model="a", min_replicas=0, scale_down_after=30),))
    manager, clock = make(spec, cluster, router)
    play(manager, cluster, clock)
    router.num_wanted = 0
    manager, clock = make(spec, cluster, router)
    play(manager, cluster, clock, 20)
    assert len(cluster.ready) == 1
    play(manager, cluster, clock, 30)
    assert not cluster.ready


def test_the_router_learns_that_a_model_fails_again_and_again_to_start() -> None:
    cluster, router = FakeCluster(broken="a"), FakeRouter(num_wanted=1)
    spec = FleetSpec(models=(ReplicaPool(model="a", min_replicas=0),))
    manager, clock = make(spec, cluster, router)
    play(manager, cluster, clock)
    (name,) = [name for name in cluster.servers if name != ROUTER]
    for num_failed_starts in (1, 2):
        state = ServerState(f"http://{name}", num_failed_starts=num_failed_starts, trouble="bad")
        cluster.servers[name] = state
        manager.step()
        assert router.startable == {"a": "bad" if num_failed_starts == 2 else ""}


def test_a_replica_that_drains_by_itself_is_replaced_before_it_ends() -> None:
    cluster, router = FakeCluster(), FakeRouter()
    manager, clock = make(FleetSpec(models=(ReplicaPool(model="a"),)), cluster, router)
    play(manager, cluster, clock)
    (name,) = cluster.ready
    cluster.servers[name] = ServerState(f"http://{name}", is_ending=True)
    manager.step()
    replicas = set(cluster.servers) - {ROUTER}
    assert len(replicas) == 2
    assert router.replica_models == {"a": []}


def test_a_model_that_left_the_file_is_drained() -> None:
    cluster, router = FakeCluster(), FakeRouter()
    both = FleetSpec(models=(ReplicaPool(model="a"), ReplicaPool(model="b")))
    manager, clock = make(both, cluster, router)
    play(manager, cluster, clock)
    manager, clock = make(FleetSpec(models=both.models[1:]), cluster, router)
    play(manager, cluster, clock)
    assert [name.split("/")[0] for name in cluster.ready] == ["b"]


def test_a_model_stays_until_those_that_replace_it_are_up() -> None:
    cluster, router = FakeCluster(room=3, broken="b"), FakeRouter()
    manager, clock = make(FleetSpec(models=(ReplicaPool(model="a", replicas=2),)), cluster, router)
    play(manager, cluster, clock)
    manager, clock = make(FleetSpec(models=(ReplicaPool(model="b"),)), cluster, router)
    play(manager, cluster, clock)
    assert len(cluster.ready) == 2
    assert len(router.replica_models["a"]) == 2
    cluster.broken = ""
    play(manager, cluster, clock)
    assert [name.split("/")[0] for name in cluster.ready] == ["b"]


def test_a_model_makes_room_for_those_that_replace_it() -> None:
    cluster, router = FakeCluster(room=2), FakeRouter()
    manager, clock = make(FleetSpec(models=(ReplicaPool(model="a", replicas=2),)), cluster, router)
    play(manager, cluster, clock)
    manager, clock = make(FleetSpec(models=(ReplicaPool(model="b", replicas=2),)), cluster, router)
    for _ in range(80):
        play(manager, cluster, clock, 1)
        assert cluster.ready
    assert [name.split("/")[0] for name in cluster.ready] == ["b", "b"]


@pytest.mark.seeds(15)
def test_lost_servers_are_replaced(seed: int) -> None:
    rng, cluster, router = random.Random(seed), FakeCluster(), FakeRouter()
    spec = FleetSpec(
        models=(ReplicaPool(model="a", replicas=3), ReplicaPool(model="b", replicas=2))
    )
    manager, clock = make(spec, cluster, router)
    for _ in range(100):
        play(manager, cluster, clock, 1)
        if cluster.servers and rng.random() < 0.3:
            name = rng.choice(list(cluster.servers))
            if rng.random() < 0.5:
                del cluster.servers[name]
            else:
                cluster.servers[name] = ServerState(trouble="it was ended by signal 9")
    play(manager, cluster, clock)
    assert manager.status.is_up
    assert len(cluster.ready) == 5


def _prefill_addresses(cluster: FakeCluster) -> set[tuple[str, ...]]:
    """Return the addresses of prefill engines that the replicas of `m` were told to use."""
    return {
        state.prefill_addresses for name, state in cluster.servers.items() if name.startswith("m/")
    }


def test_decode_replicas_are_told_where_prompts_are_read() -> None:
    cluster, router = FakeCluster(), FakeRouter()
    prefill = ReplicaPool(model="m", name="reader", replicas=2)
    spec = FleetSpec(models=(ReplicaPool(model="m", prefill="reader"), prefill))
    manager, clock = make(spec, cluster, router)
    play(manager, cluster, clock)
    assert manager.status.is_up
    assert list(router.replica_models) == ["m"]
    (decode,) = [name for name in cluster.ready if name.startswith("m/")]
    options = {"role": "decode", "prefill-peers-file": "{prefill-peers}"}
    assert cluster.pools[decode].options == options
    assert _prefill_addresses(cluster) == {("reader:7800", "reader:7801")}
    readers = [cluster.pools[name].options["peer-address"] for name in cluster.ready[-2:]]
    assert readers == ["{host}:7800", "{host}:7801"]


def test_prefill_replicas_scale_from_zero_by_the_work_and_by_measured_rates() -> None:
    cluster, router = FakeCluster(), FakeRouter()
    prefill = ReplicaPool(
        model="m", name="reader", min_replicas=0, max_replicas=3, scale_down_after=20
    )
    spec = FleetSpec(models=(ReplicaPool(model="m", prefill="reader", replicas=2), prefill))
    manager, clock = make(spec, cluster, router)
    play(manager, cluster, clock)
    decode = cluster.ready
    assert len(decode) == 2
    play(manager, cluster, clock, 30)
    assert cluster.ready == decode, "there is no work"
    router.running = {f"http://{decode[0]}": 1}
    play(manager, cluster, clock, 5)
    assert len(cluster.ready) == 3
    assert _prefill_addresses(cluster) == {("reader:7800",)}
    router.readers = {f"http://{name}": 0.9 for name in decode}
    play(manager, cluster, clock, 5)
    assert _prefill_addresses(cluster) == {("reader:7800", "reader:7801")}
    router.running = {}
    play(manager, cluster, clock, 10)
    assert len(cluster.ready) == 4, "20 seconds have not passed"
    play(manager, cluster, clock, 30)
    assert cluster.ready == decode
    assert _prefill_addresses(cluster) == {()}
    router.num_requests += 1  # too short to be seen while it runs
    play(manager, cluster, clock, 5)
    assert len(cluster.ready) == 4


def test_the_status_says_how_many_prefill_replicas_the_measured_rates_ask_for() -> None:
    cluster, router = FakeCluster(), FakeRouter()
    prefill = ReplicaPool(model="m", name="reader")
    spec = FleetSpec(models=(ReplicaPool(model="m", prefill="reader", replicas=3), prefill))
    manager, clock = make(spec, cluster, router)
    play(manager, cluster, clock)
    urls = [f"http://{name}" for name in cluster.ready if name.startswith("m/")]
    assert [pool.num_prefill_wanted for pool in manager.status.pools] == [None, None]
    router.readers = dict(zip(urls, (0.5, None, 0.7), strict=True))
    manager.step()
    decode = next(pool for pool in manager.status.pools if pool.prefill)
    assert decode.num_prefill_wanted == pytest.approx(3 * 0.6)


def test_decode_replicas_follow_prompts_to_another_machine() -> None:
    cluster, router = FakeCluster(), FakeRouter()
    prefill = ReplicaPool(model="m", name="reader")
    spec = FleetSpec(models=(ReplicaPool(model="m", prefill="reader", replicas=2), prefill))
    manager, clock = make(spec, cluster, router)
    play(manager, cluster, clock)
    before = cluster.ready
    (reader,) = [name for name in cluster.ready if name.startswith("reader/")]
    cluster.servers[reader] = ServerState("http://elsewhere:1", is_ready=True)
    play(manager, cluster, clock, 3)
    assert cluster.ready == before, "no replica is replaced for that"
    assert _prefill_addresses(cluster) == {("elsewhere:7800",)}
