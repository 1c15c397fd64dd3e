"""Recurrent states that are evicted, stored, loaded and handed over leave tokens as they are."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from support.recurrent_rounds import run_recurrent_round

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.seeds(4)
def test_tokens_are_those_of_an_engine_without_cache(seed: int, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    run_recurrent_round(seed, tmp_path, counts)
    assert counts["hit tokens"] > 0
    assert counts["loaded states"] + counts["handed over"] > 0
