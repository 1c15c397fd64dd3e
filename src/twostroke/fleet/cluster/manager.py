"""The manager of a fleet: starts, replaces and drains servers until they match the fleet's file."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlsplit

from msgspec import field

from twostroke.core.frozen import Frozen
from twostroke.fleet.cluster.choice import Phase, ReplicaView, ScaleDownDelay, choose
from twostroke.fleet.cluster.process import ServerState
from twostroke.fleet.cluster.router_link import ListedModel, RouterView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twostroke.fleet.cluster.router_link import RouterControl
    from twostroke.fleet.cluster.spec import FleetSpec, ReplicaPool

_PLACEMENT_TIMEOUT_S: Final = 20.0  # after which a replica without a machine counts as stuck
_MAX_FAILED_STARTS: Final = 2  # of a replica, after which waiting requests are refused
STEP_INTERVAL_S: Final = 0.25  # between two calls of `Manager.step`
ROUTER: Final = "router"  # the name of the router among the servers
_logger = logging.getLogger("twostroke.fleet")


class Cluster(Protocol):
    """The servers of a fleet on the machines of a cluster, by the name of each server."""

    def start(self, name: str, pool: ReplicaPool | None) -> None:
        """Start a replica of `pool`, or the router if `pool` is None; it may wait for a machine."""

    def states(self) -> Mapping[str, ServerState]:
        """Return the state of each server that was started and has not ended, by name."""

    def stop(self, name: str) -> None:
        """Drain a server and end it. Returns at once; a second call does nothing."""

    def set_prefill_addresses(self, name: str, addresses: tuple[str, ...]) -> None:
        """Tell a decode engine which prefill engines it may use now; returns at once."""


class ReplicaStatus(Frozen):
    """A replica as `twostroke fleet status` shows it."""

    name: str
    phase: Phase
    is_current: bool
    num_running: int
    state: ServerState


class PoolStatus(Frozen):
    """The replicas of a model as `twostroke fleet status` shows them.

    Attributes:
        label: the name of the model.
        num_wanted: the number of replicas that the manager aims at.
        replicas: the pool's replicas.
        prefill: the label of the pool that prefills prompts for this pool.
        num_prefill_wanted: the number of prefill replicas that the pool's decode replicas can keep
            busy, by measured speeds; None if it is not known.
    """

    label: str
    num_wanted: int = field(name="wanted")
    replicas: tuple[ReplicaStatus, ...]
    prefill: str = ""
    num_prefill_wanted: float | None = field(default=None, name="readers")

    @property
    def num_ready(self) -> int:
        """The number of ready replicas of the pool's present version."""
        return sum(replica.phase is Phase.READY and replica.is_current for replica in self.replicas)

    @property
    def start_failure(self) -> str:
        """Why the pool's replicas do not start; empty if a replica is ready or may become ready."""
        failed = [
            replica.state
            for replica in self.replicas
            if replica.state.num_failed_starts >= _MAX_FAILED_STARTS
        ]
        return failed[0].trouble if failed and not self.num_ready else ""


class FleetStatus(Frozen):
    """A fleet as `twostroke fleet status` shows it."""

    name: str
    url: str
    router: ServerState
    pools: tuple[PoolStatus, ...]

    @property
    def is_up(self) -> bool:
        """Whether the router answers and each pool has the number of ready replicas it wants."""
        return self.router.is_ready and all(
            pool.num_ready >= pool.num_wanted for pool in self.pools
        )

    @property
    def trouble(self) -> str:
        """Why a server that is not ready ended last; empty if there is no such server."""
        replicas = (replica for pool in self.pools for replica in pool.replicas)
        states = [self.router, *(replica.state for replica in replicas)]
        return next((state.trouble for state in states if state.trouble), "")


