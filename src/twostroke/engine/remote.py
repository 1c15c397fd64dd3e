"""An engine in a process of its own, which may die: the server's side.

What waited for its first step when the process died is asked for again of the next one. What held
pages gets an error, since it may be what killed the process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from twostroke.core.errors import (
    EngineDiedError,
    EngineStoppedError,
    OverloadedError,
    TwostrokeError,
)
from twostroke.core.hardware import memory_used
from twostroke.core.request import FinishReason
from twostroke.engine import wire
from twostroke.engine.build import make_card
from twostroke.engine.child import EngineProcess
from twostroke.engine.health import Health
from twostroke.engine.limits import Limits
from twostroke.engine.loading import build_tokenizer
from twostroke.engine.loading import load as load_model
from twostroke.engine.output import Output, Usage
from twostroke.engine.seconds import Span
from twostroke.engine.supervisor import Supervisor
from twostroke.models import build_program
from twostroke.program.cost import CostModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from twostroke.core.config import EngineOptions
    from twostroke.core.constraint import Constraint
    from twostroke.core.embedding import EmbeddingParams
    from twostroke.core.request import Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.client import Caller, ModelCard
    from twostroke.engine.health import Progress
    from twostroke.engine.served import EngineFacts, Reading

_READ_S = 1.0  # that a reading may take; then the last one is returned
_logger = logging.getLogger("twostroke.serve")


class RemoteOutputs:
    """The outputs of what one message asked for; `num_open` of its answers have not ended."""

    def __init__(
        self, engine: RemoteEngine, message: wire.Generate | wire.Embed, num_open: int
    ) -> None:
        """Wait in the running event loop for outputs that `engine` passes on."""
        self.message = message
        self.asked_s = time.monotonic()
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_begun = False  # some of it holds pages, or did
        self.is_cancelled = False
        self.num_open = num_open
        self._engine = engine
        self._unread: asyncio.Queue[Output] = asyncio.Queue()
        self._num_unread_ends = num_open

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield outputs as they come, until every answer has had its last.

        Raises:
            RequestError: a constraint could not be followed further.
            EngineStoppedError: the engine died meanwhile.
            TwostrokeError: the engine failed on an answer.
        """
        while self._num_unread_ends:
            output = await self._unread.get()
            self._num_unread_ends -= output.finish_reason is not None
            if output.error is not None:
                raise output.error
            yield output

    @property
    def num_unread(self) -> int:
        """How many outputs have come and were not read yet."""
        return self._unread.qsize()

    def cancel(self) -> None:
        """Stop all that still runs."""
        self._engine.cancel(self)

    def put(self, output: Output) -> None:
        """Take an output."""
        self.has_begun = True
        self.num_open -= output.finish_reason is not None
        self._unread.put_nowait(output)

    def fail(self, error: TwostrokeError) -> None:
        """End with an error."""
        if self.accepted.done():
            self.end(FinishReason.ERROR, error)
        else:
            self.accepted.set_exception(error)

    def end(self, reason: FinishReason, error: TwostrokeError | None = None) -> None:
        """End all answers that have not ended."""
        usage = Usage(0, 0, 0)
        while self.num_open:
            self.put(Output(0, "", (), finish_reason=reason, usage=usage, error=error))


