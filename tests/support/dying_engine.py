"""An engine that dies, in the process of its server: only its process and its model are fake."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any, cast

from support.fake_model import VOCAB_SIZE, FakeModel
from twostroke.backends.interface import BackendFacts
from twostroke.core.options import BatchOptions, SpeculationOptions
from twostroke.core.transport.connection import Connection
from twostroke.core.transport.event_loop import EventLoopConnection
from twostroke.engine.client import Client
from twostroke.engine.engine import build_speculator
from twostroke.engine.kv_cache import PagePool, PrefixIndex
from twostroke.engine.loop import EngineLoop
from twostroke.engine.process import messages as wire
from twostroke.engine.process.child import EngineProcess
from twostroke.engine.process.main import RequestHandler
from twostroke.engine.process.served import engine_facts, read_status
from twostroke.engine.scheduler import Scheduler, SchedulerConfig, make_policy
from twostroke.model.program.kv_layout import PageGroups

if TYPE_CHECKING:
    import random

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan, StepResult
    from twostroke.engine.model_card import ModelCard

POISON, KILLER = VOCAB_SIZE + 1, VOCAB_SIZE + 2  # what fails alone, and what ends the process
CONTEXT = 48
_SPECULATIONS = (
    SpeculationOptions("off"),
    SpeculationOptions("ngram", count=3),
    SpeculationOptions("lookahead", count=3),
)


class Died(BaseException):
    """Raised where the process of an engine would end."""


class Backend:
    """The fake model as a backend, which some tokens make fail."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.facts = BackendFacts("fake", "fake", 1, num_pages, page_size, (None,), 0, 0)
        self.is_broken = False
        self._model = FakeModel(num_pages, page_size)

    @property
    def state_memory(self) -> None:
        """None, since there are no recurrent states."""

    @property
    def pages(self) -> None:
        """None, since the pages of the fake model have no bytes to transfer."""

    def run(self, plan: StepPlan) -> StepResult:
        tokens = [slice_.request.prompt for slice_ in plan.slices]
        if any(KILLER in prompt for prompt in tokens):
            raise Died
        if self.is_broken:
            raise KeyboardInterrupt
        if any(POISON in prompt for prompt in tokens):
            raise ValueError("a bad token")
        return self._model.run(plan)

    def forget(self, request: Request) -> None:
        assert not request.is_in_flight

    def close(self) -> None:
        """Do nothing, since the fake model holds no resources."""


class Loop(EngineLoop):
    """An engine loop that runs a step when a test says so."""

    _idle_s = 0.0  # it never waits

    def __init__(self, *args: Any) -> None:
        self.end = threading.Event()
        super().__init__(*args)

    def _run(self) -> None:
        self.end.wait()

    def step(self) -> None:
        """Run a step, or fail as the loop's thread would."""
        try:
            self._step()
        except Died:
            raise
        except BaseException:  # noqa: BLE001 whatever it was, the loop fails with it
            EngineLoop._run(self)


class Process(EngineProcess):
    """An engine process that loads, works and dies when a test says so."""

    def __init__(self, rng: random.Random, card: ModelCard) -> None:
        ours, theirs = socket.socketpair()
        self.connection = EventLoopConnection(ours, wire.RECEIVED_BY_SERVER)
        self._theirs = Connection(theirs, wire.RECEIVED_BY_ENGINE)
        self.start_s = 0.0
        self.is_dead = False
        self.handler: RequestHandler | None = None
        self._rng, self._card = rng, card

    @property
    def pid(self) -> int:
        return 0

    def load(self) -> wire.EngineReady:
        """Build the engine."""
        rng, card = self._rng, self._card
        page_size = rng.choice((1, 3, 4, 8))
        num_pages = PageGroups(page_size, (None,)).num_needed(CONTEXT) + rng.randint(0, 10)
        self.backend = Backend(num_pages, page_size)
        self.pool = PagePool(num_pages, page_size)
        self.index = PrefixIndex(self.pool)
        config = SchedulerConfig(
            context_length=CONTEXT,
            max_running=rng.choice((1, 3, 8)),
            token_budget=rng.choice((8, 20, 40)),
            max_waiting_requests=12,
        )
        policy = make_policy(BatchOptions())
        self.scheduler = Scheduler(config, self.pool, self.index, policy)
        speculation = rng.choice(_SPECULATIONS)
        cost = card.cost.per_step()
        speculator = build_speculator(speculation, cost, limits=None, rows_together=1)
        loop = Loop(cast("Any", self.backend), self.scheduler, speculator, cost)
        client = Client(card, loop)
        self.handler = RequestHandler(cast("Any", _Engine(client)), cast("Any", self))
        identity, cache = card.identity, card.cost.cache
        about = wire.EngineCard(CONTEXT, identity, cache, None, None, 0.0)
        return wire.EngineReady(about, engine_facts(client), read_status(client, ()))

    def send(self, message: wire.EngineMessage) -> None:
        """Send a message to the server, as the engine process does."""
        self._theirs.send(message)

    def read(self) -> None:
        """Handle the messages of the server."""
        assert self.handler is not None
        for message in self._theirs.receive_arrived(0):
            self.handler._handle(message)

    def step(self) -> None:
        """Run a step, of which the process may die."""
        assert self.handler is not None
        if not self.scheduler.has_work:
            return
        try:
            cast("Loop", self.handler.loop).step()
        except Died:
            self.kill()
            return
        if self.handler._failure is not None:
            self.send(wire.EngineFailed(self.handler._failure))
            self.kill()

    def kill(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            self._theirs.close()
            if self.handler is not None:
                cast("Loop", self.handler.loop).end.set()

    def describe_end(self) -> str:
        self.kill()
        return "its process was ended"

    def close(self) -> None:
        self.kill()
        self.connection.close()


class _Engine:
    """The parts of an engine that a request handler needs."""

    def __init__(self, client: Client) -> None:
        self.client = client
