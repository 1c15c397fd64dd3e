"""Engine processes that die at unusual moments, and failures in their request handler."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.remote import (
    ANYONE,
    GREEDY,
    LONG,
    PROMPTS,
    first_of,
    idle,
    options,
    start_generation,
    started,
    texts,
)
from support.tiny import Tiny, write_tiny_gguf
from support.waiting import until
from twostroke.core.constraint import Constraint
from twostroke.core.errors import EngineDiedError, EngineStoppedError
from twostroke.core.request import NO_HINTS, FinishReason
from twostroke.core.sampling import SamplingParams
from twostroke.engine.engine import build
from twostroke.engine.generation import Outputs
from twostroke.engine.output import Output
from twostroke.engine.process import launch, supervisor
from twostroke.engine.process import messages as wire
from twostroke.engine.process.main import RequestHandler, ServerConnection
from twostroke.engine.process.remote import RemoteEngine
from twostroke.engine.status import Health


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("remote") / "tiny.gguf"
    return str(write_tiny_gguf(path, Tiny(context_length=4096)))


def test_an_engine_that_dies_before_it_listens_is_an_error(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_ENTRY_MODULE", "twostroke.no_such_module")
    with pytest.raises(EngineStoppedError, match="did not start: its process ended with exit"):
        RemoteEngine.start(model, options(), "warning", lambda *_: None)


def read_environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def test_an_engine_does_not_have_the_key_of_clients(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_API_KEY", "sk-of-clients")

    async def run() -> None:
        async with started(model) as engine:
            environment = read_environment(engine.supervisor.pid)
            assert b"PATH=" in environment
            assert b"sk-of-clients" not in environment

    asyncio.run(run())


def test_what_was_cancelled_is_not_asked_of_the_next_process(model: str) -> None:
    async def run() -> None:
        async with started(model, max_running=1, token_budget=8) as engine:
            running = await start_generation(engine, LONG)
            await first_of(running)
            left, kept_generation = (
                await start_generation(engine, LONG),
                await start_generation(engine),
            )
            os.kill(engine.supervisor.pid, signal.SIGSTOP)  # it reads no cancellation
            for outputs in (left, running):
                outputs.cancel()
            os.kill(engine.supervisor.pid, signal.SIGKILL)
            for outputs in (left, running):
                reasons = [output.finish_reason async for output in outputs]
                assert reasons[-1] is FinishReason.CANCEL
            assert await texts(kept_generation)
            assert (await idle(engine)).snapshot.services["default"].answers == 1

    asyncio.run(run())


def test_a_constraint_that_kills_two_engines_is_not_compiled_again(model: str) -> None:
    async def run() -> None:
        async with started(model) as engine:
            constraint = Constraint("regex", "a")
            for previous_deaths in range(2):
                os.kill(engine.supervisor.pid, signal.SIGSTOP)
                begun = asyncio.create_task(engine.compile(constraint))
                await asyncio.sleep(0)
                engine.on_message(wire.RequestsStarted([*engine._inquiries]))
                waiting = asyncio.create_task(engine.compile(Constraint("regex", "b")))
                await asyncio.sleep(0)
                os.kill(engine.supervisor.pid, signal.SIGKILL)
                if previous_deaths:
                    with pytest.raises(EngineDiedError):
                        await begun
                else:
                    assert await begun == ()
                    engine.pending.crash_history.record_death([wire.Compile(0, constraint)])
                assert await waiting == ()

    asyncio.run(run())


def test_a_system_that_lacks_something_for_a_moment_is_asked_again(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, refusals = socket.socketpair, [1]

    def scarce(*args: Any) -> Any:
        if refusals.pop() if refusals else 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return make(*args)

    async def run() -> None:
        async with started(model) as engine:
            monkeypatch.setattr(socket, "socketpair", scarce)
            os.kill(engine.supervisor.pid, signal.SIGKILL)
            await until(lambda: engine.health is Health.RECOVERING)
            assert await texts(await start_generation(engine))
            assert not refusals

    asyncio.run(run())


def test_a_process_that_hangs_while_it_loads_is_replaced(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_MAX_LOAD_SILENCE_S", 5.0)

    async def run() -> None:
        async with started(model) as engine:
            pid = engine.supervisor.pid
            os.kill(pid, signal.SIGKILL)
            await until(lambda: engine.supervisor.pid != pid)
            os.kill(engine.supervisor.pid, signal.SIGSTOP)
            assert await texts(await start_generation(engine))
            assert engine.supervisor.num_deaths >= 2

    asyncio.run(run())


def test_a_failure_of_the_watch_does_not_end_it(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults: list[Any] = [ArithmeticError("odd"), ArithmeticError("odd"), "it was tested"]

    def fault(*_: object, **_options: object) -> str | None:
        result = faults.pop(0) if faults else None
        if isinstance(result, Exception):
            raise result
        return result

    async def run() -> None:
        async with started(model) as engine:
            monkeypatch.setattr(supervisor.ProgressWatchdog, "fault", fault)
            await until(lambda: engine.supervisor.num_deaths == 1)
            assert await texts(await start_generation(engine))

    asyncio.run(run())
    assert caplog.text.count("progress could not be checked") == 1


def test_an_engine_that_ran_for_a_while_was_no_failed_start(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "BACK_OFF_S", (0.0,))
    monkeypatch.setattr(supervisor, "_STABLE_AFTER_S", 0.0)

    async def run() -> None:
        async with started(model) as engine:
            for count in (1, 2):
                os.kill(engine.supervisor.pid, signal.SIGKILL)
                await until(lambda count=count: engine.supervisor.num_deaths == count)
                await until(lambda: engine.health is Health.READY)

    asyncio.run(run())


class Recorder:
    """Records the messages that a request handler sends."""

    def __init__(self) -> None:
        self.sent: list[wire.EngineMessage] = []

    def send(self, message: wire.EngineMessage) -> None:
        self.sent.append(message)


def test_whatever_fails_at_the_desk_is_answered(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = Constraint("regex", "a")
    with build(model, options()) as engine:
        recorder = Recorder()
        handler = RequestHandler(engine, cast("Any", recorder))
        handler._handle(wire.Compile(1, constraint))
        handler._compiler.submit(int).result()  # after it
        assert recorder.sent == [wire.RequestsStarted([1]), wire.Compiled(1)]

        def fail(*_: object, **__: object) -> None:
            raise ValueError("odd")

        monkeypatch.setattr(engine.client.grammars, "compile", fail)
        monkeypatch.setattr(engine.client, "submit_prompts", fail)
        handler._handle(wire.Compile(2, constraint))
        handler._compiler.submit(int).result()
        handler._handle(wire.Generate(3, PROMPTS, GREEDY, ANYONE, NO_HINTS))
        *_, compiled, accepted = recorder.sent
    assert isinstance(compiled, wire.Compiled)
    assert isinstance(accepted, wire.Accepted)
    assert str(compiled.error) == str(accepted.error)
    assert str(accepted.error) == "The engine could not begin: ValueError: odd"


def test_what_is_cancelled_while_its_constraint_is_compiled_does_not_run(model: str) -> None:
    params = SamplingParams(max_tokens=3000, constraint=Constraint("regex", "a+"))
    with build(model, options()) as engine:
        recorder = Recorder()
        handler = RequestHandler(engine, cast("Any", recorder))
        compiler_gate, compiled = threading.Event(), handler._compiler.submit(int)
        handler._compiler.submit(compiler_gate.wait)
        compiled.result()
        handler._handle(wire.Generate(1, PROMPTS, params, ANYONE, NO_HINTS))
        handler._handle(wire.Cancel(1))
        compiler_gate.set()
        handler._compiler.submit(int).result()
        ends = [o for m in recorder.sent if isinstance(m, wire.OutputBatch) for _, o in m.outputs]
    assert [output.finish_reason for output in ends][-2:] == [FinishReason.CANCEL] * 2
    assert not handler._open


def test_a_descriptor_beyond_1023_is_read() -> None:
    """A server with a thousand clients gives such a descriptor to its next engine process."""
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD, 1030)) as high:
        server = ServerConnection(high)
        assert server.receive(0.01) == []
        ours.sendall(wire.RECEIVED_BY_ENGINE.frame(wire.Flush()))
        assert server.receive(5.0) == [wire.Flush()]


def test_a_text_that_ends_while_it_is_submitted_is_counted() -> None:
    class Quick(Outputs):
        def _submit(self, _listeners: object) -> None:
            assert self.is_open
            self.count_output(Output(0, "", (), finish_reason=FinishReason.STOP))
            ends.append(self.is_open)

    ends: list[bool] = []
    listeners = [SimpleNamespace(request=SimpleNamespace(id=str(i))) for i in range(2)]
    loop = SimpleNamespace(flush=lambda: None)
    quick = Quick(cast("Any", loop), cast("Any", None))
    quick.submit_gradually(cast("Any", listeners))
    assert ends == [True, False]
