"""Requests that kill engine processes are found among others, run alone, and refused."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.remote import (
    ANYONE,
    GREEDY,
    LONG,
    PROMPTS,
    first_of,
    start_generation,
    started,
    texts,
)
from support.tiny import Tiny, write_tiny_gguf
from twostroke.core.constraint import Constraint
from twostroke.core.errors import EngineDiedError, EngineKillerError
from twostroke.core.request import NO_HINTS
from twostroke.core.sampling import SamplingParams
from twostroke.engine.output import Output
from twostroke.engine.process import messages as wire
from twostroke.engine.process import supervisor
from twostroke.engine.process.pending import (
    CrashHistory,
    PendingCalls,
    RemoteOutputs,
    ResumptionLimits,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine


DEATH = EngineDiedError("It died.")


def make_call(number: int, prompt: int) -> wire.Generate:
    return wire.Generate(number, [[prompt]], GREEDY, ANYONE, NO_HINTS)


class SentCalls:
    """Pending calls, and the ids of the calls that were sent to the engine process."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.pending = PendingCalls(self._record)

    def _record(self, message: wire.ServerMessage) -> None:
        if isinstance(message, wire.Generate):
            self.sent.append(message.id)

    def submit(self, prompt: int, *, begins: bool = False) -> RemoteOutputs:
        outputs = RemoteOutputs(make_call(next(self.pending.ids), prompt), 1, lambda _: None)
        self.pending.add(outputs)
        if begins:
            outputs.start()
        return outputs

    def begin(self, *calls: RemoteOutputs) -> None:
        """Let the engine process start calls."""
        for outputs in calls:
            outputs.start()

    def put(self, outputs: RemoteOutputs) -> None:
        """Deliver an output of a call."""
        outputs.put(Output(0, "", (5,)))
        self.pending.on_output(outputs)

    def die(self) -> None:
        self.sent.clear()
        self.pending.take_back(DEATH, [])
        self.pending.is_up = True
        self.pending.send_waiting()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_what_was_there_at_two_deaths_runs_alone_and_then_goes_on_with_others() -> None:
    async def work() -> None:
        calls = SentCalls()
        first, second = calls.submit(7, begins=True), calls.submit(8, begins=True)
        calls.die()
        assert calls.sent == [first.message.id, second.message.id]
        calls.begin(first, second)
        calls.die()
        late_call = calls.submit(2)
        assert calls.sent == [first.message.id]
        calls.put(first)
        assert calls.sent[-1] == second.message.id  # the first is paused
        assert {first.message.id, late_call.message.id} == calls.pending.unsent.keys()
        calls.put(second)
        assert not calls.pending.unsent
        assert sorted(calls.sent[-2:]) == sorted([first.message.id, late_call.message.id])

    run(work())


def test_a_paused_call_gets_no_output_of_its_earlier_number() -> None:
    async def work() -> None:
        calls = SentCalls()
        for _ in range(2):
            calls.pending.crash_history.record_death([make_call(0, 7)])
        paused = calls.submit(1, begins=True)
        number = paused.message.id
        calls.submit(7)
        assert number not in calls.pending.open
        assert paused.message.id in calls.pending.unsent

    run(work())


def test_a_call_fails_after_as_many_deaths_as_it_may_survive() -> None:
    async def work() -> None:
        calls = SentCalls()
        calls.pending.limits = ResumptionLimits(max_attempts=2)
        outputs, other = calls.submit(7, begins=True), calls.submit(8, begins=True)
        outputs.accepted.set_result(None)
        for number in range(3):
            assert not outputs.num_open or number < 3
            calls.begin(outputs, other)
            calls.die()
        with pytest.raises(EngineDiedError):
            await anext(aiter(outputs))

    run(work())


def test_a_call_that_waits_too_long_for_another_process_fails() -> None:
    async def work() -> None:
        calls = SentCalls()
        calls.pending.limits = ResumptionLimits(max_wait_s=0.0)
        begun = calls.submit(7, begins=True)
        waiting = calls.submit(8)
        calls.pending.take_back(DEATH, [])
        await asyncio.sleep(0.01)
        calls.pending.end_late(DEATH)
        with pytest.raises(EngineDiedError):
            await begun.accepted
        assert [*calls.pending.unsent.values()] == [waiting]

    run(work())


def test_a_suspect_that_leaves_lets_others_go() -> None:
    async def work() -> None:
        calls = SentCalls()
        for _ in range(2):
            calls.pending.crash_history.record_death([make_call(0, 7)])
        suspect, late_call = calls.submit(7), calls.submit(2)
        assert calls.sent == [suspect.message.id]
        calls.pending.remove(suspect)
        assert calls.sent[1:] == [late_call.message.id]

    run(work())


def test_a_suspect_that_waits_does_not_hold_up_others_for_ever() -> None:
    async def work() -> None:
        calls = SentCalls()
        for _ in range(2):
            calls.pending.crash_history.record_death([make_call(0, 7)])
        calls.submit(7)
        late_call = calls.submit(2)
        calls.die()  # before it has begun
        assert calls.sent == [1]
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


def test_after_a_fourth_death_a_request_stays_alone_to_its_end() -> None:
    async def work() -> None:
        calls = SentCalls()
        history = calls.pending.crash_history
        for number in range(4):
            history.record_death([make_call(0, 7), make_call(0, 100 + number)])
        repeated_call = calls.submit(7, begins=True)
        late_call = calls.submit(2)
        calls.put(repeated_call)
        assert late_call.message.id in calls.pending.unsent
        calls.pending.remove(repeated_call)
        assert late_call.message.id in calls.sent

    run(work())


def test_a_death_after_outputs_refuses_a_request_only_if_it_was_meant_to_stay_alone() -> None:
    """Otherwise a user who ends processes by hand would have a long answer refused."""
    history, message = CrashHistory(), make_call(1, 7)
    for _ in range(4):
        history.record_death([message], has_output=True)
        assert not history.is_refused(message)
    assert history.must_run_alone_to_its_end(message)
    history.record_death([message], has_output=True)
    assert history.is_refused(message)


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


@pytest.fixture
def killer_tokens(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Two tokens: an engine process dies of the first in its first step, of the second later."""
    hook = Path(__file__).parents[2] / "support" / "killer_hook"
    python_path = [str(hook), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(python_path))
    monkeypatch.setenv("KILLER_TOKEN", "7")
    monkeypatch.setenv("LATE_KILLER_TOKEN", "8")
    monkeypatch.setattr(supervisor, "BACK_OFF_S", (0.0,))
    return 7, 8


@pytest.mark.parametrize("is_late", [False, True])
def test_a_killer_is_refused_after_three_deaths_and_others_go_on(
    model: str, killer_tokens: tuple[int, int], is_late: bool
) -> None:
    killer = [killer_tokens[is_late], 9]
    others = [[1, 2, 3], [4, 5], [6]]
    params = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)

    async def work() -> None:
        async with started(model) as engine:
            expected = [
                await texts(await engine.generate([prompt], params, ANYONE, NO_HINTS))
                for prompt in others
            ]
            running = [
                await engine.generate([prompt], params, ANYONE, NO_HINTS) for prompt in others
            ]
            await asyncio.gather(*map(first_of, running))
            with pytest.raises(EngineKillerError, match="refused for an hour"):
                await texts(await engine.generate([killer], GREEDY, ANYONE, NO_HINTS))
            with pytest.raises(EngineKillerError):
                await engine.generate([killer], GREEDY, ANYONE, NO_HINTS)
            for outputs, text in zip(running, expected, strict=True):
                assert text[0].endswith((await texts(outputs))[0])
                assert outputs.num_deaths
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
