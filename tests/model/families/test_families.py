"""Every family: its GGUF file and its folder give the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.tiny import tiny_of, write_tiny_folder, write_tiny_gguf
from support.tiny_families import FAMILIES
from twostroke.backends.reference import ReferenceBackend
from twostroke.model.families import ARCHITECTURES, MODEL_TYPES, build_program
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from twostroke.model.weights import LoadedModel

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden/families.json").read_bytes())
TOKENS: list[int] = GOLDEN["tokens"]


@pytest.mark.parametrize("family", FAMILIES)
def test_file_and_folder_have_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    assert family in GOLDEN, f"run {GOLDEN['made_by']}, which records {family}"
    tiny = tiny_of(family)
    file = load_path(write_tiny_gguf(tmp_path / "a.gguf", tiny))
    folder = load_path(write_tiny_folder(tmp_path / "a", tiny))
    names = file.tensors.keys()
    if tiny.variant.query_norm_in_gguf is not None:
        names = {name for name in names if not name.endswith(("q_norm.weight", "k_norm.weight"))}
    assert names == folder.tensors.keys()
    for loaded in (file, folder):
        ours = _logits(loaded)[np.ix_(GOLDEN["rows"], GOLDEN["columns"])]
        assert np.abs(ours - np.array(GOLDEN[family])).max() < 1e-4


def test_every_architecture_has_a_tiny_model() -> None:
    assert {variant.architecture for variant in FAMILIES.values()} == ARCHITECTURES.keys()
    # As gemma3_text, gemma4_text and deepseek_v3.
    same_types = {"gemma3", "gemma4", "gemma4_unified", "gemma4_unified_text", "kimi_k2"}
    same_types |= {"qwen3_5", "qwen3_5_moe", "muse_glimmer", "llama4"}
    assert {variant.model_type for variant in FAMILIES.values()} | same_types == MODEL_TYPES.keys()


def _logits(loaded: LoadedModel) -> np.ndarray:
    program = build_program(loaded.spec)
    return ReferenceBackend(program, loaded.tensors, num_pages=1, page_size=16).score(TOKENS)
