"""An engine that is loaded on demand: its requests wait until its process has loaded the model."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Final, Self

from msgspec.structs import replace

from twostroke.backends.create import is_native
from twostroke.backends.interface import BackendFacts
from twostroke.backends.kv_size import WORKING_BYTES
from twostroke.backends.recipe import EngineRecipe
from twostroke.core.errors import (
    MemoryLimitError,
    ModelFormatError,
    ModelNotLoadedError,
    OverloadedError,
    TwostrokeError,
)
from twostroke.core.message_text import counted_noun, format_bytes
from twostroke.core.request import Pooling
from twostroke.engine.client import UNSAMPLED, new_request
from twostroke.engine.counters import Counters
from twostroke.engine.engine import make_card
from twostroke.engine.process import messages as wire
from twostroke.engine.process.remote import RemoteEngine
from twostroke.engine.process.served import EngineFacts, EngineStatus
from twostroke.engine.process.supervisor import expected_load_s
from twostroke.engine.scheduler import SchedulerConfig, SchedulerStats
from twostroke.engine.scheduler.config import max_len
from twostroke.engine.scheduler.recurrent_states import with_room_for_states
from twostroke.engine.speculation import SpeculationStats
from twostroke.engine.status import Health, RunningRequests, StepProgress
from twostroke.model.program.kv_layout import PageGroups
from twostroke.model.weights import weights_identity
from twostroke.server.models.residency import ModelResidency, ModelUse

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from twostroke.backends.kv_size import CacheSize
    from twostroke.backends.machine_limits import MachineLimits
    from twostroke.core.constraint import Constraint
    from twostroke.core.options import EngineOptions
    from twostroke.core.request import EmbeddingParams, Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.client import Caller
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.process.pending import RemoteOutputs
    from twostroke.engine.resumption import (
        AnswerProgress,
        ResumptionLimits,
        ResumptionTotals,
    )

_RETRY_AFTER_S: Final = 5.0  # requests are refused for this time after a failed load
_logger = logging.getLogger("twostroke.serve")


class OnDemandEngine:
    """A model's engine whose process runs only while the model is loaded: from `wake` to `unload`.

    It owns a `RemoteEngine`, and observes its process: the supervisor of the process calls the
    `on_` methods.

    Attributes:
        num_bytes: the memory that the loaded model uses.
        default_keep_s: how many seconds the model stays loaded without a request.
        keep_s: this time, as set by the latest request that named a time.
        is_closed: whether the model will be unloaded, so that new requests wait.
        num_loads, num_unloads, num_failed_loads: counts since the server's start.
        loading_s: the total time of loading.
        value: the model's `retention_value`, which the pool sets.
        changed: called when the pool should decide again which models are loaded.
    """

    def __init__(
        self,
        load_: wire.LoadModel,
        card: ModelCard,
        ready: wire.EngineReady,
        num_bytes: int,
        keep_s: float,
    ) -> None:
        """Create the engine of an unloaded model.

        Args:
            load_: the message that makes an engine process load the model.
            card: the model's facts.
            ready: the engine's facts, such as its backend, until a process has sent its own.
            num_bytes: the memory that the loaded model uses.
            keep_s: how many seconds the model stays loaded without a request.
        """
        self._engine = RemoteEngine(load_, card, process=None, ready=ready, observer=self)
        self._pending = self._engine.pending
        self._supervisor = self._engine.supervisor
        self.card = card
        self.num_bytes = num_bytes
        self._is_on_gpu = load_.options.compute.backend == "gpu"
        self.default_keep_s = self.keep_s = keep_s
        self.is_closed = False
        self.num_loads = self.num_unloads = self.num_failed_loads = 0
        self.loading_s = self.value = 0.0
        self.changed: Callable[[], None] = lambda: None
        self._pending.is_up = False
        self._began_s = self._used_s = self._loaded_s = time.monotonic()
        # The time of a request to load the model for which no prompt waits.
        self._load_requested_s: float | None = None
        self._is_unloading = False
        self._refusal: tuple[float, ModelNotLoadedError] | None = None

    @classmethod
    def for_model(
        cls,
        name: str | None,
        model: str,
        options: EngineOptions,
        log_level: str,
        budget_bytes: int,
        keep_s: float,
    ) -> Self:
        """Create the engine of `model` without loading it; only the model's header is read.

        The model is served as `name`, or under its own name if `name` is None.

        Raises:
            MemoryLimitError: the model does not fit into `budget_bytes`, or the recurrent states
                of a static batch do not.
            ModelFormatError: the model's files are not valid or not supported.
        """
        recipe = EngineRecipe.of(model, options)
        gpu_working_bytes = recipe.gpu_working_bytes
        try:
            recipe, size = _with_cache_size(recipe, budget_bytes - gpu_working_bytes)
        except MemoryLimitError as error:
            limit = f"With {format_bytes(budget_bytes)} of memory for all models (--memory), "
            raise MemoryLimitError(limit + str(error)) from None
        options = recipe.options
        card = make_card(
            recipe,
            recipe.build_tokenizer(),
            context_length=size.context_length,
            cost=recipe.cost_model(size.kv_format),
            identity=weights_identity(recipe.loaded.tensors),
        )
        facts = EngineFacts(
            _backend_facts(recipe, size),
            _scheduler_config(recipe, size),
            (),
            keeps_pages=options.offload.is_used,
        )
        engine_card = wire.EngineCard(
            context_length=size.context_length,
            identity=card.identity,
            cache=card.cost.cache,
            draft=None,
            hardware=None,
            longest_step_s=0.0,
        )
        ready = wire.EngineReady(engine_card, facts, _initial_status(card, size.num_pages))
        num_bytes = recipe.weight_bytes + size.cache_bytes + WORKING_BYTES + gpu_working_bytes
        message = wire.LoadModel(wire.VERSION, model, options, log_level)
        return cls(message, replace(card, name=name or card.name), ready, num_bytes, keep_s)

    @property
    def facts(self) -> EngineFacts:
        """The facts of the engine, such as its backend, as its latest process has sent them."""
        return self._engine.facts

    @property
    def limits(self) -> MachineLimits | None:
        """The machine's compute and memory limits, as the latest process has measured them."""
        return self._engine.limits

    @property
    def health(self) -> Health:
        """Whether the engine can answer requests now."""
        return self._engine.health

    @property
    def progress(self) -> StepProgress:
        """The number of the engine's steps, and the seconds of its current step."""
        return self._engine.progress

    @property
    def num_deaths(self) -> int:
        """How often the engine's process has died."""
        return self._engine.num_deaths

    @property
    def resumptions(self) -> ResumptionTotals:
        """Counts of the requests that continued after a death of the engine's process."""
        return self._engine.resumptions

    def limit_resumption(self, limits: ResumptionLimits) -> None:
        """Set how long requests continue after deaths of the engine's process."""
        self._engine.limit_resumption(limits)

    @property
    def residency(self) -> ModelResidency:
        """Whether the model is loaded, loading, unloading or unloaded."""
        if self._is_unloading:
            return ModelResidency.UNLOADING
        if self._supervisor.is_resting:
            return ModelResidency.UNLOADED
        return ModelResidency.LOADED if self._supervisor.is_up else ModelResidency.LOADING

    @property
    def load_s(self) -> float:
        """The seconds that the latest load of the model took; an estimate before the first load."""
        return self._supervisor.load_s or self.expected_load_s

    @property
    def expected_load_s(self) -> float:
        """The seconds that loading the model should take, estimated from its size."""
        return expected_load_s(self.num_bytes)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for the model to be loaded."""
        return len(self._pending.unsent)

    @property
    def expires_s(self) -> float:
        """The seconds until the model is unloaded if no request arrives."""
        return max(0.0, self._used_s + self.keep_s - time.monotonic())

    @property
    def memory_bytes(self) -> int:
        """The memory of the engine's process when it last reported; 0 without a loaded model."""
        return 0 if self._supervisor.is_resting else self._engine.process_memory_bytes

    def model_use(self, now_s: float) -> ModelUse:
        """Return the facts by which `decide_residency` chooses models to load and unload.

        A model with running requests counts as used at `now_s`, a monotonic time.
        """
        is_compiling = self._engine.is_compiling
        state = self.residency
        is_loaded = self._supervisor.is_up
        num_running = (
            len(self._pending.open) - len(self._pending.unsent) + (is_compiling and is_loaded)
        )
        if num_running and is_loaded:
            self._used_s = now_s
        if is_compiling and not is_loaded and self._load_requested_s is None:
            self._load_requested_s = now_s
        waiting_times_s = [outputs.received_s for outputs in self._pending.unsent.values()]
        if self._load_requested_s is not None:
            waiting_times_s.append(self._load_requested_s)
        return ModelUse(
            name=self.card.name,
            num_bytes=self.num_bytes,
            load_s=self.load_s,
            state=state,
            waiting_since_s=min(waiting_times_s, default=None),
            used_s=self._used_s,
            loaded_s=self._loaded_s,
            num_running=num_running,
            keep_s=self.keep_s,
            value=self.value,
            is_closed=self.is_closed,
        )

    def request_load(self) -> None:
        """Ask the pool to load the model, although no prompt waits for it."""
        if self._supervisor.is_resting and self._load_requested_s is None:
            self._load_requested_s = time.monotonic()
        self._used_s = time.monotonic()
        self.changed()

    def set_keep_s(self, keep_s: float) -> None:
        """Set how many seconds the model stays loaded without a request."""
        self.keep_s = keep_s
        self.changed()

    def set_closed(self, *, is_closed: bool) -> None:
        """Make new requests wait, because another model needs the memory; or let them run again."""
        if is_closed != self.is_closed:
            self.is_closed = is_closed
            self._pending.is_up = self._supervisor.is_up and not is_closed
            self._pending.send_waiting()

    def wake(self) -> None:
        """Start a process that loads the model."""
        _logger.info("Loading %s.", self.card.name)
        self._used_s = time.monotonic()
        try:
            self._supervisor.wake()
        except TwostrokeError as error:
            self.on_load_failure(error)

    def unload(self) -> Coroutine[None, None, None]:
        """Stop using the model's idle process now; return the coroutine that ends the process."""
        self._pending.is_up = self.is_closed = False
        self._is_unloading = True
        self.keep_s = self.default_keep_s
        self._supervisor.retire()  # at once, so that no other process starts if this one dies
        return self._rest()

    async def _rest(self) -> None:
        """End the model's process, and wait until its memory is free."""
        began_s = time.monotonic()
        try:
            await self._supervisor.rest()
        finally:
            self._is_unloading = False
        self.num_unloads += 1
        _logger.info("Unloaded %s in %.1f s.", self.card.name, time.monotonic() - began_s)
        self.changed()

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        caller: Caller,
        hints: Hints,
        progress: Sequence[AnswerProgress] = (),
    ) -> RemoteOutputs:
        """Submit prompts, which wait until the model is loaded.

        Raises:
            ModelNotLoadedError: loading the model failed a few seconds ago.
            RequestError: a prompt can never fit.
        """
        message = self._engine.generate_message(prompts, params, caller, hints, progress)
        return await self._submit(message, num_answers=len(prompts) * params.n)

    async def embed(
        self, texts: Sequence[Sequence[int]], params: EmbeddingParams, caller: Caller
    ) -> RemoteOutputs:
        """Submit texts to embed, which wait until the model is loaded.

        Raises:
            ModelNotLoadedError: loading the model failed a few seconds ago.
            RequestError: a text can never fit.
        """
        message = self._engine.embed_message(texts, params, caller)
        return await self._submit(message, num_answers=len(texts))

    async def _submit(
        self, message: wire.Generate | wire.EmbedTexts, num_answers: int
    ) -> RemoteOutputs:
        """Send a request to the model's process, or let it wait until the model is loaded."""
        self._used_s = time.monotonic()
        if self._supervisor.is_up and not self.is_closed:
            return await self._engine.submit(message, num_answers)
        self._check_fits(message)
        self._check_may_load()
        # The objective for the time to first token does not include loading.
        caller = replace(message.caller, start_within_s=math.inf)
        outputs = self._engine.open_call(replace(message, caller=caller), num_answers)
        if not outputs.accepted.done():
            outputs.accepted.set_result(None)  # so that a stream can send keep-alive bytes
        self.changed()
        return outputs

    async def compile(self, constraint: Constraint, limit_s: float = math.inf) -> tuple[str, ...]:
        """Compile a constraint when the model is loaded.

        Returns the schema rules that the grammar does not enforce.

        Raises:
            ModelNotLoadedError: loading the model failed a few seconds ago.
            OverloadedError: too many requests wait for the model.
        """
        if not self._supervisor.is_up:
            self._check_may_load()
            num_inquiries = self._engine.num_inquiries
            if num_inquiries >= self.facts.config.max_waiting_requests:
                requests = counted_noun(num_inquiries, "request waits", "requests wait")
                raise OverloadedError(f"{requests} for the model.")
        self.changed()
        return await self._engine.compile(constraint, limit_s)

    async def read(self, spans: Sequence[tuple[int, int]] = ()) -> EngineStatus:
        """Return the engine's status; if the model is not loaded, its last status."""
        return await self._engine.read(spans)

    def flush(self) -> None:
        """Make the engine start a step that it delays to gather more requests."""
        self._engine.flush()

    def attach(self, on_end: Callable[[], None]) -> None:
        """Start to work in the running event loop.

        `on_end` is called if the supervisor gives up, so that no process can load the model.
        """
        self._engine.attach(on_end)

    def close(self) -> None:
        """End the model's process, after the event loop has ended."""
        self._engine.close()

    def _check_fits(self, message: wire.Generate | wire.EmbedTexts) -> None:
        """Check that a request can ever run, before the model is loaded for it.

        Raises:
            RequestError: a prompt is empty.
            ContextLengthError: a prompt is too long.
        """
        backend = self.facts.backend
        context_length = self.facts.config.context_length
        groups = PageGroups(backend.page_size, backend.windows)
        max_tokens = groups.max_tokens(backend.num_pages, context_length)
        caller = message.caller
        if isinstance(message, wire.EmbedTexts):
            requests = [
                new_request(tokens, UNSAMPLED, caller, Pooling.LAST) for tokens in message.texts
            ]
        else:
            requests = [new_request(tokens, message.params, caller) for tokens in message.prompts]
        for request in requests:
            max_len(request, context_length, max_tokens)

    def _check_may_load(self) -> None:
        """Check that loading the model has not failed a few seconds ago.

        Raises:
            ModelNotLoadedError: loading failed a few seconds ago.
        """
        if self._refusal is not None and time.monotonic() < self._refusal[0]:
            raise self._refusal[1]

    # The methods below implement `ProcessObserver`: the supervisor calls them.

    def on_message(self, message: wire.EngineMessage) -> None:
        """Handle a message from the model's process."""
        self._engine.on_message(message)

    def on_tick(self) -> None:
        """Fail the requests whose timeout has passed."""
        self._engine.on_tick()

    def on_give_up(self, reason: str) -> None:
        """Fail all requests, because no other process will be started for the model."""
        self._engine.on_give_up(reason)

    def on_restart(self, ready: wire.EngineReady) -> None:
        """Send the waiting requests to a new process, which has loaded the model."""
        if ready.card.identity != self.card.identity:
            reason = "Its files are not those with which the server was started: start it again."
            self._supervisor.refuse(ModelFormatError(reason))
            return
        self._refusal = None
        self._load_requested_s = None
        self._used_s = self._loaded_s = time.monotonic()
        self.num_loads += 1
        self.loading_s += self._supervisor.load_s
        if not self._is_on_gpu:  # a process does not see the GPU's memory
            self.num_bytes = max(self.num_bytes, ready.status.memory_bytes)
        self._engine.update_facts(ready)
        requests = counted_noun(len(self._pending.open), "request")
        load_s = self._supervisor.load_s
        _logger.info("Loaded %s in %.1f s; %s had waited.", self.card.name, load_s, requests)
        self._pending.is_up = not self.is_closed
        self._engine.send_waiting()
        self.changed()

    def on_death(self) -> bool:
        """Keep the requests for the next process, where running requests continue.

        Returns whether one of these requests may have caused the process's death.
        """
        is_to_blame = self._engine.on_death()
        self.changed()
        return is_to_blame

    def on_load_failure(self, error: TwostrokeError) -> bool:
        """Fail all waiting requests, and refuse new requests for some seconds.

        Returns True: the supervisor starts no other process by itself.
        """
        name = self.card.name
        _logger.error("%s cannot be loaded: %s", name, error)
        self.num_failed_loads += 1
        reason = f" {error}" if isinstance(error, MemoryLimitError) else ""
        text = f"The model {name!r} cannot be loaded now; the server's log says why.{reason}"
        refusal = ModelNotLoadedError(text, room_s=_RETRY_AFTER_S)
        self._refusal = (time.monotonic() + _RETRY_AFTER_S, refusal)
        self._load_requested_s = None
        self._engine.fail_all(refusal)
        self.changed()
        return True


