"""A fleet on this machine without Ray: its manager in a thread, its servers as processes."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING

from twostroke.fleet.cluster.manager import ROUTER, STEP_INTERVAL_S, Manager
from twostroke.fleet.cluster.process import ServerProcess, ServerState
from twostroke.fleet.cluster.router_link import RouterLink
from twostroke.fleet.cluster.spec import HOST

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from twostroke.fleet.cluster.manager import FleetStatus
    from twostroke.fleet.cluster.spec import FleetSpec, ReplicaPool

_LOOPBACK = "127.0.0.1"
_CLOSE_S = 10.0
KEY = "the-key-of-the-replicas"


def free_port() -> int:
    """Return a free port of the loopback address."""
    with socket.create_server((_LOOPBACK, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class LocalCluster:
    """Servers as processes of this machine; implements `Cluster`.

    The notice of a spot machine reaches a replica by a file, which `give_notice` makes.
    """

    def __init__(self, spec: FleetSpec, router_files: tuple[str, ...], folder: Path) -> None:
        """Start no server yet; the files of notices are in `folder`."""
        self._spec, self._router_files, self._folder = spec, router_files, folder
        self._servers: dict[str, ServerProcess] = {}
        self._notices: dict[str, Path] = {}
        self._closing: dict[str, threading.Thread] = {}
        self._lock = threading.RLock()
        self.num_starts = Counter[str]()

    def start(self, name: str, pool: ReplicaPool | None) -> None:
        """Start a replica of `pool`, or the router if `pool` is None."""
        with self._lock:
            self.num_starts[name] += 1
            variables = {"TWOSTROKE_REPLICA_KEY": KEY, "TWOSTROKE_PEER_SECRET": KEY}
            if pool is None:
                arguments = (*self._spec.router.arguments, *self._router_files)
                port = self._spec.router.port
            else:
                number = self.num_starts[name]
                notice = self._folder / f"{name.replace('/', '-')}-{number}.notice"
                self._notices[name] = notice
                local = [argument.replace(HOST, _LOOPBACK) for argument in pool.arguments]
                arguments = (*local, "--drain-notice", str(notice))
                port = None
            self._servers[name] = ServerProcess(arguments, _LOOPBACK, port, variables)

    def states(self) -> Mapping[str, ServerState]:
        """Return the state of each server that was started and has not ended, by name."""
        with self._lock:
            for name, thread in list(self._closing.items()):
                if not thread.is_alive():
                    del self._closing[name], self._servers[name]
            states = {name: server.state for name, server in self._servers.items()}
            for name, state in states.items():
                if state.is_ending:
                    self.stop(name)
            return states

    def stop(self, name: str) -> None:
        """Drain a server and end it; returns at once."""
        with self._lock:
            if name not in self._closing:
                close = self._servers[name].close
                thread = threading.Thread(target=close, args=(_CLOSE_S,))
                self._closing[name] = thread
                thread.start()

    def set_prefill_addresses(self, name: str, addresses: tuple[str, ...]) -> None:
        """Tell a decode engine which prefill engines it may use now."""
        self._servers[name].set_prefill_addresses(addresses)

    def give_notice(self, name: str) -> None:
        """Give a replica the notice that its machine ends."""
        self._notices[name].touch()

    def close(self) -> None:
        """End all servers."""
        for name in list(self._servers):
            self.stop(name)
        for thread in list(self._closing.values()):
            thread.join()


class LocalFleet:
    """A fleet's manager, router and replicas on this machine.

    Attributes:
        cluster: the servers.
        url: the router's URL.
    """

    def __init__(self, spec: FleetSpec, folder: Path) -> None:
        """Start the fleet; `TWOSTROKE_CACHE` should name a folder that a test may write."""
        self._link = RouterLink(spec.name, spec.router, KEY)
        self.cluster = LocalCluster(spec, self._link.router_files, folder)
        self.url = f"http://{_LOOPBACK}:{spec.router.port}"
        self._manager = Manager(spec, self.cluster, self._link)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def status(self) -> FleetStatus:
        """The state of the fleet after the manager's last step."""
        return self._manager.status

    def replicas(self, label: str = "") -> dict[str, ServerState]:
        """Return the states of the replicas of a pool, or of all, by name."""
        states = self.cluster.states()
        return {name: state for name, state in states.items()
                if name != ROUTER and name.startswith(label)}  # fmt: skip

    def close(self) -> None:
        """End the manager and all servers."""
        self._is_closed.set()
        self._thread.join()
        self.cluster.close()
        self._link.close()

    def _run(self) -> None:
        while not self._is_closed.wait(STEP_INTERVAL_S):
            self._manager.step()
