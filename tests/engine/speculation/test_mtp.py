"""Layers for multi-token prediction (MTP) in whole engines: drafts do not change answers."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.heads import write_random_heads
from support.native import load_level
from support.speculating_engines import GREEDY, PROMPTS, comparable_fields, engine_of, everything
from support.tiny import tiny_of, write_tiny_gguf
from support.tiny_mtp import MTP_FAMILIES, write_mtp_folder, write_mtp_gguf
from twostroke import LLM, SamplingParams
from twostroke.backends.reference import ReferenceBackend
from twostroke.core.errors import MemoryLimitError, ModelFormatError, UsageError
from twostroke.core.options import (
    BatchOptions,
    CacheOptions,
    EngineOptions,
    SpeculationOptions,
)
from twostroke.core.request import Request
from twostroke.core.step import Slice, StepPlan
from twostroke.engine import drafters, mtp_drafter
from twostroke.engine.speculation.heads import MAX_WAITING_STATES
from twostroke.model.families import build_program
from twostroke.model.families.mtp import mtp_program, mtp_spec
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path
from twostroke.model.weights.mtp import mtp_tensors

if TYPE_CHECKING:
    from pathlib import Path

LONG_PROMPTS = [f"{prompt} {prompt * 12} {index}" for index, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mtp_gguf(tmp_path_factory.mktemp("mtp") / "qwen.gguf", "qwen3.5")


def proposed(llm: LLM) -> int:
    return llm.engine.client.loop.snapshot().speculation.proposed["mtp"]


@pytest.mark.parametrize(
    ("family", "count"),
    [("qwen3.5", 1), ("qwen3.5", 7), ("qwen3.5", None), ("glm4", 3), ("glm4", None)],
)
def test_answers_are_the_same(tmp_path: Path, family: str, count: int | None) -> None:
    model = write_mtp_gguf(tmp_path / "m.gguf", family)
    with engine_of(model, method="off") as llm:
        plain = everything(llm)
        plain_long = comparable_fields(llm.generate(LONG_PROMPTS, GREEDY))
    with engine_of(model, method="mtp", count=count) as llm:
        assert everything(llm) == plain
        for _ in range(2):  # the second time with prefix hits
            assert comparable_fields(llm.generate(LONG_PROMPTS, GREEDY)) == plain_long
        stats = llm.engine.client.loop.snapshot().speculation
        if count is not None:
            assert stats.proposed["mtp"] > 300
        assert set(stats.proposed) <= {"mtp"}
        assert llm.engine.client.loop.speculator._proposers


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_folders_of_all_families_draft(tmp_path: Path, family: str) -> None:
    folder = write_mtp_folder(tmp_path / family, family)
    params = replace(GREEDY, max_tokens=12)
    with engine_of(folder, method="off") as llm:
        plain = comparable_fields(llm.generate(PROMPTS, params))
    with engine_of(folder, method="mtp", count=3) as llm:
        assert comparable_fields(llm.generate(PROMPTS, params)) == plain
        assert proposed(llm) > 20


@pytest.mark.parametrize("backend", ["reference", "torch", "cpu:portable", "cpu:amx_emulated"])
def test_all_backends_run_the_layer(path: Path, backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch", reason="no PyTorch here")
    if backend.startswith("cpu:"):
        load_level(backend.removeprefix("cpu:"))  # skips where this machine lacks it
    params = [replace(GREEDY, max_tokens=12), SamplingParams(max_tokens=12, seed=1)] * 2
    with engine_of(path, backend, method="off") as llm:
        plain = comparable_fields(llm.generate(LONG_PROMPTS, params))
    with engine_of(path, backend, method="mtp", count=3) as llm:
        assert comparable_fields(llm.generate(LONG_PROMPTS, params)) == plain
        assert proposed(llm) > 20


def greedy_drafts(model: Path, tokens: list[int], count: int) -> list[int]:
    """Return the tokens that the model's MTP layer drafts after a text, computed plainly.

    Row i of the layer reads token i + 1 and the hidden state from which the model drew it.
    """
    loaded = load_path(model)
    target = ReferenceBackend(build_program(loaded.spec), loaded.tensors, 16, 16, num_states=2)
    spec = mtp_spec(loaded.spec)
    program = mtp_program(spec, loaded.spec.vocab_size)
    tensors = mtp_tensors(loaded, spec, program)
    states = target.trace(tokens[:-1], ["last"])["last"]
    own = "last" if loaded.spec.delta else "x1"  # the hidden state that Qwen's layers read again
    layer = ReferenceBackend(program, tensors, 16, 16, tapped_value=own)
    text = tokens[1:]
    for _ in range(count):
        pages = [list(range(-(-len(text) // 16)))]
        request = Request("a", text, len(text), SamplingParams(temperature=0), 0, pages=pages)
        plan = StepPlan((Slice(request, 0, len(text), samples=True),), external=states)
        result = layer.run(plan)
        assert result.hidden is not None
        text = [*text, result.tokens[0]]
        states = np.concatenate([states, result.hidden])
    return text[len(tokens) - 1 :]


@pytest.mark.parametrize("family", ["qwen3.5", "glm4", "deepseek-v3"])
def test_drafts_are_those_of_a_plain_computation(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the whole prompt, also after prompts in several chunks and drafts of earlier steps."""
    model = write_mtp_gguf(tmp_path / "m.gguf", family)
    proposals: list[tuple[list[int], tuple[int, ...]]] = []
    with engine_of(model, "reference", method="mtp", count=3) as llm:
        (mtp,) = llm.engine.client.loop.speculator._proposers
        propose = mtp.propose

        def noting(requests: Any, cost: Any) -> Any:
            texts = [list(request.tokens) for request in requests]
            result = propose(requests, cost)
            for request, text in zip(requests, texts, strict=True):
                proposals.append((text, tuple(mtp._draft_sequences[request].tokens)))
            return result

        monkeypatch.setattr(mtp, "propose", noting)
        llm.generate("hello the world is in " * 6, replace(GREEDY, max_tokens=8))
    assert len(proposals) > 3
    for text, tokens in (proposals[0], proposals[-1]):
        assert tokens
        assert list(tokens) == greedy_drafts(model, text, len(tokens)), len(text)


