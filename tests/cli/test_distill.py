"""`twostroke distill`: the sizes of a student in a file. Cutting is tested in tests/oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.tiny import tiny_of, write_tiny_gguf
from twostroke.core.errors import UsageError
from twostroke.lab.train.options import StudentShape
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Ran


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("layers: 3\nwidth: 64\n", r"shape.yaml, line 2: there is no field 'width'"),
        ("layers: many\n", "line 1: must be a whole number such as 2048, got a text"),
        ("- 3\n", "shape.yaml, line 1"),
    ],
)
def test_wrong_files_name_the_line(
    cli: Callable[..., Ran], tmp_path: Path, text: str, sentence: str
) -> None:
    path = tmp_path / "shape.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=sentence):
        StudentShape.read(path)
    ran = cli("distill", "tiny", "--student", str(path), "-o", str(tmp_path / "out"))
    assert (ran.code, "shape.yaml, line" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (StudentShape(layers=3), "layers must be from 1 to 2, as many as .* has; got 3"),
        (StudentShape(kv_heads=0), "kv_heads must be from 1 to 2"),
        (StudentShape(feed_forward=48), "feed_forward must be a multiple of 32, got 48"),
        (StudentShape(1, feed_forward=1 << 20), "feed_forward must be from 1 to 128"),
        (StudentShape(), "as large as"),
        (StudentShape(2, 2, 128), "as large as"),
    ],
)
def test_what_cannot_be_cut_is_refused(tmp_path: Path, shape: StudentShape, sentence: str) -> None:
    spec = load_path(write_tiny_gguf(tmp_path / "tiny.gguf", tiny_of("llama"))).spec
    with pytest.raises(UsageError, match=sentence):
        shape.check(spec)
    StudentShape(1).check(spec)
    StudentShape(kv_heads=1, feed_forward=96).check(spec)


def test_experts_keep_their_widths(tmp_path: Path) -> None:
    spec = load_path(write_tiny_gguf(tmp_path / "tiny.gguf", tiny_of("mixtral"))).spec
    StudentShape(1).check(spec)
    with pytest.raises(UsageError, match="mixture of experts: only its layers"):
        StudentShape(1, kv_heads=1).check(spec)
