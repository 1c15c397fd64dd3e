"""`RemoteEngine`: the server's side of an engine in another process, which may die.

When the process dies, a new one is started. All requests are sent to the new process, and running
requests continue there. A request that was running at several deaths runs alone, and is
refused later (`CrashHistory`), because it may have killed the processes.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from twostroke.backends.machine_limits import MachineLimits
from twostroke.backends.recipe import EngineRecipe
from twostroke.core.errors import (
    EngineDiedError,
    EngineStoppedError,
    RequestError,
    TwostrokeError,
)
from twostroke.core.hardware import memory_used
from twostroke.core.message_text import counted_noun
from twostroke.core.request import FinishReason
from twostroke.core.transport.frames import InvalidMessageError
from twostroke.engine.counters import TimeSpan
from twostroke.engine.engine import make_card
from twostroke.engine.process import messages as wire
from twostroke.engine.process.child import EngineProcess
from twostroke.engine.process.pending import (
    FullQueue,
    PendingCalls,
    RemoteOutputs,
    killer_error,
)
from twostroke.engine.process.supervisor import Supervisor
from twostroke.engine.status import Health

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.core.constraint import Constraint
    from twostroke.core.options import EngineOptions
    from twostroke.core.request import EmbeddingParams, Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.client import Caller
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.output import Output
    from twostroke.engine.process.launch import LaunchedProcess
    from twostroke.engine.process.served import EngineFacts, EngineStatus
    from twostroke.engine.process.supervisor import ProcessObserver
    from twostroke.engine.resumption import (
        AnswerProgress,
        ResumptionLimits,
        ResumptionTotals,
    )
    from twostroke.engine.status import StepProgress

_STATUS_TIMEOUT_S = 1.0  # after it, the last known status is returned
_logger = logging.getLogger("twostroke.serve")


class RemoteEngine:
    """The server's interface to an engine in its own process, which is restarted if it dies.

    It implements `ServedEngine`.
    """

    def __init__(
        self,
        load: wire.LoadModel,
        card: ModelCard,
        process: EngineProcess | None,
        ready: wire.EngineReady,
        observer: ProcessObserver | None = None,
    ) -> None:
        """Serve the model of `card` with `process`, which has loaded `load` and sent `ready`.

        If `process` is None, no process runs yet and `ready` has the facts that are known before
        the model is loaded. If there is an `observer`, the supervisor reports events to the
        observer instead of this engine; the observer passes them on.
        """
        self.card = card
        self.update_facts(ready)
        self._last_spans: list[tuple[int, int]] = []  # the spans of the last status
        self._inquiries: dict[int, tuple[wire.Compile | wire.GetStatus, asyncio.Future[Any]]] = {}
        self._limits: tuple[int, int] | None = None  # changed, for the next process, too
        self._compiling: set[int] = set()  # inquiries whose constraints are being compiled
        self._stop_reason: str | None = None
        self._on_end: Callable[[], None] = lambda: None
        self._supervisor = Supervisor(load, process, ready, observer or self)
        self._pending = PendingCalls(self._supervisor.send)
        self._full_queue = FullQueue()

    @classmethod
    def start(
        cls,
        model: str,
        options: EngineOptions,
        log_level: str,
        progress: Callable[[int, int], None],
        launched: LaunchedProcess | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Self:
        """Start an engine for `model`, and wait until it takes requests.

        Args:
            model: the name or path of the model.
            options: all options of the engine.
            log_level: the log level of the engine process.
            progress: called as `progress(done, total)`, in bytes of weights that are ready.
            launched: a process to use; a new process is started without it.
            meanwhile: called while the process loads.

        Raises:
            EngineStoppedError: the process died.
            TwostrokeError: the engine could not be built; errors are as in `build`.
        """
        load = wire.LoadModel(wire.VERSION, model, options, log_level)
        process = EngineProcess(load, launched)
        try:
            # Only the header is read here; the process reads the weights meanwhile.
            recipe = EngineRecipe.of(model, options)
            tokenizer = recipe.build_tokenizer()
            meanwhile()
            ready = process.wait_ready(progress)
            stops_rows = ready.facts.backend.stops_rows
            card = make_card(
                recipe,
                tokenizer,
                context_length=ready.card.context_length,
                cost=replace(recipe.cost_model(), cache=ready.card.cache, stops_rows=stops_rows),
                identity=ready.card.identity,
            )
            return cls(load, card, process, ready)
        except BaseException:  # also after Ctrl-C: the engine process must not stay
            process.kill()
            process.close()
            raise

    def update_facts(self, ready: wire.EngineReady) -> None:
        """Replace the engine's facts by the facts that a new engine process has sent."""
        self.facts: EngineFacts = ready.facts
        self._ready_facts = ready.facts  # with the limits at the start of the process
        self.draft = ready.card.draft
        self.limits = (
            MachineLimits.of_hardware(ready.card.hardware) if ready.card.hardware else None
        )
        self._last_status: EngineStatus = ready.status

    def attach(self, on_end: Callable[[], None]) -> None:
        """Start to serve calls in the running event loop.

        `on_end` is called if the engine ends for good.
        """
        self._on_end = on_end
        self._supervisor.attach()

    def close(self) -> None:
        """End the engine process; call this after the event loop has ended."""
        self._stop_reason = self._stop_reason or "The engine is shutting down."
        self._supervisor.close()

    def __enter__(self) -> Self:
        """Return the engine; the `with` block closes it at its end."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the engine at the end of a `with` block."""
        self.close()

    @property
    def health(self) -> Health:
        """Whether the engine process can answer requests."""
        if self._stop_reason is not None:
            return Health.STOPPED
        is_recovering = not self._supervisor.is_up or self.progress.is_recovering
        return Health.RECOVERING if is_recovering else Health.READY

    @property
    def progress(self) -> StepProgress:
        """The progress of the engine process's steps, from its last heartbeat."""
        return self._supervisor.progress

    @property
    def num_deaths(self) -> int:
        """The number of times that the engine process has died."""
        return self._supervisor.num_deaths

    @property
    def resumptions(self) -> ResumptionTotals:
        """Counts of the calls that continued after a death of the engine process."""
        return self._pending.totals

    def limit_resumption(self, limits: ResumptionLimits) -> None:
        """Set how long calls continue after deaths of the engine process."""
        self._pending.limits = limits

    @property
    def supervisor(self) -> Supervisor:
        """The supervisor that starts the engine process again."""
        return self._supervisor

    @property
    def pending(self) -> PendingCalls:
        """The calls to the engine that have not ended."""
        return self._pending

    @property
    def num_inquiries(self) -> int:
        """The number of messages to the engine process that wait for a reply, besides calls.

        These messages compile constraints and ask for the status.
        """
        return len(self._inquiries)

    @property
    def is_compiling(self) -> bool:
        """Whether a compilation of a constraint waits for a reply."""
        return any(isinstance(message, wire.Compile) for message, _ in self._inquiries.values())

    @property
    def process_memory_bytes(self) -> int:
        """Bytes of memory of the engine process at its last status."""
        return self._last_status.memory_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of the engine process (at its last status) and of this process now."""
        return self._last_status.memory_bytes + memory_used()

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        caller: Caller,
        hints: Hints,
        progress: Sequence[AnswerProgress] = (),
    ) -> RemoteOutputs:
        """Submit prompts to the engine process, all or none, and wait until it accepts them.

        Raises:
            EngineStoppedError, EngineKillerError, OverloadedError, RequestError: the server or
                the engine refuses the prompts.
        """
        message = self.generate_message(prompts, params, caller, hints, progress)
        return await self.submit(message, num_answers=len(prompts) * params.n)

    async def embed(
        self, texts: Sequence[Sequence[int]], params: EmbeddingParams, caller: Caller
    ) -> RemoteOutputs:
        """Submit texts to embed to the engine process, and wait until it accepts them.

        Raises:
            EngineStoppedError, EngineKillerError, OverloadedError, RequestError: the server or
                the engine refuses the texts.
        """
        message = self.embed_message(texts, params, caller)
        return await self.submit(message, num_answers=len(texts))

    async def compile(self, constraint: Constraint, limit_s: float = math.inf) -> tuple[str, ...]:
        """Compile and cache a constraint in the engine process.

        Returns the rules of its JSON schema that the grammar does not enforce.
        """
        message = wire.Compile(self._new_id(), constraint, limit_s)
        self._check_no_killer(message)
        unenforced_keywords: tuple[str, ...] = await self._inquire(message)
        self._pending.crash_history.clear(message)
        return unenforced_keywords

    async def read(self, spans: Sequence[tuple[int, int]] = ()) -> EngineStatus:
        """Return the engine's status, or its last known status if it does not answer in time."""
        if self._supervisor.is_up:
            message = wire.GetStatus(self._new_id(), list(spans))
            try:
                async with asyncio.timeout(_STATUS_TIMEOUT_S):
                    status: EngineStatus | None = await self._inquire(message)
            except TimeoutError:
                _logger.debug("The engine did not send its status in time.")
            else:
                if status is not None:
                    self._last_status = status
                    self._last_spans = message.spans
                    return status
        if self._last_spans == list(spans):
            return self._last_status
        empty_span = TimeSpan(self._last_status.snapshot, self._last_status.snapshot, 0)
        return replace(self._last_status, spans=(empty_span,) * len(spans))

    def flush(self) -> None:
        """Tell the engine process to start a batch that is not full."""
        if self._supervisor.is_up:
            self._supervisor.send(wire.Flush())

    def change_limits(self, token_budget: int, max_running: int) -> None:
        """Change the limits of later steps, also in later engine processes.

        A limit cannot be higher than it was when the process started; higher values are lowered.
        Call this in the event loop.
        """
        self._limits = token_budget, max_running
        self._send_limits()

    def _send_limits(self) -> None:
        if self._limits is None:
            return
        room = self._ready_facts.config
        token_budget = min(self._limits[0], room.token_budget)
        max_running = min(self._limits[1], room.max_running, token_budget)
        config = replace(room, token_budget=token_budget, max_running=max_running)
        self.facts = replace(self._ready_facts, config=config)
        if self._supervisor.is_up:
            self._supervisor.send(wire.ChangeLimits(token_budget, max_running))

    def cancel(self, outputs: RemoteOutputs) -> None:
        """Cancel the call of `outputs` in the engine process, unless it has ended."""
        id_ = outputs.message.id
        if id_ in self._pending.unsent:
            self._pending.remove(outputs)
            outputs.end(FinishReason.CANCEL)
        elif id_ in self._pending.open:
            outputs.is_cancelled = True  # the process may die before it reads this
            self._supervisor.send(wire.Cancel(id_))

    def generate_message(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        caller: Caller,
        hints: Hints,
        progress: Sequence[AnswerProgress] = (),
    ) -> wire.Generate:
        """Return a message to the engine process that submits prompts, with a new id."""
        return wire.Generate(
            id=self._new_id(),
            prompts=[list(tokens) for tokens in prompts],
            params=params,
            caller=caller,
            hints=hints,
            progress=tuple(progress),
        )

    def embed_message(
        self, texts: Sequence[Sequence[int]], params: EmbeddingParams, caller: Caller
    ) -> wire.EmbedTexts:
        """Return a message to the engine process that submits texts to embed, with a new id."""
        return wire.EmbedTexts(
            id=self._new_id(),
            texts=[list(tokens) for tokens in texts],
            params=params,
            caller=caller,
        )

    async def submit(
        self, message: wire.Generate | wire.EmbedTexts, num_answers: int
    ) -> RemoteOutputs:
        """Open a call, and wait until the engine process has accepted it."""
        outputs = self.open_call(message, num_answers)
        try:
            await outputs.accepted
        except asyncio.CancelledError:  # the client has disconnected
            outputs.cancel()
            raise
        return outputs

    def open_call(
        self, message: wire.Generate | wire.EmbedTexts, num_answers: int
    ) -> RemoteOutputs:
        """Open a call, which is sent to the engine process once it takes requests.

        Raises:
            EngineStoppedError, EngineKillerError, OverloadedError, RequestError: the server refuses
                the call; the engine may refuse it later.
        """
        self._check_running()
        self._check_no_killer(message)
        _check_integers(message)
        outputs = RemoteOutputs(message, num_answers, self.cancel)
        if not outputs.was_admitted:
            self._full_queue.check(message.caller)
            self._pending.check_room(outputs, self.facts.config, self._supervisor.restart_in_s)
        if outputs.num_open:
            self._pending.add(outputs)
        else:  # another server has delivered all answers
            outputs.accepted.set_result(None)
        return outputs

    async def _inquire(self, message: wire.Compile | wire.GetStatus) -> Any:
        """Send a message to the engine process, and return the result in its reply.

        The message compiles a constraint or asks for the status.
        """
        self._check_running()
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inquiries[message.id] = (message, reply)
        if self._supervisor.is_up:
            self._supervisor.send(message)
        try:
            return await reply
        finally:
            self._inquiries.pop(message.id, None)
            self._compiling.discard(message.id)

    def _check_no_killer(self, message: wire.Generate | wire.EmbedTexts | wire.Compile) -> None:
        """Refuse a request if engine processes died while they ran requests with this content."""
        if self._pending.crash_history.is_refused(message):
            raise killer_error()

    def _new_id(self) -> int:
        return next(self._pending.ids)

    def _check_running(self) -> None:
        if self._stop_reason is not None:
            raise EngineStoppedError(self._stop_reason)

    # The methods below implement `ProcessObserver`: the supervisor calls them.

    def on_message(self, message: wire.EngineMessage) -> None:
        """Handle a message of the engine process."""
        match message:
            case wire.OutputBatch():
                for id_, output in message.outputs:
                    self._on_output(id_, output)
            case wire.RequestsStarted():
                for outputs in filter(None, map(self._pending.open.get, message.ids)):
                    outputs.start()
                self._compiling.update(self._inquiries.keys() & message.ids)
            case wire.Accepted():
                self._on_accepted(message)
            case wire.Compiled():
                self._check_reply(message.id, wire.Compile)
                self._reply(message.id, message.unenforced_keywords, message.error)
            case wire.StatusReply():
                self._check_reply(message.id, wire.GetStatus)
                self._reply(message.id, message.status)

    def on_death(self) -> bool:
        """Keep the calls for the next engine process; return whether the dead process ran any."""
        error = self._death_error()
        compiling = [self._inquiries[id_][0] for id_ in self._compiling]
        compiled = [message for message in compiling if isinstance(message, wire.Compile)]
        was_busy = self._pending.take_back(error, compiled)
        for compile_message in compiled:  # others are sent to the next process
            if self._pending.crash_history.must_run_alone(compile_message):
                self._reply(compile_message.id, None, error)
        self._compiling.clear()
        for message, _ in list(self._inquiries.values()):
            if isinstance(message, wire.GetStatus):
                self._reply(message.id, None)
        return was_busy

    def on_tick(self) -> None:
        """Fail calls that are late; the supervisor calls this several times a second."""
        self._pending.end_late(self._death_error())

    def _death_error(self) -> EngineDiedError:
        return EngineDiedError(
            f"{EngineDiedError.SENTENCE}, and is starting again: send the request again.",
            room_s=self._supervisor.restart_in_s,
        )

    def on_restart(self, ready: wire.EngineReady) -> None:
        """Send the waiting calls to the new engine process, in the order of their arrival."""
        self.facts = self._ready_facts = ready.facts
        self._send_limits()
        if ready.card.identity != self.card.identity:  # the model's files were replaced
            self._pending.fail_started(self._death_error())
        num_resumed = sum(outputs.has_started for outputs in self._pending.open.values())
        resumed = counted_noun(num_resumed, "request continues", "requests continue")
        waiting = counted_noun(len(self._pending.open) - num_resumed, "request")
        _logger.info("The engine runs again; %s, and %s had waited for it.", resumed, waiting)
        self._pending.is_up = True
        self.send_waiting()

    def send_waiting(self) -> None:
        """Send the waiting calls that may run now, and all inquiries, to the engine process."""
        self._pending.send_waiting()
        for message, _ in self._inquiries.values():
            self._supervisor.send(message)

    def on_load_failure(self, error: TwostrokeError) -> bool:  # noqa: ARG002
        """Return False after an engine process failed to load: the supervisor starts another."""
        return False

    def on_give_up(self, reason: str) -> None:
        """Fail all calls, because no other engine process will be started."""
        self._stop_reason = reason
        self.fail_all(EngineStoppedError(reason))
        self._on_end()

    def fail_all(self, error: TwostrokeError) -> None:
        """Fail all calls and all inquiries (compilations and status requests) with an error."""
        self._pending.end_all(error)
        for id_ in list(self._inquiries):
            self._reply(id_, None, error)

    def _on_output(self, id_: int, output: Output) -> None:
        outputs = self._pending.open.get(id_)
        if outputs is None:
            return
        outputs.put(output)
        self._pending.on_output(outputs)
        if not outputs.num_open:
            if output.error is None and not outputs.is_cancelled:
                self._pending.crash_history.clear(outputs.message)
            self._pending.remove(outputs)

    def _on_accepted(self, message: wire.Accepted) -> None:
        outputs = self._pending.open.get(message.id)
        if outputs is None:
            return
        if message.error is not None:
            self._full_queue.record_error(outputs.message.caller, message.error)
            self._pending.remove(outputs)
            outputs.fail(message.error)
            return
        outputs.was_admitted = True
        if not outputs.accepted.done():  # else an earlier process has accepted it
            outputs.accepted.set_result(None)

    def _check_reply(self, id_: int, message_type: type[wire.ServerMessage]) -> None:
        """Raise InvalidMessageError if a reply has the id of another type of message."""
        if id_ in self._inquiries and not isinstance(self._inquiries[id_][0], message_type):
            raise InvalidMessageError("The engine's reply has the id of a message of another type.")

    def _reply(self, id_: int, value: object, error: TwostrokeError | None = None) -> None:
        """Give an inquiry its result or error, unless it was answered or cancelled before."""
        _, reply = self._inquiries.get(id_, (None, None))
        if reply is None or reply.done():
            return
        if error is None:
            reply.set_result(value)
        else:
            reply.set_exception(error)


def _check_integers(message: wire.Generate | wire.EmbedTexts) -> None:
    """Refuse a call with an integer that a MessagePack message cannot hold."""
    try:
        wire.encode(message)
    except OverflowError:
        raise RequestError("A number of the request does not fit into 64 bits.") from None
