"""An engine that runs only while somebody wants its model: requests for it wait until it loads."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Final, Self

from msgspec.structs import replace

from twostroke.backends.create import auto_kv_format, cost_model, weight_bytes, working_bytes
from twostroke.backends.interface import BackendFacts
from twostroke.backends.kv_size import WORKING_BYTES, size_kv_cache
from twostroke.backends.machine_limits import MachineLimits
from twostroke.core.embedding import Pooling
from twostroke.core.errors import (
    MemoryLimitError,
    ModelFormatError,
    ModelNotLoadedError,
    OverloadedError,
    TwostrokeError,
)
from twostroke.core.files import megabytes
from twostroke.engine.client import UNSAMPLED, new_request
from twostroke.engine.counters import Counters
from twostroke.engine.engine import make_card
from twostroke.engine.process import messages as wire
from twostroke.engine.process.remote import RemoteEngine
from twostroke.engine.process.served import EngineFacts, EngineStatus
from twostroke.engine.scheduler import SchedulerConfig, SchedulerStats
from twostroke.engine.scheduler.config import max_len
from twostroke.engine.speculation import SpeculationStats
from twostroke.engine.status import RunningRequests
from twostroke.model.families import build_program
from twostroke.model.loader import build_tokenizer, load
from twostroke.model.program.kv_layout import PageGroups
from twostroke.model.weights import weights_identity
from twostroke.server.models.residency import ModelResidency, ModelUse

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from twostroke.core.options import EngineOptions
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.process.pending import RemoteOutputs

_START_S: Final = 0.5  # of loading, before a first load was timed
_BYTES_PER_S: Final = 1e9
_REFUSED_S: Final = 5.0  # after a load that failed
_logger = logging.getLogger("twostroke.serve")


class OnDemandEngine(RemoteEngine):
    """A `RemoteEngine` without a process until `wake`, and after `rest`.

    Attributes:
        num_bytes: what it takes in memory.
        default_keep_s, keep_s: how long it stays loaded without a request, if nobody says
            otherwise, and as somebody said last.
        is_closed: it has to go, so requests wait.
        num_loads, num_unloads, num_failed_loads, loading_s: counts since the server's start.
        worth: see `schedule.residence`; the roster keeps it.
        changed: called when there is something to decide.
    """

    def __init__(
        self,
        load_: wire.LoadModel,
        card: ModelCard,
        ready: wire.EngineReady,
        num_bytes: int,
        keep_s: float,
    ) -> None:
        """Serve the model of `card`, once it is loaded; `ready` is what is known before that."""
        super().__init__(load_, card, None, ready)
        self.num_bytes = num_bytes
        self._is_on_gpu = load_.options.compute.backend == "gpu"
        self.default_keep_s = self.keep_s = keep_s
        self.is_closed = False
        self.num_loads = self.num_unloads = self.num_failed_loads = 0
        self.loading_s = self.worth = 0.0
        self.changed: Callable[[], None] = lambda: None
        self._pending.is_up = False
        self._began_s = self._used_s = self._loaded_s = time.monotonic()
        self._wanted_since_s: float | None = None  # by what is no request
        self._is_leaving = False
        self._refusal: tuple[float, ModelNotLoadedError] | None = None

    @classmethod
    def find(
        cls,
        name: str | None,
        model: str,
        options: EngineOptions,
        log_level: str,
        budget_bytes: int,
        keep_s: float,
    ) -> Self:
        """Read the header of `model`, to be served as `name`, or as its own.

        Errors as those of `build`.

        Raises:
            MemoryLimitError: it does not fit into `budget_bytes`.
        """
        loaded = load(model)
        program, batch = build_program(loaded.spec), options.batch
        num_weight_bytes, num_working = weight_bytes(loaded, options.compute), WORKING_BYTES
        if options.compute.backend == "gpu":
            given = options.compute, program, loaded.tensors, batch.token_budget
            num_working += working_bytes(*given)
        try:
            size = size_kv_cache(
                program,
                options.cache,
                batch.token_budget,
                num_weight_bytes,
                budget_bytes + WORKING_BYTES - num_working,
                max_running=batch.effective_max_running,
                auto_format=auto_kv_format(options.compute),
            )
        except MemoryLimitError as error:
            limit = f"With {megabytes(budget_bytes)} of memory for all models (--memory), "
            raise MemoryLimitError(limit + str(error)) from None
        options = replace(options, cache=replace(options.cache, memory_bytes=size.cache_bytes))
        cost = cost_model(program, loaded.tensors, size.kv_format, options.compute.backend)
        identity = weights_identity(loaded.tensors)
        card = make_card(
            loaded,
            build_tokenizer(loaded, options.chat_template),
            context_length=size.context_length,
            cost=cost,
            identity=identity,
            sampling=options.generation.defaults(loaded.sampling),
        )
        windows = tuple(group.window for group in program.cache_groups)
        config = SchedulerConfig(
            context_length=size.context_length,
            max_running=batch.effective_max_running,
            token_budget=batch.token_budget,
            max_waiting_requests=batch.max_waiting_requests,
            max_waiting_tokens=batch.max_waiting_tokens,
        )
        sizes = size.num_pages, size.page_size, windows, num_weight_bytes, size.cache_bytes
        backend = BackendFacts("none", "not loaded", 0, *sizes)
        facts = EngineFacts(backend, config, (), keeps_pages=options.offload.is_used)
        about = wire.EngineCard(size.context_length, identity, cost.cache, None, None, 0.0)
        ready = wire.EngineReady(about, facts, _nothing_read(card, size.num_pages))
        num_bytes = num_weight_bytes + size.cache_bytes + num_working
        message = wire.LoadModel(wire.VERSION, model, options, log_level)
        return cls(message, replace(card, name=name or card.name), ready, num_bytes, keep_s)

    @property
    def residence(self) -> ModelResidency:
        """Where the model is."""
        if self._is_leaving:
            return ModelResidency.LEAVING
        if self._supervisor.is_resting:
            return ModelResidency.OUT
        return ModelResidency.IN if self._supervisor.is_up else ModelResidency.LOADING

    @property
    def load_s(self) -> float:
        """How long it loads: as it did last, or by its size."""
        return self._supervisor.load_s or self.expected_load_s

    @property
    def expected_load_s(self) -> float:
        """How long it should load, by its size alone."""
        return _START_S + self.num_bytes / _BYTES_PER_S

    @property
    def num_waiting(self) -> int:
        """How many requests wait until it is loaded."""
        return len(self._pending.unsent)

    @property
    def expires_s(self) -> float:
        """Seconds until it is unloaded if nobody asks for it."""
        return max(0.0, self._used_s + self.keep_s - time.monotonic())

    @property
    def memory_bytes(self) -> int:
        """What the engine's process used when it was last asked; 0 without one."""
        return 0 if self._supervisor.is_resting else self._last_status.memory_bytes

    def view(self, now_s: float) -> ModelUse:
        """Return what `decide` needs to know of it."""
        compiling = any(
            isinstance(inquiry, wire.Compile) for inquiry, _ in self._inquiries.values()
        )
        state, is_in = self.residence, self._supervisor.is_up
        num_running = len(self._pending.open) - len(self._pending.unsent) + (compiling and is_in)
        if num_running and is_in:
            self._used_s = now_s
        if compiling and not is_in and self._wanted_since_s is None:
            self._wanted_since_s = now_s
        since = [outputs.received_s for outputs in self._pending.unsent.values()]
        if self._wanted_since_s is not None:
            since.append(self._wanted_since_s)
        return ModelUse(
            self.card.name,
            self.num_bytes,
            self.load_s,
            state,
            min(since, default=None),
            self._used_s,
            self._loaded_s,
            num_running,
            self.keep_s,
            self.worth,
            self.is_closed,
        )

    def want(self) -> None:
        """Have it loaded in its turn, though nobody sends a request yet."""
        if self._supervisor.is_resting and self._wanted_since_s is None:
            self._wanted_since_s = time.monotonic()
        self._used_s = time.monotonic()
        self.changed()

    def keep(self, keep_s: float) -> None:
        """Let it stay loaded for so long without a request."""
        self.keep_s = keep_s
        self.changed()

    def close_door(self, *, is_closed: bool) -> None:
        """Let requests wait, as its memory is promised; or let them in again."""
        if is_closed != self.is_closed:
            self.is_closed = is_closed
            self._pending.is_up = self._supervisor.is_up and not is_closed
            self._pending.send_waiting()

    def wake(self) -> None:
        """Load it."""
        _logger.info("Loading %s.", self.card.name)
        self._used_s = time.monotonic()
        try:
            self._supervisor.wake()
        except TwostrokeError as error:
            self.on_load_failure(error)

    def leave(self) -> Coroutine[None, None, None]:
        """Return what unloads it, as it has nothing to do; from now on it is not there."""
        self._pending.is_up = self.is_closed = False
        self._is_leaving, self.keep_s = True, self.default_keep_s
        self._supervisor.retire()  # now: should it die before it is ended, no other is to start
        return self._rest()

    async def _rest(self) -> None:
        began_s = time.monotonic()
        try:
            await self._supervisor.rest()
        finally:
            self._is_leaving = False
        self.num_unloads += 1
        _logger.info("Unloaded %s in %.1f s.", self.card.name, time.monotonic() - began_s)
        self.changed()

    async def _submit(
        self, message: wire.Generate | wire.EmbedTexts, num_answers: int
    ) -> RemoteOutputs:
        self._used_s = time.monotonic()
        if self._supervisor.is_up and not self.is_closed:
            return await super()._submit(message, num_answers)
        self._check_fits(message)
        self._check_may_load()
        # An objective for the first token is for a model that is there.
        caller = replace(message.caller, start_within_s=math.inf)
        outputs = self._open(replace(message, caller=caller), num_answers)
        if not outputs.accepted.done():
            outputs.accepted.set_result(None)  # so that a stream can show that it is alive
        self.changed()
        return outputs

    async def _inquire(self, message: wire.Compile | wire.GetStatus) -> object:
        if isinstance(message, wire.Compile) and not self._supervisor.is_up:
            self._check_may_load()
            if len(self._inquiries) >= self.facts.config.max_waiting_requests:
                raise OverloadedError(f"{len(self._inquiries)} requests wait for the model.")
        self.changed()
        return await super()._inquire(message)

    def _check_fits(self, message: wire.Generate | wire.EmbedTexts) -> None:
        """Refuse what can never run, rather than load the model for it.

        Raises:
            RequestError: a prompt is empty.
            ContextLengthError: one is too long.
        """
        backend, context_length = self.facts.backend, self.facts.config.context_length
        groups = PageGroups(backend.page_size, backend.windows)
        most_tokens = groups.max_tokens(backend.num_pages, context_length)
        caller = message.caller
        if isinstance(message, wire.EmbedTexts):
            requests = [
                new_request(tokens, UNSAMPLED, caller, Pooling.LAST) for tokens in message.texts
            ]
        else:
            requests = [new_request(one, message.params, caller) for one in message.prompts]
        for request in requests:
            max_len(request, context_length, most_tokens)

    def _check_may_load(self) -> None:
        if self._refusal is not None and time.monotonic() < self._refusal[0]:
            raise self._refusal[1]

    def on_restart(self, ready: wire.EngineReady) -> None:
        """Give the process what waits."""
        if ready.card.identity != self.card.identity:
            reason = "Its files are not those with which the server was started: start it again."
            self._supervisor.refuse(ModelFormatError(reason))
            return
        self._refusal, self._wanted_since_s = None, None
        self._used_s = self._loaded_s = time.monotonic()
        self.num_loads += 1
        self.loading_s += self._supervisor.load_s
        if not self._is_on_gpu:  # whose memory a process does not see
            self.num_bytes = max(self.num_bytes, ready.status.memory_bytes)
        self.facts, self._last_status, self.draft = ready.facts, ready.status, ready.card.draft
        self.limits = (
            MachineLimits.of_hardware(ready.card.hardware) if ready.card.hardware else None
        )
        name, load_s, count = self.card.name, self._supervisor.load_s, len(self._pending.open)
        noun = "request" if count == 1 else "requests"
        _logger.info("Loaded %s in %.1f s; %d %s had waited.", name, load_s, count, noun)
        self._pending.is_up = not self.is_closed
        self._pending.send_waiting()
        for message, _ in self._inquiries.values():
            self._supervisor.send(message)
        self.changed()

    def on_death(self) -> bool:
        """Tell those whose requests the process was computing."""
        is_to_blame = super().on_death()
        self.changed()
        return is_to_blame

    def on_load_failure(self, error: TwostrokeError) -> bool:
        """Tell those who wait, and leave it at that for some seconds."""
        name = self.card.name
        _logger.error("%s cannot be loaded: %s", name, error)
        self.num_failed_loads += 1
        why = f" {error}" if isinstance(error, MemoryLimitError) else ""
        text = f"The model {name!r} cannot be loaded now; the server's log says why.{why}"
        refusal = ModelNotLoadedError(text, room_s=_REFUSED_S)
        self._refusal, self._wanted_since_s = (time.monotonic() + _REFUSED_S, refusal), None
        self._fail_all(refusal)
        self.changed()
        return True


def _nothing_read(card: ModelCard, num_pages: int) -> EngineStatus:
    """Return what is known of an engine that has not run."""
    stats = SchedulerStats(0, 0, 0, num_pages, *[0] * 6)
    counters = Counters(
        card.cost.per_step(), scheduler=lambda: stats, speculation=SpeculationStats()
    )
    view = RunningRequests(stats, (), (0,) * num_pages, (), None)
    return EngineStatus(counters.snapshot(), view, (), (), 0)
