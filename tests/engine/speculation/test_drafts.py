"""Draft models that an engine uses, drops or refuses, and contradictory options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.native import native_dir
from support.speculating_engines import comparable_fields, engine_of
from support.tiny import Tiny, tiny_of, write_tiny_gguf
from twostroke import LLM, SamplingParams
from twostroke.backends import recipe
from twostroke.core.errors import (
    MemoryLimitError,
    ModelFormatError,
    ModelNotFoundError,
    RequestError,
    UsageError,
)
from twostroke.core.options import (
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    SpeculationOptions,
)

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.backends.interface import Backend


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Tiny(num_layers=1, seed=5, context_length=300)
    return write_tiny_gguf(tmp_path_factory.mktemp("other") / "other.gguf", tiny)


def test_a_damaged_draft_from_the_catalogue_is_left_out(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(path.read_bytes()[:2000])
    monkeypatch.setattr("twostroke.engine.drafters.local_draft", lambda _: str(damaged))
    with engine_of(path, draft="auto") as llm:
        assert llm.engine.draft is None
    assert "is not used as a draft (--draft none: no draft): " in caplog.text
    with pytest.raises(ModelFormatError, match="damaged"):
        engine_of(path, draft="auto", method="draft")


def test_the_catalogues_draft_is_used_if_it_is_asked_for(
    path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_paths: list[str | None] = [str(other)]
    monkeypatch.setattr("twostroke.engine.drafters.local_draft", lambda _: draft_paths[0])

    def drafts(**options: Any) -> tuple[str | None, tuple[str, ...]]:
        with engine_of(path, **options) as llm:
            return llm.engine.draft, llm.engine.client.loop.speculator.methods

    assert drafts() == (None, ("ngram", "lookahead"))
    assert drafts(draft="auto") == ("other", ("ngram", "draft", "lookahead"))
    assert drafts(draft="auto", method="draft") == ("other", ("draft",))
    assert drafts(draft="auto", method="ngram") == (None, ("ngram",))
    assert drafts(draft="auto", method="off") == (None, ())
    with monkeypatch.context() as poor:
        poor.setattr("twostroke.engine.drafters.unused_bytes", lambda *_: 10**18)
        assert drafts(draft="auto") == (None, ("ngram", "lookahead"))
        with pytest.raises(MemoryLimitError, match="The draft model does not fit into memory"):
            drafts(draft="auto", method="draft")
    draft_paths[0] = None
    assert drafts(draft="auto") == (None, ("ngram", "lookahead"))
    with pytest.raises(UsageError, match=r"The catalogue has no draft model .*--draft MODEL"):
        drafts(draft="auto", method="draft")


def test_a_draft_that_does_not_fit_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.engine.drafters.unused_bytes", lambda *_: 10**18)
    with pytest.raises(MemoryLimitError, match="The draft model does not fit into memory"):
        engine_of(path, draft=str(path))


def test_the_error_names_a_draft_without_memory_for_weights(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_backend = recipe.create_backend

    def no_room(*args: Any, share_threads_with: Backend | None, **options: Any) -> Backend:
        if share_threads_with is not None:
            raise MemoryLimitError("No memory for 1.1 GB of weights; use a smaller model.")
        return create_backend(*args, **options)

    monkeypatch.setattr(recipe, "create_backend", no_room)
    with pytest.raises(
        MemoryLimitError, match=r"does not fit into memory with tiny\. No memory for"
    ):
        engine_of(path, draft=str(path))


def test_a_draft_with_recurrent_layers_is_refused(path: Path, tmp_path: Path) -> None:
    hybrid = write_tiny_gguf(tmp_path / "hybrid.gguf", tiny_of("qwen3.5"))
    with pytest.raises(UsageError, match="hybrid has recurrent layers, whose states cannot take"):
        engine_of(path, draft=str(hybrid))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_model_with_recurrent_layers_has_drafts(backend: str, path: Path, tmp_path: Path) -> None:
    hybrid = write_tiny_gguf(tmp_path / "hybrid.gguf", tiny_of("qwen3.5"))
    prompts = [[5, 6, 7, 8, 9, 10] * 3, list(range(20, 40))]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with engine_of(hybrid, backend, method="off") as llm:
        expected = llm.generate(prompts, params)
    for options in ({"method": "ngram"}, {"method": "draft", "draft": str(path)}):
        with engine_of(hybrid, backend, count=3, **options) as llm:
            predictions = [answer.text for [answer] in expected]
            answers = [
                llm.generate([prompt], params, prediction=prediction)[0]
                for prompt, prediction in zip(prompts, predictions, strict=True)
            ]
            stats = llm.engine.client.loop.speculator.stats
            assert sum(stats.proposed.values()) > 0
            if options["method"] == "ngram":
                assert sum(stats.accepted.values()) > 0
        assert comparable_fields(answers) == comparable_fields(expected)
    with pytest.raises(UsageError, match="cannot branch: leave out --speculate lookahead"):
        engine_of(hybrid, backend, method="lookahead")
    with engine_of(hybrid, backend) as llm:
        assert llm.engine.client.loop.speculator.methods == ("ngram",)
        with pytest.raises(RequestError, match="must be one of auto, off, ngram here"):
            llm.generate(prompts, params, speculate="lookahead")


def test_a_missing_draft_is_refused(path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        engine_of(path, draft="nowhere.gguf")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "drafts"}, "got 'drafts'.*Did you mean 'draft'"),
        ({"method": "draft"}, "set draft as well"),
        ({"method": "off", "draft": "a"}, "has no effect where method is off"),
        ({"method": "lookahead", "draft": "a"}, "has no effect where method is lookahead"),
        ({"method": "lookahed"}, "Did you mean 'lookahead'"),
        ({"count": 0}, "count must be from 1 to 24, got 0"),
        ({"count": 25}, "count must be from 1 to 24, got 25"),
    ],
)
def test_contradictory_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        SpeculationOptions(**options)


def test_a_request_that_reports_on_its_prompt_keeps_the_draft(path: Path, other: Path) -> None:
    """The draft model prefills the prompt in several steps, without log-probabilities."""
    prompt = list(range(20, 230))
    params = SamplingParams(temperature=0, max_tokens=24, prompt_logprobs=1, ignore_eos=True)
    native_dir()
    compute, speculation = (
        ComputeOptions(backend="cpu"),
        SpeculationOptions("draft", str(other), count=2),
    )
    batch = BatchOptions(token_budget=64, max_running=8)
    options = EngineOptions(compute, CacheOptions(memory_bytes=6_000_000), batch, speculation)
    with LLM(str(path), options) as llm:
        [[answer]] = llm.generate([prompt], params)
        assert answer.usage.completion_tokens == 24
        assert llm.engine.client.loop.speculator.stats.proposed["draft"] > 0
        assert not llm.engine.client.loop.speculator._failed


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch_size", 2.5), ("max_running", True), ("token_budget", None), ("max_wait_s", "1")],
)
def test_batch_sizes_must_be_whole_numbers(field: str, value: object) -> None:
    with pytest.raises(UsageError, match="must be a"):
        BatchOptions(**{field: value})  # type: ignore[arg-type]
