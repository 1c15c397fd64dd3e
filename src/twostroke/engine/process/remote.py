"""An engine in a process of its own, which may die: the server's side.

What waited for its first step when the process died is asked for again of the next one. What held
pages gets an error, since it may be what killed the process; what was there at several deaths is
computed alone, then refused (`Suspects`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from twostroke.backends.create import cost_model
from twostroke.backends.machine_limits import MachineLimits
from twostroke.core.errors import (
    EngineDiedError,
    EngineKillerError,
    EngineStoppedError,
    RequestError,
    TwostrokeError,
)
from twostroke.core.hardware import memory_used
from twostroke.core.request import FinishReason
from twostroke.core.transport.frames import WireError
from twostroke.engine.counters import TimeSpan
from twostroke.engine.engine import make_card
from twostroke.engine.process import messages as wire
from twostroke.engine.process.child import EngineProcess
from twostroke.engine.process.pending import FullQueue, PendingCalls, RemoteOutputs
from twostroke.engine.process.supervisor import Supervisor
from twostroke.engine.status import Health
from twostroke.model.families import build_program
from twostroke.model.loader import build_tokenizer
from twostroke.model.loader import load as load_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.core.constraint import Constraint
    from twostroke.core.embedding import EmbeddingParams
    from twostroke.core.options import EngineOptions
    from twostroke.core.request import Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.client import Caller
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.output import Output
    from twostroke.engine.process.launch import LaunchedProcess
    from twostroke.engine.process.served import EngineFacts, EngineStatus
    from twostroke.engine.status import StepProgress

_READ_S = 1.0  # that a reading may take; then the last one is returned
_logger = logging.getLogger("twostroke.serve")


class RemoteEngine:
    """Implements `ServedEngine` with a process that is started again whenever it dies."""

    def __init__(
        self,
        load: wire.LoadModel,
        card: ModelCard,
        process: EngineProcess | None,
        ready: wire.EngineReady,
    ) -> None:
        """Serve the model of `card` through `process`, which has loaded `load`."""
        self.card = card
        self.facts: EngineFacts = ready.facts
        self.draft = ready.card.draft
        self.limits = (
            MachineLimits.of_hardware(ready.card.hardware) if ready.card.hardware else None
        )
        self._last: EngineStatus = ready.reading
        self._spans: list[tuple[int, int]] = []  # that it has
        self._ids = itertools.count(1)
        self._asked: dict[int, tuple[wire.Compile | wire.GetStatus, asyncio.Future[Any]]] = {}
        self._compiling: set[int] = set()  # of what is asked
        self._ended: str | None = None
        self._on_end: Callable[[], None] = lambda: None
        self._life = Supervisor(load, process, ready, self)
        self._book = PendingCalls(self._life.send)
        self._full = FullQueue()

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
        """Start an engine for `model` and wait until it takes requests; errors as `build`.

        Its first process is the launched one, or a new one; `meanwhile` is called while it loads.

        Raises:
            EngineStoppedError: its process died.
        """
        load = wire.LoadModel(wire.VERSION, model, options, log_level)
        process = EngineProcess(load, launched)
        try:
            loaded = load_model(model)  # its header, while the process reads the weights
            tokenizer = build_tokenizer(loaded, options.chat_template)
            program = build_program(loaded.spec)
            meanwhile()
            ready = process.wait_ready(progress)
            cost = cost_model(program, loaded.tensors, backend=options.compute.backend)
            stops_rows = ready.facts.backend.stops_rows
            cost = replace(cost, cache=ready.card.cache, stops_rows=stops_rows)
            about = ready.card
            card = make_card(
                loaded,
                tokenizer,
                context_length=about.context_length,
                cost=cost,
                identity=about.identity,
                sampling=options.generation.defaults(loaded.sampling),
            )
            return cls(load, card, process, ready)
        except BaseException:
            process.kill()
            process.close()
            raise

    def attach(self, on_end: Callable[[], None]) -> None:
        """Begin in the running event loop; `on_end` is called if the engine is given up."""
        self._on_end = on_end
        self._life.attach()

    def close(self) -> None:
        """End the process, after the event loop."""
        self._ended = self._ended or "The engine is shutting down."
        self._life.close()

    def __enter__(self) -> Self:
        """Use the engine in a `with` block, which closes it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the engine."""
        self.close()

    @property
    def health(self) -> Health:
        """Whether the engine can answer."""
        if self._ended is not None:
            return Health.STOPPED
        is_recovering = not self._life.is_up or self.progress.is_recovering
        return Health.RECOVERING if is_recovering else Health.READY

    @property
    def progress(self) -> StepProgress:
        """What its process has computed."""
        return self._life.progress

    @property
    def num_deaths(self) -> int:
        """How often its process has died."""
        return self._life.num_deaths

    @property
    def life(self) -> Supervisor:
        """What keeps its process alive."""
        return self._life

    @property
    def memory_bytes(self) -> int:
        """What the engine's process used when it was last asked, and this one now."""
        return self._last.memory_bytes + memory_used()

    async def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, caller: Caller, hints: Hints
    ) -> RemoteOutputs:
        """Queue prompts, all or none."""
        texts = [list(tokens) for tokens in prompts]
        message = wire.Generate(next(self._ids), texts, params, caller, hints)
        return await self._ask(message, len(texts) * params.n)

    async def embed(
        self, texts: Sequence[Sequence[int]], params: EmbeddingParams, caller: Caller
    ) -> RemoteOutputs:
        """Queue texts."""
        tokens = [list(text) for text in texts]
        return await self._ask(
            wire.EmbedTexts(next(self._ids), tokens, params, caller), len(tokens)
        )

    async def compile(self, constraint: Constraint, limit_s: float = math.inf) -> tuple[str, ...]:
        """Compile a constraint in the engine's process."""
        message = wire.Compile(next(self._ids), constraint, limit_s)
        self._check_harmless(message)
        gaps: tuple[str, ...] = await self._inquire(message)
        self._book.suspects.clear(message)
        return gaps

    async def read(self, spans: Sequence[tuple[int, int]] = ()) -> EngineStatus:
        """Return counts and spans; if the engine does not answer now, what it said last."""
        if self._life.is_up:
            message = wire.GetStatus(next(self._ids), list(spans))
            try:
                async with asyncio.timeout(_READ_S):
                    reading: EngineStatus | None = await self._inquire(message)
            except TimeoutError:
                _logger.debug("The engine took long to say what it does.")
            else:
                if reading is not None:
                    self._last, self._spans = reading, message.spans
                    return reading
        if self._spans == list(spans):
            return self._last
        nothing = TimeSpan(self._last.snapshot, self._last.snapshot, 0)
        return replace(self._last, spans=(nothing,) * len(spans))

    def flush(self) -> None:
        """Start a batch that is not full."""
        if self._life.is_up:
            self._life.send(wire.Flush())

    def cancel(self, outputs: RemoteOutputs) -> None:
        """End what `outputs` were asked for; does nothing after its end."""
        id_ = outputs.message.id
        if id_ in self._book.unsent:
            self._book.drop(outputs)
            outputs.end(FinishReason.CANCEL)
        elif id_ in self._book.open:
            outputs.is_cancelled = True  # the process may die before it reads this
            self._life.send(wire.Cancel(id_))

    async def _ask(
        self, message: wire.Generate | wire.EmbedTexts, num_answers: int
    ) -> RemoteOutputs:
        outputs = self._open(message, num_answers)
        try:
            await outputs.accepted
        except asyncio.CancelledError:  # the client has left
            outputs.cancel()
            raise
        return outputs

    def _open(self, message: wire.Generate | wire.EmbedTexts, num_answers: int) -> RemoteOutputs:
        """Put a message into the book; errors as `generate`, but for those of the process."""
        self._check_running()
        self._check_harmless(message)
        self._full.check(message.caller)
        _check_numbers(message)
        outputs = RemoteOutputs(message, num_answers, self.cancel)
        self._book.check_room(outputs, self.facts.config, self._life.back_s)
        self._book.add(outputs)
        return outputs

    async def _inquire(self, message: wire.Compile | wire.GetStatus) -> Any:
        self._check_running()
        found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[message.id] = message, found
        if self._life.is_up:
            self._life.send(message)
        try:
            return await found
        finally:
            self._asked.pop(message.id, None)
            self._compiling.discard(message.id)

    def _check_harmless(self, message: wire.Generate | wire.EmbedTexts | wire.Compile) -> None:
        if self._book.suspects.is_refused(message):
            raise EngineKillerError(
                "The engine died each time that it computed this request, so it is refused for "
                "an hour. Please report it, with the server's log."
            )

    def _check_running(self) -> None:
        if self._ended is not None:
            raise EngineStoppedError(self._ended)

    # What follows is called by the supervisor.

    def take(self, message: wire.Answer) -> None:
        """Pass on what the process has sent."""
        match message:
            case wire.OutputBatch():
                for id_, output in message.outputs:
                    self._said(id_, output)
            case wire.RequestsStarted():
                for outputs in filter(None, map(self._book.open.get, message.ids)):
                    outputs.has_begun = True
                self._compiling.update(self._asked.keys() & message.ids)
            case wire.Accepted():
                self._accepted(message)
            case wire.Compiled():
                self._check_asked(message.id, wire.Compile)
                self._reply(message.id, message.gaps, message.error)
            case wire.StatusReply():
                self._check_asked(message.id, wire.GetStatus)
                self._reply(message.id, message.reading)

    def died(self) -> bool:
        """Tell those whose requests the process was computing; return whether there were any."""
        error = EngineDiedError(
            f"{EngineDiedError.SENTENCE}, and is starting again: send the request again.",
            room_s=self._life.back_s,
        )
        asked_for = [self._asked[id_][0] for id_ in self._compiling]
        compiled = [message for message in asked_for if isinstance(message, wire.Compile)]
        was_busy = self._book.end_begun(error, compiled)
        for id_ in self._compiling:
            self._reply(id_, None, error)
        for asked, _ in list(self._asked.values()):
            if isinstance(asked, wire.GetStatus):
                self._reply(asked.id, None)
        return was_busy

    def look(self) -> None:
        """End what is past its timeout."""
        self._book.end_late()

    def runs_again(self, ready: wire.EngineReady) -> None:
        """Ask the new process for what still waits, in the order in which it came."""
        self.facts = ready.facts
        count = len(self._book.open)
        noun = "request" if count == 1 else "requests"
        _logger.info("The engine runs again; %d %s had waited for it.", count, noun)
        self._book.is_up = True
        self._book.send_waiting()
        for message, _ in self._asked.values():
            self._life.send(message)

    def failed_to_load(self, error: TwostrokeError) -> bool:  # noqa: ARG002
        """Have another process tried."""
        return False

    def gave_up(self, reason: str) -> None:
        """Tell everybody."""
        self._ended = reason
        self._fail_all(EngineStoppedError(reason))
        self._on_end()

    def _fail_all(self, error: TwostrokeError) -> None:
        self._book.end_all(error)
        for id_ in list(self._asked):
            self._reply(id_, None, error)

    def _said(self, id_: int, output: Output) -> None:
        outputs = self._book.open.get(id_)
        if outputs is None:
            return
        outputs.put(output)
        if outputs.num_open:
            self._book.speaks(outputs)
        else:
            if output.error is None and not outputs.is_cancelled:
                self._book.suspects.clear(outputs.message)
            self._book.drop(outputs)

    def _accepted(self, message: wire.Accepted) -> None:
        outputs = self._book.open.get(message.id)
        if outputs is None:
            return
        if message.error is not None:
            self._full.note(outputs.message.caller, message.error)
            self._book.drop(outputs)
            outputs.fail(message.error)
        elif not outputs.accepted.done():  # else an earlier process has accepted it
            outputs.accepted.set_result(None)

    def _check_asked(self, id_: int, kind: type[wire.Request]) -> None:
        """Raise WireError if the process answers what was asked as if it were something else."""
        if id_ in self._asked and not isinstance(self._asked[id_][0], kind):
            raise WireError("The engine's answer does not fit what it was asked.")

    def _reply(self, id_: int, value: object, error: TwostrokeError | None = None) -> None:
        _, found = self._asked.get(id_, (None, None))
        if found is None or found.done():
            return
        if error is None:
            found.set_result(value)
        else:
            found.set_exception(error)


def _check_numbers(message: wire.Generate | wire.EmbedTexts) -> None:
    """Refuse a message that cannot be sent, before it waits among others."""
    try:
        wire.encode(message)
    except OverflowError:
        raise RequestError("A number of the request does not fit into 64 bits.") from None
