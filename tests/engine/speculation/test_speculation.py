"""Speculation in whole engines: the same answers, in fewer steps."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.draft_costs import cheap_up_to
from support.gguf_writer import I32, Typed, write_gguf
from support.native import native_dir
from support.speculating_engines import GREEDY, PROMPTS, comparable_fields, engine_of, everything
from support.tiny import Tiny, tiny_metadata, tiny_tensors, write_tiny_gguf
from twostroke import LLM, AsyncLLM, SamplingParams
from twostroke.core.errors import RequestError, UsageError
from twostroke.core.options import CacheOptions, ComputeOptions, EngineOptions, SpeculationOptions
from twostroke.engine.speculation import DraftModel
from twostroke.model.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from pathlib import Path

SMALL = CacheOptions(memory_bytes=6_000_000)
LONG = replace(GREEDY, max_tokens=120)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return another model with the same vocabulary; it drafts right tokens only by chance."""
    tiny = Tiny(num_layers=1, seed=5, context_length=300)
    return write_tiny_gguf(tmp_path_factory.mktemp("other") / "other.gguf", tiny)


@pytest.fixture(scope="module")
def plain(path: Path) -> list[Any]:
    with engine_of(path, method="off") as llm:
        result = everything(llm)
        assert llm.engine.client.loop.snapshot().speculation.passes == 0
    return result


@pytest.mark.parametrize(
    "speculation",
    [
        {"method": "auto"},
        {"method": "ngram", "count": 4},
        {"method": "draft", "draft": "same", "count": 3},
        {"method": "draft", "draft": "other", "count": 5},
        {"method": "auto", "draft": "other"},
        {"method": "auto", "draft": "same", "count": 24},
        {"method": "lookahead"},
        {"method": "lookahead", "count": 24},
    ],
    ids=str,
)
def test_answers_are_the_same(
    path: Path, other: Path, plain: list[Any], speculation: dict[str, Any]
) -> None:
    drafts = {"same": str(path), "other": str(other)}
    kwargs = {**speculation}
    if "draft" in kwargs:
        kwargs["draft"] = drafts[kwargs["draft"]]
    with engine_of(path, **kwargs) as llm:
        assert everything(llm) == plain
        assert everything(llm, prediction="hello the world is of the world") == plain
        stats = llm.engine.client.loop.snapshot().speculation
        if "count" in speculation:
            assert sum(stats.proposed.values()) > 100
            assert 0 < sum(stats.accepted.values()) == sum(stats.accepted_at.values())
        assert llm.engine.client.loop.snapshot().scheduler.num_running == 0


def test_the_reference_backend_speculates(path: Path) -> None:
    with engine_of(path, "reference", method="off") as llm:
        plain = comparable_fields(llm.generate(PROMPTS, replace(GREEDY, max_tokens=20)))
    with engine_of(path, "reference", method="draft", draft=str(path), count=3) as llm:
        assert comparable_fields(llm.generate(PROMPTS, replace(GREEDY, max_tokens=20))) == plain
        assert llm.engine.client.loop.snapshot().speculation.accepted["draft"] > 20


def test_a_draft_that_is_the_model_is_always_right(path: Path) -> None:
    with engine_of(path, method="draft", draft=str(path), count=4) as llm:
        [[answer]] = llm.generate("hello the world", LONG)
        [[sampled]] = llm.generate("hello the world", replace(LONG, temperature=1.0, seed=7))
    for completion in (answer, sampled):
        assert completion.usage.completion_tokens == 120
        assert completion.usage.accepted_tokens >= 120 * 4 / 5 - 5
        assert completion.usage.rejected_tokens <= 4  # behind the end


def test_drafts_after_a_stop_string_are_not_accepted(path: Path) -> None:
    with engine_of(path, method="draft", draft=str(path), count=20) as llm:
        [[answer]] = llm.generate("hello the world", LONG)
        for letter in sorted(set(answer.text)):
            [[stopped]] = llm.generate("hello the world", replace(LONG, stop=[letter]))
            assert 0 <= stopped.usage.accepted_tokens <= stopped.usage.completion_tokens
            assert stopped.usage.rejected_tokens >= 0


def test_repeated_text_is_drafted(path: Path) -> None:
    with engine_of(path, method="ngram", count=6) as llm:
        [[answer]] = llm.generate("hello", LONG)
        [[repeated]] = llm.generate("hello", LONG)
    assert answer.token_ids == repeated.token_ids
    assert repeated.usage.accepted_tokens > 80  # what the tenant has heard already


