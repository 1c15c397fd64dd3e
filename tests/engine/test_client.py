"""The client: errors, choices, stop strings and cancellation, blocking and asynchronous."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from support.engines import tiny_client
from support.waiting import wait_for
from twostroke.core.errors import ContextLengthError, OverloadedError, RequestError
from twostroke.core.request import FinishReason
from twostroke.core.sampling import SamplingParams
from twostroke.engine.client import Caller

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from twostroke.engine.client import Client

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with tiny_client(tmp_path_factory.mktemp("tiny")) as (client, _):
        yield client


@pytest.mark.parametrize(
    ("tokens", "params", "word"),
    [
        ([], GREEDY, "empty"),
        ([5, 10**6], GREEDY, "outside 0 to"),
        ([-1], GREEDY, "outside 0 to"),
        ([5], SamplingParams(logit_bias={10**6: 1.0}), "logit_bias"),
        ([5], SamplingParams(stop_token_ids=(10**6,)), "stop_token_ids"),
    ],
)
def test_unknown_token_ids_are_refused(
    client: Client, tokens: list[int], params: SamplingParams, word: str
) -> None:
    with pytest.raises(RequestError, match=word):
        client.generate(tokens, params)


def test_a_prompt_that_can_never_fit_is_refused_at_once(client: Client) -> None:
    with pytest.raises(ContextLengthError, match="512 tokens"):
        client.generate([5] * 512, GREEDY)
    with pytest.raises(ContextLengthError, match="512 tokens"):
        client.generate([5] * 501, GREEDY)
    [longest_answer] = client.generate([5] * 500, GREEDY).wait()
    assert longest_answer.finish_reason is FinishReason.LENGTH


def test_choice_i_has_the_seed_plus_i(client: Client) -> None:
    def answer(seed: int, n: int) -> list[tuple[int, ...]]:
        params = SamplingParams(seed=seed, n=n, max_tokens=8)
        return [choice.token_ids for choice in client.generate([5, 6, 7], params).wait()]

    together = answer(40, 3)
    assert together == [answer(seed, 1)[0] for seed in (40, 41, 42)]
    assert len(set(together)) == 3


def test_seeds_wrap_around_after_the_largest(client: Client) -> None:
    params = SamplingParams(seed=2**64 - 1, n=2, max_tokens=2)
    assert len(client.generate([5], params).wait()) == 2


def test_pieces_joined_are_the_whole(client: Client) -> None:
    outputs = list(client.generate([5, 6, 7], GREEDY))
    [completion] = client.generate([5, 6, 7], GREEDY).wait()
    assert "".join(output.text for output in outputs) == completion.text
    assert tuple(t for output in outputs for t in output.token_ids) == completion.token_ids
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert completion.text == client.card.tokenizer.decode(completion.token_ids)


def test_a_stop_string_ends_the_text_before_it(client: Client) -> None:
    tokenizer = client.card.tokenizer
    hello, world = tokenizer.find("hello"), tokenizer.find("Ġworld")
    assert hello is not None
    assert world is not None
    bias = {hello: 100.0, world: 99.0}
    params = SamplingParams(
        temperature=0, max_tokens=9, logit_bias=bias, stop=("oh",), ignore_eos=True
    )
    [completion] = client.generate([5], params).wait()
    assert (completion.text, completion.finish_reason, completion.stop) == (
        "hell",
        FinishReason.STOP,
        "oh",
    )
    assert completion.token_ids == (hello, hello)
    assert completion.usage.completion_tokens == 2


def test_a_stop_string_can_be_included(client: Client) -> None:
    hello = client.card.tokenizer.find("hello")
    assert hello is not None
    params = SamplingParams(
        temperature=0, max_tokens=9, logit_bias={hello: 100.0}, stop=("oh",), include_stop=True
    )
    [completion] = client.generate([5], params).wait()
    assert completion.text == "helloh"


def test_a_stop_token_ends_without_its_text(client: Client) -> None:
    hello = client.card.tokenizer.find("hello")
    assert hello is not None
    params = SamplingParams(temperature=0, logit_bias={hello: 100.0}, stop_token_ids=(hello,))
    [completion] = client.generate([5], params).wait()
    assert (completion.text, completion.stop, completion.token_ids) == ("", hello, (hello,))


def test_an_unfinished_stop_string_is_part_of_the_text(client: Client) -> None:
    hello = client.card.tokenizer.find("hello")
    assert hello is not None
    params = SamplingParams(
        temperature=0, max_tokens=2, logit_bias={hello: 100.0}, stop=("hellohellohello",)
    )
    [completion] = client.generate([5], params).wait()
    assert (completion.text, completion.finish_reason) == ("hellohello", FinishReason.LENGTH)


def test_each_token_has_logprobs(client: Client) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, ignore_eos=True)
    [completion] = client.generate([5], params).wait()
    assert [len(entry.top_ids) for entry in completion.logprobs] == [2, 2, 2]
    assert [entry.top_ids[0] for entry in completion.logprobs] == list(completion.token_ids)


def test_timings_are_in_order(client: Client) -> None:
    [completion] = client.generate([5] * 40, GREEDY).wait()
    timings, usage = completion.timings, completion.usage
    assert timings.arrival_s <= timings.started_s <= timings.first_token_s <= timings.last_token_s
    assert timings.ttft_s == timings.first_token_s - timings.arrival_s
    assert (usage.prompt_tokens, usage.completion_tokens) == (40, 12)
    [repeated] = client.generate([5] * 40, GREEDY).wait()
    assert repeated.usage.cached_tokens == 32
    assert repeated.token_ids == completion.token_ids


def test_tenants_do_not_share_prefixes(client: Client) -> None:
    prompt = list(range(20, 60))
    for tenant in ("a", "b"):
        [completion] = client.generate(prompt, GREEDY, Caller(tenant=tenant)).wait()
        assert completion.usage.cached_tokens == 0
    [repeated] = client.generate(prompt, GREEDY, Caller(tenant="a")).wait()
    assert repeated.usage.cached_tokens == 32


def test_leaving_early_cancels_the_other_choices(tmp_path: Path) -> None:
    with tiny_client(tmp_path) as (client, backend):
        backend.gate.clear()
        generation = client.generate([5], SamplingParams(n=3, ignore_eos=True))
        backend.gate.set()
        for _ in generation:
            break
        wait_for(lambda: client.loop.snapshot().scheduler.num_running == 0)
        assert client.loop.snapshot().scheduler.num_referenced_pages == 0


def test_first_and_last_output_have_usage(tmp_path: Path) -> None:
    with tiny_client(tmp_path) as (client, _):
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        for cached in (0, 32):
            first, middle, last = client.generate([5] * 40, params)
            assert first.usage is not None
            assert (first.usage.prompt_tokens, first.usage.cached_tokens) == (40, cached)
            assert first.usage.completion_tokens == 1
            assert middle.usage is None
            assert last.usage is not None
            assert last.usage.completion_tokens == 3


def test_a_cancelled_generation_keeps_its_text_and_its_reason(tmp_path: Path) -> None:
    with tiny_client(tmp_path) as (client, _):
        generation = client.generate([5], SamplingParams(temperature=0, ignore_eos=True))
        outputs = generation.outputs()
        first = next(outputs)
        generation.cancel()
        rest = list(outputs)
        assert rest[-1].finish_reason is FinishReason.CANCEL
        assert rest[-1].usage is not None
        assert rest[-1].usage.completion_tokens >= len(first.token_ids)
        generation.cancel()  # once more does no harm
        assert list(generation.outputs()) == []


def test_a_waiting_request_can_be_cancelled(tmp_path: Path) -> None:
    with tiny_client(tmp_path, max_running=1) as (client, backend):
        backend.gate.clear()
        running = client.generate([5], GREEDY)
        waiting = client.generate([6], GREEDY)
        wait_for(lambda: client.loop.snapshot().scheduler.num_running == 1)
        waiting.cancel()
        [completion] = waiting.wait()
        assert (completion.finish_reason, completion.token_ids) == (FinishReason.CANCEL, ())
        backend.gate.set()
        assert running.wait()[0].finish_reason is FinishReason.LENGTH


def test_prompts_are_queued_all_or_none(tmp_path: Path) -> None:
    with tiny_client(tmp_path, max_running=1, max_waiting_requests=2) as (client, backend):
        backend.gate.clear()
        running = client.generate([5], GREEDY)
        wait_for(lambda: client.loop.snapshot().scheduler.num_running == 1)
        with pytest.raises(OverloadedError):
            client.generate([6], SamplingParams(n=3))
        assert client.loop.snapshot().scheduler.num_waiting == 0
        waiting = client.generate([6], SamplingParams(n=2, max_tokens=1))
        backend.gate.set()
        assert len(waiting.wait()) == 2
        assert len(running.wait()) == 1


def test_async_outputs_equal_blocking_ones(client: Client) -> None:
    async def answer() -> list[tuple[int, ...]]:
        many = client.generate_many_async([[5], [6, 7]], GREEDY)
        return [completion.token_ids for completion in await many.wait()]

    blocking = [client.generate(prompt, GREEDY).wait()[0].token_ids for prompt in ([5], [6, 7])]
    assert asyncio.run(answer()) == blocking


def test_async_generation_can_be_cancelled(client: Client) -> None:
    async def answer() -> list[FinishReason | None]:
        generation = client.generate_many_async([[5]], SamplingParams(n=2, ignore_eos=True))
        reasons = []
        async for output in generation:
            generation.cancel()
            reasons.append(output.finish_reason)
        assert generation.num_unread == 0
        return reasons

    reasons = asyncio.run(answer())
    assert reasons.count(FinishReason.CANCEL) == 2


def test_a_closed_event_loop_does_not_harm_the_engine(tmp_path: Path) -> None:
    with tiny_client(tmp_path) as (client, backend):

        async def leave() -> None:
            backend.gate.clear()
            client.generate_many_async([[5]], GREEDY)

        asyncio.run(leave())
        backend.gate.set()
        assert client.generate([6], GREEDY).wait()[0].finish_reason is FinishReason.LENGTH
