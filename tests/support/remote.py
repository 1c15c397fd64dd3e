"""Engines in processes of their own, and what tests ask of them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from twostroke.core.config import (
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    SpeculationOptions,
)
from twostroke.core.request import NO_HINTS
from twostroke.core.sampling import SamplingParams
from twostroke.engine.client import Caller
from twostroke.engine.remote import RemoteEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from twostroke.engine.output import Output
    from twostroke.engine.served import Reading, ServedEngine, ServedOutputs

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


@asynccontextmanager
async def started(model: str, **batch: Any) -> AsyncIterator[RemoteEngine]:
    with RemoteEngine.start(model, options(**batch), "warning", lambda *_: None) as engine:
        engine.attach(lambda: None)
        yield engine


async def texts(outputs: ServedOutputs, count: int = 1) -> list[str]:
    found = [""] * count
    async for output in outputs:
        found[output.index] += output.text
    return found


async def ask(engine: ServedEngine, params: SamplingParams = GREEDY) -> ServedOutputs:
    return await engine.generate(PROMPTS[:1], params, ANYONE, NO_HINTS)


async def first_of(outputs: ServedOutputs) -> Output:
    async for output in outputs:
        return output
    raise AssertionError


async def idle(engine: ServedEngine) -> Reading:
    """Wait until no page is held, which a step in flight may delay."""
    async with asyncio.timeout(20):
        while True:
            reading = await engine.read([(10, 0)])
            if not reading.snapshot.scheduler.num_referenced_pages:
                return reading


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.01)
