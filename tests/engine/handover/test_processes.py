"""Engines in processes hand prompts over; `make test-exact-fleet` does more of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.handed_over import Case, compare
from support.tiny import tiny_of, write_tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("family", "how"), [("llama", ("f16", "127.0.0.1", "ngram")), ("gemma2", ("int8", "127.0.0.2"))]
)
def test_answers_are_those_of_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, how: tuple[str, ...]
) -> None:
    monkeypatch.setenv("TWOSTROKE_PEER_SECRET", "a secret of the tests")
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_of(family))
    found = compare(Case(str(path), *how), 40, 1, tmp_path)
    assert not found.different
    assert found.transfers["done"] >= 20
