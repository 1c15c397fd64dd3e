"""A model is checked at its first load, and users can accept a model that fails."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from support.gguf_writer import write_gguf
from support.tiny import Tiny, tiny_metadata, tiny_tensors, write_tiny_gguf
from twostroke import LLM, EngineOptions
from twostroke.backends.activation_bits import resolve as activations
from twostroke.backends.cpu import CpuBackend
from twostroke.backends.recipe import EngineRecipe
from twostroke.core.errors import ModelFormatError, QualityError
from twostroke.core.options import CacheOptions, ComputeOptions
from twostroke.engine import canary
from twostroke.engine.canary import REPORT_KEY, CanaryScores, FirstLoadCheck
from twostroke.model.families import build_program
from twostroke.model.loader import build_tokenizer
from twostroke.model.quant import QuantTensor
from twostroke.model.weights import GgufTokenizer, LoadedModel, load_path

if TYPE_CHECKING:
    from pathlib import Path

SMALL = EngineOptions(cache=CacheOptions(context_length=128))


def damaged_copy(source: Path, folder: Path) -> Path:
    """Copy a model and swap the nibbles of its feed-forward layers."""
    path, loaded = folder / source.name, load_path(source)
    shutil.copy(source, path)
    (mapping,) = loaded.mappings
    start = mapping.view(0, mapping.size).ctypes.data
    data = np.memmap(path, np.uint8, "r+")
    for layer in range(loaded.spec.num_layers):
        tensor = loaded.tensors[f"blk.{layer}.ffn_down.weight"]
        at = tensor.data.ctypes.data - start
        blocks = data[at : at + tensor.num_bytes].reshape(-1, tensor.format.block_bytes)
        blocks[:, 4:] = blocks[:, 4:] << 4 | blocks[:, 4:] >> 4
    data.flush()
    return path


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Return a list of the number of tokens of each canary that is scored, with an empty cache."""
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    counts: list[int] = []
    score = CpuBackend.score

    def counting(self: CpuBackend, tokens: list[int], *, generated: bool = False) -> np.ndarray:
        counts.append(len(tokens))
        return score(self, tokens, generated=generated)

    monkeypatch.setattr(CpuBackend, "score", counting)
    return counts


@pytest.mark.model
def test_a_file_that_passed_is_not_scored_again(smollm2_path: Path, scored: list[int]) -> None:
    for _ in range(2):
        LLM(smollm2_path, SMALL).close()
    assert scored == [64]
    for _ in range(2):
        LLM(smollm2_path, replace(SMALL, cache=CacheOptions(None, 128, kv_format="int8"))).close()
    assert scored == [64, 64], "once with other keys, too"


@pytest.mark.model
def test_garbage_is_refused_each_time_unless_it_is_accepted(
    smollm2_path: Path,
    scored: list[int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = damaged_copy(smollm2_path, tmp_path)
    monkeypatch.setattr(activations, "choose", lambda *_: pytest.fail("bits were chosen for it"))
    for _ in range(2):
        with pytest.raises(QualityError, match=r"would write garbage: .* accept_quality uses it"):
            LLM(path, SMALL)
    with caplog.at_level(logging.WARNING):
        precise = ComputeOptions(activation_bits=15)
        LLM(path, replace(SMALL, accept_quality=True, compute=precise)).close()
    assert "writes garbage: its perplexity on counting is" in caplog.text
    assert scored == [64] * 3


def test_a_tiny_model_needs_finite_logits_only(scored: list[int], tmp_path: Path) -> None:
    tensors = tiny_tensors(Tiny())
    good = write_gguf(tmp_path / "good.gguf", tiny_metadata(Tiny()), tensors)
    LLM(good, SMALL).close()
    norm = tensors["output_norm.weight"]
    signaling = np.full(norm.shape, 0x7F800001, np.uint32).view(np.float32)  # NumPy warns of these
    lost = QuantTensor.from_floats(signaling, norm.format)
    tensors["output_norm.weight"] = lost
    bad = write_gguf(tmp_path / "bad.gguf", tiny_metadata(Tiny()), tensors)
    with pytest.raises(QualityError, match="its logits are not finite"):
        LLM(bad, SMALL)


def test_accepted_garbage_is_scored_once_and_warned_of_each_time(
    scored: list[int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(canary, "_MIN_JUDGED_VALUES", 1)
    path = write_tiny_gguf(tmp_path / "random.gguf", Tiny())
    with pytest.raises(QualityError, match="would write garbage"):
        LLM(path, SMALL)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            LLM(path, replace(SMALL, accept_quality=True)).close()
        assert "writes garbage: its perplexity on counting is" in caplog.text
    assert scored == [64] * 2
    with pytest.raises(QualityError, match="would write garbage"):
        LLM(path, SMALL)
    assert scored == [64] * 3


@pytest.mark.parametrize("min_values", [1, 1 << 40])
def test_a_model_of_embeddings_is_scored_once_if_it_is_large(
    scored: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, min_values: int
) -> None:
    monkeypatch.setattr(canary, "_MIN_JUDGED_VALUES", min_values)
    metadata = tiny_metadata(Tiny()) | {"llama.pooling_type": 1}
    path = write_gguf(tmp_path / "embeds.gguf", metadata, tiny_tensors(Tiny()))
    for _ in range(2):
        LLM(path, SMALL).close()
    assert scored == ([64] if min_values == 1 else [64, 64])


@pytest.mark.model
def test_a_file_must_repeat_the_canary_of_its_report(smollm2_path: Path) -> None:
    loaded = load_path(smollm2_path)
    sound = CanaryScores((0.1,) * 63, tuple(range(64)))
    other = replace(sound, nats=(0.5,) * 63)
    assert first_load(loaded, sound).fault(sound) is None
    assert "0.40 nats from the scores in its report" in (
        first_load(loaded, other).fault(sound) or ""
    )
    close_report, coarse = replace(sound, nats=(0.3,) * 63), ComputeOptions(activation_bits=8)
    assert first_load(loaded, sound).fault(close_report) is not None
    assert first_load(loaded, sound, EngineOptions(coarse)).fault(close_report) is None
    # An answer of one token, and a text that has other tokens now.
    assert "one token" in (
        first_load(loaded, sound).fault(CanaryScores((0.1,) * 63, (7,) * 64)) or ""
    )
    assert first_load(loaded, replace(sound, nats=(0.1,) * 9)).fault(sound) is not None
    with pytest.raises(ModelFormatError, match="its report is damaged"):
        first_load(loaded, "not JSON")


def first_load(
    loaded: LoadedModel, recorded: CanaryScores | str, options: EngineOptions | None = None
) -> FirstLoadCheck:
    """Return the first-load check of a model whose metadata have a quality report."""
    assert isinstance(loaded.tokenizer_source, GgufTokenizer)
    text = recorded
    if isinstance(recorded, CanaryScores):
        text = msgspec.json.encode({"canary": recorded, "made_by": "a test"}).decode()
    metadata = {**loaded.tokenizer_source.metadata, REPORT_KEY: text}
    with_report = replace(loaded, tokenizer_source=GgufTokenizer(metadata))
    program = build_program(loaded.spec)
    recipe = EngineRecipe(with_report.name, options or EngineOptions(), with_report, program)
    return FirstLoadCheck.of(recipe, build_tokenizer(loaded))
