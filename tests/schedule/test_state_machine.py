"""Pool, index and scheduler under 50,000 random operations, with a model that costs nothing."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from support.machine import SchedulerMachine

NUM_OPERATIONS = 50_000
SETTINGS = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # Shrinking takes minutes; add Phase.shrink to find a short sequence that fails.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@pytest.mark.slow
def test_any_order_of_operations_keeps_pages_tokens_and_progress():
    class Machine(SchedulerMachine):
        counts: ClassVar[Counter[str]] = Counter()

    while Machine.counts["operations"] < NUM_OPERATIONS:
        run_state_machine_as_test(Machine, settings=SETTINGS)
    print(dict(Machine.counts))
    assert Machine.counts["operations"] >= NUM_OPERATIONS
    for what in ("add", "end", "commit", "refuse", "flush"):
        assert Machine.counts[what] > NUM_OPERATIONS // 500, f"too few of {what}"
    for what in ("end in flight", "branches", "moves", "lose", "recall"):
        assert Machine.counts[what] > NUM_OPERATIONS // 10_000, f"too few {what}"
    for what in (
        "preemptions",
        "hit tokens",
        "chunks",
        "chunks that follow",
        "empty places",
        "scores",
    ):
        assert Machine.counts[what] > NUM_OPERATIONS // 1000, f"too few {what}"
