"""The engine's own process: it loads a model, then does what a server asks by messages.

It is started with the number of an inherited socket. Nothing listens, and the end of the socket is
the end of the process. Signals are left to the server, which drains first.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import BackendError, EngineStoppedError, MemoryLimitError, TwostrokeError
from twostroke.core.process_tuning import tune_garbage_collector
from twostroke.core.transport.frames import Frames, WireError
from twostroke.engine.engine import build
from twostroke.engine.generation import Outputs
from twostroke.engine.output import Mailbox
from twostroke.engine.process import messages as wire
from twostroke.engine.process.served import facts_of, take_reading
from twostroke.engine.speculation import StepTimeModel
from twostroke.engine.status import Health
from twostroke.model.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.core.constraint import Constraint
    from twostroke.core.step import StepPlan
    from twostroke.engine.engine import Engine
    from twostroke.engine.output import Addressed, Output
    from twostroke.engine.request_listener import RequestListener
    from twostroke.engine.structured_output.grammar import GrammarMatcher

_PULSE_S: Final = 0.5
_RETRY_S: Final = 0.02  # between looks for room in the queue for texts
_CHUNK: Final = 1 << 16  # as in child.py
_PROGRESS_S: Final = 0.05  # between reports while weights load
_PR_SET_PDEATHSIG: Final = 1


class Wire:
    """This end of the socket. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected socket."""
        self._socket = sock
        self._poll = select.poll()  # not `select`: a busy server's numbers go beyond 1023
        self._poll.register(sock, select.POLLIN)
        self._frames = Frames(wire.requests)
        self._lock = threading.Lock()

    def send(self, message: wire.Answer) -> None:
        """Send a message; the process ends if nobody reads it any more."""
        frame = wire.pack(message)
        try:
            with self._lock:
                self._socket.sendall(frame)
        except OSError:
            os._exit(0)

    def receive(self, timeout_s: float) -> list[wire.Request]:
        """Return the messages that come in time; the process ends with the other end."""
        if not self._poll.poll(timeout_s * 1000):
            return []
        try:
            data = self._socket.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:
            os._exit(0)  # a kernel may run for long: nothing would be lost by not waiting
        return list(self._frames.feed(data))


class _Log(logging.Handler):
    """Sends log records to the server, whose log they belong to."""

    def __init__(self, wire_: Wire) -> None:
        super().__init__()
        self._wire = wire_

    def emit(self, record: logging.LogRecord) -> None:
        self._wire.send(wire.Log(record.name, record.levelno, self.format(record)))


class _OpenCall(Outputs):
    """What one message asked for; `id` is the message's."""

    is_cancelled = False  # perhaps while its constraint is compiled, before it is queued

    def __init__(self, desk: RequestHandler, id_: int, waited_s: float) -> None:
        super().__init__(desk.loop, Mailbox(partial(desk.put, id_), desk.carry))
        self.id, self._desk, self._waited_s = id_, desk, waited_s

    def _submit(self, listeners: Sequence[RequestListener]) -> None:
        waiting, ids = self._desk.waiting, [listener.request.id for listener in listeners]
        waiting.update(dict.fromkeys(ids, self.id))  # before a step can have them
        try:
            self._loop.submit(listeners, self._waited_s)
        except BaseException:
            for request_id in ids:
                waiting.pop(request_id, None)
            raise


