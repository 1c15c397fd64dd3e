"""Every family, from both kinds of files: one model, whichever way it is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.tiny import tiny_of, write_tiny_folder, write_tiny_gguf
from support.tiny_families import FAMILIES
from twostroke.backends.reference import ReferenceBackend
from twostroke.models import build_program
from twostroke.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.weights import LoadedModel

TOKENS = [(7 * i * i + 3 * i) % 285 for i in range(100)]


@pytest.mark.parametrize("family", FAMILIES)
def test_file_and_folder_of_one_model_have_the_same_logits(tmp_path: Path, family: str) -> None:
    tiny = tiny_of(family)
    file = load_path(write_tiny_gguf(tmp_path / "a.gguf", tiny))
    folder = load_path(write_tiny_folder(tmp_path / "a", tiny))
    assert file.tensors.keys() == folder.tensors.keys()
    assert np.abs(_logits(file) - _logits(folder)).max() < 2e-5


def _logits(loaded: LoadedModel) -> np.ndarray:
    program = build_program(loaded.spec)
    return ReferenceBackend(program, loaded.tensors, num_pages=1, page_size=16).score(TOKENS)
