"""Embeddings for callers: order, options, errors, cancellation."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.engines import tiny_client
from support.native import native_dir
from support.tiny import write_tiny_folder, write_tiny_gguf
from support.vectors import twin
from support.waiting import wait_for
from twostroke import LLM, AsyncLLM, EngineOptions
from twostroke.core.errors import (
    ContextLengthError,
    EngineStoppedError,
    OverloadedError,
    RequestError,
    TwostrokeError,
)
from twostroke.core.options import BatchOptions, CacheOptions, ComputeOptions
from twostroke.core.request import DEFAULT_SERVICE_TIER, EmbeddingParams
from twostroke.core.sampling import SamplingParams
from twostroke.engine import embedding
from twostroke.engine.client import Caller
from twostroke.engine.embedding import Embedding

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.engines import Backend as GatedBackend
    from twostroke.engine.client import Client

TEXT = [9, 2, 30, 4, 101, 17, 2, 2, 8, 9, 2, 30, 77, 5, 6, 60, 61, 62, 63, 64, 9, 8]
CALLER = Caller(prompt_field="input")
SMALL = CacheOptions(memory_bytes=4_000_000)


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[tuple[Client, GatedBackend]]:
    with tiny_client(tmp_path, token_budget=8, max_running=8) as both:
        yield both


def texts_of(count: int) -> list[list[int]]:
    return [[5 + (index * 7 + i) % 200 for i in range(1 + index % 9)] for index in range(count)]


def test_many_texts_come_in_order_through_a_small_queue(tmp_path: Path) -> None:
    texts = texts_of(300)
    with tiny_client(tmp_path, max_waiting_requests=5) as (client, backend):
        results = list(client.embed(texts, EmbeddingParams(), CALLER))
        assert [result.index for result in results] == [*range(300)]
        assert [result.usage.prompt_tokens for result in results] == [len(text) for text in texts]
        for position in (0, 7, 299):
            name = backend._program.last_states
            right = twin(backend.trace(texts[position], [name])[name], "mean")
            np.testing.assert_allclose(results[position].vector, right, atol=1e-4)
        totals = client.loop.snapshot().services[DEFAULT_SERVICE_TIER]
        assert totals.embedded_texts == 300
        assert totals.embedded_tokens == sum(map(len, texts))


def test_embedded_texts_are_not_counted_as_answers(tmp_path: Path) -> None:
    with tiny_client(tmp_path) as (client, backend):
        assert len(list(client.embed(texts_of(3), EmbeddingParams(), CALLER))) == 3
        backend.gate.clear()
        stream = client.embed(texts_of(3), EmbeddingParams(), CALLER)
        threading.Timer(0.2, client.loop.cancel, [list(client.loop._listeners)]).start()
        with pytest.raises(EngineStoppedError):
            next(stream)
        backend.gate.set()
        totals = client.loop.snapshot().services[DEFAULT_SERVICE_TIER]
    assert (totals.embedded_texts, totals.embedded_tokens) == (3, 1 + 2 + 3)
    assert (totals.ends, totals.prompt_tokens, totals.completion_tokens) == ({}, 0, 0)
    assert {latency.count for latency in totals.latencies.values()} == {0}


def test_a_full_queue_refuses_a_caller_without_a_text_in_it(tmp_path: Path) -> None:
    with tiny_client(tmp_path, max_waiting_requests=1) as (client, backend):
        refuse_when_full(client, backend)


def refuse_when_full(client: Client, backend: GatedBackend) -> None:
    backend.gate.clear()
    first = client.generate([5, 6], SamplingParams(max_tokens=1))
    wait_for(lambda: client.loop.snapshot().scheduler.num_running == 1)
    second = client.generate([5, 6], SamplingParams(max_tokens=1))
    with pytest.raises(OverloadedError):
        next(client.embed(texts_of(2), EmbeddingParams(), CALLER))
    backend.gate.set()
    assert first.wait()
    assert second.wait()
    assert len(list(client.embed(texts_of(5), EmbeddingParams(), CALLER))) == 5


async def read_all(client: Client, count: int) -> list[int]:
    generation = client.embed_async(texts_of(count), EmbeddingParams(), CALLER)
    return sorted([Embedding.of(output).index async for output in generation])


def refuse(
    client: Client, monkeypatch: pytest.MonkeyPatch, first: int, last: int = sys.maxsize
) -> list[int]:
    """Refuse submissions `first` to `last`, counted from 1.

    Returns a list that grows with each submission.
    """
    submit, seen = client.loop.submit, []

    def submit_or_not(choices: Any) -> None:
        seen.append(len(seen) + 1)
        if first <= seen[-1] <= last:
            raise OverloadedError("The queue is full.")
        submit(choices)

    monkeypatch.setattr(client.loop, "submit", submit_or_not)
    return seen


def test_later_texts_wait_while_the_queue_is_full(
    gated: tuple[Client, GatedBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = gated
    refuse(client, monkeypatch, 4, 12)
    result = client.embed(texts_of(20), EmbeddingParams(), CALLER)
    assert [embedding.index for embedding in result] == [*range(20)]
    refuse(client, monkeypatch, 4, 12)
    assert asyncio.run(read_all(client, 20)) == [*range(20)]
    refuse(client, monkeypatch, 1)
    with pytest.raises(OverloadedError):
        next(client.embed(texts_of(2), EmbeddingParams(), CALLER))
    with pytest.raises(OverloadedError):
        asyncio.run(read_all(client, 2))


def test_waiting_texts_can_be_cancelled(
    gated: tuple[Client, GatedBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = gated
    seen = refuse(client, monkeypatch, 3)

    async def read_until_cancelled() -> None:
        generation = client.embed_async(texts_of(5), EmbeddingParams(), CALLER)

        async def cancel() -> None:
            await asyncio.to_thread(wait_for, lambda: len(seen) > 8)  # it tries again and again
            generation.cancel()

        cancelling = asyncio.create_task(cancel())
        async for output in generation:
            Embedding.of(output)
        await cancelling

    with pytest.raises(EngineStoppedError):
        asyncio.run(asyncio.wait_for(read_until_cancelled(), 30))
    assert not client.loop._listeners


def test_static_batches_do_not_wait_for_texts_that_wait_themselves(tmp_path: Path) -> None:
    batch = BatchOptions(policy="static", batch_size=256)
    with tiny_client(tmp_path, batch=batch) as (client, _):
        reading = asyncio.wait_for(read_all(client, 300), 30)
        assert asyncio.run(reading) == [*range(300)]
        results = list(client.embed(texts_of(300), EmbeddingParams(), CALLER))
        assert [result.index for result in results] == [*range(300)]


def test_leaving_early_cancels_all_texts(gated: tuple[Client, GatedBackend]) -> None:
    client, _ = gated
    stream = client.embed(texts_of(600), EmbeddingParams(), CALLER)
    assert next(stream).index == 0
    stream.close()
    wait_for(
        lambda: (
            client.loop.snapshot().scheduler.num_running
            + client.loop.snapshot().scheduler.num_waiting
            == 0
        )
    )
    assert client.loop.snapshot().scheduler.num_referenced_pages == 0
    assert client.loop.snapshot().services[DEFAULT_SERVICE_TIER].embedded_texts < 600


def test_a_failing_text_raises_and_other_requests_continue(
    gated: tuple[Client, GatedBackend],
) -> None:
    client, backend = gated
    backend.poison = 99
    other = client.generate(TEXT, SamplingParams(max_tokens=2, ignore_eos=True))
    with pytest.raises(TwostrokeError, match="failed on this request"):
        list(client.embed([[7, 8], [5, 99, 6], [9]], EmbeddingParams(), CALLER))
    assert len(other.wait()[0].token_ids) == 2
    backend.poison = None
    assert len(list(client.embed([[7, 8]], EmbeddingParams(), CALLER))) == 1


def test_states_that_are_not_finite_are_an_error(
    gated: tuple[Client, GatedBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, backend = gated
    compute = backend.run

    def run(plan: Any) -> Any:
        result = compute(plan)
        for part, rows in zip(plan.slices, result.states, strict=True):
            if part.request.tokens[0] == 66:
                rows[-1, 0] = np.nan
        return result

    monkeypatch.setattr(backend, "run", run)
    assert len(list(client.embed([[7, 8]], EmbeddingParams(), CALLER))) == 1
    with pytest.raises(TwostrokeError, match="are not finite numbers"):
        list(client.embed([[7, 8], [66]], EmbeddingParams(), CALLER))


def test_stopping_the_engine_ends_embeddings_with_an_error(
    gated: tuple[Client, GatedBackend],
) -> None:
    client, backend = gated
    backend.gate.clear()
    stream = client.embed(texts_of(3), EmbeddingParams(), CALLER)
    threading.Timer(0.2, lambda: (backend.gate.set(), client.loop.close())).start()
    with pytest.raises((EngineStoppedError, TwostrokeError)):
        [*stream, *client.embed(texts_of(30), EmbeddingParams(), CALLER)]


@pytest.mark.parametrize(
    ("texts", "params", "error", "param", "sentence"),
    [
        ([[]], {}, RequestError, "input", "empty"),
        ([[5], [10**6]], {}, RequestError, "input[1]", "outside 0 to"),
        ([[5], [-1]], {}, RequestError, "input[1]", "outside 0 to"),
        ([[5], [5] * 513], {}, ContextLengthError, "input", "your input resulted in 513 tokens"),
        ([[5]], {"dimensions": 65}, RequestError, "dimensions", "from 1 to 64"),
        ([[5]], {"dimensions": 0}, RequestError, "dimensions", "at least 1"),
        ([[5]], {"dimensions": True}, RequestError, "dimensions", "an integer"),
        ([[5]], {"pooling": "maen"}, RequestError, "pooling", "Did you mean 'mean'?"),
    ],
)
def test_wrong_texts_are_refused_before_a_step_runs(
    gated: tuple[Client, GatedBackend],
    texts: list[list[int]],
    params: dict[str, Any],
    error: type[RequestError],
    param: str,
    sentence: str,
) -> None:
    client, backend = gated
    with pytest.raises(error, match=sentence) as caught:
        list(client.embed(texts, EmbeddingParams(**params), CALLER))
    assert caught.value.field == param
    assert backend.num_steps == 0


@pytest.fixture(scope="module", params=["reference", "cpu"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    if request.param == "cpu":
        native_dir()
    path = write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    compute = ComputeOptions(request.param)
    with LLM(path, EngineOptions(compute, SMALL, BatchOptions(token_budget=16))) as llm:
        yield llm


def test_texts_and_ids_become_vectors_of_length_one(llm: LLM) -> None:
    ids = llm.engine.card.tokenizer.encode("hello world")
    alone = llm.embed("hello world")[0]
    result = llm.embed(["the world is in", "hello world", ids])
    assert [embedding.vector.shape for embedding in result] == [(64,)] * 3
    assert {embedding.vector.dtype for embedding in result} == {np.dtype(np.float32)}
    np.testing.assert_allclose(result[1].vector, alone.vector, atol=1e-6)
    np.testing.assert_array_equal(result[1].vector, result[2].vector)
    assert result[1].usage.prompt_tokens == len(ids)
    for answer in result:
        assert np.linalg.norm(answer.vector) == pytest.approx(1, abs=1e-6)
        timings = answer.timings
        assert timings.last_token_s >= timings.started_s >= timings.arrival_s > 0
    assert llm.embed([]) == []


def test_fewer_dimensions_keep_the_first_values(llm: LLM) -> None:
    whole_vector = llm.embed("hello world")[0].vector
    for count in (1, 10, 64):
        result = llm.embed("hello world", dimensions=count)[0].vector
        part = whole_vector[:count].astype(np.float64)
        np.testing.assert_allclose(result, part / np.linalg.norm(part), atol=1e-5)


def test_without_pooling_each_token_has_its_own_vector(llm: LLM) -> None:
    text = "hello world " * 60
    last, mean, each = (llm.embed(text, pooling=word)[0] for word in ("last", "mean", "none"))
    assert each.vector.shape == (each.usage.prompt_tokens, len(mean.vector))
    for states, pooled in ((each.vector[-1], last), (each.vector.mean(axis=0), mean)):
        result = states / np.linalg.norm(states)
        np.testing.assert_allclose(result, pooled.vector, atol=1e-4)
    first_values = llm.embed(text, pooling="none", dimensions=3)[0].vector
    np.testing.assert_array_equal(first_values, each.vector[:, :3])
    assert "one for each token" in repr(each)


def test_vectors_of_too_many_tokens_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    width = llm.engine.card.embedding_width
    monkeypatch.setattr(embedding, "MAX_TOKEN_VALUES", 3 * width)
    assert llm.embed([[5, 6, 7]], pooling="none")[0].vector.shape == (3, width)
    with pytest.raises(RequestError, match="at most 3 tokens with this model, got 4"):
        llm.embed([[5, 6, 7, 8]], pooling="none")


def test_the_mean_is_the_default_and_never_uses_cached_pages(llm: LLM) -> None:
    text = "hello world " * 20
    llm.generate(text, SamplingParams(max_tokens=1))
    results = {pooling: llm.embed(text, pooling=pooling)[0] for pooling in ("auto", "mean", "last")}
    np.testing.assert_array_equal(results["auto"].vector, results["mean"].vector)
    assert np.abs(results["mean"].vector - results["last"].vector).max() > 1e-3
    assert results["mean"].usage.cached_tokens == 0
    assert results["last"].usage.cached_tokens > 0


def test_async_embeddings_equal_blocking_ones(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    options = EngineOptions(ComputeOptions("reference"), SMALL)

    async def run_requests() -> tuple[list[Any], list[Any]]:
        async with await AsyncLLM.load(path, options) as llm:
            both = await asyncio.gather(llm.embed(["hello", "the world"]), llm.embed("hello"))
            with pytest.raises(RequestError):
                await llm.embed("")
            return both

    with LLM(path, options) as llm:
        right = llm.embed(["hello", "the world"])
    embeddings, alone = asyncio.run(run_requests())
    assert [embedding.index for embedding in embeddings] == [0, 1]
    for our_embedding, expected in zip([*embeddings, *alone], [*right, right[0]], strict=True):
        np.testing.assert_allclose(our_embedding.vector, expected.vector, atol=1e-6)


def test_cancelling_stops_async_embeddings(gated: tuple[Client, GatedBackend]) -> None:
    client, _ = gated

    async def leave() -> None:
        generation = client.embed_async(texts_of(600), EmbeddingParams(), CALLER)
        async for _ in generation:
            break
        generation.cancel()

    asyncio.run(leave())
    wait_for(lambda: not client.loop._listeners)
    wait_for(lambda: client.loop.snapshot().scheduler.num_referenced_pages == 0)


@pytest.mark.parametrize(
    ("number", "expected"), [(None, "mean"), (0, "mean"), (1, "mean"), (3, "last"), (2, None)]
)
def test_a_gguf_file_chooses_the_pooling(
    tmp_path: Path, number: int | None, expected: str | None
) -> None:
    metadata = {} if number is None else {"llama.pooling_type": number}
    path = write_tiny_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    with LLM(path, EngineOptions(ComputeOptions("reference"), SMALL)) as llm:
        if expected is None:
            with pytest.raises(RequestError, match="'cls', which is not supported") as caught:
                llm.embed("hello world")
            assert caught.value.field == "pooling"
            expected = "last"
        else:
            named = llm.embed("hello world", pooling=expected)[0].vector
            np.testing.assert_array_equal(llm.embed("hello world")[0].vector, named)
        assert len(llm.embed("hello", pooling=expected)) == 1


def test_a_sentence_transformers_folder_chooses_the_pooling(tmp_path: Path) -> None:
    import json

    folder = write_tiny_folder(tmp_path / "tiny")
    (folder / "1_Pooling").mkdir()
    flags = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    with LLM(folder, EngineOptions(ComputeOptions("reference"), SMALL)) as llm:
        results = [llm.embed("hello world", pooling=word)[0].vector for word in ("auto", "last")]
    np.testing.assert_array_equal(*results)