def _with_cache_size(recipe: EngineRecipe, available_bytes: int) -> tuple[EngineRecipe, CacheSize]:
    """Choose the bytes of a model's KV cache.

    Returns the recipe with this number of bytes, and the numbers of pages and state slots that the
    engine will make of them. For a model with recurrent layers, the engine may split these bytes
    in another way than the free memory: into fewer state slots and more pages.

    Raises:
        MemoryLimitError: the model does not fit.
    """
    cache_bytes = recipe.size_kv_cache(available_bytes).cache_bytes
    cache = replace(recipe.options.cache, memory_bytes=cache_bytes)
    recipe = recipe.with_options(replace(recipe.options, cache=cache))
    return recipe, recipe.size_kv_cache(available_bytes)


def _scheduler_config(recipe: EngineRecipe, size: CacheSize) -> SchedulerConfig:
    """Return the limits that the scheduler will have when the model is loaded.

    Raises:
        MemoryLimitError: the recurrent states of a static batch do not fit into memory.
    """
    batch, num_stages = recipe.options.batch, len(recipe.mesh.stages)
    steps_ahead = num_stages - 1 if is_native(recipe.options.compute) else 0
    config = SchedulerConfig.from_options(batch, size.context_length, steps_ahead=steps_ahead)
    return with_room_for_states(config, batch, size.num_states)


