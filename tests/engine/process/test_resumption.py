"""Answers that go on in another engine process are those of one process that never died."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from support.remote import ANYONE, first_of, idle, options, started, texts
from support.tiny import Tiny, write_tiny_gguf
from support.waiting import until
from twostroke.core.constraint import Constraint
from twostroke.core.errors import EngineDiedError
from twostroke.core.options import SpeculationOptions
from twostroke.core.request import NO_HINTS, EmbeddingParams, Hints
from twostroke.core.sampling import SamplingParams
from twostroke.engine.process import supervisor
from twostroke.engine.process.pending import RemoteOutputs, ResumptionLimits
from twostroke.engine.process.remote import RemoteEngine

if TYPE_CHECKING:
    from twostroke.engine.output import Output

PROMPT = list(range(1, 40))
PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "several choices with log-probabilities": SamplingParams(
        temperature=1.5, seed=3, n=3, logprobs=2
    ),
    "penalties": SamplingParams(
        temperature=1.2,
        seed=2**63 + 5,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias={5: 2.0},
    ),
    "log-probabilities of the prompt": SamplingParams(seed=1, prompt_logprobs=1, logprobs=0),
    "a stop string": SamplingParams(temperature=2.0, seed=11, stop=["ab", "q z"], min_tokens=40),
    "a grammar": SamplingParams(
        seed=4, constraint=Constraint("regex", "([a-m]{3},)+", "guided_regex")
    ),
    "a schema": SamplingParams(
        seed=4,
        constraint=Constraint(
            "json_schema",
            '{"type":"object","properties":{"a":{"type":"array","items":{"type":"integer"}},'
            '"b":{"type":"string"}},"required":["a","b"],"additionalProperties":false}',
            "response_format",
        ),
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("resumption") / "tiny.gguf"
    return str(write_tiny_gguf(path, Tiny(context_length=4096)))


@pytest.fixture(autouse=True)
def _starts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACK_OFF_S", (0.0,))


def joined(outputs: list[Output], num_answers: int) -> list[Any]:
    """Return what the outputs of each answer amount to, however they are divided."""
    answers = []
    for index in range(num_answers):
        parts = [output for output in outputs if output.index == index]
        last = parts[-1]
        assert last.usage is not None
        assert [part.finish_reason is None for part in parts].count(False) == 1
        answers.append(
            (
                "".join(part.text for part in parts),
                [token for part in parts for token in part.token_ids],
                [logprob for part in parts for logprob in part.logprobs],
                [score for part in parts for score in part.prompt_logprobs],
                (last.finish_reason, last.stop),
                (last.usage.prompt_tokens, last.usage.completion_tokens),
            )
        )
    return answers


async def answer(
    engine: RemoteEngine, params: SamplingParams, deaths: list[int], hints: Hints = NO_HINTS
) -> list[Any]:
    """Generate answers, and kill the engine process after these numbers of outputs."""
    outputs = await engine.generate([PROMPT], params, ANYONE, hints)
    received: list[Output] = []
    async for output in outputs:
        received.append(output)
        if len(received) in deaths:
            num_deaths = engine.num_deaths
            os.kill(engine.supervisor.pid, signal.SIGKILL)
            await until(lambda num=num_deaths: engine.num_deaths > num and engine.supervisor.is_up)
    return joined(received, params.n)


def test_answers_go_on_after_deaths_as_if_there_were_none(model: str) -> None:
    rng = random.Random(1)

    async def run() -> None:
        async with started(model) as engine:
            for name, params in PARAMS.items():
                params = replace(params, max_tokens=600)  # noqa: PLW2901 - the same, but bounded
                num_deaths, num_resumed = engine.num_deaths, engine.pending.totals.num_resumed
                expected = await answer(engine, params, [])
                num_outputs = sum(len(tokens) for _, tokens, *_ in expected)
                deaths = sorted(rng.sample(range(1, max(4, num_outputs // 3)), 2))
                assert await answer(engine, params, deaths) == expected, (name, deaths)
                num_deaths = engine.num_deaths - num_deaths
                assert num_deaths, "it was never killed"
                assert 1 <= engine.pending.totals.num_resumed - num_resumed <= num_deaths
            await idle(engine)
            assert not engine.pending.open

    asyncio.run(run())


@pytest.mark.parametrize("method", ["ngram", "lookahead"])
def test_an_answer_with_speculation_goes_on(model: str, method: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, logprobs=1)
    speculative = replace(options(), speculation=SpeculationOptions(method, count=3))

    async def run() -> None:
        with RemoteEngine.start(model, speculative, "warning", lambda *_: None) as engine:
            engine.attach(lambda: None)
            expected = await answer(engine, params, [])
            assert await answer(engine, params, [20, 30]) == expected
            assert engine.num_deaths == 2

    asyncio.run(run())


def test_an_answer_without_a_seed_keeps_its_random_numbers(model: str) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=500, ignore_eos=True)

    async def run() -> None:
        async with started(model) as engine:
            outputs = await engine.generate([PROMPT], params, ANYONE, NO_HINTS)
            received = [await first_of(outputs)]
            os.kill(engine.supervisor.pid, signal.SIGKILL)
            received += [output async for output in outputs]
            await until(lambda: engine.num_deaths == 1)
            seeded = SamplingParams(
                temperature=2.0, max_tokens=500, ignore_eos=True, seed=outputs._seed
            )
            assert joined(received, 1) == await answer(engine, seeded, [])

    asyncio.run(run())


def test_a_death_during_prefill_repeats_no_progress_and_no_log_probability(model: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0, ignore_eos=True)
    prompt = [1 + i % 50 for i in range(3000)]

    async def run() -> None:
        async with started(model, token_budget=8) as engine:
            hints = Hints(shows_progress=True)
            expected = [
                output async for output in await engine.generate([prompt], params, ANYONE, hints)
            ]
            outputs = await engine.generate([prompt], params, ANYONE, hints)
            received = []
            async for output in outputs:
                received.append(output)
                if len(received) == 5:
                    os.kill(engine.supervisor.pid, signal.SIGKILL)
            await until(lambda: engine.num_deaths == 1)
            assert joined(received, 1) == joined(expected, 1)
            progress = [output.num_read for output in received if output.num_read]
            assert progress == sorted(set(progress))
            assert progress[-1] == 3000

    asyncio.run(run())


def test_an_engine_that_hangs_is_replaced_and_all_answers_go_on(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_MIN_STEP_LIMIT_S", 3.0)
    params = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)

    async def run() -> None:
        async with started(model, max_running=2, max_waiting_requests=3) as engine:
            prompts = [[number, 2, 3] for number in range(1, 6)]
            expected = [
                await texts(await engine.generate([prompt], params, ANYONE, NO_HINTS))
                for prompt in prompts
            ]
            calls = [
                await engine.generate([prompt], params, ANYONE, NO_HINTS) for prompt in prompts[:2]
            ]
            first_outputs = [await first_of(call) for call in calls]  # these two run: none waits
            calls += [
                await engine.generate([prompt], params, ANYONE, NO_HINTS) for prompt in prompts[2:]
            ]
            os.kill(engine.supervisor.pid, signal.SIGSTOP)
            results = await asyncio.gather(*map(texts, calls))
            assert results[2:] == expected[2:], "the queue has room for what it had admitted"
            for output, result, text in zip(first_outputs, results, expected, strict=False):
                assert [output.text + result[0]] == text
            assert engine.num_deaths >= 1  # a slow machine may seem to hang again

    asyncio.run(run())


def test_texts_that_were_embedded_are_not_embedded_again(model: str) -> None:
    async def run() -> None:
        async with started(model, max_running=1, token_budget=16) as engine:
            prompts = [[1 + number % 60] * 200 for number in range(30)]
            expected = {
                vector.index: vector.embedding.tobytes()
                async for vector in await engine.embed(prompts, EmbeddingParams(), ANYONE)
            }
            outputs = await engine.embed(prompts, EmbeddingParams(), ANYONE)
            received: dict[int, bytes] = {}
            async for vector in outputs:
                assert vector.index not in received
                received[vector.index] = vector.embedding.tobytes()
                if len(received) == 3:
                    os.kill(engine.supervisor.pid, signal.SIGKILL)
            assert received == expected
            await until(lambda: engine.num_deaths == 1)

    asyncio.run(run())


def test_no_attempt_fails_answers_at_once(model: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)

    async def run() -> None:
        async with started(model) as engine:
            engine.pending.limits = ResumptionLimits(max_attempts=0)
            outputs: RemoteOutputs = await engine.generate([PROMPT], params, ANYONE, NO_HINTS)
            await first_of(outputs)
            os.kill(engine.supervisor.pid, signal.SIGKILL)
            with pytest.raises(EngineDiedError, match="send the request again"):
                await texts(outputs)

    asyncio.run(run())
