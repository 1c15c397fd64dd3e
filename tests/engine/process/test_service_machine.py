"""A server and an engine process that dies at any moment, under random operations."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from support.random_rounds import play_service

NUM_ROUNDS = 1


@pytest.mark.slow
@pytest.mark.rounds
def test_everybody_gets_the_right_end_whenever_an_engine_dies(
    caplog: pytest.LogCaptureFixture, rounds: int
) -> None:
    caplog.set_level(logging.CRITICAL)  # deaths are no news here
    counts: Counter[str] = Counter()
    for seed in range(rounds * NUM_ROUNDS):
        play_service(seed, counts)
    print(dict(counts))
    assert counts["operations"] >= rounds * NUM_ROUNDS * 2_750
    for name in ("answered", "resumed", "die", "cancelled", "refused"):
        assert counts[name] > 25, f"too few were {name}"
    for name in ("preemptions", "hit tokens", "killers refused", "failed alone", "left"):
        assert counts[name] > 5, f"too few {name}"
