"""Which models can be trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.tiny import tiny_of, write_tiny_gguf
from twostroke.core.errors import UsageError
from twostroke.lab.compress.quantize import quantize
from twostroke.lab.train.options import check_trainable
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path


def test_recurrent_layers_are_not_trained(tmp_path: Path) -> None:
    spec = load_path(write_tiny_gguf(tmp_path / "plain.gguf")).spec
    check_trainable(spec, "take another model")
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tiny_of("qwen3.5"))
    spec = load_path(path).spec
    with pytest.raises(UsageError, match="recurrent layers, which cannot be trained: take another"):
        check_trainable(spec, "take another model")
    with pytest.raises(UsageError, match="cannot be trained: leave out --tune"):
        quantize(
            str(path),
            "q4_0",
            tmp_path / "out.gguf",
            text=None,
            num_tokens=1024,
            notice=print,
            tuning_minutes=1,
        )
