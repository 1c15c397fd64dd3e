"""Servers as actors of a Ray cluster, which places them and starts them again.

An actor is a process beside its server, and a request never passes it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import ray
from ray.exceptions import RayError

from twostroke.core.errors import BackendError, UnreachableError
from twostroke.fleet.cluster.manager import ROUTER, FleetStatus, Manager
from twostroke.fleet.cluster.process import ServerProcess, ServerState
from twostroke.fleet.cluster.router_link import RouterLink
from twostroke.fleet.cluster.spec import HOST

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from twostroke.fleet.cluster.spec import FleetSpec, ReplicaPool

_logger = logging.getLogger("twostroke.fleet")
_NAMESPACE: Final = "twostroke"
_MANAGER: Final = "manager"
_STEP_S: Final = 0.5
_ANSWER_S: Final = 1.0  # for all actors together
_FROZEN_S: Final = 20.0  # an actor that has a server and is silent for so long is replaced
_DRAIN_S: Final = 60.0
_ON_HEAD: Final[dict[str, Any]] = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
_GB: Final = 1_000_000_000


class _Server:
    """An actor that looks after one server on its machine."""

    def __init__(
        self, arguments: tuple[str, ...], address: tuple[str, int] | None, key: str
    ) -> None:
        host, port = address or (ray.util.get_node_ip_address(), None)
        secret = blake2b(key.encode(), person=b"twostroke peer").hexdigest()
        variables = {"TWOSTROKE_REPLICA_KEY": key, "TWOSTROKE_PEER_SECRET": secret}
        words = [word.replace(HOST, host) for word in arguments]
        self._server = ServerProcess(words, host, port, variables)

    def state(self) -> ServerState:
        return self._server.state

    def close(self, within_s: float) -> None:
        self._server.close(within_s)


class _Manager:
    """The actor that manages a fleet."""

    def __init__(self, spec: FleetSpec, key: str) -> None:
        self._link = RouterLink(spec.name, spec.router, key)
        self._cluster = RayCluster(spec, key, self._link.listing)
        self._manager = Manager(spec, self._cluster, self._link)
        self._key = key
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def status(self) -> FleetStatus:
        return self._manager.status

    def key(self) -> str:
        return self._key

    def halt(self) -> None:
        """Leave the servers as they are."""
        self._is_closed.set()
        self._thread.join()

    def close(self) -> None:
        """Drain all servers, the router last."""
        self.halt()
        self._cluster.clear()
        self._link.close()

    def _run(self) -> None:
        while not self._is_closed.wait(_STEP_S):
            try:
                self._manager.step()
            except RayError as error:  # of Ray itself: the next look may go better
                _logger.warning("Ray: %s", error)


class RayCluster:
    """A `Cluster`: the named actors of one fleet."""

    def __init__(self, spec: FleetSpec, key: str, listing: Path) -> None:
        """Give replicas and router a `key`, and the router a file that lists the replicas."""
        self._spec, self._key, self._listing = spec, key, listing
        self._prefix = f"{spec.name}:"
        self._looks: dict[str, Any] = {}  # a call of `state` under way, by name
        self._heard: dict[str, tuple[float, ServerState]] = {}  # when it last answered, and what
        self._closing: dict[str, Any] = {}

    def start(self, name: str, pool: ReplicaPool | None) -> None:
        """Ask Ray for a replica of `pool`, or for the router; it may wait for a place."""
        if pool is None:
            router = self._spec.router
            actor = _actor(_Server, self._prefix + name, **_ON_HEAD)
            arguments = (*router.arguments, "--replicas-file", str(self._listing))
            actor.remote(arguments, router.address, self._key)
            return
        needs = {"num_cpus": pool.cpus, "resources": pool.resources}
        if pool.memory:
            needs["memory"] = int(pool.memory * _GB)
        _actor(_Server, self._prefix + name, **needs).remote(pool.arguments, None, self._key)

    def look(self) -> Mapping[str, ServerState]:
        """Return what is known of each server that was started and has not gone."""
        names = self._servers()
        for name in names:
            if name not in self._looks and name not in self._closing:
                with suppress(ValueError):  # it has just gone
                    self._looks[name] = self._handle(name).state.remote()
        _wait(self._looks.values(), _ANSWER_S)
        for name in list(self._looks):
            self._hear(name)
        for name in names:
            if self._state(name).is_ending:  # perhaps at the wish of an earlier manager
                self.stop(name)
        for name, call in list(self._closing.items()):
            if _wait([call], 0):
                self._forget(name)
        left = set(self._servers())
        return {name: self._state(name) for name in names if name in left}

    def stop(self, name: str) -> None:
        """Let a server drain and go."""
        if name in self._closing:
            return
        if not self._state(name).url:  # it has no place yet
            self._forget(name)
            return
        with suppress(ValueError):
            self._closing[name] = self._handle(name).close.remote(_DRAIN_S)

    def clear(self) -> None:
        """Drain all servers, the router last, and return when they have gone."""
        known = self.look()
        for names in ([name for name in known if name != ROUTER], [ROUTER]):
            for name in names:
                self.stop(name)
            _wait(self._closing.values(), _DRAIN_S + _ANSWER_S)
            for name in names:
                self._forget(name)

    def _servers(self) -> list[str]:
        """Return the names of the router and of the replicas that there are."""
        size = len(self._prefix)
        names = ray.util.list_named_actors()
        found = [name[size:] for name in names if name.startswith(self._prefix)]
        return [name for name in found if name != _MANAGER]

    def _handle(self, name: str) -> Any:
        return ray.get_actor(self._prefix + name, _NAMESPACE)

    def _hear(self, name: str) -> None:
        """Take in an answer, if it has come; replace an actor that is silent for too long."""
        now_s, call = time.monotonic(), self._looks[name]
        if not _wait([call], 0):
            at_s, state = self._heard.get(name, (now_s, ServerState()))
            if state.url and now_s - at_s > _FROZEN_S:
                _logger.warning("The actor of %s is silent: it is replaced.", name)
                with suppress(ValueError):
                    ray.kill(self._handle(name), no_restart=False)
                self._heard[name] = (now_s, ServerState())
            return
        del self._looks[name]
        try:
            self._heard[name] = (now_s, ray.get(call))
        except RayError as error:  # Ray starts it again, unless it cannot begin
            cause = str(error).strip().splitlines()[-1] if "creation task" in str(error) else ""
            self._heard[name] = (now_s, ServerState(trouble=cause))

    def _state(self, name: str) -> ServerState:
        state = self._heard.get(name, (0.0, ServerState()))[1]
        return ServerState(state.url, state.pid, is_ending=True) if name in self._closing else state

    def _forget(self, name: str) -> None:
        with suppress(ValueError):
            ray.kill(self._handle(name))
        for kept in (self._looks, self._heard, self._closing):
            kept.pop(name, None)


def connect(address: str) -> None:
    """Join a Ray cluster.

    Raises:
        BackendError: it cannot be reached, or runs another version.
    """
    try:
        ray.init(
            address=address, namespace=_NAMESPACE, log_to_driver=False, logging_level="critical"
        )
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise BackendError(f"Ray at {address} cannot be joined: {reason}.") from None


def check_room(spec: FleetSpec) -> tuple[int, str] | None:
    """Return the first pool, by index, whose replicas no machine of the cluster could hold."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for index, pool in enumerate(spec.models):
        needs = {"CPU": pool.cpus, "memory": pool.memory * _GB, **pool.resources}
        if any(all(node.get(key, 0) >= need for key, need in needs.items()) for node in nodes):
            continue
        for key, need in needs.items():
            most = max((node.get(key, 0) for node in nodes), default=0)
            if most < need:
                what, unit = {"CPU": ("cores", 1), "memory": ("GB", _GB)}.get(key, (key, 1))
                return index, (
                    f"a replica of {pool.label} needs {need / unit:g} {what}, and the largest "
                    f"machine has {most / unit:.3g}."
                )
        return index, f"no machine has all that a replica of {pool.label} needs."
    return None


