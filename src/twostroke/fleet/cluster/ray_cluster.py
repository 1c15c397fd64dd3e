"""Servers as actors of a Ray cluster, which chooses their machines and restarts them.

An actor is a process beside its server; requests do not pass through it.
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
from msgspec.structs import replace
from ray.exceptions import RayError

from twostroke.core.errors import BackendError, UnreachableError
from twostroke.fleet.cluster.choice import EndingMachines
from twostroke.fleet.cluster.manager import ROUTER, STEP_INTERVAL_S, FleetStatus, Manager
from twostroke.fleet.cluster.process import ServerProcess, ServerState
from twostroke.fleet.cluster.router_link import RouterLink
from twostroke.fleet.cluster.spec import HOST

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twostroke.fleet.cluster.spec import FleetSpec, ReplicaPool

_logger = logging.getLogger("twostroke.fleet")
_NAMESPACE: Final = "twostroke"
_MANAGER_NAME: Final = "manager"
_ANSWER_TIMEOUT_S: Final = 1.0  # for all actors together
_MAX_SILENCE_S: Final = 20.0  # after which an actor that has a server is replaced
_DRAIN_TIMEOUT_S: Final = 60.0
_ON_HEAD: Final[dict[str, Any]] = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
_GB_BYTES: Final = 1_000_000_000


class _ServerActor:
    """A Ray actor that runs one server of a fleet on its machine."""

    def __init__(
        self, arguments: tuple[str, ...], address: tuple[str, int] | None, key: str
    ) -> None:
        host, port = address or (ray.util.get_node_ip_address(), None)
        secret = blake2b(key.encode(), person=b"twostroke peer").hexdigest()
        variables = {"TWOSTROKE_REPLICA_KEY": key, "TWOSTROKE_PEER_SECRET": secret}
        local_arguments = [argument.replace(HOST, host) for argument in arguments]
        self._server = ServerProcess(local_arguments, host, port, variables)

    def state(self) -> ServerState:
        return replace(self._server.state, machine=ray.get_runtime_context().get_node_id())

    def set_prefill_addresses(self, addresses: tuple[str, ...]) -> None:
        self._server.set_prefill_addresses(addresses)

    def close(self, within_s: float) -> None:
        self._server.close(within_s)


class _ManagerActor:
    """The Ray actor that calls a fleet's manager again and again, and answers `fleet status`."""

    def __init__(self, spec: FleetSpec, key: str) -> None:
        self._link = RouterLink(spec.name, spec.router, key)
        self._cluster = RayCluster(spec, key, self._link.router_files)
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
        """Stop managing the fleet; its servers continue."""
        self._is_closed.set()
        self._thread.join()

    def close(self) -> None:
        """Drain all servers of the fleet, the router last."""
        self.halt()
        self._cluster.clear()
        self._link.close()

    def _run(self) -> None:
        while not self._is_closed.wait(STEP_INTERVAL_S):
            try:
                self._manager.step()
            except RayError as error:  # of Ray itself; the next step may succeed
                _logger.warning("Ray: %s", error)


