"""An engine in its own process: the same answers, and the effects of its death."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.remote import (
    ANYONE,
    GREEDY,
    LONG,
    PROMPTS,
    faked,
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
from twostroke.core.errors import (
    ContextLengthError,
    DeadlineError,
    EngineStoppedError,
    ModelFormatError,
    OverloadedError,
    RequestError,
    TwostrokeError,
)
from twostroke.core.request import NO_HINTS, EmbeddingParams, FinishReason
from twostroke.core.sampling import SamplingParams
from twostroke.engine.client import Caller
from twostroke.engine.engine import build
from twostroke.engine.output import Output, Usage
from twostroke.engine.process import launch, pending, supervisor
from twostroke.engine.process import messages as wire
from twostroke.engine.process.remote import RemoteEngine
from twostroke.engine.process.served import LocalEngine
from twostroke.engine.status import Health

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.engine.process.served import ServedEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("remote") / "tiny.gguf"
    return str(write_tiny_gguf(path, Tiny(context_length=4096)))


def test_answers_are_those_of_an_engine_in_this_process(model: str) -> None:
    seeded = SamplingParams(max_tokens=12, seed=5, n=2, stop=["q"], logprobs=2)
    constrained = SamplingParams(
        max_tokens=5, temperature=0, constraint=Constraint("regex", "(ab)+", "guided_regex")
    )

    async def run(engine: ServedEngine) -> list[Any]:
        result: list[Any] = []
        for params in (GREEDY, seeded, constrained):
            parts_by_index: dict[int, list[Any]] = {}
            async for output in await engine.generate(PROMPTS, params, ANYONE, NO_HINTS):
                parts = output.text, output.token_ids, output.logprobs
                ends = output.finish_reason, output.stop, output.usage
                parts_by_index.setdefault(output.index, []).append((parts, ends))
            result.append(parts_by_index)
        vectors = await engine.embed(PROMPTS, EmbeddingParams(), ANYONE)
        result += [
            (vector.index, np.asarray(vector.embedding).tobytes()) async for vector in vectors
        ]
        result.append(await engine.compile(Constraint("regex", "a*")))
        return result

    async def run_in_process() -> list[Any]:
        async with started(model) as engine:
            return await run(engine)

    with build(model, options()) as engine:
        local_answers = asyncio.run(run(LocalEngine(engine.client)))
    assert asyncio.run(run_in_process()) == local_answers


def test_refusals_are_those_of_the_engine(model: str) -> None:
    async def run() -> None:
        async with started(model, max_waiting_requests=2, max_running=1, token_budget=8) as engine:
            with pytest.raises(ContextLengthError):
                await engine.generate([[1] * 5000], GREEDY, ANYONE, NO_HINTS)
            with pytest.raises(RequestError, match="token ids outside"):
                await engine.generate([[10**6]], GREEDY, ANYONE, NO_HINTS)
            with pytest.raises(RequestError) as caught:
                await engine.compile(Constraint("regex", "(", "guided_regex"))
            assert caught.value.field == "guided_regex"
            generations = [await start_generation(engine, LONG)]
            await first_of(generations[0])
            generations += [await start_generation(engine, LONG) for _ in range(2)]
            with pytest.raises(OverloadedError):
                await start_generation(engine)
            for outputs in generations:
                outputs.cancel()

    asyncio.run(run())


def test_cancelled_requests_end(model: str) -> None:
    async def run() -> None:
        async with started(model) as engine:
            outputs = await start_generation(engine, LONG)
            await first_of(outputs)
            outputs.cancel()
            reasons = [output.finish_reason async for output in outputs]
            assert reasons[-1] is FinishReason.CANCEL
            reading = await idle(engine)
            assert reading.snapshot.phases.prefill.steps > 0
            assert len(reading.spans) == 1

    asyncio.run(run())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_costs_neither_what_was_computed_nor_what_waited(model: str, number: int) -> None:
    async def run() -> None:
        async with started(model, max_running=1, token_budget=8) as engine:
            expected = await texts(await start_generation(engine))
            long_text = await texts(await start_generation(engine, LONG))
            running = await start_generation(engine, LONG)
            first = await first_of(running)
            waiting = [await start_generation(engine) for _ in range(3)]
            pid = engine.supervisor.pid
            os.kill(pid, number)
            await until(lambda: engine.health is Health.RECOVERING)
            during = asyncio.create_task(start_generation(engine))
            for outputs in waiting:
                assert await texts(outputs) == expected
            assert await texts(await during) == expected
            [rest] = await texts(running)
            assert [first.text + rest] == long_text
            assert engine.supervisor.pid != pid
            assert engine.supervisor.num_deaths == 1
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
            await idle(engine)

    asyncio.run(run())


def test_changed_limits_outlive_the_process(model: str) -> None:
    async def run() -> None:
        async with started(model, max_running=4, token_budget=64) as engine:
            expected = await texts(await start_generation(engine, LONG))
            running = await start_generation(engine, LONG)
            engine.change_limits(8, 2)
            assert await texts(running) == expected
            for has_died in (False, True):
                if has_died:
                    os.kill(engine.supervisor.pid, signal.SIGKILL)
                    await until(lambda: engine.supervisor.num_deaths == 1)
                assert await texts(await start_generation(engine, LONG)) == expected
                assert engine.facts.config.max_running == 2
                status = await idle(engine)
                assert status.snapshot.max_step_tokens == 8

    asyncio.run(run())


def test_a_process_that_is_stopped_is_replaced(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_MIN_STEP_LIMIT_S", 1.0)

    async def run() -> None:
        async with started(model) as engine:
            pid = engine.supervisor.pid
            os.kill(pid, signal.SIGSTOP)
            assert await texts(await start_generation(engine))
            assert engine.supervisor.pid != pid

    asyncio.run(run())


def test_a_request_whose_prompt_is_being_read_has_begun(model: str) -> None:
    async def run() -> None:
        async with started(model, max_running=1, token_budget=8) as engine:
            reading = await engine.generate([[1] * 4000], GREEDY, ANYONE, NO_HINTS)
            await until(lambda: reading.has_started)
            os.kill(engine.supervisor.pid, signal.SIGKILL)
            assert await texts(reading)
            assert reading.num_deaths == 1

    asyncio.run(run())


def test_requests_that_are_cancelled_while_no_engine_runs_are_not_asked_again(model: str) -> None:
    async def run() -> None:
        async with started(model) as engine:
            os.kill(engine.supervisor.pid, signal.SIGKILL)
            await until(lambda: engine.health is Health.RECOVERING)
            asking = asyncio.create_task(start_generation(engine, LONG))
            await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert not engine._pending.open
            await until(lambda: engine.health is Health.READY)
            assert await texts(await start_generation(engine))

    asyncio.run(run())


def test_an_engine_that_dies_at_each_start_is_given_up(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "BACK_OFF_S", (0.0, 0.01))
    end_counts = []

    async def run() -> None:
        with RemoteEngine.start(model, options(), "warning", lambda *_: None) as engine:
            engine.attach(lambda: end_counts.append(1))
            monkeypatch.setattr(launch, "_ENTRY_MODULE", "twostroke.no_such_module")
            os.kill(engine.supervisor.pid, signal.SIGKILL)
            await until(lambda: engine.health is Health.RECOVERING)
            waiting = asyncio.create_task(start_generation(engine))
            with pytest.raises(EngineStoppedError, match="died 3 times in a row"):
                await waiting
            assert engine.health is Health.STOPPED
            with pytest.raises(EngineStoppedError):
                await start_generation(engine)
            with pytest.raises(EngineStoppedError):
                await engine.compile(Constraint("regex", "a"))

    asyncio.run(run())
    assert end_counts == [1]
    assert "exit code 1" in caplog.text


def test_an_engine_that_cannot_start_says_why(tmp_path: Path, model: str) -> None:
    with pytest.raises(TwostrokeError) as caught:
        RemoteEngine.start(str(tmp_path / "none.gguf"), options(), "warning", lambda *_: None)
    assert caught.value.exit_code == 3
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 60)
    with pytest.raises(ModelFormatError):
        RemoteEngine.start(str(broken), options(), "warning", lambda *_: None)


def test_what_is_not_a_message_ends_the_process(model: str) -> None:
    async def run() -> None:
        async with started(model) as engine:
            pid = engine.supervisor.pid
            engine.supervisor._process.connection._socket.send(b"\xff" * 64)
            await until(lambda: engine.supervisor.num_deaths == 1)
            assert await texts(await start_generation(engine))
            assert engine.supervisor.pid != pid

    asyncio.run(run())


def test_nothing_is_left_when_the_server_dies(model: str) -> None:
    async def run() -> int:
        engine = RemoteEngine.start(model, options(), "warning", lambda *_: None)
        # As the system does for a server that was killed.
        engine.supervisor._process.connection._socket.close()
        return engine.supervisor._process._process.wait(120)

    assert asyncio.run(run()) == 0


def test_a_launched_process_ends_without_a_load() -> None:
    """The server may end while the process still imports modules."""
    left, closed = launch.LaunchedProcess(), launch.LaunchedProcess()
    left.socket.close()
    closed.close()
    closed.close()
    assert closed.process.returncode == -signal.SIGKILL
    assert left.process.wait(120) == 0


def test_an_engine_that_hangs_is_read_with_the_spans_that_are_asked(model: str) -> None:
    async def run() -> None:
        async with started(model) as engine:
            assert len((await engine.read([(10, 0), (60, 0)])).spans) == 2
            os.kill(engine.supervisor.pid, signal.SIGSTOP)
            assert len((await engine.read([(10, 0)])).spans) == 1
            reading = asyncio.create_task(engine.read([(10, 0)] * 3))
            await asyncio.sleep(0)
            os.kill(engine.supervisor.pid, signal.SIGKILL)
            assert len((await reading).spans) == 3
            await until(lambda: engine.supervisor.num_deaths == 1 and engine.supervisor.is_up)

    asyncio.run(run())


def test_a_timeout_is_kept_by_the_server_while_the_engine_hangs_or_starts(model: str) -> None:
    async def run() -> None:
        hasty = Caller(timeout_s=0.5)
        async with started(model) as engine:
            os.kill(engine.supervisor.pid, signal.SIGSTOP)
            start_s = time.monotonic()
            with pytest.raises(DeadlineError, match=r"its timeout of 0\.5 s"):
                await engine.generate(PROMPTS, GREEDY, hasty, NO_HINTS)
            assert time.monotonic() - start_s >= 0.5
            os.kill(engine.supervisor.pid, signal.SIGKILL)
            await until(lambda: not engine.supervisor.is_up)
            assert engine.supervisor.restart_in_s > 0, "it knows how long loading took"
            hasty = Caller(timeout_s=0.01)
            with pytest.raises(DeadlineError):  # later if it was back first, on a busy machine
                await texts(await engine.generate(PROMPTS, GREEDY, hasty, NO_HINTS))
            assert await texts(await start_generation(engine))
            assert engine.supervisor.restart_in_s == 0
            assert (await idle(engine)).snapshot.services["default"].answers == 1

    asyncio.run(run())


def test_a_full_queue_is_not_asked_again_for_a_moment(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "_QUEUE_FULL_S", 60.0)

    async def run() -> None:
        async with started(model, max_running=1, max_waiting_requests=1) as engine:
            running = await start_generation(engine, LONG)
            await first_of(running)
            waiting = await start_generation(engine)
            sent: list[wire.ServerMessage] = []
            send = engine.supervisor.send
            engine._pending._send = lambda message: sent.append(message) or send(message)
            errors = []
            for _ in range(3):
                with pytest.raises(OverloadedError) as got:
                    await start_generation(engine)
                errors.append(str(got.value))
            assert len(sent) == 1
            assert errors == errors[:1] * 3
            other = await engine.generate(PROMPTS[:1], GREEDY, Caller(priority=-1), NO_HINTS)
            monkeypatch.setattr(pending, "_QUEUE_FULL_S", 0.0)  # the moment is over
            with pytest.raises(OverloadedError):
                await start_generation(engine)
            assert len(sent) == 3, "it was asked again after the moment"
            running.cancel()
            assert await texts(other)
            assert await texts(waiting)

    asyncio.run(run())


def test_an_output_that_overtakes_the_acceptance_is_read(model: str) -> None:
    end = Output(0, "x", (4,), finish_reason=FinishReason.LENGTH, usage=Usage(3, 0, 1))

    async def run() -> list[str]:
        async with faked(model) as (engine, process):
            generation_task = asyncio.create_task(start_generation(engine))
            await until(process.is_asked)
            process.say(wire.OutputBatch([(1, end)]))
            process.say(wire.Accepted(1))
            async with asyncio.timeout(5):
                return await texts(await generation_task)

    assert asyncio.run(run()) == ["x"]


def test_an_answer_to_another_question_ends_the_process(model: str) -> None:
    async def run() -> None:
        async with faked(model) as (engine, process):
            reading = asyncio.create_task(engine.read())
            await until(process.is_asked)
            process.say(wire.Compiled(1))
            await until(lambda: process.is_killed and engine.num_deaths == 1)  # not by its watch
            assert (await reading).snapshot is not None  # the last one

    asyncio.run(run())


def test_a_process_that_is_ready_twice_is_not_asked_twice(model: str) -> None:
    async def run() -> None:
        async with faked(model) as (engine, process):
            reading = asyncio.create_task(engine.read())
            await until(process.is_asked)
            process.say(wire.EngineReady(*_ready_of(engine)))
            process.say(wire.StatusReply(1, engine._last_status))
            await reading
            assert not process.is_asked()

    asyncio.run(run())


def _ready_of(engine: RemoteEngine) -> tuple[wire.EngineCard, Any, Any]:
    card = wire.EngineCard(4096, "", engine.card.cost.cache, None, None, 0.0)
    return card, engine.facts, engine._last_status


def test_numbers_that_no_frame_holds_are_refused_and_do_not_wait(model: str) -> None:
    async def run() -> None:
        async with faked(model) as (engine, process):
            for token in (2**64, -(2**63) - 1, 10**400):
                with pytest.raises(RequestError, match="64 bits"):
                    await engine.generate([[1], [token]], GREEDY, ANYONE, NO_HINTS)
            with pytest.raises(RequestError, match="64 bits"):
                await engine.embed([[1]], EmbeddingParams(dimensions=2**64), ANYONE)
            assert not process.is_asked()
            assert not engine._pending.open

    asyncio.run(run())
