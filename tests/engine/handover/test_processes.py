"""Engines in processes hand prompts over; `make test-exact-fleet` and `test-handover` do more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from support.handed_over import Case, compare
from support.handover_kills import campaign
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


def test_a_killed_prefill_engine_costs_no_request(tmp_path: Path) -> None:
    faults = [("prefill", "kill engine")]
    counts, wrong = asyncio.run(campaign(tmp_path, faults, 1, together=2, most_tokens=1000))
    assert not wrong
    assert counts["answered"] == 2