class RayCluster:
    """The servers of one fleet as named Ray actors; implements `Cluster`."""

    def __init__(self, spec: FleetSpec, key: str, router_files: tuple[str, ...]) -> None:
        """Prepare to start the fleet's servers, and to find those already running.

        Args:
            spec: the fleet's spec.
            key: the secret that router and replicas share.
            router_files: command-line options for the router, which name the files that list the
                replicas and models.
        """
        self._spec = spec
        self._key = key
        self._router_files = router_files
        self._prefix = f"{spec.name}:"
        # All by the name of the server: the running call of `state`, the time and value of its last
        # answer, and the running call of `close`.
        self._state_calls: dict[str, Any] = {}
        self._last_states: dict[str, tuple[float, ServerState]] = {}
        self._close_calls: dict[str, Any] = {}
        self._ending_machines = EndingMachines()

    def start(self, name: str, pool: ReplicaPool | None) -> None:
        """Start a replica of `pool`, or the router if `pool` is None; it may wait for a machine."""
        if pool is None:
            router = self._spec.router
            actor = _create_actor(_ServerActor, self._prefix + name, **_ON_HEAD)
            arguments = (*router.arguments, *self._router_files)
            actor.remote(arguments, router.address, self._key)
            return
        needs: dict[str, Any] = {"num_cpus": pool.cpus, "resources": pool.resources}
        if pool.memory:
            needs["memory"] = int(pool.memory * _GB_BYTES)
        alive_machines = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if ending := self._ending_machines.to_avoid(alive_machines):
            needs["label_selector"] = {"ray.io/node-id": f"!in({','.join(sorted(ending))})"}
        _create_actor(_ServerActor, self._prefix + name, **needs).remote(
            pool.arguments, None, self._key
        )

    def states(self) -> Mapping[str, ServerState]:
        """Return the state of each server that was started and has not ended, by name."""
        names = self._servers()
        for name in names:
            if name not in self._state_calls and name not in self._close_calls:
                with suppress(ValueError):  # it has just ended
                    self._state_calls[name] = self._handle(name).state.remote()
        _wait(self._state_calls.values(), _ANSWER_TIMEOUT_S)
        for name in list(self._state_calls):
            self._update_state(name)
        for name in names:
            state = self._state(name)
            if state.is_ending and name not in self._close_calls:
                if name != ROUTER and state.machine and not state.was_told_to_end:
                    _logger.warning("%s drains by itself: its machine may end.", name)
                    self._ending_machines.add(state.machine)
                self.stop(name)  # an earlier manager may have stopped it
        for name, call in list(self._close_calls.items()):
            if _wait([call], 0):
                self._forget(name)
        remaining = set(self._servers())
        return {name: self._state(name) for name in names if name in remaining}

    def stop(self, name: str) -> None:
        """Drain a server and end its actor; returns at once."""
        if name in self._close_calls:
            return
        if not self._state(name).url:  # it has no machine yet
            self._forget(name)
            return
        with suppress(ValueError):
            self._close_calls[name] = self._handle(name).close.remote(_DRAIN_TIMEOUT_S)

    def set_prefill_addresses(self, name: str, addresses: tuple[str, ...]) -> None:
        """Tell a decode engine which prefill engines it may use now; returns at once."""
        with suppress(ValueError):  # it has just ended
            self._handle(name).set_prefill_addresses.remote(addresses)

    def clear(self) -> None:
        """Drain all servers of the fleet, the router last, and return when they have ended."""
        replicas = [name for name in self.states() if name != ROUTER]
        for names in (replicas, [ROUTER]):
            for name in names:
                self.stop(name)
            _wait(self._close_calls.values(), _DRAIN_TIMEOUT_S + _ANSWER_TIMEOUT_S)
            for name in names:
                self._forget(name)

    def _servers(self) -> list[str]:
        """Return the names of the fleet's router and replicas that have actors."""
        actors = ray.util.list_named_actors()
        names = [
            actor.removeprefix(self._prefix) for actor in actors if actor.startswith(self._prefix)
        ]
        return [name for name in names if name != _MANAGER_NAME]

    def _handle(self, name: str) -> Any:
        return ray.get_actor(self._prefix + name, _NAMESPACE)

    def _update_state(self, name: str) -> None:
        """Read the state that a server's actor has sent, if it has answered.

        An actor that has been silent too long is killed, and Ray starts another actor.
        """
        now_s, call = time.monotonic(), self._state_calls[name]
        if not _wait([call], 0):
            heard_s, state = self._last_states.get(name, (now_s, ServerState()))
            if state.url and now_s - heard_s > _MAX_SILENCE_S:
                _logger.warning("The actor of %s is silent: it is replaced.", name)
                with suppress(ValueError):
                    ray.kill(self._handle(name), no_restart=False)
                self._last_states[name] = (now_s, ServerState())
            return
        del self._state_calls[name]
        try:
            self._last_states[name] = (now_s, ray.get(call))
        except RayError as error:  # Ray restarts it, unless it could not be created
            cause = str(error).strip().splitlines()[-1] if "creation task" in str(error) else ""
            self._last_states[name] = (now_s, ServerState(trouble=cause))

    def _state(self, name: str) -> ServerState:
        state = self._last_states.get(name, (0.0, ServerState()))[1]
        return (
            ServerState(state.url, state.pid, is_ending=True)
            if name in self._close_calls
            else state
        )

    def _forget(self, name: str) -> None:
        with suppress(ValueError):
            ray.kill(self._handle(name))
        self._state_calls.pop(name, None)
        self._last_states.pop(name, None)
        self._close_calls.pop(name, None)


