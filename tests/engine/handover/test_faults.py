"""Messages get lost and engines die, but no request does."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from support.handover_rounds import play_round

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.seeds(6)
def test_faults_cost_time_and_no_request(seed: int, tmp_path: Path) -> None:
    play_round(seed, tmp_path, Counter())
