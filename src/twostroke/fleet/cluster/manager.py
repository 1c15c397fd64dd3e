"""Brings a fleet to what its file asks, and keeps it there."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlsplit

from twostroke.core.frozen import Frozen
from twostroke.fleet.cluster.choice import Actions, Phase, ReplicaView, Steady, choose
from twostroke.fleet.cluster.process import ServerState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twostroke.fleet.cluster.spec import FleetSpec, ReplicaPool

_PLACE_S: Final = 20.0  # without a place for so long, an update replaces in place
ROUTER: Final = "router"
_logger = logging.getLogger("twostroke.fleet")


class Cluster(Protocol):
    """Where servers run, each under a name of its own."""

    def start(self, name: str, pool: ReplicaPool | None) -> None:
        """Ask for a replica of `pool`, or for the router; it may wait for a place."""

    def look(self) -> Mapping[str, ServerState]:
        """Return what is known of each server that was started and has not gone."""

    def stop(self, name: str) -> None:
        """Let a server drain and go; returns at once, and twice does no harm."""


class RouterControl(Protocol):
    """The router as the manager sees it."""

    def tell(self, replicas: Mapping[str, Sequence[str]]) -> None:
        """Say which replicas there are: their URLs, by model."""

    def look(self) -> Mapping[str, RouterView]:
        """Return what it knows, by model; nothing while it does not answer."""


class RouterView(Frozen):
    """A model as the router sees it: wanted replicas, and by URL what it knows of replicas.

    `running` counts requests; `readers` are the prefill engines that a decode engine can use, None
    if that is not known.
    """

    wanted: int
    running: Mapping[str, int]
    readers: Mapping[str, float | None] = {}


class ReplicaStatus(Frozen):
    """A replica for `twostroke fleet status`."""

    name: str
    phase: Phase
    is_current: bool
    num_running: int
    state: ServerState


class PoolStatus(Frozen):
    """A pool for `twostroke fleet status`; `wanted` replicas are aimed at.

    By the measured rates, its replicas can use `readers` of the pool `prefill`; None if that is not
    known.
    """

    label: str
    wanted: int
    replicas: tuple[ReplicaStatus, ...]
    prefill: str = ""
    readers: float | None = None

    @property
    def num_ready(self) -> int:
        """Replicas that answer, of the pool's current version."""
        return sum(one.phase is Phase.READY and one.is_current for one in self.replicas)


class FleetStatus(Frozen):
    """A fleet for `twostroke fleet status`."""

    name: str
    url: str
    router: ServerState
    pools: tuple[PoolStatus, ...]

    @property
    def is_up(self) -> bool:
        """Whether the router answers and each pool has the replicas that it wants."""
        return self.router.is_ready and all(one.num_ready >= one.wanted for one in self.pools)

    @property
    def trouble(self) -> str:
        """How a server that is not ready last ended, if any did."""
        states = [self.router, *(one.state for pool in self.pools for one in pool.replicas)]
        return next((one.trouble for one in states if one.trouble), "")