def test_a_prediction_is_used(path: Path) -> None:
    with engine_of(path, method="ngram", count=6) as llm:
        params = SamplingParams(temperature=0, max_tokens=30)
        [[answer]] = llm.generate("the world is", params)
    with engine_of(path, method="ngram", count=6) as llm:
        [[expected]] = llm.generate("the world is", params, prediction=answer.text)
        assert expected.text == answer.text
        assert expected.token_ids == answer.token_ids
        assert llm.engine.client.loop.snapshot().speculation.accepted["prediction"] > 0


def test_one_request_can_turn_speculation_off(path: Path) -> None:
    with engine_of(path, method="draft", draft=str(path), count=4) as llm:
        [[answer]] = llm.generate("hello", LONG, speculate="off")
        assert (answer.usage.accepted_tokens, answer.usage.rejected_tokens) == (0, 0)
        with pytest.raises(
            RequestError, match="speculate must be one of auto, off, draft here, got 'ngram'"
        ):
            llm.generate("hello", LONG, speculate="ngram")


def test_lookahead_runs_only_on_request(path: Path) -> None:
    seeded = replace(LONG, seed=2)  # what it tries first is drawn
    with engine_of(path, count=24) as llm:
        proposed = llm.engine.client.loop.speculator.stats.proposed
        [[answer]] = llm.generate("hello", seeded)
        assert not proposed["lookahead"]
        [[seeded_answer]] = llm.generate("hello", seeded, speculate="lookahead")
        assert seeded_answer.token_ids == answer.token_ids
        assert proposed["lookahead"] > 100
        assert seeded_answer.usage.accepted_tokens > 20
    with (
        engine_of(path, method="ngram") as llm,
        pytest.raises(RequestError, match="auto, off, ngram here, got 'lookahead'"),
    ):
        llm.generate("hello", LONG, speculate="lookahead")


def test_async_callers_can_give_hints(path: Path) -> None:
    async def answer() -> int:
        compute = ComputeOptions()
        speculation = SpeculationOptions(draft=str(path), count=4)
        options = EngineOptions(compute, SMALL, speculation=speculation)
        async with await AsyncLLM.load(str(path), options) as llm:
            last = None
            async for output in llm.generate("hello", LONG, speculate="draft"):
                last = output
            assert last is not None
            assert last.usage is not None
            return last.usage.accepted_tokens

    native_dir()
    assert asyncio.run(answer()) > 80


def test_a_context_that_fills_up_ends_as_without_drafts(path: Path) -> None:
    """The last tokens of the context leave no room for drafts."""
    prompt = [5 + i % 200 for i in range(490)]
    results = []
    for speculation in ({"method": "off"}, {"draft": str(path), "count": 24}):
        with engine_of(path, **speculation) as llm:
            results.append(
                comparable_fields(
                    llm.generate(prompt, SamplingParams(temperature=0, ignore_eos=True))
                )
            )
    assert results[0] == results[1]
    assert len(results[0][0][1]) == 22