def test_preempted_requests_get_drafts_again(tmp_path: Path) -> None:
    path = write_mtp_gguf(tmp_path / "m.gguf", "glm4")
    prompts = [f"{prompt} {index}" for index in range(2) for prompt in PROMPTS]
    params = [GREEDY, SamplingParams(max_tokens=60, ignore_eos=True, seed=5, n=6)] * 4
    with engine_of(path, method="off") as llm:
        plain = comparable_fields(llm.generate(prompts, params))
    cache = CacheOptions(memory_bytes=100_000, context_length=224)
    with engine_of(path, cache=cache, method="mtp", count=4) as llm:
        assert comparable_fields(llm.generate(prompts, params)) == plain
        assert llm.engine.client.loop.speculator._proposers
        assert llm.engine.client.loop.snapshot().scheduler.num_preemptions > 0


def test_few_hidden_states_wait_for_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those at the end of two texts, also of texts that are computed again, else very few."""
    monkeypatch.setattr(mtp_drafter, "_NUM_PROMPT_STATES", 40)
    monkeypatch.setattr(mtp_drafter, "_MAX_REQUESTS", 2)
    path = write_mtp_gguf(tmp_path / "m.gguf", "glm4")
    seen: list[tuple[bool, int]] = []  # is computed again, number of states
    num_large: list[int] = []
    with engine_of(
        path, cache=CacheOptions(100_000, context_length=224), method="mtp", count=2
    ) as llm:
        (mtp,) = llm.engine.client.loop.speculator._proposers
        see = mtp.see

        def noting(plan: StepPlan, result: Any) -> None:
            see(plan, result)
            sequences = mtp._draft_sequences
            num_large.append(
                sum(len(part.states) > MAX_WAITING_STATES for part in sequences.values())
            )
            for slice_ in plan.slices:
                if slice_.count > 1 and slice_.request in sequences:
                    sequence = sequences[slice_.request]
                    seen.append((slice_.request.num_output > 1, len(sequence.states)))

        monkeypatch.setattr(mtp, "see", noting)
        params = SamplingParams(max_tokens=60, ignore_eos=True, seed=5, n=3)
        llm.generate(LONG_PROMPTS * 2, params)
        assert llm.engine.client.loop.speculator._proposers
        assert llm.engine.client.loop.snapshot().scheduler.num_preemptions > 0
    assert max(num_large) == 2
    assert max(num_states for _, num_states in seen) == 40
    assert (True, 40) in seen
    assert (False, 1) in seen


def test_more_requests_than_have_pages_in_the_layer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp_drafter, "_MAX_REQUESTS", 1)
    monkeypatch.setattr(drafters, "_SPARE_TOKENS", 16)
    monkeypatch.setattr(mtp_drafter, "_WINDOW", 64)
    prompts = LONG_PROMPTS * 2
    with engine_of(path, method="off") as llm:
        plain = comparable_fields(llm.generate(prompts, GREEDY))
    with engine_of(path, method="mtp", count=3) as llm:
        assert comparable_fields(llm.generate(prompts, GREEDY)) == plain
        assert llm.engine.client.loop.speculator._proposers
        assert proposed(llm) > 20


@pytest.mark.seeds(3)
def test_tokens_do_not_depend_on_the_schedule(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of random lengths, in random engines with little memory for the layer."""
    chance = random.Random(seed)
    path = write_mtp_gguf(tmp_path / "m.gguf", chance.choice(MTP_FAMILIES))
    monkeypatch.setattr(mtp_drafter, "_WINDOW", chance.choice((20, 64, 1024)))
    monkeypatch.setattr(mtp_drafter, "_LATENT_LENGTH", chance.choice((48, 200)))
    monkeypatch.setattr(mtp_drafter, "_NUM_PROMPT_STATES", chance.choice((1, 30, 256)))
    monkeypatch.setattr(mtp_drafter, "_MAX_REQUESTS", chance.choice((1, 3, 16)))
    lengths = [chance.randint(1, 180) for _ in range(8)]
    prompts = [[chance.randrange(3, 250) for _ in range(length)] for length in lengths]
    prompts += [prompt + prompt[-20:] for prompt in prompts[:4]]
    params = [
        SamplingParams(max_tokens=30, seed=1, ignore_eos=True, temperature=chance.choice((0, 1)))
        for _ in prompts
    ]
    with engine_of(path, method="off") as llm:
        plain = comparable_fields(llm.generate(prompts, params))
    max_running = chance.choice((1, 3, 8))
    options = EngineOptions(
        cache=CacheOptions(memory_bytes=3_000_000, prefix_cache=chance.random() < 0.7),
        batch=BatchOptions(max_running=max_running, token_budget=chance.choice((8, 33, 400))),
        speculation=SpeculationOptions("mtp", count=chance.choice((1, 3, 7))),
    )
    with LLM(str(path), options) as llm:
        for _ in range(2):
            assert comparable_fields(llm.generate(prompts, params)) == plain
        assert llm.engine.client.loop.speculator._proposers
        assert proposed(llm) > 50


