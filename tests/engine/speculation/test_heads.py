"""EAGLE and Medusa heads in whole engines: their drafts do not change answers."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.draft_costs import cheap_up_to
from support.heads import write_random_heads
from support.native import load_level
from support.speculating_engines import GREEDY, PROMPTS, comparable_fields, engine_of, everything
from support.tiny import Tiny, write_tiny_gguf
from twostroke import LLM, SamplingParams
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
from twostroke.engine import drafters
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_heads
from twostroke.model.weights.heads import save_heads
from twostroke.model.weights.safetensors import write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("eagle", "medusa")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, path: Path) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("heads")
    return {kind: str(write_random_heads(folder / kind, path, kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def plain(path: Path) -> list[Any]:
    with engine_of(path, method="off") as llm:
        return everything(llm)


@pytest.mark.parametrize("count", [3, 7, None])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_same(
    path: Path, heads: dict[str, str], plain: list[Any], kind: str, count: int | None
) -> None:
    with engine_of(path, method=kind, heads=heads[kind], count=count) as llm:
        assert everything(llm) == plain
        assert (
            comparable_fields(llm.generate(PROMPTS, GREEDY)) == plain[: len(PROMPTS)]
        )  # with prefix hits
        stats = llm.engine.client.loop.snapshot().speculation
        if count is not None:
            assert stats.proposed[kind] > 300
        assert set(stats.proposed) <= {kind}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", "torch", "cpu:portable", "cpu:amx_emulated"])
def test_all_backends_run_heads(path: Path, heads: dict[str, str], backend: str, kind: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch", reason="no PyTorch here")
    if backend.startswith("cpu:"):
        load_level(backend.removeprefix("cpu:"))  # skips where this machine lacks it
    params = [replace(GREEDY, max_tokens=12), SamplingParams(max_tokens=12, seed=1)] * 2
    with engine_of(path, backend, method="off") as llm:
        plain = comparable_fields(llm.generate(PROMPTS, params))
    with engine_of(path, backend, method=kind, heads=heads[kind], count=3) as llm:
        assert comparable_fields(llm.generate(PROMPTS, params)) == plain
        assert llm.engine.client.loop.snapshot().speculation.proposed[kind] > 20


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_heads_have_no_more_rows_than_there_is_memory_for(
    path: Path, heads: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafters, "_MIN_STEP_ROWS", 1)
    monkeypatch.setattr(drafters, "MAX_WAITING_STATES", 8)
    make, max_rows_seen, counts = drafters.create_backend, [0], list[int]()

    def counting(*args: Any, max_rows: int, **options: Any) -> Any:
        backend = make(*args, max_rows=max_rows, **options)
        run, max_rows_seen[0] = backend.run, max_rows

        def run_counted(plan: Any) -> Any:
            counts.append(sum(part.num_rows for part in plan.slices))
            return run(plan)

        monkeypatch.setattr(backend, "run", run_counted)
        return backend

    monkeypatch.setattr(drafters, "create_backend", counting)
    options = EngineOptions(
        ComputeOptions("reference"),
        batch=BatchOptions(max_running=2, token_budget=16),
        speculation=SpeculationOptions(kind, heads=heads[kind], count=4),
    )
    with LLM(str(path), options) as llm:
        llm.generate(PROMPTS, GREEDY)
        assert llm.engine.client.loop.snapshot().speculation.proposed[kind] > 50
    assert max_rows_seen == [8]  # two requests with four drafts each
    assert 2 < max(counts) <= 8


@pytest.mark.parametrize(("cheap", "max_drafts"), [(1, 1), (3, 3), (24, 8)])
def test_eagle_drafts_no_further_than_rows_are_cheap(
    path: Path, heads: dict[str, str], cheap: int, max_drafts: int
) -> None:
    with engine_of(path, method="eagle", heads=heads["eagle"]) as llm:
        (eagle,) = llm.engine.client.loop.speculator._proposers
        propose, counts = eagle.propose, []

        def with_price(requests: Any, price: Any) -> Any:
            result = propose(requests, cheap_up_to(cheap, price))
            counts.extend(len(eagle._draft_sequences[request].tokens) for request in requests)
            return result

        eagle.propose = with_price
        llm.generate(PROMPTS[:1], GREEDY)
    assert max(counts) == max_drafts


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_first_step_does_not_count(
    path: Path, heads: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(path, method=kind, heads=heads[kind]) as llm:
        (proposer,) = llm.engine.client.loop.speculator._proposers
        propose, run, now_s, has_drafts = proposer.propose, proposer._runner.runner.run, 0.0, []

        def slow_at_first(plan: Any) -> Any:
            nonlocal now_s
            now_s += 0.001 if now_s else 0.2
            return run(plan)

        def with_price(requests: Any, price: Any) -> Any:  # 0.2 s are ten tokens, a ms a twentieth
            price = replace(price, row_chance=0.0, tokens_per_s=50.0, max_drafts=2, seconds=None)
            result = propose(requests, price)
            has_drafts.append(result[0] is not None)
            return result

        monkeypatch.setattr(proposer._runner.runner, "run", slow_at_first)
        clock = SimpleNamespace(monotonic=lambda: now_s)
        monkeypatch.setattr("twostroke.engine.speculation.draft_sequences.time", clock)
        monkeypatch.setattr(proposer, "propose", with_price)
        monkeypatch.setattr(
            "twostroke.engine.speculation.payoff.ProposerGain.may_ask", lambda _: True
        )
        llm.generate(PROMPTS[:1], GREEDY)
    assert sum(has_drafts) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_requests_get_drafts_again(path: Path, heads: dict[str, str], kind: str) -> None:
    """The KV cache has room for one request, but not for six answers to it."""
    prompts = [f"{prompt} {index}" for index in range(2) for prompt in PROMPTS]
    params = [GREEDY, SamplingParams(max_tokens=60, ignore_eos=True, seed=5, n=6)] * 4
    cache = CacheOptions(memory_bytes=65_000, context_length=224)
    with engine_of(path, method="off") as llm:
        plain = comparable_fields(llm.generate(prompts, params))
    with engine_of(path, cache=cache, method=kind, heads=heads[kind], count=4) as llm:
        assert comparable_fields(llm.generate(prompts, params)) == plain
        assert llm.engine.client.loop.snapshot().scheduler.num_preemptions > 0


def test_heads_and_ngrams_work_together(
    path: Path, heads: dict[str, str], plain: list[Any]
) -> None:
    with engine_of(path, method="auto", heads=heads["eagle"], count=4) as llm:
        assert llm.engine.client.loop.speculator.methods[:2] == ("ngram", "eagle")
        assert everything(llm) == plain
        assert everything(llm, speculate="eagle") == plain
        assert everything(llm, speculate="off") == plain
        with pytest.raises(RequestError, match=r"speculate must be one of auto, off, ngram, eagle"):
            llm.generate("a", GREEDY, speculate="medusa")
        assert {"eagle"} < set(llm.engine.client.loop.snapshot().speculation.proposed)


def test_ended_requests_are_forgotten(path: Path, heads: dict[str, str]) -> None:
    for kind in KINDS:
        with engine_of(path, method=kind, heads=heads[kind], count=4) as llm:
            llm.generate(PROMPTS * 3, GREEDY)
            llm.generate("the", GREEDY)  # the others' ends are heard by now
            (proposer,) = llm.engine.client.loop.speculator._proposers
            assert len(proposer._draft_sequences) <= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [4, 24])
def test_answers_up_to_the_end_of_the_context_are_drafted(
    tmp_path: Path, kind: str, count: int
) -> None:
    short = write_tiny_gguf(tmp_path / "short.gguf", Tiny(context_length=64))
    folder = str(write_random_heads(tmp_path / kind, short, kind))
    params = SamplingParams(temperature=0, ignore_eos=True)
    with engine_of(short, method="off") as llm:
        plain = comparable_fields(llm.generate([[3]], params))
    with engine_of(short, method=kind, heads=folder, count=count) as llm:
        for _ in range(2):
            assert comparable_fields(llm.generate([[3]], params)) == plain
        assert llm.engine.client.loop.speculator._proposers  # none was given up


def test_heads_with_a_shorter_context_start_again(path: Path, tmp_path: Path) -> None:
    folder = write_random_heads(tmp_path / "heads", path, "eagle")
    facts = json.loads((folder / "heads.json").read_text())
    (folder / "heads.json").write_text(json.dumps(facts | {"context_length": 40}))
    with engine_of(path, method="off") as llm:
        plain = comparable_fields(llm.generate(PROMPTS, replace(GREEDY, max_tokens=160)))
    with engine_of(path, method="eagle", heads=str(folder), count=4) as llm:
        assert comparable_fields(llm.generate(PROMPTS, replace(GREEDY, max_tokens=160))) == plain
        assert llm.engine.client.loop.speculator._proposers
        assert llm.engine.client.loop.snapshot().speculation.proposed["eagle"] > 4 * 4 * 50


def test_heads_of_another_model_are_refused(tmp_path: Path, heads: dict[str, str]) -> None:
    other = write_tiny_gguf(tmp_path / "other.gguf", Tiny(hidden_size=32, head_dim=16))
    with pytest.raises(UsageError, match=r"heads of tiny, which cannot draft for other: train"):
        engine_of(other, method="eagle", heads=heads["eagle"])


def test_heads_of_another_kind_are_refused(path: Path, heads: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"holds medusa heads: use --speculate medusa, or auto"):
        engine_of(path, method="eagle", heads=heads["medusa"])


def test_folders_without_heads_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no heads.json"):
        engine_of(path, method="eagle", heads=str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"is not a folder"):
        engine_of(path, method="eagle", heads=str(tmp_path / "nosuch"))


def test_damaged_heads_are_refused(path: Path, tmp_path: Path) -> None:
    folder = write_random_heads(tmp_path / "heads", path, "eagle")
    facts = json.loads((folder / "heads.json").read_text())
    for change, message in (
        ({"ffn_size": 96}, r"'blk.0.ffn_gate.weight' with shape"),
        ({"token_ids": [5, 3]}, r"token_ids must ascend from 0 to"),
        ({"token_ids": [5, 5]}, r"token_ids must ascend from 0 to"),
        ({"token_ids": [5, 1 << 40]}, r"token_ids must ascend from 0 to"),
        ({"token_ids": ["a"]}, r"token_ids"),
        ({"token_ids": []}, r"token_ids"),
        ({"token_ids": None}, r"token_ids"),
        ({"hidden_sise": 64}, r"hidden_sise"),
        ({"kind": "hydra"}, r"kind"),
        ({"accepted": [0.5]}, r"accepted must have 4 shares"),
        ({"head_dim": 15}, r"head_dim"),
        ({"format": 9}, r"format"),
    ):
        (folder / "heads.json").write_text(json.dumps(facts | change))
        with pytest.raises(ModelFormatError, match=message):
            engine_of(path, method="eagle", heads=str(folder))


def test_heads_with_values_that_are_not_finite_are_refused(path: Path, tmp_path: Path) -> None:
    folder = write_random_heads(tmp_path / "heads", path, "medusa")
    loaded = load_heads(folder)
    broken = loaded.tensors["output.weight"].dequantize().copy()
    broken[3, 5] = np.nan
    tensors = dict(loaded.tensors) | {
        "output.weight": QuantTensor.from_floats(broken, FORMATS["F16"])
    }
    save_heads(tmp_path / "broken", loaded.facts, tensors)
    with pytest.raises(ModelFormatError, match=r"output.weight has values that are not finite"):
        engine_of(path, method="medusa", heads=str(tmp_path / "broken"))


def test_unknown_weights_of_heads_are_refused(path: Path, tmp_path: Path) -> None:
    folder = write_random_heads(tmp_path / "heads", path, "eagle")
    tensors = dict(load_heads(folder).tensors)
    write_safetensors(
        folder / "heads.safetensors", tensors | {"fc.bias": tensors["output_norm.weight"]}
    )
    with pytest.raises(ModelFormatError, match=r"'fc.bias', which eagle heads of depth 4"):
        engine_of(path, method="eagle", heads=str(folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "eagle"}, r"method can be eagle only with trained heads"),
        ({"method": "ngram", "heads": "x"}, r"heads has no effect where method is ngram"),
        ({"heads": ""}, r"heads must name a folder"),
        ({"method": "off", "count": 4}, r"count has no effect where method is off"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SpeculationOptions(**options)


def test_heads_whose_window_exceeds_memory_are_refused(path: Path, tmp_path: Path) -> None:
    wide_heads = write_random_heads(tmp_path, path, "eagle", window=1 << 28)
    with pytest.raises(MemoryLimitError, match=r"MB of memory are free. Lower --max-running"):
        engine_of(path, heads=str(wide_heads))
