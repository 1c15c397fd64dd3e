"""Models that are loaded on demand."""

from __future__ import annotations

import asyncio
import math
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from support.remote import FakeProcess, first_of, options, start_generation
from support.tiny import tiny_of, write_tiny_gguf
from support.waiting import until
from twostroke.core.errors import ModelFormatError, ModelNotLoadedError
from twostroke.core.options import CacheOptions
from twostroke.engine.engine import build
from twostroke.engine.process import messages as wire
from twostroke.engine.process import supervisor
from twostroke.engine.process.main import _ready
from twostroke.server.models.on_demand import OnDemandEngine
from twostroke.server.models.residency import ModelResidency

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    """Return the fake engine processes that are started, which the test controls."""
    started: list[FakeProcess] = []

    def start(_load: object) -> FakeProcess:
        started.append(FakeProcess())
        return started[-1]

    monkeypatch.setattr(supervisor, "EngineProcess", start)
    return started


def make_engine(folder: Path) -> tuple[OnDemandEngine, wire.EngineReady]:
    """Return an engine without a process, and the message of a process that has loaded."""
    path = folder / "tiny.gguf"
    write_tiny_gguf(path)
    with build(str(path), options()) as built:
        ready = _ready(built)
    engine = OnDemandEngine.for_model(None, str(path), options(), "warning", 1 << 30, math.inf)
    return engine, ready


def test_running_requests_are_counted_as_after_loading(tmp_path: Path) -> None:
    """Few slots for recurrent states limit the running requests, before and after a load."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tiny_of("qwen3.5", context_length=256))
    wanted_options = replace(options(max_running=5000, token_budget=8192), cache=CacheOptions())
    engine = OnDemandEngine.for_model(
        None, str(path), wanted_options, "warning", 300 << 20, math.inf
    )
    with closing(engine), build(str(path), engine._supervisor._load.options) as built:
        facts = _ready(built).facts
    assert facts.config.max_running < 5000
    assert engine.facts.config.max_running == facts.config.max_running
    assert engine.facts.backend.num_states == facts.backend.num_states
    assert engine.facts.backend.num_pages == facts.backend.num_pages


def test_process_that_dies_as_it_is_unloaded_has_no_successor(
    tmp_path: Path, processes: list[FakeProcess]
) -> None:
    engine, ready = make_engine(tmp_path)

    async def work() -> None:
        with closing(engine):
            engine.attach(lambda: None)
            engine.wake()
            processes[0].say(ready)
            await until(lambda: engine.residency is ModelResidency.LOADED)
            unload = engine.unload()
            processes[0].theirs.close()
            await asyncio.sleep(0.05)
            await unload
            await asyncio.sleep(0.05)
            assert engine.residency is ModelResidency.UNLOADED
            assert (engine.num_deaths, engine.num_unloads, len(processes)) == (0, 1, 1)

    asyncio.run(work())


def test_requests_wait_for_the_model_and_for_a_model_that_must_go(
    tmp_path: Path, processes: list[FakeProcess]
) -> None:
    engine, ready = make_engine(tmp_path)

    async def work() -> None:
        with closing(engine):
            engine.attach(lambda: None)
            first = await start_generation(engine)
            assert engine.model_use(0.0).waiting_since_s is not None
            engine.wake()
            assert engine.residency is ModelResidency.LOADING
            assert not processes[0].is_asked()
            processes[0].say(ready)
            await until(lambda: engine.residency is ModelResidency.LOADED)
            await until(processes[0].is_asked)
            assert (engine.num_waiting, engine.model_use(0.0).num_running) == (0, 1)
            engine.set_closed(is_closed=True)
            second = await start_generation(engine)
            assert engine.num_waiting == 1
            assert not processes[0].is_asked()
            engine.set_closed(is_closed=False)
            await until(processes[0].is_asked)
            assert engine.num_waiting == 0
            first.cancel()
            second.cancel()

    asyncio.run(work())


def test_failed_load_fails_waiting_requests_and_refuses_new_ones(
    tmp_path: Path, processes: list[FakeProcess]
) -> None:
    engine, _ = make_engine(tmp_path)

    async def work() -> None:
        with closing(engine):
            engine.attach(lambda: None)
            waiting = await start_generation(engine)
            engine.wake()
            processes[0].say(wire.EngineFailed(ModelFormatError("The file is damaged.")))
            processes[0].theirs.close()
            await until(lambda: engine.num_failed_loads)
            with pytest.raises(ModelNotLoadedError):
                await first_of(waiting)
            with pytest.raises(ModelNotLoadedError):
                await start_generation(engine)
            assert engine.num_waiting == 0

    asyncio.run(work())
