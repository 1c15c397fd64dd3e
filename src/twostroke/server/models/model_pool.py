"""Several models that share memory: each starts when asked for, and makes room for others."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.cancellation import wait_until_set
from twostroke.core.hardware import memory_used
from twostroke.engine.status import Health, StepProgress
from twostroke.server.models.residency import ModelResidency, decide, worth_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from twostroke.core.constraint import Constraint
    from twostroke.core.embedding import EmbeddingParams
    from twostroke.core.request import Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.client import Caller
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.process.served import EngineFacts, EngineStatus, ServedOutputs
    from twostroke.server.models.on_demand import OnDemandEngine

_TICK_S: Final = 0.05  # between decisions while a request waits
_QUIET_TICK_S: Final = 0.25


class ModelPool:
    """Implements `ServedEngine` with the first of several engines, and looks after all of them."""

    def __init__(self, engines: Mapping[str, OnDemandEngine], budget_bytes: int) -> None:
        """Let `engines`, by name, share `budget_bytes` of memory."""
        self.engines = engines
        self.budget_bytes = budget_bytes
        self._first = next(iter(engines.values()))
        self.card: ModelCard = self._first.card
        self._changed = asyncio.Event()
        self._gone_worth = 0.0
        self.unloaded_s: float | None = None  # when a model's pages went last
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_ended = False
        for engine in engines.values():
            engine.changed = self._changed.set

    @property
    def facts(self) -> EngineFacts:
        """The first engine's."""
        return self._first.facts

    @property
    def health(self) -> Health:
        """READY, as each request is answered once its model is loaded; STOPPED after the end."""
        return Health.STOPPED if self._has_ended else Health.READY

    @property
    def progress(self) -> StepProgress:
        """The steps of all engines, and the longest present one."""
        all_ = [engine.progress for engine in self.engines.values()]
        return StepProgress(sum(one.num_steps for one in all_), max(one.step_s for one in all_))

    @property
    def memory_bytes(self) -> int:
        """What all processes use, as far as is known."""
        return memory_used() + sum(engine.memory_bytes for engine in self.engines.values())

    @property
    def num_deaths(self) -> int:
        """How often processes have died."""
        return sum(engine.num_deaths for engine in self.engines.values())

    async def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, caller: Caller, hints: Hints
    ) -> ServedOutputs:
        """Queue prompts for the first model."""
        return await self._first.generate(prompts, params, caller, hints)

    async def embed(
        self, texts: Sequence[Sequence[int]], params: EmbeddingParams, caller: Caller
    ) -> ServedOutputs:
        """Queue texts for the first model."""
        return await self._first.embed(texts, params, caller)

    async def compile(self, constraint: Constraint, limit_s: float = math.inf) -> tuple[str, ...]:
        """Compile a constraint for the first model."""
        return await self._first.compile(constraint, limit_s)

    async def read(self, spans: Sequence[tuple[int, int]] = ()) -> EngineStatus:
        """Return what the first engine counts."""
        return await self._first.read(spans)

    def flush(self) -> None:
        """Start all batches that are not full."""
        for engine in self.engines.values():
            engine.flush()

    def attach(self, on_end: Callable[[], None]) -> None:  # noqa: ARG002
        """Begin in the running event loop; a model that cannot be loaded ends nothing."""
        for engine in self.engines.values():
            engine.attach(lambda: None)
        self._spawn(self._look_after())

    def close(self) -> None:
        """End all processes, after the event loop."""
        self._has_ended = True
        for engine in self.engines.values():
            engine.close()

    async def _look_after(self) -> None:
        while not self._has_ended:
            self._changed.clear()
            self._decide()
            is_quiet = all(
                engine.residence in {ModelResidency.OUT, ModelResidency.IN}
                and not engine.num_waiting
                for engine in self.engines.values()
            )
            await wait_until_set(self._changed, _QUIET_TICK_S if is_quiet else _TICK_S)

    def _decide(self) -> None:
        """Do what `decide` says now."""
        now_s = time.monotonic()
        views = [engine.view(now_s) for engine in self.engines.values()]
        for view in views:
            if view.num_running or view.used_s >= now_s - _QUIET_TICK_S:
                engine = self.engines[view.name]
                cost_s = engine.expected_load_s
                engine.worth = worth_of(view.num_bytes, cost_s, self._gone_worth)
        decision = decide(now_s, self.budget_bytes, views)
        for name, engine in self.engines.items():
            engine.close_door(is_closed=name in decision.close)
        for name in decision.unload:
            self._gone_worth = max(self._gone_worth, self.engines[name].worth)
            self.unloaded_s = now_s
            self._spawn(self.engines[name].leave())
        for name in decision.load:
            self.engines[name].wake()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
