"""Requests that kill engine processes are found among others, run alone, and refused."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from support.remote import ANYONE, GREEDY, LONG, PROMPTS, start_generation, started, texts, until
from support.tiny import Tiny, write_tiny_gguf
from twostroke.core.constraint import Constraint
from twostroke.core.errors import EngineDiedError, EngineKillerError
from twostroke.core.request import NO_HINTS
from twostroke.engine.process import messages as wire
from twostroke.engine.process import supervisor
from twostroke.engine.process.pending import CrashHistory, PendingCalls, RemoteOutputs

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from twostroke.engine.process.remote import RemoteEngine

DEATH = EngineDiedError("It died.")


def make_call(number: int, prompt: int) -> wire.Generate:
    return wire.Generate(number, [[prompt]], GREEDY, ANYONE, NO_HINTS)


class SentCalls:
    """Pending calls, and the ids of the calls that were sent to the engine process."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.pending = PendingCalls(lambda message: self.sent.append(message.id))  # type: ignore[union-attr]
        self._ids = iter(range(1, 100))

    def submit(self, prompt: int, *, begins: bool = False) -> RemoteOutputs:
        outputs = RemoteOutputs(make_call(next(self._ids), prompt), 1, lambda _: None)
        self.pending.add(outputs)
        outputs.has_started = begins
        return outputs

    def die(self) -> None:
        self.sent.clear()
        self.pending.end_started(DEATH, [])
        self.pending.is_up = True
        self.pending.send_waiting()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_what_was_there_at_two_deaths_runs_alone() -> None:
    async def work() -> None:
        calls = SentCalls()
        for _ in range(2):
            calls.submit(7, begins=True)
            calls.submit(8, begins=True)
            calls.die()
        other = calls.submit(1, begins=True)
        suspect, late_call = calls.submit(7), calls.submit(2)
        assert calls.sent == [other.message.id]  # it waits for the other, and others for it
        calls.pending.remove(other)
        assert calls.sent == [other.message.id, suspect.message.id]
        calls.pending.on_output(suspect)
        assert calls.sent[2:] == [late_call.message.id]

    run(work())


def test_a_suspect_that_leaves_lets_others_go() -> None:
    async def work() -> None:
        calls = SentCalls()
        for _ in range(2):
            calls.submit(7, begins=True)
            calls.die()
        suspect, late_call = calls.submit(7), calls.submit(2)
        assert calls.sent == [suspect.message.id]
        calls.pending.remove(suspect)
        assert calls.sent[1:] == [late_call.message.id]

    run(work())


def test_a_suspect_that_waits_does_not_hold_up_others_for_ever() -> None:
    async def work() -> None:
        calls = SentCalls()
        for _ in range(2):
            calls.submit(7, begins=True)
            calls.die()
        calls.submit(7)
        late_call = calls.submit(2)
        calls.die()  # before it has begun
        assert calls.sent == [3]
        assert late_call.message.id in calls.pending.unsent

    run(work())


def test_one_death_alone_after_two_is_enough_and_innocents_are_not_refused() -> None:
    suspects = CrashHistory()
    killer, innocent = make_call(1, 7), make_call(2, 8)
    for _ in range(2):
        suspects.record_death([killer, innocent])
    for message in (killer, innocent):
        assert suspects.must_run_alone(message)
        assert not suspects.is_refused(message)
    suspects.record_death([make_call(3, 7)])
    assert suspects.is_refused(make_call(4, 7))
    suspects.clear(innocent)
    assert not suspects.must_run_alone(innocent)
    assert not suspects.must_run_alone(make_call(5, 9))


def test_what_was_asked_several_times_has_seen_one_death() -> None:
    suspects = CrashHistory()
    for _ in range(2):
        suspects.record_death([make_call(number, 7) for number in range(4)])
    assert suspects.num_deaths(make_call(9, 7)) == 2
    suspects.record_death([make_call(1, 7), make_call(2, 7)])
    assert suspects.is_refused(make_call(9, 7))  # nothing else was there