def test_a_text_longer_than_the_drafts_context_continues_without_it(
    path: Path, other: Path
) -> None:
    prompt = [5 + i % 200 for i in range(280)]
    results = []
    for speculation in ({"method": "off"}, {"method": "draft", "draft": str(other), "count": 4}):
        with engine_of(path, **speculation) as llm:
            params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
            results.append(comparable_fields(llm.generate(prompt, params)))
    assert results[0] == results[1]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with another vocabulary: fewer merges, and bytes in another order."""
    tiny = Tiny(seed=3, context_length=400)
    metadata = tiny_metadata(tiny)
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[40:200] = reversed(tokens[40:200])
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][:9]
    path = tmp_path_factory.mktemp("stranger") / "stranger.gguf"
    write_gguf(path, metadata, tiny_tensors(tiny))
    return path


@pytest.mark.parametrize("options", [{"count": 5}, {"method": "draft"}, {"count": 24}], ids=str)
def test_a_draft_can_have_another_vocabulary(
    path: Path, stranger: Path, plain: list[Any], options: dict[str, Any]
) -> None:
    with engine_of(path, draft=str(stranger), **options) as llm:
        assert everything(llm) == plain
        assert everything(llm, prediction="hello the world is of the world") == plain
        if "count" in options:
            assert llm.engine.client.loop.snapshot().speculation.proposed["draft"] > 100
        assert llm.engine.client.loop.snapshot().scheduler.num_running == 0


def test_a_draft_can_lack_rows_for_its_targets_control_tokens(path: Path, tmp_path: Path) -> None:
    """A request with such a token does not end speculation for other requests."""
    metadata, tensors = tiny_metadata(Tiny()), tiny_tensors(Tiny())
    tokens, table = metadata["tokenizer.ggml.tokens"], tensors["token_embd.weight"].dequantize()
    metadata["tokenizer.ggml.tokens"] = [*tokens, "<|tool|>", "<|call|>"]
    kinds = [3 if token.startswith("<|") else 1 for token in metadata["tokenizer.ggml.tokens"]]
    metadata["tokenizer.ggml.token_type"] = Typed(I32, kinds)
    metadata["llama.vocab_size"] = len(kinds)
    larger = np.concatenate([table, table[:2]])
    tensors["token_embd.weight"] = QuantTensor.from_floats(larger, FORMATS["F32"])
    target = tmp_path / "larger.gguf"
    write_gguf(target, metadata, tensors)
    prompt = [40, 50, len(tokens) + 1, 60]
    with engine_of(target, method="off") as llm:
        plain = comparable_fields(llm.generate(prompt, LONG))
    with engine_of(target, method="draft", draft=str(path), count=3) as llm:
        assert comparable_fields(llm.generate(prompt, LONG)) == plain
        assert llm.engine.client.loop.snapshot().speculation.accepted["draft"] > 40


def test_a_draft_without_letters_is_refused(path: Path, tmp_path: Path) -> None:
    metadata = tiny_metadata(Tiny())
    tokens = metadata["tokenizer.ggml.tokens"]
    strange = [token if number < 40 else f"q{number}x" for number, token in enumerate(tokens)]
    strange[40] = tokens[3] + tokens[4]
    metadata["tokenizer.ggml.tokens"] = strange
    metadata["tokenizer.ggml.merges"] = [f"{tokens[3]} {tokens[4]}"]
    odd = tmp_path / "odd.gguf"
    write_gguf(odd, metadata, tiny_tensors(Tiny()))
    with pytest.raises(
        UsageError,
        match="odd cannot draft for tiny: the vocabulary of one model cannot",
    ):
        engine_of(path, draft=str(odd))


def test_a_draft_has_pages_for_no_more_tokens_than_its_target(path: Path) -> None:
    results = []
    for memory in (300_000, 450_000):
        options = EngineOptions(
            ComputeOptions(),
            CacheOptions(memory_bytes=memory, context_length=256),
            speculation=SpeculationOptions(draft=str(path)),
        )
        native_dir()
        with LLM(str(path), options) as llm:
            _, draft, _ = llm.engine.client.loop.speculator._proposers
            assert isinstance(draft, DraftModel)
            results.append(draft._runner.runner.facts.num_pages)
            assert results[-1] == llm.engine.facts.num_pages
    assert results[0] < results[1]


@pytest.mark.parametrize(("cheap", "max_drafts"), [(1, 1), (3, 3), (24, 8)])
def test_a_draft_model_drafts_no_further_than_rows_are_cheap(
    path: Path, cheap: int, max_drafts: int
) -> None:
    """The draft model equals its target, so only the cost of rows limits the drafts."""
    with engine_of(path, method="draft", draft=str(path)) as llm:
        (draft,) = llm.engine.client.loop.speculator._proposers
        propose, counts = draft.propose, []

        def with_price(requests: Any, price: Any) -> Any:
            result = propose(requests, cheap_up_to(cheap, price))
            counts.extend(len(draft.tokens) for draft in result if draft is not None)
            return result

        draft.propose = with_price
        llm.generate(PROMPTS[:1], LONG)
    assert max(counts) == max_drafts


@pytest.mark.parametrize("failing", ["propose", "learn", "finish"])
def test_a_failing_draft_does_not_harm_answers(
    path: Path, plain: list[Any], failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(path, method="draft", draft=str(path), count=3) as llm:
        (draft,) = llm.engine.client.loop.speculator._proposers

        def fail(*_: Any) -> None:
            raise ArithmeticError("the draft is tired")

        setattr(draft, failing, fail)
        assert everything(llm) == plain
        assert llm.engine.client.loop.speculator._proposers == ()
        assert llm.engine.client.loop.snapshot().scheduler.num_running == 0
    assert caplog.text.count("DraftModel failed and is not used any more.") == 1