class RequestHandler:
    """Does what messages ask of an engine, and sends what comes of it."""

    def __init__(self, engine: Engine, wire_: Wire) -> None:
        """Serve `engine`."""
        self.loop = engine.client.loop
        self.waiting: dict[str, int] = {}  # requests without pages: what they were asked for as
        self._client, self._wire = engine.client, wire_
        self._open: dict[int, _OpenCall] = {}
        self._gradual: set[int] = set()  # texts that the queue had no room for yet
        self._said: list[tuple[int, Output]] = []
        self._saying = threading.Lock()
        self._compiler = ThreadPoolExecutor(1, "twostroke-compile")
        self._pulse_s = 0.0
        self._failure: EngineStoppedError | None = None
        self.loop.on_step = self._on_step

    def run(self) -> None:
        """Serve until the server closes the engine, or the engine stops.

        Raises:
            TwostrokeError: the engine stopped by itself.
        """
        while True:
            timeout_s = _RETRY_S if self._gradual else _PULSE_S
            for message in self._wire.receive(timeout_s):
                if isinstance(message, wire.Close):
                    return
                self._do(message)
            for id_ in list(self._gradual):
                self._top_up(id_)
            now_s = time.monotonic()
            if now_s - self._pulse_s >= _PULSE_S:
                self._pulse_s = now_s
                self._wire.send(wire.Heartbeat(self.loop.progress, self._num_lent()))
                if self.loop.health is Health.STOPPED:
                    raise self._failure or EngineStoppedError("The engine stopped.")

    def _num_lent(self) -> int:
        view = self._client.disaggregation_stats
        lender = view().lender if view is not None else None
        return lender.num_pages_lent if lender is not None else 0

    def _do(self, message: wire.Request) -> None:
        match message:
            case wire.Generate():
                self._generate(message)
            case wire.EmbedTexts():
                self._open[message.id] = _OpenCall(self, message.id, message.waited_s)
                self._start(message)
            case wire.Cancel():
                if (asked := self._open.get(message.id)) is not None:
                    asked.is_cancelled = True
                    asked.cancel()
            case wire.Compile():
                self._compiler.submit(self._compile, message)
            case wire.GetStatus():
                reading = take_reading(self._client, message.spans)
                self._wire.send(wire.StatusReply(message.id, reading))
            case wire.Flush():
                self.loop.flush()
            case wire.LoadModel() | wire.Close():
                raise WireError("The engine is loaded already.")

    def _generate(self, message: wire.Generate) -> None:
        self._open[message.id] = _OpenCall(self, message.id, message.waited_s)
        constraint = message.params.constraint
        grammar = self._client.grammars.known(constraint) if constraint else None
        if constraint and grammar is None:  # forgotten, or known to a process that died
            self._compiler.submit(self._start, message, constraint)
        else:
            self._start(message, grammar=grammar)

    def _start(
        self,
        message: wire.Generate | wire.EmbedTexts,
        constraint: Constraint | None = None,
        grammar: GrammarMatcher | None = None,
    ) -> None:
        """Queue what was asked for, and say whether that was possible."""
        asked, client, caller = self._open[message.id], self._client, message.caller
        try:
            if isinstance(message, wire.EmbedTexts):
                client.queue_texts(asked, message.texts, message.params, caller)
                if asked.has_waiting:
                    self._gradual.add(message.id)
            else:
                grammar = self._grammar(message.id, constraint) if constraint else grammar
                prompts, params, hints = message.prompts, message.params, message.hints
                client.queue(asked, prompts, params, caller, hints, grammar)
        except BaseException as error:  # noqa: BLE001 the server waits for an answer, whatever fails
            self._open.pop(message.id, None)
            if not isinstance(error, EngineStoppedError):  # else the next process is asked
                self._wire.send(wire.Accepted(message.id, _told(error)))
        else:
            self._wire.send(wire.Accepted(message.id))
            if asked.is_cancelled:
                asked.cancel()

    def _top_up(self, id_: int) -> None:
        asked = self._open.get(id_)
        if asked is not None:
            asked.submit_waiting()
        if asked is None or not asked.has_waiting:
            self._gradual.discard(id_)

    def _compile(self, message: wire.Compile) -> None:
        try:
            gaps = self._grammar(message.id, message.constraint, message.limit_s).gaps
        except BaseException as error:  # noqa: BLE001 the server waits for an answer, whatever fails
            self._wire.send(wire.Compiled(message.id, (), _told(error)))
        else:
            self._wire.send(wire.Compiled(message.id, gaps))

    def _grammar(
        self, id_: int, constraint: Constraint, limit_s: float = math.inf
    ) -> GrammarMatcher:
        """Compile a constraint; if that kills the process, what asked for it is to blame."""
        self._wire.send(wire.RequestsStarted([id_]))
        return self._client.grammars.compile(constraint, limit_s)

    # The engine's thread, or the one that cancels, calls these.

    def put(self, id_: int, output: Output) -> None:
        """Take an output; `carry` sends it."""
        asked = self._open.get(id_)
        if isinstance(output.error, EngineStoppedError):
            self._failure = output.error
            return  # what waits is asked for again, of the next process
        if asked is None:
            return
        self._said.append((id_, output))
        asked.note(output)
        if not asked.is_open:
            del self._open[id_]
            for request_id in asked.request_ids:
                self.waiting.pop(request_id, None)

    def carry(self, put_all: Callable[[Addressed], None], outputs: Addressed) -> None:
        """Send the outputs of a step in one message."""
        with self._saying:
            put_all(outputs)
            said, self._said = self._said, []
        if said:
            self._wire.send(wire.OutputBatch(said))

    def _on_step(self, plan: StepPlan) -> None:
        """Tell what holds pages from now on: if this step kills the process, that is to blame."""
        if not self.waiting:
            return
        ids = {self.waiting.pop(part.request.id, None) for part in plan.slices}
        if began := sorted(id_ for id_ in ids if id_ is not None):
            self._wire.send(wire.RequestsStarted(began))


