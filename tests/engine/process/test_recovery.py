"""Several steps in flight, and ranks that die: the tokens stay the same."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from support.engines import tiny_client
from support.heads import write_random_heads
from support.native import native_dir
from support.tiny import write_tiny_gguf
from support.unreliable import Ranks
from support.waiting import wait_for
from twostroke import LLM, SamplingParams
from twostroke.backends import recipe as recipe_module
from twostroke.core.constraint import Constraint
from twostroke.core.errors import EngineStoppedError, TwostrokeError
from twostroke.core.options import (
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    SpeculationOptions,
)
from twostroke.core.request import FinishReason
from twostroke.engine.status import Health

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.engines import Backend
    from twostroke.engine.client import Client

TEXTS = ["hello the world is in the world is in", "the and the and " * 4, "a", "ing er is of"]
FORM = Constraint("regex", r"(hello|help)( the (world|moon)){1,4}\.")
PARAMS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.8, max_tokens=25, seed=1, logprobs=2, n=3),
    SamplingParams(max_tokens=20, seed=3, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(temperature=1.5, max_tokens=40, seed=2, constraint=FORM),
    SamplingParams(max_tokens=4, seed=5, prompt_logprobs=1),
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5], [6, 7], [8] * 40, [9, 10, 11], [12] * 20]


@contextmanager
def engine_of(
    path: Path, backend: str, steps_ahead: int, chance: float, **speculation: Any
) -> Iterator[tuple[LLM, Ranks]]:
    """Yield an engine on ranks; each call of the backend loses a rank with the given `chance`."""
    native_dir()
    backends: list[Ranks] = []
    create_backend = recipe_module.create_backend

    def make(*args: Any, **kwargs: Any) -> Any:
        result = create_backend(*args, **kwargs)
        if kwargs["share_threads_with"] is not None:
            return result  # a draft model's backend
        backends.append(Ranks(result, steps_ahead))
        return result

    options = EngineOptions(
        ComputeOptions(backend=backend),
        CacheOptions(memory_bytes=6_000_000 if backend == "cpu" else None),
        BatchOptions(token_budget=40, max_running=8),
        SpeculationOptions(**speculation),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_module, "create_backend", make)
        llm = LLM(str(path), options)
    with llm:
        backends[0].chance = chance
        yield llm, backends[0]
        backends[0].chance = 0.0


def output_parts(llm: LLM) -> list[Any]:
    """Return all answers, without log-probabilities where these depend on a step's rows."""
    prompts = [text for text in TEXTS for _ in PARAMS]
    is_exact = llm.engine.client.loop.facts.name == "cpu"
    return [
        (
            answer.text,
            answer.token_ids,
            answer.finish_reason,
            (answer.logprobs, answer.prompt_logprobs)
            if is_exact
            else len(answer.prompt_logprobs or ()),
        )
        for answers in llm.generate(prompts, PARAMS * len(TEXTS))
        for answer in answers
    ]


