"""The reference backend against transformers: float32, the same dequantized weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.heldout import heldout_pieces
from support.tiny import Tiny, write_tiny_gguf
from support.transformers_llama import logits, transformers_llama
from twostroke.backends.compare import compare
from twostroke.backends.reference import ReferenceBackend
from twostroke.models import build_program
from twostroke.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path


def test_reference_equals_transformers_on_the_real_model(smollm2_path: Path) -> None:
    loaded = load_path(smollm2_path)
    theirs, ours = transformers_llama(loaded), _reference(loaded)
    pieces = heldout_pieces(loaded, length=512)
    result = compare([(logits(theirs, p), ours.score(p), p) for p in pieces])
    print(result)
    assert result.num_rows >= 2000
    assert result.mean_kl < 1e-6
    assert result.top1_agreement > 0.999
    assert result.perplexity_change < 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_reference_equals_transformers_on_tiny_models(seed: int, tmp_path: Path) -> None:
    sizes = Tiny(seed=seed, num_layers=1 + seed, num_kv_heads=(1, 2, 4)[seed], tied=seed % 2 == 0)
    loaded = load_path(write_tiny_gguf(tmp_path / "tiny.gguf", sizes))
    tokens = [(7 * i * i + seed) % loaded.spec.vocab_size for i in range(200)]
    result = compare(
        [(logits(transformers_llama(loaded), tokens), _reference(loaded).score(tokens), tokens)]
    )
    assert result.mean_kl < 1e-6


def _reference(loaded):
    return ReferenceBackend(build_program(loaded.spec), loaded.tensors, num_pages=1, page_size=16)
