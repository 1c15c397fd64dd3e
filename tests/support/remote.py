"""Engine processes for tests, and a stand-in for one."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from twostroke.core.options import (
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    SpeculationOptions,
)
from twostroke.core.request import NO_HINTS
from twostroke.core.sampling import SamplingParams
from twostroke.core.transport.event_loop import EventLoopConnection
from twostroke.engine.client import Caller
from twostroke.engine.engine import build
from twostroke.engine.process import messages as wire
from twostroke.engine.process.main import _ready
from twostroke.engine.process.remote import RemoteEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from twostroke.engine.output import Output
    from twostroke.engine.process.served import EngineStatus, ServedEngine, ServedOutputs

PROMPTS = [[1, 2, 3], [4, 5]]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True)
ANYONE = Caller()


def options(**batch: Any) -> EngineOptions:
    return EngineOptions(
        ComputeOptions(num_threads=1),
        CacheOptions(memory_bytes=8 << 20),
        BatchOptions(**batch),
        SpeculationOptions("off"),  # how tokens come together then depends on time
        accept_quality=True,  # its weights are random
    )


class FakeProcess:
    """A stand-in for an engine process; the test holds its end of the socket, `theirs`."""

    pid = 0
    start_s = 0.0

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.connection = EventLoopConnection(ours, wire.RECEIVED_BY_SERVER)
        self.is_killed = False

    def say(self, message: wire.EngineMessage) -> None:
        self.theirs.sendall(wire.RECEIVED_BY_SERVER.frame(message))

    def is_asked(self) -> bool:
        """Whether something was sent to the process since the last call."""
        self.theirs.setblocking(False)
        try:
            return bool(self.theirs.recv(1 << 16))
        except BlockingIOError:
            return False

    def kill(self) -> None:
        self.is_killed = True

    def describe_end(self) -> str:
        return "it was ended"

    def close(self) -> None:
        self.connection.close()
        self.theirs.close()


@asynccontextmanager
async def faked(model: str) -> AsyncIterator[tuple[RemoteEngine, FakeProcess]]:
    with build(model, options()) as engine:
        card, ready = engine.client.card, _ready(engine)
    process: Any = FakeProcess()
    load = wire.LoadModel(wire.VERSION, model, options(), "warning")
    engine_ = RemoteEngine(load, card, process, ready)
    engine_.supervisor._num_failures = 1000  # no other process follows
    engine_.attach(lambda: None)
    try:
        yield engine_, process
    finally:
        engine_.supervisor._has_ended = True
        for task in list(engine_.supervisor._tasks):
            task.cancel()
        if not process.is_killed:
            process.connection.detach()
        process.close()


@asynccontextmanager
async def started(model: str, **batch: Any) -> AsyncIterator[RemoteEngine]:
    with RemoteEngine.start(model, options(**batch), "warning", lambda *_: None) as engine:
        engine.attach(lambda: None)
        yield engine


async def texts(outputs: ServedOutputs, count: int = 1) -> list[str]:
    result = [""] * count
    async for output in outputs:
        result[output.index] += output.text
    return result


async def start_generation(engine: ServedEngine, params: SamplingParams = GREEDY) -> ServedOutputs:
    return await engine.generate(PROMPTS[:1], params, ANYONE, NO_HINTS)


async def first_of(outputs: ServedOutputs) -> Output:
    async for output in outputs:
        return output
    raise AssertionError


async def idle(engine: ServedEngine) -> EngineStatus:
    """Wait until no page is held, which a step in flight may delay; return the status."""
    async with asyncio.timeout(60):
        while True:
            reading = await engine.read([(10, 0)])
            if not reading.snapshot.scheduler.num_referenced_pages:
                return reading
