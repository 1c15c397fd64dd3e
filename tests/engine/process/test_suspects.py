"""Requests that kill engine processes are found among others, run alone, and refused."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from support.remote import ANYONE, GREEDY, LONG, PROMPTS, ask, started, texts, until
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


def asked(number: int, prompt: int) -> wire.Generate:
    return wire.Generate(number, [[prompt]], GREEDY, ANYONE, NO_HINTS)


class Desk:
    """Pending calls, and the ids of the calls that were sent to the engine process."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.book = PendingCalls(lambda message: self.sent.append(message.id))  # type: ignore[union-attr]
        self._ids = iter(range(1, 100))

    def ask(self, prompt: int, *, begins: bool = False) -> RemoteOutputs:
        outputs = RemoteOutputs(asked(next(self._ids), prompt), 1, lambda _: None)
        self.book.add(outputs)
        outputs.has_started = begins
        return outputs

    def die(self) -> None:
        self.sent.clear()
        self.book.end_started(DEATH, [])
        self.book.is_up = True
        self.book.send_waiting()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_what_was_there_at_two_deaths_runs_alone() -> None:
    async def work() -> None:
        handler = Desk()
        for _ in range(2):
            handler.ask(7, begins=True)
            handler.ask(8, begins=True)
            handler.die()
        other = handler.ask(1, begins=True)
        suspect, late = handler.ask(7), handler.ask(2)
        assert handler.sent == [other.message.id]  # it waits for the other, and others for it
        handler.book.remove(other)
        assert handler.sent == [other.message.id, suspect.message.id]
        handler.book.on_output(suspect)
        assert handler.sent[2:] == [late.message.id]

    run(work())


def test_a_suspect_that_leaves_lets_others_go() -> None:
    async def work() -> None:
        handler = Desk()
        for _ in range(2):
            handler.ask(7, begins=True)
            handler.die()
        suspect, late = handler.ask(7), handler.ask(2)
        assert handler.sent == [suspect.message.id]
        handler.book.remove(suspect)
        assert handler.sent[1:] == [late.message.id]

    run(work())


def test_a_suspect_that_waits_does_not_hold_up_others_for_ever() -> None:
    async def work() -> None:
        handler = Desk()
        for _ in range(2):
            handler.ask(7, begins=True)
            handler.die()
        handler.ask(7)
        late = handler.ask(2)
        handler.die()  # before it has begun
        assert handler.sent == [3]
        assert late.message.id in handler.book.unsent

    run(work())


def test_one_death_alone_after_two_is_enough_and_innocents_are_not_refused() -> None:
    suspects = CrashHistory()
    killer, innocent = asked(1, 7), asked(2, 8)
    for _ in range(2):
        suspects.record_death([killer, innocent])
    for message in (killer, innocent):
        assert suspects.must_run_alone(message)
        assert not suspects.is_refused(message)
    suspects.record_death([asked(3, 7)])
    assert suspects.is_refused(asked(4, 7))
    suspects.clear(innocent)
    assert not suspects.must_run_alone(innocent)
    assert not suspects.must_run_alone(asked(5, 9))


def test_what_was_asked_several_times_has_seen_one_death() -> None:
    suspects = CrashHistory()
    for _ in range(2):
        suspects.record_death([asked(number, 7) for number in range(4)])
    assert suspects.num_deaths(asked(9, 7)) == 2
    suspects.record_death([asked(1, 7), asked(2, 7)])
    assert suspects.is_refused(asked(9, 7))  # nothing else was there


def test_no_number_of_deaths_beside_other_requests_refuses_a_request() -> None:
    history = CrashHistory()
    for number in range(10):
        history.record_death([asked(1, 7), asked(2, 100 + number)])
    assert not history.is_refused(asked(1, 7))
    assert history.must_run_alone_to_its_end(asked(1, 7))
    history.record_death([asked(1, 7)])
    assert history.is_refused(asked(1, 7))


def test_after_a_third_death_a_request_stays_alone_to_its_end() -> None:
    async def work() -> None:
        handler = Desk()
        for _ in range(2):
            handler.ask(7, begins=True)
            handler.ask(8, begins=True)
            handler.die()
        suspect = handler.ask(7, begins=True)
        joined = handler.ask(1, begins=True)
        handler.book.on_output(suspect)
        assert joined.message.id in handler.sent  # it joined after the first output
        handler.die()
        assert not handler.book.crash_history.is_refused(suspect.message)
        again = handler.ask(7, begins=True)
        late = handler.ask(2)
        handler.book.on_output(again)
        assert late.message.id in handler.book.unsent
        handler.book.remove(again)
        assert late.message.id in handler.sent

    run(work())


def test_suspects_are_forgotten_after_an_hour_and_when_there_are_many() -> None:
    now = [0.0]
    suspects = CrashHistory(lambda: now[0])
    for number in range(4097):
        suspects.record_death([asked(1, number)])
    assert suspects.num_deaths(asked(1, 0)) == 0
    assert suspects.num_deaths(asked(1, 1)) == 1
    now[0] = 3601.0
    assert suspects.num_deaths(asked(1, 1)) == 0


def test_requests_differ_by_what_they_ask_and_not_by_who_asks() -> None:
    suspects = CrashHistory()
    suspects.record_death([wire.Compile(1, Constraint("regex", "a"))])
    assert suspects.num_deaths(wire.Compile(2, Constraint("regex", "a"))) == 1
    assert suspects.num_deaths(wire.Compile(3, Constraint("regex", "b"))) == 0
    suspects.record_death([asked(1, 7)])
    assert suspects.num_deaths(wire.Generate(2, [[7]], LONG, ANYONE, NO_HINTS)) == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("suspects") / "tiny.gguf"
    return str(write_tiny_gguf(path, Tiny(context_length=4096)))


async def kill_while_it_computes(engine: RemoteEngine) -> None:
    """Submit a request that kills the engine process before it sends an output."""
    os.kill(engine.supervisor.pid, signal.SIGSTOP)
    asking = asyncio.create_task(ask(engine, LONG))
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
                await ask(engine, LONG)
            assert await texts(await ask(engine))
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
            alone, other = await asyncio.gather(ask(engine), ask(engine, LONG))
            other.cancel()
            assert await texts(alone)
            assert suspects.num_deaths(suspect) == 0

    run(work())
