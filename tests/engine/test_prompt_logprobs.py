"""Log-probabilities of prompts, from every backend."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from support.cpu import cpu_backend, tiny_model
from support.engines import tiny_client
from support.schedules import Setting, fresh, random_requests, run_schedule
from twostroke.backends.reference import ReferenceBackend
from twostroke.core.errors import ContextLengthError, TwostrokeError
from twostroke.core.request import FinishReason
from twostroke.core.sampling import SamplingParams
from twostroke.engine.scheduler import Continuous

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from twostroke.backends.interface import Backend
    from twostroke.engine.client import Client

CONTEXT = 200
NUM_PAGES = 64
PROMPT = [9, 2, 30, 4, 101, 17, 2, 2, 8, 9, 2, 30, 77, 5, 6, 60, 61, 62, 63, 64]
SETTING = Setting(
    num_pages=8,
    token_budget=24,
    max_running=5,
    prefix_cache=True,
    policy=Continuous(),
    max_scored_rows=7,
)


@pytest.fixture(params=["reference", "cpu", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    model = tiny_model(num_layers=2)
    if request.param == "cpu":
        with cpu_backend(model, "portable", NUM_PAGES) as native:
            yield native
        return
    if request.param == "reference":
        yield ReferenceBackend(*model, NUM_PAGES, 16)
        return
    pytest.importorskip("torch", reason="no PyTorch here")
    from twostroke.backends.torch import TorchBackend

    yield TorchBackend(*model, NUM_PAGES, 16)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with tiny_client(tmp_path_factory.mktemp("scored"), max_scored_rows=6, token_budget=256) as (
        built_client,
        _,
    ):
        yield built_client


def test_prompt_logprobs_follow_from_the_logits(backend: Backend) -> None:
    rng = random.Random(3)
    requests = random_requests(rng, 12, vocab_size=200, longest=60, most_output=6)
    for number, request in enumerate(requests):
        request.params = replace(
            request.params, max_tokens=(0, 1, 40)[number % 3], prompt_logprobs=3
        )
    answers, num_preemptions = run_schedule(
        backend, SETTING, [fresh(request) for request in requests], CONTEXT
    )
    assert num_preemptions > 0
    for request in requests:
        tokens, prompt_logprobs = answers[request.id]
        expected_logprobs = log_softmax(backend.score([*request.prompt, *tokens]))
        assert len(prompt_logprobs) == len(request.prompt) - 1 + len(tokens)
        next_tokens = [*request.prompt[1:], *tokens]
        for row, token, logprobs in zip(
            expected_logprobs, next_tokens, prompt_logprobs, strict=False
        ):
            assert logprobs is not None
            assert logprobs.logprob == pytest.approx(row[token], abs=2e-3)
            best = np.sort(row)[::-1][: len(logprobs.top_logprobs)]
            np.testing.assert_allclose(logprobs.top_logprobs, best, atol=2e-3)
        assert request.params.max_tokens == len(tokens) or tokens


def test_answers_have_their_prompts_logprobs(client: Client) -> None:
    plain = client.generate(PROMPT, SamplingParams(max_tokens=5, seed=1, logprobs=0)).wait()[0]
    params = SamplingParams(max_tokens=5, seed=1, logprobs=0, prompt_logprobs=2, n=2)
    first, second = client.generate(PROMPT, params).wait()
    assert first.token_ids == plain.token_ids
    assert plain.prompt_logprobs == ()
    assert [prompt_logprob.top_ids for prompt_logprob in first.prompt_logprobs] == [
        prompt_logprob.top_ids for prompt_logprob in second.prompt_logprobs
    ]
    assert len(first.prompt_logprobs) == len(PROMPT) - 1
    assert all(len(prompt_logprob.top_ids) == 2 for prompt_logprob in first.prompt_logprobs)
    longer = SamplingParams(max_tokens=0, prompt_logprobs=0)
    (scored,) = client.generate([*PROMPT, *plain.token_ids], longer).wait()
    values = [
        prompt_logprob.logprob for prompt_logprob in scored.prompt_logprobs[len(PROMPT) - 1 :]
    ]
    assert values == pytest.approx([logprob.logprob for logprob in plain.logprobs], abs=1e-5)


def test_logprobs_of_a_long_prompt_come_step_by_step(client: Client) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = list(client.generate(PROMPT, params))
    assert [len(output.prompt_logprobs) for output in outputs] == [6, 6, 6, 1]
    assert [len(output.token_ids) for output in outputs] == [0, 0, 0, 1]
    timings = outputs[-1].timings
    assert timings is not None
    assert timings.first_token_s == timings.last_token_s


@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_a_prompt_can_be_scored_without_an_answer(client: Client, length: int) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, ignore_eos=length % 2 == 1)
    (answer,) = client.generate(PROMPT[:length], params).wait()
    assert (answer.text, answer.token_ids, answer.logprobs) == ("", (), ())
    assert answer.finish_reason is FinishReason.LENGTH
    assert len(answer.prompt_logprobs) == length - 1
    assert answer.usage.completion_tokens == 0


def test_prompt_logprobs_do_not_use_cached_pages(client: Client) -> None:
    prompt = [*range(20, 90)]
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    (first,) = client.generate(prompt, params).wait()
    (second,) = client.generate(prompt, params).wait()
    assert first.prompt_logprobs == second.prompt_logprobs
    assert second.usage.cached_tokens == 0
    (plain,) = client.generate(prompt, SamplingParams(max_tokens=1)).wait()
    assert plain.usage.cached_tokens == 64


def test_a_prompt_as_long_as_the_context_can_be_scored_but_not_continued(client: Client) -> None:
    length = client.card.context_length
    prompt = [20 + i % 60 for i in range(length)]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    (answer,) = client.generate(prompt, params).wait()
    assert len(answer.prompt_logprobs) == length - 1
    with pytest.raises(ContextLengthError):
        client.generate(prompt, replace(params, max_tokens=1))
    with pytest.raises(ContextLengthError):
        client.generate([*prompt, 20], params)


def test_a_failing_prompt_does_not_harm_others(tmp_path: Path) -> None:
    with tiny_client(tmp_path, max_scored_rows=4) as (client, backend):
        backend.poison = 99
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        wrong, right = (client.generate(tokens, params) for tokens in ([7, 8, 99, 9], PROMPT))
        assert len(right.wait()[0].prompt_logprobs) == len(PROMPT) - 1
        with pytest.raises(TwostrokeError, match="failed on this request"):
            wrong.wait()


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return log-probabilities, (rows, vocab_size)."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
