"""The reference backend against transformers: float32, the same dequantized weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.heldout import heldout_pieces
from support.tiny import Tiny, tiny_of, write_tiny_gguf
from support.transformers_models import logits, transformers_model
from twostroke.backends.reference import ReferenceBackend
from twostroke.lab.measure.divergence import compare
from twostroke.model.families import build_program
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from twostroke.model.weights import LoadedModel


@pytest.mark.parametrize(
    "name",
    [
        "smollm2",
        pytest.param("gemma3-270m", marks=pytest.mark.models),
        pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.models),
        pytest.param("qwen2.5-coder-1.5b", marks=[pytest.mark.models, pytest.mark.slow]),
    ],
)
def test_reference_equals_transformers_on_real_models(
    name: str, real_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """One side after the other, with the logits on disk: the largest has 7 GB in float32."""
    loaded = load_path(real_model(name))
    pieces = heldout_pieces(loaded, length=512)
    _keep_theirs(loaded, pieces, tmp_path)
    ours = _reference(loaded)
    result = compare(
        (np.load(tmp_path / f"{index}.npy"), ours.score(piece), piece)
        for index, piece in enumerate(pieces)
    )
    print(name, result)
    assert result.num_rows >= 2000
    assert result.mean_kl < 1e-6
    assert result.top1_agreement > 0.999
    assert result.perplexity_change < 1e-4


def _keep_theirs(loaded: LoadedModel, pieces: list[list[int]], folder: Path) -> None:
    theirs = transformers_model(loaded)
    for index, piece in enumerate(pieces):
        np.save(folder / f"{index}.npy", logits(theirs, piece))


@pytest.mark.parametrize("seed", range(3))
def test_reference_equals_transformers_on_tiny_models(seed: int, tmp_path: Path) -> None:
    sizes = Tiny(seed=seed, num_layers=1 + seed, num_kv_heads=(1, 2, 4)[seed], tied=seed % 2 == 0)
    _check_tiny(sizes, tmp_path)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral", "qwen2", "qwen3"])
def test_a_gguf_of_each_family_equals_transformers(family: str, tmp_path: Path) -> None:
    _check_tiny(tiny_of(family), tmp_path)


def _check_tiny(tiny: Tiny, folder: Path) -> None:
    loaded = load_path(write_tiny_gguf(folder / "tiny.gguf", tiny))
    tokens = [(7 * i * i + tiny.seed) % loaded.spec.vocab_size for i in range(200)]
    theirs = logits(transformers_model(loaded), tokens)
    assert compare([(theirs, _reference(loaded).score(tokens), tokens)]).mean_kl < 1e-6


def _reference(loaded: LoadedModel) -> ReferenceBackend:
    return ReferenceBackend(build_program(loaded.spec), loaded.tensors, num_pages=1, page_size=16)
