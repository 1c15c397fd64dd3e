"""The Python interface on a tiny model, with both backends."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import twostroke
from support.native import native_dir
from support.tiny import infill_metadata, write_base_gguf, write_tiny_folder, write_tiny_gguf
from support.vocabulary_kinds import GGUF_KINDS, kind_metadata
from support.waiting import wait_for
from twostroke import LLM, AsyncLLM, SamplingParams
from twostroke.backends.cpu import CpuBackend
from twostroke.core.distributed_options import ParallelOptions
from twostroke.core.errors import (
    ContextLengthError,
    EngineStoppedError,
    ModelNotFoundError,
    RequestError,
    UsageError,
)
from twostroke.core.options import BatchOptions, CacheOptions, ComputeOptions, EngineOptions
from twostroke.core.request import FinishReason
from twostroke.engine import engine as build_module
from twostroke.engine.engine import build
from twostroke.engine.prompts import to_hints
from twostroke.model.loader import load
from twostroke.model.weights import weights_identity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL = CacheOptions(memory_bytes=4_000_000)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def test_raw_prompts_have_special_tokens_and_their_answers_a_first_space(tmp_path: Path) -> None:
    metadata = kind_metadata(GGUF_KINDS["pieces_with_prefix"])
    path = write_tiny_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    with LLM(path, EngineOptions(ComputeOptions("reference"), SMALL)) as llm:
        (token,) = llm.engine.card.tokenizer.encode_exact(" Paris")
        params = SamplingParams(max_tokens=1, temperature=0, logit_bias={token: 100})
        prompts = ["<s>yes</s>", "yes</s>"]
        for completions in llm.generate(prompts, params):
            assert completions[0].text == " Paris"
            assert completions[0].usage.prompt_tokens == 3  # a begin, a word, an end
        plain = llm.generate(prompts, params, parse_special=False)
        assert all(completions[0].usage.prompt_tokens > 3 for completions in plain)
        assert llm.chat(HELLO, params)[0].text == "Paris"
        assert [output.text for output in llm.stream("yes", params)] == [" Paris"]


def test_a_model_is_a_path_or_a_name(path: Path) -> None:
    with LLM(path, EngineOptions(ComputeOptions("reference"), SMALL)) as llm:
        assert llm.generate("hello", GREEDY)[0][0].usage.completion_tokens == 8
    for wrong in (None, 5, b"smollm2"):
        with pytest.raises(UsageError, match="must be a name or a path"):
            LLM(wrong)  # type: ignore[arg-type]


def test_the_reference_runs_several_ranks_in_this_process(path: Path) -> None:
    reference, answers = ComputeOptions("reference"), []
    for parallel in (ParallelOptions(), ParallelOptions(tensor=3, pipeline=2, context=2)):
        with LLM(path, EngineOptions(reference, SMALL, parallel=parallel)) as llm:
            answers.append([many[0].text for many in llm.generate(["hello", "the world"], GREEDY)])
    assert answers[0] == answers[1]


def test_public_names_are_listed_and_importable() -> None:
    assert {"LLM", "SamplingParams", "Constraint", "EngineOptions"} <= set(dir(twostroke))
    for name in dir(twostroke):
        assert getattr(twostroke, name).__name__ == name


@pytest.fixture(scope="module", params=["reference", "cpu"])
def llm(path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    if request.param == "cpu":
        native_dir()
    compute = ComputeOptions(backend=request.param)
    with LLM(str(path), EngineOptions(compute, SMALL)) as llm:
        yield llm


def test_each_prompt_has_its_own_answers_in_order(llm: LLM) -> None:
    prompts = ["hello", "the world is", "a"]
    result = llm.generate(prompts, GREEDY)
    assert [len(answers) for answers in result] == [1, 1, 1]
    alone = [llm.generate(prompt, GREEDY)[0][0].token_ids for prompt in prompts]
    assert [answers[0].token_ids for answers in result] == alone
    assert all(len(tokens) == 8 for tokens in alone)


def test_a_prompt_can_be_token_ids(llm: LLM) -> None:
    tokens = llm.engine.card.tokenizer.encode("hello world")
    by_text = llm.generate("hello world", GREEDY)
    assert llm.generate(tokens, GREEDY)[0][0].token_ids == by_text[0][0].token_ids
    both = llm.generate([tokens, "hello world"], GREEDY)
    assert both[0][0].token_ids == both[1][0].token_ids == by_text[0][0].token_ids
    for array in (np.array(tokens), np.array([tokens])):  # of one prompt, and of a list of one
        assert llm.generate(array, GREEDY)[0][0].token_ids == by_text[0][0].token_ids


@pytest.mark.parametrize(
    "prompts", [None, 5, b"ab", {"a": 1}, [[1, "a"]], [None], [[1.5]], [b"ab"], [1, "a"]]
)
def test_wrong_prompts_are_refused_with_a_sentence(llm: LLM, prompts: Any) -> None:
    for call, name in ((llm.generate, "prompt"), (llm.embed, "input")):
        with pytest.raises(RequestError, match=rf"^{name} .*a text.* list of .*, got .*\.$"):
            call(prompts)


def test_no_prompts_have_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_each_prompt_can_have_its_own_params(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=count, n=2, ignore_eos=True) for count in (1, 3)]
    result = llm.generate(["a", "a"], each)
    assert [[len(answer.token_ids) for answer in answers] for answers in result] == [[1, 1], [3, 3]]
    with pytest.raises(UsageError, match="one entry for each prompt: 2, got 1"):
        llm.generate(["a", "a"], each[:1])


@pytest.mark.parametrize("wrong", [{"max_tokens": 5}, 5, "5", [{"max_tokens": 5}]])
def test_params_of_another_kind_are_refused(llm: LLM, wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"must be a SamplingParams, .* got (dict|int|str)\."):
        llm.generate("a", wrong)
    with pytest.raises(UsageError, match="must be a SamplingParams"):
        next(llm.stream("a", wrong))


def test_no_prediction_may_be_none() -> None:
    card: Any = None  # only a prediction needs the model
    assert to_hints(card, "off", None) == to_hints(card, "off", "")


@pytest.mark.parametrize("name", ["suffix", "speculate", "prediction"])
def test_hints_and_suffixes_of_another_kind_are_refused(llm: LLM, name: str) -> None:
    for call in (llm.generate, lambda *args, **names: list(llm.stream(*args, **names))):
        with pytest.raises(RequestError, match=f"^{name} must be a text, got 5"):
            call("a", GREEDY, **{name: 5})
    if name != "suffix":
        with pytest.raises(RequestError, match=f"^{name} must be a text, got 5"):
            llm.chat(HELLO, GREEDY, **{name: 5})  # type: ignore[call-overload]


def test_none_stands_for_no_stops_and_no_bias() -> None:
    nothing: Any = None
    params = SamplingParams(stop=nothing, stop_token_ids=nothing, logit_bias=nothing)
    assert params == SamplingParams()


def test_options_of_another_kind_are_refused(path: Path) -> None:
    options: Any = {"num_threads": 1}
    for kind in (LLM, AsyncLLM):
        with pytest.raises(UsageError, match=r"must be an EngineOptions, got dict\. .* by name"):
            kind(str(path), options)


def test_a_loaded_model_says_that_it_is_not_pickled(llm: LLM) -> None:
    for value in (llm, AsyncLLM(llm.engine)):
        for call in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="load it in each process"):
                call(value)


def test_the_same_seed_gives_the_same_answer(llm: LLM) -> None:
    params = SamplingParams(seed=7, max_tokens=16, ignore_eos=True)
    first, second_answer = (llm.generate("hello", params)[0][0].token_ids for _ in range(2))
    other = llm.generate("hello", SamplingParams(seed=8, max_tokens=16, ignore_eos=True))
    assert first == second_answer != other[0][0].token_ids


def test_streamed_pieces_equal_the_whole_text(llm: LLM) -> None:
    outputs = list(llm.stream("hello", GREEDY))
    assert "".join(output.text for output in outputs) == llm.generate("hello", GREEDY)[0][0].text


def test_a_conversation_goes_through_the_template(llm: LLM) -> None:
    [answer] = llm.chat(HELLO, GREEDY)
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    tokens = llm.engine.card.tokenizer.encode(text, parse_special=True)
    assert answer.usage.prompt_tokens == len(tokens)
    assert answer.token_ids == llm.generate(tokens, GREEDY)[0][0].token_ids
    with pytest.raises(RequestError):
        llm.chat([{"role": "user"}], GREEDY)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ("Hello.", "messages must be a list."),
        (None, "messages must be a list."),
        ({"role": "user", "content": "x"}, "messages must be a list."),
        ([5], "messages[0] must be an object with role and content."),
        ([[5]], "messages[0] must be an object"),
        ([], "messages must have at least one message."),
        ([HELLO, []], "messages must have at least one message."),
    ],
)
def test_wrong_conversations_are_refused_with_a_sentence(llm: LLM, messages: Any, why: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.chat(messages, SamplingParams(max_tokens=1))
    assert str(refused.value).startswith(why)


def test_errors_use_the_callers_name_of_a_long_prompt(llm: LLM) -> None:
    tokens, text = [5] * 600, "x" * 600
    with pytest.raises(ContextLengthError, match=r"your prompt resulted .* the prompt\.") as error:
        llm.generate([tokens])
    assert error.value.field == "prompt"
    with pytest.raises(ContextLengthError, match=r"300 in the prompt, 300 in the completion"):
        next(llm.stream(tokens[:300], SamplingParams(max_tokens=300)))
    with pytest.raises(ContextLengthError, match=r"your messages resulted") as error:
        llm.chat([{"role": "user", "content": text}])
    assert error.value.field == "messages"

    async def run_requests() -> None:
        async_llm = AsyncLLM(llm.engine)
        with pytest.raises(ContextLengthError, match="your prompt"):
            await anext(async_llm.generate(text))
        with pytest.raises(ContextLengthError, match="your messages"):
            await anext(async_llm.chat([{"role": "user", "content": text}]))

    asyncio.run(run_requests())


def test_keys_and_values_stay_within_memory_bytes(llm: LLM) -> None:
    assert 0.9 * SMALL.memory_bytes < llm.engine.facts.cache_bytes <= SMALL.memory_bytes


def test_one_refused_prompt_stops_the_others(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate(["a", [5] * 600], SamplingParams(ignore_eos=True))
    wait_for(lambda: llm.engine.client.loop.snapshot().scheduler.num_running == 0)
    assert llm.engine.client.loop.snapshot().scheduler.num_waiting == 0


def test_async_answers_stream_concurrently(llm: LLM) -> None:
    async def answer(text: str) -> str:
        return "".join(
            [output.text async for output in AsyncLLM(llm.engine).generate(text, GREEDY)]
        )

    async def both() -> list[str]:
        return await asyncio.gather(answer("hello"), answer("a"))

    assert asyncio.run(both()) == [llm.generate(text, GREEDY)[0][0].text for text in ("hello", "a")]


def test_leaving_an_async_answer_cancels_it(llm: LLM) -> None:
    async def leave() -> None:
        answers = AsyncLLM(llm.engine).chat(HELLO, SamplingParams(ignore_eos=True))
        async for _ in answers:
            break
        await answers.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    wait_for(lambda: llm.engine.client.loop.snapshot().scheduler.num_running == 0)


def test_async_loading_and_closing(path: Path) -> None:
    async def life() -> str:
        options = EngineOptions(ComputeOptions(backend="reference"), SMALL)
        llm = await AsyncLLM.load(str(path), options)
        text = "".join([output.text async for output in llm.generate("hello", GREEDY)])
        await llm.close()
        with pytest.raises(EngineStoppedError):
            async for _ in llm.generate("hello", GREEDY):
                pass
        return text

    assert asyncio.run(life())


def test_a_closed_model_refuses_prompts(path: Path) -> None:
    options = EngineOptions(ComputeOptions(backend="reference"), SMALL)
    with LLM(str(path), options) as llm:
        llm.generate("a", GREEDY)
    with pytest.raises(EngineStoppedError):
        llm.generate("a", GREEDY)


def test_a_static_batch_does_not_wait_for_prompts_that_never_come(path: Path) -> None:
    options = EngineOptions(
        ComputeOptions(backend="reference"), SMALL, BatchOptions(policy="static", batch_size=4)
    )
    with LLM(str(path), options) as llm:
        result = llm.generate(["a"] * 6, GREEDY)
        assert len({answers[0].token_ids for answers in result}) == 1


def test_a_folder_is_called_by_its_name(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "some-model")
    options = EngineOptions(ComputeOptions(backend="reference"), SMALL)
    with LLM(str(folder), options) as llm:
        assert llm.engine.card.name == "some-model"
        assert llm.engine.card.format == "F32"
        assert llm.engine.card.identity == weights_identity(load(str(folder)).tensors)
        assert llm.chat(HELLO, GREEDY)[0].finish_reason is FinishReason.LENGTH


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    path = write_base_gguf(tmp_path / "base.gguf")
    options = EngineOptions(ComputeOptions(backend="reference"), SMALL)
    with LLM(str(path), options) as llm:
        with pytest.raises(RequestError, match="no chat template"):
            llm.chat(HELLO)
        assert llm.generate("hello", GREEDY)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ModelNotFoundError, match="Did you mean 'smollm2'"):
        LLM("smolm2")


def test_building_reports_progress_and_fails_clean(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_dir()
    seen: list[tuple[int, int]] = []
    closed: list[bool] = []

    def fail(*_: object, **__: object) -> None:
        raise UsageError("no scheduler today.")

    real_close = CpuBackend.close

    def close(self: Any) -> None:
        closed.append(True)
        real_close(self)

    monkeypatch.setattr(build_module, "build_scheduler", fail)
    monkeypatch.setattr(CpuBackend, "close", close)
    with pytest.raises(UsageError, match="no scheduler"):
        build(str(path), EngineOptions(cache=SMALL), lambda done, total: seen.append((done, total)))
    assert closed == [True]
    assert seen[-1][0] == seen[-1][1] > 0
    assert seen == sorted(seen)


def test_more_prompts_than_the_queue_takes_are_answered_in_order(path: Path) -> None:
    options = EngineOptions(
        ComputeOptions(num_threads=1), SMALL, BatchOptions(max_running=2, max_waiting_requests=3)
    )
    prompts = [f"hello {number}" for number in range(20)]
    with LLM(str(path), options) as llm:
        result = llm.generate(prompts, GREEDY)
        alone = [llm.generate(prompt, GREEDY)[0][0].token_ids for prompt in prompts]
    assert [answers[0].token_ids for answers in result] == alone


def test_a_stream_does_not_wait_for_the_rest_of_a_static_batch(path: Path) -> None:
    batch = BatchOptions(policy="static", batch_size=3)
    with LLM(str(path), EngineOptions(ComputeOptions(num_threads=1), SMALL, batch)) as llm:
        assert list(llm.stream("hello", GREEDY))[-1].finish_reason is FinishReason.LENGTH


def test_stop_strings_wait_for_the_fewest_tokens(llm: LLM) -> None:
    free = llm.generate("hello", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    letter = free[0][0].text[0]
    params = SamplingParams(
        temperature=0, max_tokens=12, min_tokens=5, stop=(letter,), ignore_eos=True
    )
    stopped = llm.generate("hello", params)[0][0]
    assert len(stopped.token_ids) > 5
    assert stopped.token_ids == free[0][0].token_ids[: len(stopped.token_ids)]


def test_an_async_model_closes_with_its_block(path: Path) -> None:
    async def use() -> AsyncLLM:
        async with await AsyncLLM.load(str(path), EngineOptions(cache=SMALL)) as llm:
            async for output in llm.generate("hello", GREEDY):
                last = output
        assert last.finish_reason is FinishReason.LENGTH
        return llm

    with pytest.raises(EngineStoppedError):
        asyncio.run(use()).engine.client.generate([1], GREEDY)


def test_an_answer_can_fill_the_gap_before_a_suffix(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "code.gguf", metadata=infill_metadata())
    with LLM(path, EngineOptions(ComputeOptions("reference"), SMALL)) as llm:
        tokenizer = llm.engine.card.tokenizer
        marks = tokenizer.infill
        assert marks is not None
        prompts = [
            [marks.prefix, *tokenizer.encode(text), marks.suffix, 7, 8, marks.middle]
            for text in ("hello", "the")
        ]
        suffix = tokenizer.decode([7, 8])
        expected_answers = [answers[0].token_ids for answers in llm.generate(prompts, GREEDY)]
        result = llm.generate(["hello", tokenizer.encode("the")], GREEDY, suffix=suffix)
        assert [answers[0].token_ids for answers in result] == expected_answers
        outputs = llm.stream("hello", GREEDY, suffix=suffix)
        assert [token for output in outputs for token in output.token_ids] == [*expected_answers[0]]
        end = max(marks.end_ids)
        ending = SamplingParams(max_tokens=8, logit_bias={end: 100})
        assert llm.generate("hello", ending, suffix=suffix)[0][0].stop == end


def test_a_model_without_infill_tokens_refuses_a_suffix(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no tokens for filling in the middle") as caught:
        llm.generate("hello", GREEDY, suffix="world")
    assert caught.value.field == "suffix"
