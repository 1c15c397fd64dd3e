"""Models that are loaded on demand."""

from __future__ import annotations

import asyncio
import math
from contextlib import closing
from typing import TYPE_CHECKING

from support.remote import FakeProcess, options, until
from support.tiny import write_tiny_gguf
from twostroke.engine.engine import build
from twostroke.engine.process import supervisor
from twostroke.engine.process.main import _ready
from twostroke.server.models.on_demand import OnDemandEngine
from twostroke.server.models.residency import ModelResidency

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_process_that_dies_as_it_is_to_be_unloaded_has_no_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made = str(tmp_path / "tiny.gguf"), list[FakeProcess]()
    write_tiny_gguf(tmp_path / "tiny.gguf")
    with build(model, options()) as built:
        ready = _ready(built)

    def start(_load: object) -> FakeProcess:
        made.append(FakeProcess())
        return made[-1]

    monkeypatch.setattr(supervisor, "EngineProcess", start)
    find = OnDemandEngine.for_model(None, model, options(), "warning", 1 << 30, math.inf)

    async def work() -> None:
        with closing(find) as engine:
            engine.attach(lambda: None)
            engine.wake()
            made[0].say(ready)
            await until(lambda: engine.residency is ModelResidency.IN)
            unload = engine.unload()
            made[0].theirs.close()
            await asyncio.sleep(0.05)
            await unload
            await asyncio.sleep(0.05)
            assert engine.residency is ModelResidency.OUT
            assert (engine.num_deaths, engine.num_unloads, len(made)) == (0, 1, 1)

    asyncio.run(work())
