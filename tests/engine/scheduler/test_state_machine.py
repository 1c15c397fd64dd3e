"""Page pool, prefix index and scheduler under random operations, with a trivial model."""

from __future__ import annotations

from collections import Counter

import pytest

from support.random_rounds import play_scheduler

NUM_OPERATIONS = 20_000


@pytest.mark.slow
@pytest.mark.rounds
def test_any_order_of_operations_keeps_pages_tokens_and_progress(rounds):
    counts: Counter[str] = Counter()
    seed = 0
    while counts["operations"] < rounds * NUM_OPERATIONS:
        play_scheduler(seed, counts)
        seed += 1
    print(dict(counts))
    for name in ("add", "end", "commit", "refuse", "flush", "changed limits"):
        assert counts[name] > NUM_OPERATIONS // 500, f"too few of {name}"
    for name in ("end in flight", "branches", "moves", "lose", "recall", "expire", "stop late"):
        assert counts[name] > NUM_OPERATIONS // 10_000, f"too few {name}"
    for name in ("transfers", "leased pages"):
        assert counts[name] > NUM_OPERATIONS // 1000, f"too few {name}"
    for name in ("arrived pages", "dropped transfers"):
        assert counts[name] > NUM_OPERATIONS // 4000, f"too few {name}"
    for name in (
        "preemptions",
        "hit tokens",
        "chunks",
        "chunks that follow",
        "empty places",
        "scores",
    ):
        assert counts[name] > NUM_OPERATIONS // 1000, f"too few {name}"
