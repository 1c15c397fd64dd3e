"""The program of an engine process: loads a model, then handles the messages of its server.

Its argument is the descriptor of an inherited socket. It opens no port, and it exits when the
server closes the socket. It ignores SIGINT and SIGTERM, because the server drains requests first.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import (
    BackendError,
    EngineStoppedError,
    MemoryLimitError,
    TwostrokeError,
    UsageError,
)
from twostroke.core.process_tuning import tune_garbage_collector
from twostroke.core.transport.connection import Connection
from twostroke.core.transport.frames import ConnectionLostError, InvalidMessageError
from twostroke.engine.engine import build
from twostroke.engine.generation import Outputs
from twostroke.engine.output import Mailbox
from twostroke.engine.process import messages as wire
from twostroke.engine.process.served import engine_facts, read_status
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

_HEARTBEAT_INTERVAL_S: Final = 0.5
_RETRY_INTERVAL_S: Final = 0.02  # between attempts to submit texts to a full queue
_PROGRESS_INTERVAL_S: Final = 0.05  # between reports while weights load
_PR_SET_PDEATHSIG: Final = 1


class ServerConnection:
    """The engine process's connection to the server. Any thread may send; one thread receives.

    If the server has closed the connection, each method ends this process.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take over a socket that is connected to the server."""
        self._connection = Connection(sock, wire.RECEIVED_BY_ENGINE)

    def send(self, message: wire.EngineMessage) -> None:
        """Send a message to the server."""
        try:
            self._connection.send(message)
        except ConnectionLostError:
            os._exit(0)

    def receive(self, timeout_s: float) -> list[wire.ServerMessage]:
        """Return the server's messages that arrive within the timeout.

        Raises:
            InvalidMessageError: the received bytes are not messages.
        """
        try:
            return list(self._connection.receive_arrived(timeout_s))
        except InvalidMessageError:
            raise
        except ConnectionLostError:
            os._exit(0)  # without waiting for a step that may take long


class _ServerLogHandler(logging.Handler):
    """A log handler that sends the engine process's log records to the server's log."""

    def __init__(self, server: ServerConnection) -> None:
        super().__init__()
        self._server = server

    def emit(self, record: logging.LogRecord) -> None:
        self._server.send(wire.Log(record.name, record.levelno, self.format(record)))


class _OpenCall(Outputs):
    """The unfinished requests of one `Generate` or `EmbedTexts` message of the server.

    `id` is the id of the message.
    """

    is_cancelled = False  # the server may cancel a call while its constraint is compiled

    def __init__(self, handler: RequestHandler, id_: int, waited_s: float) -> None:
        super().__init__(handler.loop, Mailbox(partial(handler.put, id_), handler.send_outputs))
        self.id = id_
        self._handler = handler
        self._waited_s = waited_s

    def _submit(self, listeners: Sequence[RequestListener]) -> None:
        call_by_request = self._handler.call_by_request
        request_ids = [listener.request.id for listener in listeners]
        # Before `submit`, because a step may start the requests at once.
        call_by_request.update(dict.fromkeys(request_ids, self.id))
        try:
            self._loop.submit(listeners, self._waited_s)
        except BaseException:  # also after a panic in a library: the engine has no such request
            for request_id in request_ids:
                call_by_request.pop(request_id, None)
            raise


class RequestHandler:
    """Handles the server's messages in the engine process, and sends replies and outputs.

    `call_by_request` maps each request that no step has started yet to the id of its call.
    """

    def __init__(self, engine: Engine, server: ServerConnection) -> None:
        """Handle the messages of `server` for `engine`."""
        self.loop = engine.client.loop
        self.call_by_request: dict[str, int] = {}
        self._client = engine.client
        self._server = server
        self._open: dict[int, _OpenCall] = {}
        self._partly_submitted: set[int] = set()  # calls whose texts wait for room in the queue
        self._outputs: list[tuple[int, Output]] = []  # to be sent, each with the id of its call
        self._outputs_lock = threading.Lock()
        self._compiler = ThreadPoolExecutor(1, "twostroke-compile")
        self._heartbeat_s = 0.0  # time of the last one
        self._failure: EngineStoppedError | None = None
        self.loop.on_step = self._on_step

    def run(self) -> None:
        """Handle the server's messages until the server closes the engine, or the engine stops.

        Raises:
            TwostrokeError: the engine stopped by itself.
        """
        while True:
            timeout_s = _RETRY_INTERVAL_S if self._partly_submitted else _HEARTBEAT_INTERVAL_S
            for message in self._server.receive(timeout_s):
                if isinstance(message, wire.Close):
                    return
                self._handle(message)
            for id_ in list(self._partly_submitted):
                self._submit_more(id_)
            now_s = time.monotonic()
            if now_s - self._heartbeat_s >= _HEARTBEAT_INTERVAL_S:
                self._heartbeat_s = now_s
                self._server.send(wire.Heartbeat(self.loop.progress, self._num_pages_leased()))
                if self.loop.health is Health.STOPPED:
                    raise self._failure or EngineStoppedError("The engine stopped.")

    def _num_pages_leased(self) -> int:
        if self._client.disaggregation_stats is None:
            return 0
        prefill_side = self._client.disaggregation_stats().prefill_side
        return prefill_side.num_leased_pages if prefill_side is not None else 0

    def _handle(self, message: wire.ServerMessage) -> None:
        match message:
            case wire.Generate():
                self._generate(message)
            case wire.EmbedTexts():
                self._open[message.id] = _OpenCall(self, message.id, message.waited_s)
                self._start(message)
            case wire.Cancel():
                if (call := self._open.get(message.id)) is not None:
                    call.is_cancelled = True
                    call.cancel()
            case wire.Compile():
                self._compiler.submit(self._compile, message)
            case wire.GetStatus():
                status = read_status(self._client, message.spans)
                self._server.send(wire.StatusReply(message.id, status))
            case wire.Flush():
                self.loop.flush()
            case wire.ChangeLimits():
                self._change_limits(message)
            case wire.LoadModel() | wire.Close():
                raise InvalidMessageError("The engine is loaded already.")

    def _change_limits(self, message: wire.ChangeLimits) -> None:
        try:
            self.loop.change_limits(message.token_budget, message.max_running)
        except UsageError as error:  # the server has checked the limits
            raise InvalidMessageError(str(error)) from None

    def _generate(self, message: wire.Generate) -> None:
        self._open[message.id] = _OpenCall(self, message.id, message.waited_s)
        constraint = message.params.constraint
        grammar = self._client.grammars.cached(constraint) if constraint else None
        if constraint and grammar is None:  # evicted, or compiled by an earlier process
            self._compiler.submit(self._start, message, constraint)
        else:
            self._start(message, grammar=grammar)

    def _start(
        self,
        message: wire.Generate | wire.EmbedTexts,
        constraint: Constraint | None = None,
        grammar: GrammarMatcher | None = None,
    ) -> None:
        """Submit the requests of a call, and tell the server whether they were accepted.

        A `constraint` is compiled first; `grammar` is a constraint that was compiled before.
        """
        call = self._open[message.id]
        try:
            if isinstance(message, wire.EmbedTexts):
                self._client.submit_texts(
                    call, message.texts, message.params, message.caller, message.progress
                )
                if call.has_waiting:
                    self._partly_submitted.add(message.id)
            else:
                if constraint is not None:
                    grammar = self._compile_grammar(message.id, constraint)
                self._client.submit_prompts(
                    call,
                    message.prompts,
                    message.params,
                    caller=message.caller,
                    hints=message.hints,
                    grammar=grammar,
                    progress=message.progress,
                )
        except BaseException as error:  # noqa: BLE001 the server waits for an answer, whatever fails
            self._open.pop(message.id, None)
            if not isinstance(error, EngineStoppedError):  # the server will ask the next process
                self._server.send(wire.Accepted(message.id, _to_wire_error(error)))
        else:
            self._server.send(wire.Accepted(message.id))
            if call.is_cancelled:
                call.cancel()

    def _submit_more(self, id_: int) -> None:
        call = self._open.get(id_)
        if call is not None:
            call.submit_waiting()
        if call is None or not call.has_waiting:
            self._partly_submitted.discard(id_)

    def _compile(self, message: wire.Compile) -> None:
        try:
            unenforced_keywords = self._compile_grammar(
                message.id, message.constraint, message.limit_s
            ).unenforced_keywords
        except BaseException as error:  # noqa: BLE001 the server waits for an answer, whatever fails
            self._server.send(wire.Compiled(message.id, (), _to_wire_error(error)))
        else:
            self._server.send(wire.Compiled(message.id, unenforced_keywords))

    def _compile_grammar(
        self, id_: int, constraint: Constraint, limit_s: float = math.inf
    ) -> GrammarMatcher:
        """Compile a request's constraint within `limit_s` seconds.

        First the server is told that the call `id_` starts, because compiling may kill the process.
        """
        self._server.send(wire.RequestsStarted([id_]))
        return self._client.grammars.compile(constraint, limit_s)

    # The engine's thread, or a thread that cancels, calls the methods below.

    def put(self, id_: int, output: Output) -> None:
        """Queue an output of the call `id_`, until `send_outputs` sends it to the server."""
        call = self._open.get(id_)
        if isinstance(output.error, EngineStoppedError):
            self._failure = output.error
            return  # the server sends waiting requests to the next process
        if call is None:
            return
        self._outputs.append((id_, output))
        call.count_output(output)
        if not call.is_open:
            del self._open[id_]
            for request_id in call.request_ids:
                self.call_by_request.pop(request_id, None)

    def send_outputs(self, put_all: Callable[[Addressed], None], outputs: Addressed) -> None:
        """Send the outputs of a step to the server in one message."""
        with self._outputs_lock:
            put_all(outputs)
            outputs_to_send, self._outputs = self._outputs, []
        if outputs_to_send:
            self._server.send(wire.OutputBatch(outputs_to_send))

    def _on_step(self, plan: StepPlan) -> None:
        """Tell the server which calls have their first step now, before the step runs.

        If the step kills this process, the server suspects these calls.
        """
        if not self.call_by_request:
            return
        ids = {self.call_by_request.pop(slice_.request.id, None) for slice_ in plan.slices}
        if started := sorted(id_ for id_ in ids if id_ is not None):
            self._server.send(wire.RequestsStarted(started))


def main(descriptor: str) -> int:
    """Load the model that the first message names and serve it; return the exit code.

    `descriptor` is the number of the socket that is connected to the server.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    server = ServerConnection(socket.socket(fileno=int(descriptor)))
    load = _receive_load(server)
    root = logging.getLogger("twostroke")
    root.addHandler(_ServerLogHandler(server))
    root.setLevel(load.log_level.upper())
    root.propagate = False
    # The server reads the same files for the model's card, and logs these notices itself.
    logging.getLogger("twostroke.weights").setLevel(logging.ERROR)
    try:
        with _build(load, server) as engine:
            handler = RequestHandler(engine, server)
            engine.client.grammars.prepare()  # now: later, running requests would wait for it
            tune_garbage_collector()
            server.send(_ready(engine))
            handler.run()
    except TwostrokeError as error:
        return _fail(server, error)
    except MemoryError:
        reason = "Memory ran out: lower --context-length or --kv-memory, or take a smaller model."
        return _fail(server, MemoryLimitError(reason))
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        return _fail(server, BackendError(f"{path}{error.strerror or error}."))
    return 0


