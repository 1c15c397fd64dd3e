"""However many killers run, a harmless request is answered, and a killer ends three engines."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from twostroke.core.errors import EngineDiedError, EngineKillerError
from twostroke.fleet.router import proxied_request
from twostroke.fleet.router.engine_killers import MAX_TRIES
from twostroke.fleet.router.forward import Forwarder
from twostroke.fleet.router.options import RouteOptions
from twostroke.fleet.router.proxied_request import ProxiedRequest
from twostroke.fleet.router.replica_registry import (
    NoReplicaError,
    ReplicaFacts,
    ReplicaRegistry,
    ReplicaState,
)
from twostroke.fleet.router.response import FailedReplicaError, Head
from twostroke.fleet.router.upstream import Address
from twostroke.fleet.routing.prompt import key_without_prompt
from twostroke.server.http.error_forms import error_form
from twostroke.server.http.request_context import STATE_KEY, ServedRequest

if TYPE_CHECKING:
    from collections.abc import Coroutine

_DIED = b'{"error":{"message":"%s"}}' % EngineDiedError.SENTENCE.encode()
_ANSWER = b'{"text":"hello"}'
_RESTART_S = 3.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: its clock jumps to the next timer."""

    def __init__(self) -> None:
        """Start at 1000 seconds."""
        self.now_s = 1000.0
        loop = self

        class Selector(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> Any:
                loop.now_s += timeout or 0.0
                return super().select(0)

        super().__init__(Selector())

    def time(self) -> float:
        """Return the virtual time."""
        return self.now_s


class Engine:
    """The engine behind one replica, with all requests that it computes."""

    def __init__(self, sim: Simulation, index: int) -> None:
        """Start the engine."""
        self.sim = sim
        self.replica = sim.fleet.add(Address.of(f"http://replica-{index}"))
        self.replica.pool = self  # type: ignore[assignment]
        self.computing: list[asyncio.Future[None]] = []
        self.start()

    def start(self) -> None:
        """Be ready again after a death."""
        self.sim.fleet.set_facts(self.replica, ReplicaFacts(models=("tiny",)))
        self.sim.fleet.set_state(self.replica, ReplicaState.READY)

    async def take(self) -> Connection:
        """Return a connection to the engine, like a pool."""
        return Connection(self)

    def die(self) -> None:
        """Fail all requests that are computed, and start again a little later."""
        self.sim.fleet.set_state(self.replica, ReplicaState.DOWN, "It says recovering.")
        for computed in self.computing:
            if not computed.done():
                computed.set_exception(FailedReplicaError("died"))
        asyncio.get_running_loop().call_later(_RESTART_S, self.start)


class Connection:
    """A connection to an engine, on which a request is computed or kills the engine."""

    num_requests = 1
    has_answered = True
    is_read = True
    sink = None

    def __init__(self, engine: Engine) -> None:
        """Belong to an engine."""
        self.engine = engine
        self.is_cut = engine.sim.random.random() < engine.sim.cut_ratio

    async def request(self, _head: bytes, body: bytes, *, is_head: bool) -> Head:
        """Compute a request; its body is its name, and after how long it ends or kills."""
        assert not is_head
        name, seconds = body.decode().split()
        loop, engine = asyncio.get_running_loop(), self.engine
        computed: asyncio.Future[None] = loop.create_future()
        engine.computing.append(computed)

        def end() -> None:
            if computed.done():
                return
            if name.startswith("killer"):
                engine.sim.deaths[name] += 1
                engine.die()
            else:
                computed.set_result(None)

        loop.call_later(float(seconds), end)
        try:
            await computed
        except FailedReplicaError:
            if self.is_cut:
                raise
            self.body = _DIED
            return Head(503, [])
        finally:
            engine.computing.remove(computed)
        self.body = _ANSWER
        return Head(200, [(b"content-type", b"application/json")])

    async def read(self) -> bytes:
        """Return the body, then nothing."""
        body, self.body = self.body, b""
        return body

    def release(self) -> None:
        """Do nothing."""

    def fail(self, error: Exception) -> None:
        """Do nothing."""


class Simulation:
    """A router's forwarder before simulated engines."""

    def __init__(self, num_replicas: int, *, seed: int = 0, cut_ratio: float = 0.0) -> None:
        """Start all engines; a ratio of connections is cut where an engine dies."""
        self.random = random.Random(seed)
        self.cut_ratio = cut_ratio
        self.deaths: Counter[str] = Counter()
        self.fleet = ReplicaRegistry(RouteOptions(replicas=("http://a",), wait_s=600.0))
        self.fleet.dispatcher._clock = asyncio.get_running_loop().time
        self.forwarder = Forwarder(self.fleet)
        self.forwarder.killers._clock = asyncio.get_running_loop().time
        self.engines = [Engine(self, index) for index in range(num_replicas)]

    async def send(self, name: str, seconds: float) -> str:
        """Send a request, and return its outcome: a status, or the name of the error."""
        status = 0

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        scope: dict[str, Any] = {
            "type": "http", "method": "POST", "path": "/v1/completions", "headers": [],
            "raw_path": b"/v1/completions", "query_string": b"", "extensions": {},
        }  # fmt: skip
        form = error_form(scope)
        scope["state"] = {STATE_KEY: ServedRequest("1", form, "POST", "/v1/completions")}
        body = f"{name} {seconds}".encode()
        request = ProxiedRequest(
            scope, receive, send, body=body, key=key_without_prompt(b""), model="tiny"
        )
        request.content = name.encode()
        try:
            self.forwarder.killers.check(request.content)
            await self.forwarder.forward(request)
            outcome = str(status)
        except (EngineKillerError, FailedReplicaError, NoReplicaError) as error:
            outcome = type(error).__name__
        return outcome


def run(coroutine: Coroutine[Any, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loop = VirtualLoop()
    clock = SimpleNamespace(monotonic=loop.time)  # not the clock of other threads
    monkeypatch.setattr(proxied_request, "time", clock)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(coroutine)


# With one replica, deaths take so long that the router forgets lost connections meanwhile.
@pytest.mark.parametrize(("num_replicas", "cut_ratio"), [(1, 0.0), (2, 0.0), (6, 0.0), (6, 0.3)])
def test_harmless_requests_are_answered_and_killers_end_three_engines(
    num_replicas: int, cut_ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def campaign(seed: int) -> None:
        sim = Simulation(num_replicas, seed=seed, cut_ratio=cut_ratio)

        async def client(number: int) -> None:
            for _ in range(30):
                await asyncio.sleep(sim.random.uniform(0, 0.5))
                name = f"harmless-{sim.random.randrange(8)}"  # several clients send the same
                outcome = await sim.send(name, sim.random.choice([0.01, 0.3, 2.0]))
                assert outcome == "200", (seed, name, outcome, sim.deaths)

        async def killer(number: int) -> None:
            await asyncio.sleep(sim.random.uniform(0, 20))
            name, seconds = f"killer-{number}", sim.random.choice([0.0, 0.2, 1.0])
            outcome = ""
            while outcome != "EngineKillerError":
                outcome = await sim.send(name, seconds)

        await asyncio.gather(*map(client, range(6)), *map(killer, range(12)))
        assert len(sim.deaths) == 12
        assert max(sim.deaths.values()) == MAX_TRIES, seed

    for seed in range(10):
        run(campaign(seed), monkeypatch)


def suspect(sim: Simulation, name: str) -> None:
    """Let two engines die with a request, beside other requests."""
    for url in ("http://a", "http://b"):
        now_s = asyncio.get_running_loop().time()
        sim.forwarder.killers.note_death(name.encode(), url, now_s, is_alone=False)


async def after(delay_s: float, coroutine: Coroutine[Any, Any, str]) -> tuple[str, float]:
    """Return the outcome of a request that is sent later, and when it ended."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    await asyncio.sleep(delay_s)
    return await coroutine, round(loop.time() - start_s)


def test_a_suspect_waits_for_an_empty_replica_and_others_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def campaign() -> None:
        sim = Simulation(2)
        suspect(sim, "harmless-suspect")
        ends = await asyncio.gather(
            after(0, sim.send("harmless-a", 10)),
            after(0, sim.send("harmless-b", 10)),
            after(1, sim.send("harmless-suspect", 30)),
            after(11, sim.send("killer-0", 0)),
            after(12, sim.send("harmless-c", 1)),
        )
        assert ends[2] == ("200", 40)  # after the others, and beside nothing
        assert ends[3][0] == "EngineKillerError"
        assert ends[4][0] == "200"

    run(campaign(), monkeypatch)


def test_a_suspect_that_gets_no_replica_for_itself_is_told_so_after_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def campaign() -> None:
        sim = Simulation(1)
        suspect(sim, "harmless-suspect")
        ends = await asyncio.gather(
            after(0, sim.send("harmless-a", 200)), after(1, sim.send("harmless-suspect", 1))
        )
        assert ends[1] == ("NoReplicaError", 61)
        assert await sim.send("harmless-suspect", 1) == "200"  # the reservation has ended

    run(campaign(), monkeypatch)


def test_the_only_replica_is_reserved_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def campaign() -> None:
        sim = Simulation(1)
        suspect(sim, "harmless-suspect")
        ends = await asyncio.gather(
            after(0, sim.send("harmless-suspect", 500)),
            after(1, sim.send("harmless-a", 1)),
            after(2, sim.send("killer-0", 0)),
        )
        assert ends[1] == ("200", 92)  # it waited 90 seconds
        assert ends[0][0] == "200"  # the death beside the killer does not count against it

    run(campaign(), monkeypatch)


def test_a_router_that_stops_lets_no_suspect_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def campaign() -> None:
        sim = Simulation(1)
        suspect(sim, "harmless-suspect")
        asyncio.get_running_loop().call_later(5, sim.fleet.stop_waiting)
        ends = await asyncio.gather(
            after(0, sim.send("harmless-a", 20)), after(1, sim.send("harmless-suspect", 1))
        )
        assert ends[1] == ("NoReplicaError", 5)

    run(campaign(), monkeypatch)


def test_a_router_that_stops_lets_no_copy_wait_for_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def campaign() -> None:
        sim = Simulation(2)
        suspect(sim, "harmless-suspect")
        asyncio.get_running_loop().call_later(5, sim.fleet.stop_waiting)
        ends = await asyncio.gather(
            after(0, sim.send("harmless-suspect", 20)), after(1, sim.send("harmless-suspect", 1))
        )
        assert ends[0][0] == "200"
        assert ends[1][0] == "NoReplicaError"
        assert ends[1][1] <= 6

    run(campaign(), monkeypatch)


def test_a_replica_that_did_not_drain_serves_others_before_it_is_reserved_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def campaign() -> None:
        sim = Simulation(1)
        suspect(sim, "harmless-suspect")
        ends = await asyncio.gather(
            after(0, sim.send("harmless-a", 300)),
            after(1, sim.send("harmless-suspect", 1)),
            after(62, sim.send("harmless-suspect", 1)),
            after(65, sim.send("harmless-b", 1)),
        )
        assert ends[1][0] == "NoReplicaError"
        assert ends[3] == ("200", 66), "it does not wait for another drain"

    run(campaign(), monkeypatch)