def _backend_facts(recipe: EngineRecipe, size: CacheSize) -> BackendFacts:
    """Return backend facts that describe a model that is not loaded, with its future cache."""
    return BackendFacts(
        name="none",
        detail="not loaded",
        num_threads=0,
        num_pages=size.num_pages,
        page_size=size.page_size,
        windows=tuple(group.window for group in recipe.program.cache_groups),
        weight_bytes=recipe.weight_bytes,
        cache_bytes=size.cache_bytes,
        num_states=size.num_states,
    )


def _initial_status(card: ModelCard, num_pages: int) -> EngineStatus:
    """Return the status of an engine that has not run yet: all its KV pages are free."""
    stats = SchedulerStats(
        num_running=0,
        num_waiting=0,
        num_waiting_tokens=0,
        num_free_pages=num_pages,
        num_cached_pages=0,
        num_referenced_pages=0,
        num_prompt_tokens=0,
        num_hit_tokens=0,
        num_preemptions=0,
        num_recoveries=0,
    )
    counters = Counters(
        card.cost.per_step(), scheduler=lambda: stats, speculation=SpeculationStats()
    )
    view = RunningRequests(
        stats, running=(), counts=(0,) * num_pages, cached=(), waiting_since_s=None
    )
    return EngineStatus(counters.snapshot(), view, ranks=(), spans=(), memory_bytes=0)