def main(descriptor: str) -> int:
    """Load what the first message names, and serve it over the socket of this number."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    link = Wire(socket.socket(fileno=int(descriptor)))
    load = _first(link)
    root = logging.getLogger("twostroke")
    root.addHandler(_Log(link))
    root.setLevel(load.log_level.upper())
    root.propagate = False
    # The server reads the same files for the model's card, and logs these notices itself.
    logging.getLogger("twostroke.weights").setLevel(logging.ERROR)
    try:
        with _build(load, link) as engine:
            desk = RequestHandler(engine, link)
            engine.client.grammars.prepare()  # now, before a stream would have to wait for it
            tune_garbage_collector()
            link.send(_ready(engine))
            desk.run()
    except TwostrokeError as error:
        return _fail(link, error)
    except MemoryError:
        reason = "Memory ran out: lower --context-length or --kv-memory, or take a smaller model."
        return _fail(link, MemoryLimitError(reason))
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _fail(link, BackendError(f"{place}{error.strerror or error}."))
    return 0


def _fail(link: Wire, error: TwostrokeError) -> int:
    link.send(wire.EngineFailed(error))
    return error.exit_code


def _told(error: BaseException) -> TwostrokeError:
    """Return what the server is told of an error."""
    if isinstance(error, TwostrokeError):
        return error
    logging.getLogger("twostroke.engine").error("A request could not begin.", exc_info=error)
    return BackendError(f"The engine could not begin: {type(error).__name__}: {error}")


def _first(link: Wire) -> wire.LoadModel:
    messages: list[wire.Request] = []
    while not messages:
        messages = link.receive(60.0)
    load = messages[0]
    if not isinstance(load, wire.LoadModel) or load.version != wire.VERSION:
        reason = "The server has another version than its engine: start the server again."
        link.send(wire.EngineFailed(BackendError(reason)))
        raise SystemExit(1)
    return load


def _build(load: wire.LoadModel, link: Wire) -> Engine:
    said_s = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal said_s
        now_s = time.monotonic()
        if now_s - said_s > _PROGRESS_S or done == total:
            said_s = now_s
            link.send(wire.Loading(done, total))

    say = logging.getLogger("twostroke.serve").info
    engine = build(load.model, load.options, progress, say=say)
    if engine.facts.ranks and engine.facts.name == "cpu":
        say(engine.describe_gain())
    return engine


def _ready(engine: Engine) -> wire.EngineReady:
    client, card, hardware = engine.client, engine.card, engine.limits.hardware()
    config = client.loop.config
    longest = BatchShape.prefill(config.step_budget, config.context_length - config.step_budget)
    longest_s = StepTimeModel(card.cost.per_step(), hardware).seconds(longest)
    about = wire.EngineCard(
        card.context_length, card.identity, card.cost.cache, engine.draft, hardware, longest_s
    )
    return wire.EngineReady(about, facts_of(client), take_reading(client, ()))


def _die_with_parent() -> None:
    """Let the system kill this process when its parent dies, in whatever it is doing then."""
    parent = os.getppid()
    with suppress(OSError, AttributeError):  # not on every system
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(code)  # without waiting for a constraint that takes for ever