def test_auto_uses_the_layer_beside_ngrams(path: Path) -> None:
    with engine_of(path, method="off") as llm:
        plain = everything(llm)
    with engine_of(path, method="auto", count=4) as llm:
        assert llm.engine.client.loop.speculator.methods == ("ngram", "mtp")
        assert everything(llm) == plain
        assert everything(llm, speculate="mtp") == plain
        assert everything(llm, speculate="off") == plain
        assert {"mtp"} < set(llm.engine.client.loop.snapshot().speculation.proposed)


def test_auto_prefers_heads_that_are_named(path: Path, tmp_path: Path) -> None:
    heads = write_random_heads(tmp_path / "heads", path, "eagle")
    with engine_of(path, method="auto", heads=str(heads)) as llm:
        assert llm.engine.client.loop.speculator.methods == ("ngram", "eagle")


def test_a_model_without_the_layer_is_refused(tmp_path: Path) -> None:
    plain = write_tiny_gguf(tmp_path / "plain.gguf", tiny_of("qwen3.5"))
    with pytest.raises(UsageError, match=r"plain has no layer for multi-token prediction"):
        engine_of(plain, method="mtp")
    with engine_of(plain, method="auto") as llm:
        assert "mtp" not in llm.engine.client.loop.speculator.methods


def test_a_damaged_layer_is_refused_by_name_and_left_out_by_auto(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = QuantTensor.from_floats(np.ones((64, 64), np.float32), FORMATS["F32"])
    changes = {"blk.4.nextn.eh_proj.weight": wrong}
    damaged = write_mtp_gguf(tmp_path / "m.gguf", "qwen3.5", changes)
    with pytest.raises(ModelFormatError, match=r"eh_proj.weight' with shape \(64, 64\); the MTP"):
        engine_of(damaged, method="mtp")
    with caplog.at_level(logging.WARNING), engine_of(damaged, method="auto") as llm:
        assert llm.generate("a", GREEDY)[0][0].token_ids
        assert "mtp" not in llm.engine.client.loop.speculator.methods
    assert "The MTP layer is not used" in caplog.text


def test_a_layer_without_memory_is_refused_by_name_and_left_out_by_auto(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafters, "memory_free", lambda *_: 0)
    with pytest.raises(
        MemoryLimitError, match=r"The MTP layer of qwen cannot be used: keys.*method"
    ):
        engine_of(path, method="mtp")
    with engine_of(path, method="auto") as llm:
        assert "mtp" not in llm.engine.client.loop.speculator.methods


def test_only_named_options_go_with_mtp() -> None:
    with pytest.raises(UsageError, match=r"heads has no effect where method is mtp"):
        SpeculationOptions("mtp", heads="x")
    with pytest.raises(UsageError, match=r"draft has no effect where method is mtp"):
        SpeculationOptions("mtp", draft="x")