class RemoteEngine:
    """Implements `ServedEngine` with a process that is started again whenever it dies."""

    def __init__(
        self, load: wire.Load, card: ModelCard, process: EngineProcess, ready: wire.Ready
    ) -> None:
        """Serve the model of `card` through `process`, which has loaded `load`."""
        self.card = card
        self.facts: EngineFacts = ready.facts
        self.draft = ready.card.draft
        self.limits = Limits.known(ready.card.hardware) if ready.card.hardware else None
        self._last: Reading = ready.reading
        self._ids = itertools.count(1)
        self._open: dict[int, RemoteOutputs] = {}
        self._asked: dict[int, tuple[wire.Compile | wire.Read, asyncio.Future[Any]]] = {}
        self._compiling: set[int] = set()  # of what is asked
        self._ended: str | None = None
        self._on_end: Callable[[], None] = lambda: None
        self._life = Supervisor(load, process, ready, self)

    @classmethod
    def start(
        cls,
        model: str,
        options: EngineOptions,
        log_level: str,
        progress: Callable[[int, int], None],
    ) -> Self:
        """Start an engine for `model` and wait until it takes requests; errors as `build`.

        Raises:
            EngineStoppedError: its process died.
        """
        load = wire.Load(wire.VERSION, model, options, log_level)
        process = EngineProcess(load)
        try:
            loaded = load_model(model)  # its header, while the process reads the weights
            tokenizer = build_tokenizer(loaded)
            program = build_program(loaded.spec)
            ready = process.wait_ready(progress)
            stored = {name: loaded.tensors[name].num_bytes for name in program.weight_shapes}
            cost = CostModel(program, stored, ready.card.cache)
            about = ready.card
            card = make_card(loaded, tokenizer, about.context_length, cost, about.identity)
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
    def progress(self) -> Progress:
        """What its process has computed."""
        return self._life.progress

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
        return await self._ask(wire.Embed(next(self._ids), tokens, params, caller), len(tokens))

    async def compile(self, constraint: Constraint) -> tuple[str, ...]:
        """Compile a constraint in the engine's process."""
        id_ = next(self._ids)
        gaps: tuple[str, ...] = await self._inquire(wire.Compile(id_, constraint))
        return gaps

    async def read(self, spans: Sequence[tuple[int, int]] = ()) -> Reading:
        """Return counts and spans; those of the last time if the engine does not answer now."""
        if self._life.is_up:
            message = wire.Read(next(self._ids), list(spans))
            try:
                self._last = await asyncio.wait_for(self._inquire(message), _READ_S)
            except TimeoutError:
                _logger.debug("The engine took long to say what it does.")
        missing = len(spans) - len(self._last.spans)
        if missing <= 0:
            return self._last
        nothing = Span(self._last.snapshot, self._last.snapshot, 0)
        return replace(self._last, spans=(*self._last.spans, *(nothing,) * missing))

    def flush(self) -> None:
        """Start a batch that is not full."""
        if self._life.is_up:
            self._life.send(wire.Flush())

    def cancel(self, outputs: RemoteOutputs) -> None:
        """End what `outputs` were asked for; does nothing after its end."""
        id_ = outputs.message.id
        if id_ not in self._open:
            return
        if self._life.is_up:
            outputs.is_cancelled = True  # the process may die before it reads this
            self._life.send(wire.Cancel(id_))
        else:
            del self._open[id_]
            outputs.end(FinishReason.CANCEL)

    async def _ask(self, message: wire.Generate | wire.Embed, num_answers: int) -> RemoteOutputs:
        self._check_running()
        if not self._life.is_up and len(self._open) >= self.facts.config.max_waiting_requests:
            raise OverloadedError(f"{len(self._open)} requests wait for the engine to start again.")
        outputs = self._open[message.id] = RemoteOutputs(self, message, num_answers)
        if self._life.is_up:
            self._life.send(message)
        try:
            await outputs.accepted
        except asyncio.CancelledError:  # the client has left
            outputs.cancel()
            raise
        return outputs

    async def _inquire(self, message: wire.Compile | wire.Read) -> Any:
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

    def _check_running(self) -> None:
        if self._ended is not None:
            raise EngineStoppedError(self._ended)

    # What follows is called by the supervisor.

    def take(self, message: wire.Answer) -> None:
        """Pass on what the process has sent."""
        match message:
            case wire.Said():
                for id_, output in message.outputs:
                    self._said(id_, output)
            case wire.Began():
                for outputs in filter(None, map(self._open.get, message.ids)):
                    outputs.has_begun = True
                self._compiling.update(self._asked.keys() & message.ids)
            case wire.Accepted():
                self._accepted(message)
            case wire.Compiled():
                self._reply(message.id, message.gaps, message.error)
            case wire.State():
                self._reply(message.id, message.reading)

    def died(self) -> None:
        """Tell those whose requests the process was computing."""
        error = EngineDiedError(
            "The engine died while it computed this request, and is starting again: "
            "send the request again."
        )
        for id_, outputs in list(self._open.items()):
            if outputs.is_cancelled:
                del self._open[id_]
                outputs.end(FinishReason.CANCEL)
            elif outputs.has_begun:
                del self._open[id_]
                outputs.fail(error)
        for id_ in self._compiling:
            self._reply(id_, None, error)
        for asked, _ in list(self._asked.values()):
            if isinstance(asked, wire.Read):
                self._reply(asked.id, self._last)

    def runs_again(self, ready: wire.Ready) -> None:
        """Ask the new process for what still waits, in the order in which it came."""
        self.facts = ready.facts
        for outputs in self._open.values():
            waited_s = time.monotonic() - outputs.asked_s
            self._life.send(replace(outputs.message, waited_s=waited_s))
        for message, _ in self._asked.values():
            self._life.send(message)
        _logger.info("The engine runs again; %d requests had waited for it.", len(self._open))

    def gave_up(self, reason: str) -> None:
        """Tell everybody."""
        self._ended = reason
        error = EngineStoppedError(reason)
        for outputs in self._open.values():
            outputs.fail(error)
        self._open.clear()
        for id_ in list(self._asked):
            self._reply(id_, None, error)
        self._on_end()

    def _said(self, id_: int, output: Output) -> None:
        outputs = self._open.get(id_)
        if outputs is not None:
            outputs.put(output)
            if not outputs.num_open:
                del self._open[id_]

    def _accepted(self, message: wire.Accepted) -> None:
        outputs = self._open.get(message.id)
        if outputs is None:
            return
        if message.error is not None:
            del self._open[message.id]
            outputs.fail(message.error)
        elif not outputs.accepted.done():  # else an earlier process has accepted it
            outputs.accepted.set_result(None)

    def _reply(self, id_: int, value: object, error: TwostrokeError | None = None) -> None:
        _, found = self._asked.get(id_, (None, None))
        if found is None or found.done():
            return
        if error is None:
            found.set_result(value)
        else:
            found.set_exception(error)
