"""Several models that share memory: loads them on demand, and unloads one for another."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.cancellation import wait_until_set
from twostroke.core.hardware import memory_used
from twostroke.engine.status import Health, StepProgress
from twostroke.server.models.residency import ModelResidency, decide_residency, retention_value

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from twostroke.core.constraint import Constraint
    from twostroke.core.request import EmbeddingParams, Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.client import Caller
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.process.served import EngineFacts, EngineStatus, ServedOutputs
    from twostroke.engine.resumption import (
        AnswerProgress,
        ResumptionLimits,
        ResumptionTotals,
    )
    from twostroke.server.models.on_demand import OnDemandEngine

_TICK_S: Final = 0.05  # between decisions while a request waits
_IDLE_TICK_S: Final = 0.25


class ModelPool:
    """The engines of several models that share memory, loaded and unloaded on demand.

    Wherever the server needs one `ServedEngine`, the pool stands for the engine of its first model.
    """

    def __init__(self, engines: Mapping[str, OnDemandEngine], budget_bytes: int) -> None:
        """Manage `engines`, by model name, which share `budget_bytes` of memory."""
        self.engines = engines
        self.budget_bytes = budget_bytes
        self._default = next(iter(engines.values()))
        self.card: ModelCard = self._default.card
        self._changed = asyncio.Event()
        self._highest_unloaded_value = 0.0
        self.unloaded_s: float | None = None  # when a model was unloaded last
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_ended = False
        for engine in engines.values():
            engine.changed = self._changed.set

    @property
    def facts(self) -> EngineFacts:
        """The facts of the first model's engine, such as its backend and limits."""
        return self._default.facts

    @property
    def health(self) -> Health:
        """READY, since the pool loads a model when a request needs it; STOPPED after `close`."""
        return Health.STOPPED if self._has_ended else Health.READY

    @property
    def progress(self) -> StepProgress:
        """The number of steps of all engines, and the seconds of the longest current step."""
        progresses = [engine.progress for engine in self.engines.values()]
        return StepProgress(
            sum(progress.num_steps for progress in progresses),
            max(progress.step_s for progress in progresses),
        )

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes of the server and its engine processes, as they last reported it."""
        return memory_used() + sum(engine.memory_bytes for engine in self.engines.values())

    @property
    def num_deaths(self) -> int:
        """How often engine processes of any model have died."""
        return sum(engine.num_deaths for engine in self.engines.values())

    @property
    def resumptions(self) -> ResumptionTotals:
        """Counts of the first model's requests that continued after its engine process died."""
        return self._default.resumptions

    def limit_resumption(self, limits: ResumptionLimits) -> None:
        """Set how long requests of any model continue after deaths of its engine process."""
        for engine in self.engines.values():
            engine.limit_resumption(limits)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        caller: Caller,
        hints: Hints,
        progress: Sequence[AnswerProgress] = (),
    ) -> ServedOutputs:
        """Submit prompts to the first model's engine."""
        return await self._default.generate(prompts, params, caller, hints, progress)

    async def embed(
        self, texts: Sequence[Sequence[int]], params: EmbeddingParams, caller: Caller
    ) -> ServedOutputs:
        """Submit texts to the first model's engine, which computes their embeddings."""
        return await self._default.embed(texts, params, caller)

    async def compile(self, constraint: Constraint, limit_s: float = math.inf) -> tuple[str, ...]:
        """Compile a constraint in the first model's engine.

        Returns the schema rules that the grammar does not enforce.
        """
        return await self._default.compile(constraint, limit_s)

    async def read(self, spans: Sequence[tuple[int, int]] = ()) -> EngineStatus:
        """Return the status of the first model's engine."""
        return await self._default.read(spans)

    def flush(self) -> None:
        """Make the engines of all models start steps that they delay to gather more requests."""
        for engine in self.engines.values():
            engine.flush()

    def attach(self, on_end: Callable[[], None]) -> None:  # noqa: ARG002
        """Start to manage the models in the running event loop.

        `on_end` is never called, as models fail separately.
        """
        for engine in self.engines.values():
            engine.attach(lambda: None)
        self._spawn(self._manage())

    def close(self) -> None:
        """End all engine processes, after the event loop has ended."""
        self._has_ended = True
        for engine in self.engines.values():
            engine.close()

    async def _manage(self) -> None:
        """Load and unload models until the pool is closed.

        Decisions are made regularly, and whenever an engine's state changes.
        """
        while not self._has_ended:
            self._changed.clear()
            self._decide()
            is_idle = all(
                engine.residency in {ModelResidency.UNLOADED, ModelResidency.LOADED}
                and not engine.num_waiting
                for engine in self.engines.values()
            )
            await wait_until_set(self._changed, _IDLE_TICK_S if is_idle else _TICK_S)

    def _decide(self) -> None:
        """Load and unload models, and close models to new requests, as `decide_residency` says."""
        now_s = time.monotonic()
        model_uses = [engine.model_use(now_s) for engine in self.engines.values()]
        for model_use in model_uses:
            if model_use.num_running or model_use.used_s >= now_s - _IDLE_TICK_S:
                engine = self.engines[model_use.name]
                load_s = engine.expected_load_s
                engine.value = retention_value(
                    model_use.num_bytes, load_s, self._highest_unloaded_value
                )
        decision = decide_residency(now_s, self.budget_bytes, model_uses)
        for name, engine in self.engines.items():
            engine.set_closed(is_closed=name in decision.close)
        for name in decision.unload:
            self._highest_unloaded_value = max(
                self._highest_unloaded_value, self.engines[name].value
            )
            self.unloaded_s = now_s
            self._spawn(self.engines[name].unload())
        for name in decision.load:
            self.engines[name].wake()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