def connect(address: str) -> None:
    """Connect this process to a Ray cluster.

    Raises:
        BackendError: the cluster cannot be reached, or has another version of Ray.
    """
    try:
        ray.init(
            address=address, namespace=_NAMESPACE, log_to_driver=False, logging_level="critical"
        )
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise BackendError(f"Ray at {address} cannot be joined: {reason}.") from None


def check_room(spec: FleetSpec) -> tuple[int, str] | None:
    """Return the index of the first pool whose replicas fit on no machine, and the reason.

    None if all pools fit.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for index, pool in enumerate(spec.models):
        needs = {"CPU": pool.cpus, "memory": pool.memory * _GB_BYTES, **pool.resources}
        if any(all(node.get(key, 0) >= need for key, need in needs.items()) for node in nodes):
            continue
        for key, need in needs.items():
            largest = max((node.get(key, 0) for node in nodes), default=0)
            if largest < need:
                resource, unit = {"CPU": ("cores", 1), "memory": ("GB", _GB_BYTES)}.get(
                    key, (key, 1)
                )
                return index, (
                    f"a replica of {pool.label} needs {need / unit:g} {resource}, and the "
                    f"largest machine has {largest / unit:.3g}."
                )
        return index, f"no machine has all resources that a replica of {pool.label} needs."
    return None


def up(spec: FleetSpec) -> None:
    """Start a fleet, or change the running fleet of this name to match `spec`."""
    key = secrets.token_urlsafe(24)
    with suppress(ValueError, RayError):
        old = _manager(spec.name)
        key = ray.get(old.key.remote(), timeout=_MAX_SILENCE_S)
        ray.get(old.halt.remote(), timeout=_MAX_SILENCE_S)
        ray.kill(old)
    actor = _create_actor(_ManagerActor, f"{spec.name}:{_MANAGER_NAME}", **_ON_HEAD).remote(
        spec, key
    )
    ray.get(actor.status.remote(), timeout=_DRAIN_TIMEOUT_S)


def names() -> list[str]:
    """Return the names of the fleets that run in the Ray cluster."""
    ending = f":{_MANAGER_NAME}"
    return sorted(
        name.removesuffix(ending) for name in ray.util.list_named_actors() if name.endswith(ending)
    )


def status(name: str) -> FleetStatus:
    """Return the state of a fleet after its manager's last step.

    Raises:
        UnreachableError: there is no such fleet, or its manager does not answer.
    """
    try:
        fleet_status: FleetStatus = ray.get(_manager(name).status.remote(), timeout=_MAX_SILENCE_S)
    except ValueError:
        raise UnreachableError(f"There is no fleet '{name}' in this Ray cluster.") from None
    except RayError as error:
        reason = str(error).splitlines()[0]
        raise UnreachableError(f"The manager of '{name}' does not answer: {reason}") from None
    return fleet_status


def down(name: str) -> None:
    """End a fleet: drain its servers and end its Ray actors.

    Raises:
        UnreachableError: there is no such fleet, or its manager does not answer.
    """
    status(name)
    manager = _manager(name)
    try:
        ray.get(manager.close.remote(), timeout=3 * _DRAIN_TIMEOUT_S)
    except RayError as error:
        raise UnreachableError(f"The fleet '{name}' does not end: {error}") from None
    finally:
        ray.kill(manager)


def _wait(calls: Iterable[Any], within_s: float) -> bool:
    """Wait until calls of Ray actors have returned or failed; return whether all did in time."""
    pending = list(calls)
    if pending:
        _, pending = ray.wait(pending, num_returns=len(pending), timeout=within_s)
    return not pending


def _manager(name: str) -> Any:
    return ray.get_actor(f"{name}:{_MANAGER_NAME}", _NAMESPACE)


def _create_actor(kind: type, name: str, **options: Any) -> Any:
    """Return a Ray actor class with a name and further options; the caller starts the actor.

    The actor outlives this process. If the actor dies, Ray restarts it.
    """
    return ray.remote(kind).options(
        name=name,
        namespace=_NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=8,
        **options,
    )


def leave() -> None:
    """Disconnect from the Ray cluster, which continues to run."""
    ray.shutdown()
