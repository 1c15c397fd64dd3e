"""Budgets of reasoning in whole engines: closing text, then an answer, the same in any batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from support import family_templates
from support.native import native_dir
from support.tiny import Tiny, write_tiny_gguf
from twostroke import LLM, Constraint, SamplingParams
from twostroke.core.errors import RequestError
from twostroke.core.options import (
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    SpeculationOptions,
)

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.engine.output import Completion

CLOSING = "\n</think>\n\n"
REGEX = Constraint.regex("(hello|help)( the (world|moon)){1,4}")
OPENING = "hello the world is in the and of a in the world "
CONVERSATIONS = [
    [{"role": "user", "content": OPENING + text}] for text in ("is in the world", "and", "a er")
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=60, reasoning_budget=20),
    SamplingParams(temperature=1.5, max_tokens=50, seed=1, n=4, reasoning_budget=9, logprobs=1),
    SamplingParams(max_tokens=60, seed=2, reasoning_budget=5, constraint=REGEX, stop=["moon"]),
    SamplingParams(max_tokens=60, seed=3, reasoning_budget=13, repetition_penalty=1.3),
    SamplingParams(max_tokens=40, seed=4, reasoning_budget=200),
    SamplingParams(max_tokens=20, seed=5),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    metadata = {"tokenizer.chat_template": family_templates.ALWAYS_THINKS}
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_gguf(folder / "tiny.gguf", Tiny(), metadata)


def engine_of(path: Path, memory_bytes: int = 6_000_000, **speculation: Any) -> LLM:
    native_dir()
    return LLM(
        str(path),
        EngineOptions(
            ComputeOptions(backend="cpu"),
            CacheOptions(memory_bytes=memory_bytes, context_length=224),
            BatchOptions(token_budget=speculation.pop("token_budget", 256)),
            speculation=SpeculationOptions(**speculation),
        ),
    )


def answers(llm: LLM) -> list[Completion]:
    conversations = [messages for messages in CONVERSATIONS for _ in PARAMS]
    result = llm.chat(conversations, PARAMS * len(CONVERSATIONS))
    return [completion for completions in result for completion in completions]


def facts(completions: list[Completion]) -> list[Any]:
    return [
        (answer.text, answer.reasoning, answer.token_ids, answer.logprobs, answer.finish_reason)
        for answer in completions
    ]


@pytest.fixture(scope="module")
def plain(path: Path) -> list[Any]:
    with engine_of(path, method="off") as llm:
        return facts(answers(llm))


def test_reasoning_ends_with_its_budget(path: Path) -> None:
    with engine_of(path) as llm:
        closing = tuple(llm.engine.card.tokenizer.encode_exact(CLOSING))
        result = answers(llm)
    params = [param for param in PARAMS for _ in range(param.n)] * len(CONVERSATIONS)
    for answer_params, answer in zip(params, result, strict=True):
        if answer_params.reasoning_budget is None:
            assert not answer.text
            continue
        assert answer_params.max_tokens is not None
        max_budget = answer_params.max_tokens - answer_params.max_tokens // 4 - len(closing)
        budget = min(answer_params.reasoning_budget, max_budget)
        while answer.token_ids[budget] != closing[0]:  # completes a character
            budget += 1
        assert budget <= min(answer_params.reasoning_budget, max_budget) + 3
        assert answer.token_ids[budget : budget + len(closing)] == closing, (answer_params, answer)
        assert answer.text.strip()
        assert "</think>" not in answer.reasoning + answer.text
        if answer_params.constraint is not None:
            assert answer.text.startswith(("hello the ", "help the "))
        if answer_params.logprobs is not None:
            assert len(answer.logprobs) == len(answer.token_ids)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "auto", "count": 6},
        {"method": "draft", "draft": "same", "count": 5},
        {"method": "lookahead", "count": 12},
        {"method": "off", "token_budget": 16},
        {"memory_bytes": 65_000, "count": 5},
    ],
    ids=str,
)
def test_drafts_chunks_and_preemptions_do_not_change_answers(
    path: Path, plain: list[Any], options: dict[str, Any]
) -> None:
    options = options | ({"draft": str(path)} if "draft" in options else {})
    with engine_of(path, **options) as llm:
        assert facts(answers(llm)) == plain
        if "memory_bytes" in options:
            assert llm.engine.client.loop.snapshot().scheduler.num_preemptions > 0


def test_an_answer_alone_equals_the_answer_in_a_batch(path: Path, plain: list[Any]) -> None:
    with engine_of(path) as llm:
        alone = [llm.chat(CONVERSATIONS[0], params) for params in PARAMS]
    result = facts([completion for completions in alone for completion in completions])
    assert result == plain[: len(result)]


def test_budget_0_is_an_answer_at_once(path: Path) -> None:
    with engine_of(path) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, reasoning_budget=0)
        [answer] = llm.chat(CONVERSATIONS[0], params)
        assert not answer.reasoning
        [other] = llm.chat(
            CONVERSATIONS[0], replace(params, reasoning_budget=None), reasoning_effort="none"
        )
        assert other.token_ids == answer.token_ids
        [unlimited] = llm.chat(CONVERSATIONS[0], replace(params, reasoning_budget=-1))
        assert unlimited.reasoning


def test_wrong_budgets_are_refused(path: Path) -> None:
    with pytest.raises(RequestError, match=r"reasoning_budget must be from -1 to \d+, got -2"):
        SamplingParams(reasoning_budget=-2)
    with engine_of(path) as llm:
        params = SamplingParams(max_tokens=8, reasoning_budget=224)
        with pytest.raises(RequestError, match="less than the context length of 224, got 224"):
            llm.chat(CONVERSATIONS[0], params)
        low = SamplingParams(max_tokens=8)
        assert llm.chat(CONVERSATIONS[0], low, reasoning_effort="medium")
        with pytest.raises(RequestError, match="must be one of none"):
            llm.chat(CONVERSATIONS[0], low, reasoning_effort="much")