def _fail(server: ServerConnection, error: TwostrokeError) -> int:
    server.send(wire.EngineFailed(error))
    return error.exit_code


def _to_wire_error(error: BaseException) -> TwostrokeError:
    """Return an error in a form that can be sent to the server.

    An error that is not a `TwostrokeError` is logged, and a `BackendError` is returned for it.
    """
    if isinstance(error, TwostrokeError):
        return error
    logging.getLogger("twostroke.engine").error("A request could not begin.", exc_info=error)
    return BackendError(f"The engine could not begin: {type(error).__name__}: {error}")


def _receive_load(server: ServerConnection) -> wire.LoadModel:
    """Wait for the server's first message, which says which model to load with which options."""
    messages: list[wire.ServerMessage] = []
    while not messages:
        messages = server.receive(60.0)
    load = messages[0]
    if not isinstance(load, wire.LoadModel) or load.version != wire.VERSION:
        reason = "The server has another version than its engine: start the server again."
        server.send(wire.EngineFailed(BackendError(reason)))
        raise SystemExit(1)
    return load


def _build(load: wire.LoadModel, server: ServerConnection) -> Engine:
    """Build the engine in this process, and report the progress to the server."""
    reported_s = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal reported_s
        now_s = time.monotonic()
        if now_s - reported_s > _PROGRESS_INTERVAL_S or done == total:
            reported_s = now_s
            server.send(wire.Loading(done, total))

    say = logging.getLogger("twostroke.serve").info
    engine = build(load.model, load.options, progress, say=say)
    if engine.facts.ranks and engine.facts.name == "cpu":
        say(engine.describe_gain())
    return engine


def _ready(engine: Engine) -> wire.EngineReady:
    """Return the message that tells the server that the engine takes requests, with its facts."""
    client, card = engine.client, engine.card
    hardware = engine.limits.hardware()
    config = client.loop.config
    largest_step = BatchShape.prefill(
        config.step_budget, config.context_length - config.step_budget
    )
    engine_card = wire.EngineCard(
        context_length=card.context_length,
        identity=card.identity,
        cache=card.cost.cache,
        draft=engine.draft,
        hardware=hardware,
        longest_step_s=StepTimeModel(card.cost.per_step(), hardware).seconds(largest_step),
    )
    return wire.EngineReady(engine_card, engine_facts(client), read_status(client, ()))


def _die_with_parent() -> None:
    """Ask the operating system to kill this process when the server dies, even during a step."""
    parent = os.getppid()
    with suppress(OSError, AttributeError):  # not on every system
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(code)  # at once: the compiler's thread may still run