def up(spec: FleetSpec) -> None:
    """Start a fleet, or let one of this name become what `spec` says."""
    key = secrets.token_urlsafe(24)
    with suppress(ValueError, RayError):
        old = _manager(spec.name)
        key = ray.get(old.key.remote(), timeout=_FROZEN_S)
        ray.get(old.halt.remote(), timeout=_FROZEN_S)
        ray.kill(old)
    actor = _actor(_Manager, f"{spec.name}:{_MANAGER}", **_ON_HEAD).remote(spec, key)
    ray.get(actor.status.remote(), timeout=_DRAIN_S)


def names() -> list[str]:
    """Return the names of the fleets of the cluster."""
    ending = f":{_MANAGER}"
    return sorted(
        name.removesuffix(ending) for name in ray.util.list_named_actors() if name.endswith(ending)
    )


def status(name: str) -> FleetStatus:
    """Return what a fleet's manager saw last.

    Raises:
        UnreachableError: there is no such fleet, or its manager does not answer.
    """
    try:
        found: FleetStatus = ray.get(_manager(name).status.remote(), timeout=_FROZEN_S)
    except ValueError:
        raise UnreachableError(f"There is no fleet '{name}' in this Ray cluster.") from None
    except RayError as error:
        reason = str(error).splitlines()[0]
        raise UnreachableError(f"The manager of '{name}' does not answer: {reason}") from None
    return found


def down(name: str) -> None:
    """Drain a fleet's servers and end all that belongs to it.

    Raises:
        UnreachableError: there is no such fleet, or its manager does not answer.
    """
    status(name)
    manager = _manager(name)
    try:
        ray.get(manager.close.remote(), timeout=3 * _DRAIN_S)
    except RayError as error:
        raise UnreachableError(f"The fleet '{name}' does not end: {error}") from None
    finally:
        ray.kill(manager)


def _wait(calls: Iterable[Any], within_s: float) -> bool:
    """Wait for calls to return or to fail; return whether all have."""
    waiting = list(calls)
    return not waiting or not ray.wait(waiting, num_returns=len(waiting), timeout=within_s)[1]


def _manager(name: str) -> Any:
    return ray.get_actor(f"{name}:{_MANAGER}", _NAMESPACE)


def _actor(kind: type, name: str, **options: Any) -> Any:
    """Return a class of actors with a name, which outlive this process and Ray keeps alive."""
    return ray.remote(kind).options(
        name=name,
        namespace=_NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=8,
        **options,
    )


def leave() -> None:
    """Leave the cluster as it is."""
    ray.shutdown()
