"""Silent replicas: when the router gives them up, in virtual time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from support.replicas import LOAD
from support.virtual_time import VirtualTimeLoop, run_virtually
from twostroke.fleet.router.health_checker import HealthChecker
from twostroke.fleet.router.options import RouteOptions
from twostroke.fleet.router.replica_registry import ReplicaRegistry, ReplicaState
from twostroke.fleet.router.response import ReplicaError
from twostroke.fleet.router.silence import SilenceTimer
from twostroke.fleet.router.upstream import ConnectionPool, UpstreamConnection

_URL = "http://replica:8000"
_BODY = json.dumps(LOAD | {"models": ["tiny"]}).encode()
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
_MARGIN_S = 0.01
_FREEZE_TIMES_S = [4.0 + number / 10 for number in range(15)]


class Transport(asyncio.Transport):
    """The connection to a server that exists only in virtual time."""

    def __init__(self, connection: UpstreamConnection, server: Server) -> None:
        """Connect a connection to a server."""
        super().__init__()
        self._connection, self._server, self._is_closing = connection, server, False

    def is_closing(self) -> bool:
        """Return whether the connection was closed."""
        return self._is_closing

    def abort(self) -> None:
        """Close the connection."""
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)

    def writelines(self, list_of_data: Any) -> None:
        """Ask the server for its health."""
        del list_of_data
        if self._server.refuses:
            self.abort()
        else:
            self._server.answer(self._receive)

    def _receive(self) -> None:
        if not self._is_closing:
            self._connection.data_received(_ANSWER)


class Server(ConnectionPool):
    """A server that answers checks after `latency_s`, streams, and freezes; and the way to it."""

    def __init__(self, replica: Any, latency_s: float) -> None:
        """Stand in for the pool of a replica."""
        super().__init__(replica.address)
        self.latency_s = latency_s
        self.is_frozen = self.refuses = False
        self.given_up_s: float | None = None
        self._loop = asyncio.get_running_loop()

    def answer(self, receive: Any) -> None:
        """Answer a check, unless the server is frozen then."""
        self._loop.call_later(self.latency_s, lambda: None if self.is_frozen else receive())

    async def stream(self, interval_s: float) -> None:
        """Send the bytes of a stream until the server freezes."""
        while not self.is_frozen:
            self.has_heard()
            await asyncio.sleep(interval_s)

    async def _connect(self) -> UpstreamConnection:
        connection = UpstreamConnection(self)
        connection._transport = Transport(connection, self)
        return connection

    def fail(self, error: Exception) -> None:
        """Note when the router gives the server up."""
        if self.given_up_s is None:
            self.given_up_s = self._loop.time()
        super().fail(error)


async def checked(eject_s: float, latency_s: float) -> tuple[Server, Any, HealthChecker]:
    """Return a server, its replica, and the health checks of its router, which run."""
    fleet = ReplicaRegistry(RouteOptions(replicas=(_URL,), eject_s=eject_s))
    checker = HealthChecker(fleet)
    checker._update_replicas()
    [replica] = fleet.replicas.values()
    server = Server(replica, latency_s)
    replica.pool = server
    return server, replica, checker


@pytest.mark.parametrize("latency_s", [0.001, 0.1, 0.4, 1.2])
@pytest.mark.parametrize("eject_s", [1.5, 2.0, 5.0])
def test_a_frozen_replica_is_given_up_when_its_silence_ends(
    eject_s: float, latency_s: float
) -> None:
    async def freeze(freeze_s: float) -> float:
        server, _, checker = await checked(eject_s, latency_s)
        stream = asyncio.create_task(server.stream(0.05))
        await asyncio.sleep(freeze_s)
        assert server.given_up_s is None
        server.is_frozen = True
        heard_s = server.heard_s
        await asyncio.sleep(eject_s + 4)
        await stream
        await checker.stop()
        assert server.given_up_s is not None
        return server.given_up_s - heard_s

    for freeze_s in _FREEZE_TIMES_S:  # at each moment of a check and of the time between two
        delay_s = run_virtually(freeze(freeze_s))
        latest_s = max(eject_s, 0.5 + 1.5)
        assert eject_s - _MARGIN_S <= delay_s <= latest_s + _MARGIN_S, freeze_s


def test_a_frozen_replica_gets_no_requests_after_two_seconds() -> None:
    async def freeze(freeze_s: float) -> None:
        server, replica, checker = await checked(60.0, 0.1)
        stream = asyncio.create_task(server.stream(0.05))
        await asyncio.sleep(freeze_s)
        assert replica.state is ReplicaState.READY
        server.is_frozen = True
        await asyncio.sleep(2.0 + 2 * _MARGIN_S)
        assert replica.state is ReplicaState.DOWN
        assert "silent for 2 s" in replica.reason
        assert server.given_up_s is None
        server.is_frozen = False
        await asyncio.sleep(3.0)
        assert replica.state is ReplicaState.READY
        await stream
        await checker.stop()

    for freeze_s in _FREEZE_TIMES_S:
        run_virtually(freeze(freeze_s))


@pytest.mark.parametrize("interval_s", [0.05, 1.8, None])
def test_a_slow_replica_is_not_given_up(interval_s: float | None) -> None:
    """It answers checks after 1.4 s, or never while it streams; without a stream it is idle."""

    async def be_slow() -> None:
        server, replica, checker = await checked(2.0, 1.4 if interval_s is None else 1.9)
        await asyncio.sleep(2.0)
        if interval_s is not None:
            server.latency_s = 1e9
            stream = asyncio.create_task(server.stream(interval_s))
        for _ in range(300):
            await asyncio.sleep(0.1)
            assert replica.state is ReplicaState.READY, asyncio.get_running_loop().time()
        assert server.given_up_s is None
        if interval_s is not None:
            stream.cancel()
        await checker.stop()

    run_virtually(be_slow())


@pytest.mark.parametrize("latency_s", [0.1, 0.3, 1.2])
@pytest.mark.parametrize("frozen_s", [4.0, 8.0])
def test_a_replica_that_was_given_up_comes_back(frozen_s: float, latency_s: float) -> None:
    async def thaw() -> None:
        server, replica, checker = await checked(5.0, latency_s)
        await asyncio.sleep(4.0)
        server.is_frozen = True
        await asyncio.sleep(frozen_s)
        assert replica.state is ReplicaState.DOWN
        server.is_frozen = False
        await asyncio.sleep(2.0 + 0.5 + latency_s + _MARGIN_S)  # after the check that runs
        assert replica.state is ReplicaState.READY
        await checker.stop()

    run_virtually(thaw())


def test_running_requests_of_a_replica_that_refuses_checks_go_on() -> None:
    """A server that stops closes its listener, and finishes its requests without a byte."""

    async def refuse() -> None:
        server, replica, checker = await checked(2.0, 0.01)
        await asyncio.sleep(3.2)
        server.refuses = True
        await asyncio.sleep(6.0)
        assert replica.state is ReplicaState.DOWN
        assert server.given_up_s is None
        server.refuses = False
        await asyncio.sleep(1.0)
        assert replica.state is ReplicaState.READY
        await checker.stop()

    run_virtually(refuse())


def test_rare_checks_of_many_replicas_must_be_unanswered_for_longer() -> None:
    async def ask() -> None:
        loop = asyncio.get_running_loop()
        pool, _, checker = await checked(5.0, 0.01)
        await checker.stop()
        pool.has_heard()
        given_up: list[float] = []
        timer = SilenceTimer(pool, 5.0, lambda: None, lambda: given_up.append(loop.time()))
        await asyncio.sleep(4.0)  # nobody asks it
        asked_s = loop.time()
        timer.start(4.0)
        await asyncio.sleep(6.0)
        timer.stop()
        assert [time_s - asked_s for time_s in given_up] == [pytest.approx(4.5, abs=_MARGIN_S)]

    run_virtually(ask())


def test_a_pause_of_the_router_is_no_silence_of_its_replicas() -> None:
    async def pause() -> None:
        server, replica, checker = await checked(5.0, 0.3)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        for _ in range(50):
            await asyncio.sleep(0.37)
            loop.spend(30.0)  # with the whole machine, so that answers come late, too
            await asyncio.sleep(3.0)
            assert replica.state is ReplicaState.READY
        assert server.given_up_s is None
        await checker.stop()

    run_virtually(pause())


def test_the_requests_of_a_replica_that_is_given_up_end() -> None:
    async def lose() -> None:
        server, replica, checker = await checked(2.0, 0.01)
        await asyncio.sleep(3.2)
        connection = await replica.pool.take()
        server.is_frozen = True
        with pytest.raises(ReplicaError, match="silent for 2 s"):
            await connection.request(b"")
        await checker.stop()

    run_virtually(lose())