class Manager:
    """Starts and stops a fleet's servers, step by step, until they match the fleet's spec.

    A replica's name is LABEL/VERSION/NUMBER, so that a restarted manager recognizes running
    replicas. The manager has no other state that must survive.

    Attributes:
        status: the state of the fleet after the last step.
    """

    def __init__(
        self,
        spec: FleetSpec,
        cluster: Cluster,
        router: RouterControl,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Manage the servers of `cluster` as `spec` says; the caller calls `step` regularly."""
        self._spec = spec
        self._cluster = cluster
        self._router = router
        self._clock = clock
        self._delays: dict[str, ScaleDownDelay] = {}  # by label of the pool
        self._num_requests: dict[str, int] = {}  # of the last step, by label of a decode pool
        self._unplaced_since_s: dict[str, float] = {}  # by name of a replica without a machine
        self.status = FleetStatus(spec.name, "", ServerState(), ())

    def step(self) -> None:
        """Look at all servers of the fleet once, and start and stop servers as necessary."""
        states = self._cluster.states()
        if ROUTER not in states:
            self._cluster.start(ROUTER, None)
        router = states.get(ROUTER, ServerState())
        views = self._router.views() if router.is_ready else {}
        prefill_labels = self._spec.prefill_labels
        pools: list[PoolStatus] = []
        num_prefill: Counter[str] = Counter()  # replicas that are wanted, by label of the pool
        for pool in sorted(self._spec.models, key=lambda pool: pool.label in prefill_labels):
            view = views.get(pool.label)
            if pool.label in num_prefill:
                view = RouterView(num_prefill[pool.label], {})
            status = self._adjust(self._with_role(pool), states, view)
            pools.append(status)
            if pool.prefill and view is not None:
                num_prefill[pool.prefill] += self._num_prefill(status, view)
        self._tell_prefill_addresses(pools)
        replicas = {
            pool.label: [replica.state.url for replica in pool.replicas if _is_usable(replica)]
            for pool in pools
            if pool.label not in prefill_labels
        }
        self._router.set_replicas(replicas | self._stop_removed_models(states, pools))
        self._router.set_startable(self._startable_models(pools))
        self.status = FleetStatus(self._spec.name, router.url, router, tuple(pools))

    def _stop_removed_models(
        self, states: Mapping[str, ServerState], pools: Sequence[PoolStatus]
    ) -> dict[str, list[str]]:
        """Stop the replicas of models that were removed from the fleet's file.

        They are stopped when all other models are up, or one by one if the other models lack room.

        Returns:
            The URLs of replicas of removed models that still run, by model.
        """
        labels, now_s = {pool.label for pool in self._spec.models}, self._clock()
        removed = [name for name in states if name != ROUTER and _name_parts(name)[0] not in labels]
        alive = sorted(name for name in removed if not states[name].is_ending)
        are_up = all(pool.num_ready >= pool.num_wanted for pool in pools)
        lacks_room = any(
            name in states and not states[name].url and now_s - since_s >= _PLACEMENT_TIMEOUT_S
            for name, since_s in self._unplaced_since_s.items()
        )
        num_stops = len(alive)
        if not are_up:
            num_stops = int(lacks_room and len(alive) == len(removed))
        for name in alive[:num_stops]:
            _logger.info("Replica %s drains: its model is not in the file any more.", name)
            self._cluster.stop(name)
        staying: dict[str, list[str]] = {}
        for name in alive[num_stops:]:
            if states[name].url:
                staying.setdefault(_name_parts(name)[0], []).append(states[name].url)
        return staying

    def _startable_models(self, pools: Sequence[PoolStatus]) -> tuple[ListedModel, ...]:
        """Return the models that may have no replica, and why the replicas of some do not start."""
        status_by_label = {status.label: status for status in pools}
        return tuple(
            ListedModel(
                name=pool.label,
                takes_any_name=pool.options.get("any-model") is True,
                failure=status_by_label[pool.label].start_failure,
            )
            for pool in self._spec.models
            if pool.bounds[0] == 0 and pool.label not in self._spec.prefill_labels
        )

    def _with_role(self, pool: ReplicaPool) -> ReplicaPool:
        """Return a pool with the options of its role in disaggregation: prefill, decode or none."""
        if pool.label in self._spec.prefill_labels:
            return pool.as_prefill()
        return pool.as_decode() if pool.prefill else pool

    def _num_prefill(self, status: PoolStatus, view: RouterView) -> int:
        """Return how many prefill replicas a decode pool needs now, from its status and its load.

        While the pool has no requests, the number is zero. Otherwise it is the number of prefill
        replicas that the pool's replicas can keep busy, and at least one. Before speeds have been
        measured, it is one.
        """
        has_new = view.num_requests > self._num_requests.get(status.label, 0)
        self._num_requests[status.label] = view.num_requests
        starts = view.num_wanted > 0 and not status.num_ready
        if not (has_new or starts or any(view.running.values())):
            return 0
        return max(1, math.ceil(status.num_prefill_wanted or 0))

    def _tell_prefill_addresses(self, pools: Sequence[PoolStatus]) -> None:
        """Tell decode engines the addresses of prefill engines that run and do not drain."""
        pool_by_label = {pool.label: pool for pool in self._spec.models}
        status_by_label = {status.label: status for status in pools}
        for status in pools:
            if not status.prefill:
                continue
            port = pool_by_label[status.prefill].peer_port
            addresses = sorted(
                f"{urlsplit(replica.state.url).hostname}:{port + int(_name_parts(replica.name)[2])}"
                for replica in status_by_label[status.prefill].replicas
                if _is_usable(replica)
            )
            for replica in status.replicas:
                if _is_usable(replica) and replica.state.prefill_addresses != tuple(addresses):
                    self._cluster.set_prefill_addresses(replica.name, tuple(addresses))

    def _adjust(
        self, pool: ReplicaPool, states: Mapping[str, ServerState], view: RouterView | None
    ) -> PoolStatus:
        """Start and drain replicas of one pool; return its status.

        `states` has all servers of the fleet by name; `view` is the pool's load as the router sees
        it, None if the router does not answer. The status lacks replicas that start or begin to
        drain now.
        """
        now_s = self._clock()
        running = Counter(view.running if view else {})
        replicas = [
            ReplicaStatus(
                name=name,
                phase=_phase(state),
                is_current=_name_parts(name)[1] == pool.version,
                num_running=running[state.url],
                state=state,
            )
            for name, state in states.items()
            if _name_parts(name)[0] == pool.label
        ]
        num_wanted = self._num_wanted(pool, replicas, view)
        unplaced = {
            replica.name
            for replica in replicas
            if replica.phase is Phase.STARTING and not replica.state.url
        }
        self._unplaced_since_s = {
            **{name: since_s for name, since_s in self._unplaced_since_s.items() if name in states},
            **{name: self._unplaced_since_s.get(name, now_s) for name in unplaced},
        }
        has_room = all(
            now_s - self._unplaced_since_s[name] < _PLACEMENT_TIMEOUT_S for name in unplaced
        )
        replica_views = [
            ReplicaView(replica.name, replica.phase, replica.is_current, replica.num_running)
            for replica in replicas
        ]
        actions = choose(replica_views, num_wanted, has_room=has_room)
        for name in actions.drains:
            _logger.info("Replica %s drains.", name)
            self._cluster.stop(name)
        self._start_replicas(pool, replicas, actions.num_starts)
        remaining = tuple(replica for replica in replicas if replica.name not in actions.drains)
        return PoolStatus(
            label=pool.label,
            num_wanted=num_wanted,
            replicas=remaining,
            prefill=pool.prefill,
            num_prefill_wanted=_num_prefill_wanted(remaining, view),
        )

    def _num_wanted(
        self, pool: ReplicaPool, replicas: Sequence[ReplicaStatus], view: RouterView | None
    ) -> int:
        """Return how many replicas a pool should have.

        If the router does not answer (`view` is None), the number stays as it is.
        """
        low, high = pool.bounds
        num_alive = sum(replica.phase is not Phase.DRAINING for replica in replicas)
        num_wanted = view.num_wanted if view else num_alive
        delay, now_s = self._delays.get(pool.label), self._clock()
        if delay is None:  # of the replicas of an earlier manager, it is not known when they worked
            delay = self._delays[pool.label] = ScaleDownDelay(pool.scale_down_after)
            delay.update(max(low, min(high, num_alive)), now_s)
        return delay.update(max(low, min(high, num_wanted)), now_s)

    def _start_replicas(
        self, pool: ReplicaPool, replicas: Sequence[ReplicaStatus], count: int
    ) -> None:
        """Start `count` replicas of a pool, which get the smallest free numbers."""
        numbers = {int(_name_parts(replica.name)[2]) for replica in replicas}
        for _ in range(count):
            number = next(n for n in range(len(numbers) + 1) if n not in numbers)
            numbers.add(number)
            name = f"{pool.label}/{pool.version}/{number}"
            _logger.info("Replica %s is started.", name)
            is_prefill = pool.label in self._spec.prefill_labels
            self._cluster.start(name, pool.as_prefill(number) if is_prefill else pool)


def _num_prefill_wanted(replicas: Sequence[ReplicaStatus], view: RouterView | None) -> float | None:
    """Return how many prefill replicas a pool's decode replicas can keep busy; None if unknown."""
    if view is None:
        return None
    values = [view.prefill_per_decode.get(replica.state.url) for replica in replicas]
    reported = [value for value in values if value is not None]
    return len(replicas) * sum(reported) / len(reported) if reported else None


def _name_parts(name: str) -> list[str]:
    """Return the label, the version and the number in a replica's name."""
    return name.rsplit("/", 2)


def _phase(state: ServerState) -> Phase:
    if state.is_ending:
        return Phase.DRAINING
    return Phase.READY if state.is_ready else Phase.STARTING


def _is_usable(replica: ReplicaStatus) -> bool:
    """Return whether the router may send requests to a replica: it has a URL and does not drain."""
    return bool(replica.state.url) and replica.phase is not Phase.DRAINING