class Manager:
    """Starts, replaces and drains replicas, one look at a time. Keeps nothing that must survive.

    A replica's name is LABEL/VERSION/NUMBER, so that a manager that is started again knows those
    that run.
    """

    def __init__(
        self,
        spec: FleetSpec,
        cluster: Cluster,
        router: RouterControl,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._cluster, self._router, self._clock = spec, cluster, router, clock
        self._steady = {pool.label: Steady(pool.scale_down_after) for pool in spec.models}
        self._peers: dict[str, list[str]] = {}  # where prompts are read, by the pool that does
        self._placed_s: dict[str, float] = {}  # when each replica without a place was first seen
        self.status = FleetStatus(spec.name, "", ServerState(), ())

    def step(self) -> None:
        """Look at all servers once, and do what is to be done now."""
        states = self._cluster.look()
        if ROUTER not in states:
            self._cluster.start(ROUTER, None)
        router = states.get(ROUTER, ServerState())
        known = self._router.look() if router.is_ready else {}
        pools, readers = [], self._spec.prefill_labels
        for pool in sorted(self._spec.models, key=lambda pool: pool.label not in readers):
            pools.append(self._tend(self._with_role(pool), states, known.get(pool.label)))
            if pool.label in readers:
                self._note_peers(pool, pools[-1])
        gone = self._let_go(states, pools)
        self._router.tell(
            {
                pool.label: [one.state.url for one in pool.replicas if _is_usable(one)]
                for pool in pools
                if pool.label not in readers
            }
            | gone
        )
        self.status = FleetStatus(self._spec.name, router.url, router, tuple(pools))

    def _let_go(
        self, states: Mapping[str, ServerState], pools: Sequence[PoolStatus]
    ) -> dict[str, list[str]]:
        """Stop models that left the file once the others are up, or one by one to give them room.

        Return the URLs of those that stay, by model.
        """
        labels, now_s = {pool.label for pool in self._spec.models}, self._clock()
        gone = [name for name in states if name != ROUTER and _split(name)[0] not in labels]
        alive = sorted(name for name in gone if not states[name].is_ending)
        are_up = all(one.num_ready >= one.wanted for one in pools)
        lack_room = any(
            name in states and not states[name].url and now_s - at_s >= _PLACE_S
            for name, at_s in self._placed_s.items()
        )
        ends = alive if are_up else alive[: int(lack_room and len(alive) == len(gone))]
        for name in ends:
            _logger.info("Replica %s drains: its model is not in the file any more.", name)
            self._cluster.stop(name)
        stay: dict[str, list[str]] = {}
        for name in alive:
            if name not in ends and states[name].url:
                stay.setdefault(_split(name)[0], []).append(states[name].url)
        return stay

    def _with_role(self, pool: ReplicaPool) -> ReplicaPool:
        """Return a pool with the options of its role in a hand-over."""
        if pool.label in self._spec.prefill_labels:
            return pool.reading()
        return pool.writing(self._peers.get(pool.prefill, ())) if pool.prefill else pool

    def _note_peers(self, pool: ReplicaPool, status: PoolStatus) -> None:
        """Note where a pool reads prompts, once all of its replicas have places."""
        found = {
            f"{urlsplit(one.state.url).hostname}:{pool.peer_port + int(_split(one.name)[2])}"
            for one in status.replicas
            if one.is_current and _is_usable(one)
        }
        if len(found) >= status.wanted:
            self._peers[pool.label] = sorted(found)

    def _tend(
        self, pool: ReplicaPool, states: Mapping[str, ServerState], view: RouterView | None
    ) -> PoolStatus:
        """Bring one pool closer to what it shall be."""
        now_s, (least, most) = self._clock(), pool.bounds
        running = Counter(view.running if view else {})
        found = [
            ReplicaStatus(
                name, _phase(state), _split(name)[1] == pool.version, running[state.url], state
            )
            for name, state in states.items()
            if _split(name)[0] == pool.label
        ]
        num_alive = sum(one.phase is not Phase.DRAINING for one in found)
        asked = view.wanted if view else max(least, num_alive)  # it is kept as it is, unseen
        wanted = self._steady[pool.label].take(max(least, min(most, asked)), now_s)
        waiting = {one.name for one in found if one.phase is Phase.STARTING and not one.state.url}
        self._placed_s = {
            **{name: at_s for name, at_s in self._placed_s.items() if name in states},
            **{name: self._placed_s.get(name, now_s) for name in waiting},
        }
        has_room = all(now_s - self._placed_s[name] < _PLACE_S for name in waiting)
        waits = pool.prefill and pool.prefill not in self._peers
        actions = choose(
            [ReplicaView(one.name, one.phase, one.is_current, one.num_running) for one in found],
            wanted,
            has_room=has_room,
        )
        if waits:
            actions = Actions()
        for name in actions.drains:
            _logger.info("Replica %s drains.", name)
            self._cluster.stop(name)
        numbers = {int(_split(one.name)[2]) for one in found}
        for _ in range(actions.num_starts):
            number = next(n for n in range(len(numbers) + 1) if n not in numbers)
            numbers.add(number)
            name = f"{pool.label}/{pool.version}/{number}"
            _logger.info("Replica %s is started.", name)
            is_reader = pool.label in self._spec.prefill_labels
            self._cluster.start(name, pool.reading(number) if is_reader else pool)
        kept = tuple(one for one in found if one.name not in actions.drains)
        rates = [view.readers.get(one.state.url) for one in kept] if view else []
        known = [rate for rate in rates if rate is not None]
        readers = len(kept) * sum(known) / len(known) if known else None
        return PoolStatus(pool.label, wanted, kept, pool.prefill, readers)


def _split(name: str) -> list[str]:
    """Return a replica's label, version and number."""
    return name.rsplit("/", 2)


def _phase(state: ServerState) -> Phase:
    if state.is_ending:
        return Phase.DRAINING
    return Phase.READY if state.is_ready else Phase.STARTING


def _is_usable(one: ReplicaStatus) -> bool:
    """Whether the router may know a replica: it has a place and does not drain."""
    return bool(one.state.url) and one.phase is not Phase.DRAINING
