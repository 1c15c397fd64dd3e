"""Prints how long planning and committing take; shared machines are too noisy for a limit."""

from __future__ import annotations

import time
from statistics import median

from support.requests import make_request
from twostroke.core.step import StepResult
from twostroke.engine.kv_cache import PagePool, PrefixIndex
from twostroke.engine.scheduler import Continuous, Scheduler, SchedulerConfig

NUM_STREAMS = 256
NUM_STEPS = 200


def test_overhead_of_a_step_with_256_streams_is_printed():
    pool = PagePool(20_000, 16)
    config = SchedulerConfig(4096, max_running=NUM_STREAMS, token_budget=100_000)
    scheduler = Scheduler(config, pool, PrefixIndex(pool), Continuous())
    for i in range(NUM_STREAMS):
        prompt = [(i * 31 + j) % 40_000 for j in range(100 + i)]
        scheduler.add(make_request(f"r{i}", prompt, end_ids=frozenset({49_999}), max_tokens=1000))
    plan_s, commit_s = [], []
    for step in range(NUM_STEPS):
        start_s = time.thread_time()
        plan = scheduler.plan()
        planned = time.thread_time()
        result = StepResult([step] * NUM_STREAMS, [None] * NUM_STREAMS)
        ran = time.thread_time()
        deltas = scheduler.commit(plan, result)
        commit_s.append(time.thread_time() - ran)
        plan_s.append(planned - start_s)
        assert len(deltas) == plan.num_rows if step else NUM_STREAMS
    first = 1e3 * (plan_s[0] + commit_s[0])
    print(
        f"\n{NUM_STREAMS} streams: plan {1e6 * median(plan_s):.0f} us, "
        f"commit {1e6 * median(commit_s):.0f} us a step; admitting all {first:.1f} ms"
    )