@pytest.mark.parametrize(
    ("backend", "method", "count"),
    [
        ("reference", "ngram", 6),
        ("cpu", "off", None),
        ("cpu", "draft", 4),
        ("cpu", "lookahead", 12),
        ("cpu", "eagle", 3),
        ("cpu", "medusa", 3),
    ],
)
def test_tokens_do_not_depend_on_steps_in_flight_or_lost_ranks(
    tmp_path: Path, backend: str, method: str, count: int | None
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    speculation: dict[str, Any] = {"method": method, "count": count}
    if method == "draft":
        speculation["draft"] = str(path)
    if method in {"eagle", "medusa"}:
        speculation["heads"] = str(write_random_heads(tmp_path / method, path, method))
    with engine_of(path, backend, 0, 0.0, method="off") as (llm, _):
        plain = output_parts(llm)
    num_losses = 0
    for steps_ahead, chance in ((0, 0.05), (1, 0.0), (2, 0.05)):
        with engine_of(path, backend, steps_ahead, chance, **speculation) as (llm, ranks):
            assert output_parts(llm) == plain
            loop = llm.engine.client.loop
            stats, speculation_stats = loop.snapshot().scheduler, loop.snapshot().speculation
            assert not loop.speculator._failed
            assert stats.num_referenced_pages == 0
            assert stats.num_recoveries == ranks.num_losses
            assert ranks.most_in_flight == (1 + steps_ahead if steps_ahead else 0)
            assert method == "off" or sum(speculation_stats.proposed.values()) > 0
            num_losses += ranks.num_losses
    assert num_losses > 1


@contextmanager
def client_of(folder: Path, steps_ahead: int) -> Iterator[tuple[Client, Backend, Ranks]]:
    backends: list[Ranks] = []

    def lose(backend: Backend) -> None:
        backends.append(Ranks(backend, steps_ahead, seed=1))

    with tiny_client(
        folder, prepare=lose, steps_ahead=steps_ahead, token_budget=32, max_running=8
    ) as (
        client,
        backend,
    ):
        yield client, backend, backends[0]


def answers(client: Client, prompts: list[list[int]]) -> list[tuple[int, ...] | str]:
    generations = [client.generate(prompt, GREEDY) for prompt in prompts]
    results: list[tuple[int, ...] | str] = []
    for generation in generations:
        try:
            results.append(generation.wait()[0].token_ids)
        except TwostrokeError as error:
            results.append(str(error))
    return results


@pytest.mark.parametrize("steps_ahead", [0, 2])
def test_requests_come_and_go_while_ranks_are_replaced(tmp_path: Path, steps_ahead: int) -> None:
    with client_of(tmp_path, steps_ahead) as (client, _, ranks):
        expected = answers(client, PROMPTS)
        ranks.gate.clear()
        ranks.chance = 1.0
        generations = [client.generate(prompt, GREEDY) for prompt in PROMPTS[:3]]
        wait_for(lambda: client.loop.health is Health.RECOVERING)
        ranks.chance = 0.0
        generations += [client.generate(prompt, GREEDY) for prompt in PROMPTS[3:]]
        for index in (1, 3):
            generations[index].cancel()
        ranks.gate.set()
        results = [generation.wait()[0] for generation in generations]
        for index, answer in enumerate(results):
            if index in (1, 3):
                assert answer.finish_reason is FinishReason.CANCEL
            else:
                assert answer.token_ids == expected[index]
        assert client.loop.health is Health.READY
        assert client.loop.snapshot().scheduler.num_referenced_pages == 0


def test_ranks_that_get_lost_while_idle_are_replaced_at_once(tmp_path: Path) -> None:
    with engine_of(write_tiny_gguf(tmp_path / "tiny.gguf"), "reference", 1, 0.0) as (llm, ranks):
        loop, expected = llm.engine.client.loop, texts_of(llm)
        for _ in range(5):  # more often than losses in a row are borne
            ranks.gate.clear()
            ranks.lose()
            wait_for(lambda: loop.health is Health.RECOVERING)
            ranks.gate.set()
            wait_for(lambda: loop.health is Health.READY)
        assert texts_of(llm) == expected
        ranks.failure = TwostrokeError("Rank 1 has left.")
        ranks.lose()
        wait_for(lambda: loop.health is Health.STOPPED)


def texts_of(llm: LLM) -> list[str]:
    return [choices[0].text for choices in llm.generate(TEXTS, GREEDY)]


def test_everything_ends_if_ranks_cannot_be_replaced(tmp_path: Path) -> None:
    with client_of(tmp_path, 1) as (client, _, ranks):
        ranks.failure = TwostrokeError("Rank 1 cannot be started again: no memory.")
        ranks.gate.clear()
        ranks.chance = 1.0
        generations = [client.generate(prompt, GREEDY) for prompt in PROMPTS]
        ranks.gate.set()
        for generation in generations:
            with pytest.raises(TwostrokeError, match=r"stopped: Rank 1 cannot be started again"):
                generation.wait()
        assert client.loop.health is Health.STOPPED
        with pytest.raises(EngineStoppedError, match="no memory"):
            client.generate([5], GREEDY)


def test_an_engine_that_closes_does_not_wait_for_a_recovery(tmp_path: Path) -> None:
    with client_of(tmp_path, 1) as (client, _, ranks):
        ranks.gate.clear()
        ranks.chance = 1.0
        generation = client.generate([5], GREEDY)
        wait_for(lambda: client.loop.health is Health.RECOVERING)
        client.loop.close()  # lets the recovery give up, or it would last for long
        assert ranks.gate.is_set()
        with pytest.raises(TwostrokeError, match="The engine stopped"):
            generation.wait()


def test_ranks_that_get_lost_in_every_step_are_given_up(tmp_path: Path) -> None:
    with client_of(tmp_path, 1) as (client, _, ranks):
        ranks.chance = 1.0
        [answer] = answers(client, [[5]])
        assert answer == "The engine stopped: Rank 1 does not answer."
        assert ranks.num_losses == 4


def test_a_request_that_breaks_a_step_fails_alone_with_others_in_flight(tmp_path: Path) -> None:
    prompts = [*PROMPTS, [99] * 50, [13] * 50]
    with client_of(tmp_path, 2) as (client, backend, ranks):
        expected = answers(client, prompts)
        for chance in (0.0, 0.02):
            backend.poison, ranks.chance = 99, chance
            backend.gate.clear()
            threading.Timer(0.1, backend.gate.set).start()
            result = answers(client, prompts)
            at = prompts.index([99] * 50)
            assert str(result.pop(at)).startswith("The engine failed on this request: ValueError")
            assert result == expected[:at] + expected[at + 1 :]
        assert client.loop.snapshot().scheduler.num_referenced_pages == 0


def test_a_step_in_flight_after_one_that_fails_is_computed_again(tmp_path: Path) -> None:
    with client_of(tmp_path, 1) as (client, backend, ranks):
        expected = answers(client, [[5]])
        run = ranks._run

        def fail_alone(plan: Any) -> Any:
            backend.poison = 99 if len(plan.slices) == 1 and ranks._plans else None
            return run(plan)

        ranks._run = fail_alone  # type: ignore[method-assign]
        backend.gate.clear()
        generations = [client.generate(prompt, GREEDY) for prompt in ([99], [5])]
        backend.gate.set()
        with pytest.raises(TwostrokeError, match="ValueError"):
            generations[0].wait()
        assert generations[1].wait()[0].token_ids == expected[0]


def test_cancelled_requests_are_forgotten_after_the_last_step_that_has_them(tmp_path: Path) -> None:
    rng = random.Random(0)
    with client_of(tmp_path, 2) as (client, backend, ranks):
        forgotten: list[str] = []
        in_flight: list[bool] = []

        def forget(request: Any) -> None:
            forgotten.append(request.id)
            in_flight.append(any(request in plan.requests for plan in ranks._plans))

        backend.forget = forget  # type: ignore[method-assign]
        generations = [client.generate(PROMPTS[i % 5], GREEDY) for i in range(40)]
        for generation in rng.sample(generations, 30):
            next(generation.outputs(), None)
            generation.cancel()
        for generation in generations:
            generation.wait()
        ids = {request_id for generation in generations for request_id in generation.request_ids}
        wait_for(lambda: set(forgotten) == ids)
        assert len(forgotten) == len(ids)
        assert not any(in_flight)
