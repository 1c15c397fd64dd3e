"""Constraints in whole engines: answers match, also with drafts, preemption and failures."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
import regex
from msgspec.structs import replace

from support.native import native_dir
from support.tiny import write_tiny_gguf
from twostroke import LLM, AsyncLLM, SamplingParams
from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.core.options import CacheOptions, ComputeOptions, EngineOptions, SpeculationOptions
from twostroke.core.request import FinishReason

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.engine.output import Completion
    from twostroke.engine.structured_output.grammar import GrammarMatcher

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a long name of a kind", "another one", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
PATTERN = r"(hello|help)( the (world|moon)){1,4}\."
OPENING = "hello the world is in the and of a in the world "
PROMPTS = [OPENING + "is in the world", OPENING + "and the and", "a", OPENING + "ing er is of"]
JSON = Constraint("json_schema", json.dumps(SCHEMA))
REGEX = Constraint("regex", PATTERN)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=150, constraint=JSON),
    SamplingParams(temperature=1.5, max_tokens=150, seed=1, n=6, constraint=JSON, logprobs=2),
    SamplingParams(temperature=1.5, max_tokens=60, seed=2, constraint=REGEX, min_tokens=50),
    SamplingParams(max_tokens=60, seed=3, constraint=REGEX, repetition_penalty=1.3, min_p=0.01),
    SamplingParams(max_tokens=12, seed=4, constraint=JSON, logit_bias={20: 5.0}),
    SamplingParams(max_tokens=60, seed=5, constraint=REGEX, stop=["moon"]),
    SamplingParams(max_tokens=20, seed=6),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def engine_of(
    path: Path, backend: str = "cpu", cache: CacheOptions | None = None, **speculation: Any
) -> LLM:
    native_dir()
    compute = ComputeOptions(backend=backend)
    cache = cache or CacheOptions(memory_bytes=6_000_000 if backend == "cpu" else None)
    return LLM(
        str(path), EngineOptions(compute, cache, speculation=SpeculationOptions(**speculation))
    )


def answers(llm: LLM, **hints: Any) -> list[Completion]:
    prompts = [prompt for prompt in PROMPTS for _ in PARAMS]
    result = llm.generate(prompts, PARAMS * len(PROMPTS), **hints)
    return [completion for each in result for completion in each]


def token_texts(completions: list[Completion]) -> list[Any]:
    return [
        (
            completion.text,
            completion.token_ids,
            completion.logprobs,
            completion.finish_reason,
            completion.stop,
        )
        for completion in completions
    ]


@pytest.fixture(scope="module")
def plain(path: Path) -> list[Any]:
    with engine_of(path, method="off") as llm:
        return token_texts(answers(llm))


def test_answers_match_their_constraint(path: Path) -> None:
    with engine_of(path) as llm:
        result = answers(llm)
    params = [params for params in PARAMS for _ in range(params.n)] * len(PROMPTS)
    for answer_params, answer in zip(params, result, strict=True):
        if answer_params.constraint is JSON and answer.finish_reason is FinishReason.STOP:
            check(json.loads(answer.text))
        elif answer_params.constraint is REGEX:
            is_whole = answer.finish_reason is FinishReason.STOP and not answer_params.stop
            assert regex.fullmatch(PATTERN, answer.text, partial=not is_whole), answer.text
    reasons = [answer.finish_reason for answer in result]
    assert reasons.count(FinishReason.STOP) > len(reasons) / 2
    assert FinishReason.LENGTH in reasons


def check(value: Any) -> None:
    assert set(value) == {"name", "age", "kind", "tags"}
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 150
    assert value["kind"] in ("a long name of a kind", "another one", None)
    assert len(value["tags"]) <= 3
    assert all(tag in {True, False} for tag in value["tags"])


@pytest.mark.parametrize(
    "speculation",
    [
        {"method": "auto"},
        {"method": "ngram", "count": 6},
        {"method": "draft", "draft": "same", "count": 5},
        {"method": "lookahead", "count": 12},
    ],
    ids=str,
)
def test_drafts_do_not_change_answers(
    path: Path, plain: list[Any], speculation: dict[str, Any]
) -> None:
    options = speculation | ({"draft": str(path)} if "draft" in speculation else {})
    with engine_of(path, **options) as llm:
        assert token_texts(answers(llm)) == plain
        assert (
            token_texts(answers(llm, prediction='{"name": "hello", "age": 1, "kind": null'))
            == plain
        )
        stats = llm.engine.client.loop.snapshot().speculation
        if "count" in speculation:
            assert sum(stats.accepted.values()) > 20


def test_forced_tokens_are_drafted(path: Path) -> None:
    with engine_of(path, method="auto", count=8) as llm:
        llm.generate(PROMPTS, PARAMS[0])
        stats = llm.engine.client.loop.snapshot().speculation
        assert stats.accepted["grammar"] > 100


@pytest.mark.parametrize("count", [None, 5])
def test_preemption_and_prefix_hits_do_not_change_answers(
    path: Path, plain: list[Any], count: int | None
) -> None:
    """There are pages for one request, and not for its six answers."""
    cache = CacheOptions(memory_bytes=65_000, context_length=224)
    with engine_of(path, cache=cache, count=count) as llm:
        assert token_texts(answers(llm)) == plain
        assert token_texts(answers(llm)) == plain
        stats = llm.engine.client.loop.snapshot().scheduler
        assert stats.num_preemptions > 0
        assert stats.num_hit_tokens > 0
        assert stats.num_referenced_pages == 0


def test_the_reference_backend_follows_constraints(path: Path) -> None:
    params = replace(PARAMS[0], max_tokens=60)
    with engine_of(path, "reference", method="off") as llm:
        plain = token_texts(
            [completion for each in llm.generate(PROMPTS, params) for completion in each]
        )
    with engine_of(path, "reference", method="auto", count=4) as llm:
        reference_answers = token_texts(
            [completion for each in llm.generate(PROMPTS, params) for completion in each]
        )
    assert reference_answers == plain
    assert all(text.startswith('{"name": "') for text, *_ in plain)


def test_a_grammar_that_becomes_too_complex_fails_alone(path: Path) -> None:
    """The grammar has too many continuations after its beginning."""
    ways = " | ".join(f'"w{i}"' for i in range(3000))
    grammar = Constraint("grammar", f'start: "aaa" ({ways})')
    with engine_of(path) as llm:
        client = llm.engine.client
        doomed = client.generate([5], SamplingParams(max_tokens=400, constraint=grammar))
        other = client.generate([5], replace(PARAMS[1], n=1))
        with pytest.raises(RequestError, match="possible at one position"):
            doomed.wait()
        check(json.loads(other.wait()[0].text))
        assert client.loop.snapshot().scheduler.num_referenced_pages == 0


def test_ignore_eos_is_refused_with_a_constraint() -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        SamplingParams(constraint=REGEX, ignore_eos=True)


def test_an_unusable_constraint_is_refused_before_anything_is_queued(path: Path) -> None:
    with engine_of(path) as llm:
        with pytest.raises(RequestError, match="regular expression"):
            llm.generate("a", SamplingParams(constraint=Constraint("regex", "(")))
        assert llm.engine.client.loop.snapshot().scheduler.num_waiting == 0
        assert llm.generate("a", PARAMS[2])[0][0].text


def test_async_callers_compile_in_another_thread(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(path, "reference") as llm:
        grammars, threads = llm.engine.client.grammars, list[threading.Thread]()
        compile_ = grammars.compile

        def noted(constraint: Constraint) -> GrammarMatcher:
            threads.append(threading.current_thread())
            return compile_(constraint)

        monkeypatch.setattr(grammars, "compile", noted)

        async def run_requests() -> str:
            params = SamplingParams(constraint=Constraint("choice", '["the moon"]'))
            outputs = AsyncLLM(llm.engine).generate("a", params)
            return "".join([output.text async for output in outputs])

        assert asyncio.run(run_requests()) == "the moon"
        assert len(threads) == 1
        assert threads[0] is not threading.current_thread()