def test_no_number_of_deaths_beside_other_requests_refuses_a_request() -> None:
    history = CrashHistory()
    for number in range(10):
        history.record_death([make_call(1, 7), make_call(2, 100 + number)])
    assert not history.is_refused(make_call(1, 7))
    assert history.must_run_alone_to_its_end(make_call(1, 7))
    history.record_death([make_call(1, 7)])
    assert history.is_refused(make_call(1, 7))


def test_after_a_third_death_a_request_stays_alone_to_its_end() -> None:
    async def work() -> None:
        calls = SentCalls()
        for _ in range(2):
            calls.submit(7, begins=True)
            calls.submit(8, begins=True)
            calls.die()
        suspect = calls.submit(7, begins=True)
        joined = calls.submit(1, begins=True)
        calls.pending.on_output(suspect)
        assert joined.message.id in calls.sent  # it joined after the first output
        calls.die()
        assert not calls.pending.crash_history.is_refused(suspect.message)
        repeated_call = calls.submit(7, begins=True)
        late_call = calls.submit(2)
        calls.pending.on_output(repeated_call)
        assert late_call.message.id in calls.pending.unsent
        calls.pending.remove(repeated_call)
        assert late_call.message.id in calls.sent

    run(work())


def test_suspects_are_forgotten_after_an_hour_and_when_there_are_many() -> None:
    now = [0.0]
    suspects = CrashHistory(lambda: now[0])
    for number in range(4097):
        suspects.record_death([make_call(1, number)])
    assert suspects.num_deaths(make_call(1, 0)) == 0
    assert suspects.num_deaths(make_call(1, 1)) == 1
    now[0] = 3601.0
    assert suspects.num_deaths(make_call(1, 1)) == 0


def test_requests_differ_by_what_they_ask_and_not_by_who_asks() -> None:
    suspects = CrashHistory()
    suspects.record_death([wire.Compile(1, Constraint("regex", "a"))])
    assert suspects.num_deaths(wire.Compile(2, Constraint("regex", "a"))) == 1
    assert suspects.num_deaths(wire.Compile(3, Constraint("regex", "b"))) == 0
    suspects.record_death([make_call(1, 7)])
    assert suspects.num_deaths(wire.Generate(2, [[7]], LONG, ANYONE, NO_HINTS)) == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("suspects") / "tiny.gguf"
    return str(write_tiny_gguf(path, Tiny(context_length=4096)))


async def kill_while_it_computes(engine: RemoteEngine) -> None:
    """Submit a request that kills the engine process before it sends an output."""
    os.kill(engine.supervisor.pid, signal.SIGSTOP)
    asking = asyncio.create_task(start_generation(engine, LONG))
    await asyncio.sleep(0)
    engine.on_message(wire.RequestsStarted([*engine._pending.open]))
    deaths = engine.num_deaths
    os.kill(engine.supervisor.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError):
        await asking
    await until(lambda: engine.supervisor.is_up and engine.num_deaths > deaths)


def test_a_killer_is_refused_and_does_not_end_the_server(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "BACK_OFF_S", (0.0,))

    async def work() -> None:
        async with started(model) as engine:
            for _ in range(3):
                await kill_while_it_computes(engine)
            with pytest.raises(EngineKillerError, match="refused for an hour"):
                await start_generation(engine, LONG)
            assert await texts(await start_generation(engine))
            assert engine.num_deaths == 3

    run(work())


def test_an_answer_clears_a_suspect(model: str) -> None:
    async def work() -> None:
        async with started(model) as engine:
            suspects = engine._pending.crash_history
            suspect = wire.Generate(0, [list(PROMPTS[0])], GREEDY, ANYONE, NO_HINTS)
            for _ in range(2):
                suspects.record_death([suspect])
            assert suspects.must_run_alone(suspect)
            alone, other = await asyncio.gather(
                start_generation(engine), start_generation(engine, LONG)
            )
            other.cancel()
            assert await texts(alone)
            assert suspects.num_deaths(suspect) == 0

    run(work())
