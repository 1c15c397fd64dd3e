"""Same request, same tokens, under any schedule, cache, batch and size of the page pool."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from support.drafts import add_random_drafts
from support.fake_model import VOCAB_SIZE, FakeModel, expected_output
from support.requests import random_request, random_windows
from twostroke.engine.kv_cache import PagePool, PrefixIndex, StatePool
from twostroke.engine.scheduler import Batched, Continuous, Scheduler, SchedulerConfig
from twostroke.engine.scheduler.recurrent_states import slots_per_request
from twostroke.model.program.kv_layout import PageGroups

ROOM = 48
NUM_SCHEDULES = 40


def random_scheduler(rng):
    page_size = rng.choice((1, 4, 8, 16))
    windows = random_windows(rng)
    num_pages = PageGroups(page_size, windows).num_needed(ROOM) * rng.randint(1, 4)
    pool = PagePool(num_pages, page_size, windows)
    max_running, steps_ahead = rng.randint(1, 12), rng.choice((0, 0, 1, 3))
    num_states = 0
    if rng.random() < 0.5:
        num_states = max_running * slots_per_request(steps_ahead) + rng.choice((0, 3, 40))
    states = StatePool(num_states) if num_states else None
    model = FakeModel(
        num_pages,
        page_size,
        windows,
        two_arithmetics=rng.random() < 0.5,
        num_states=num_states,
    )
    reuse_generated = not model.two_arithmetics
    index = PrefixIndex(pool, reuse_generated=reuse_generated) if rng.random() < 0.8 else None
    budget = max_running + rng.choice((0, 3, 16, 200))
    config = SchedulerConfig(ROOM, max_running, budget, steps_ahead=steps_ahead)
    size = rng.randint(1, max_running)
    policy = rng.choice((Continuous(), Batched(size, 0.0), Batched(size)))
    return Scheduler(config, pool, index, policy, states=states), model, states


def serve(scheduler, model, requests, rng, outputs=None):
    """Let requests arrive at random steps, and run until all have ended.

    `outputs`: the right outputs by the requests' ids, from which some steps get drafts.
    """
    todo = list(requests)
    in_flight = deque()
    while todo or scheduler.has_work:
        while todo and rng.random() < 0.4:
            scheduler.add(todo.pop())
        if not todo:
            scheduler.flush()
        plan = scheduler.plan() if len(in_flight) <= scheduler.config.steps_ahead else None
        if plan is not None:
            if outputs is not None and rng.random() < 0.5:
                add_random_drafts(rng, plan, scheduler, outputs, VOCAB_SIZE)
            in_flight.append((plan, model.run(plan)))
        elif in_flight:
            scheduler.commit(*in_flight.popleft())


@pytest.mark.rounds
def test_tokens_do_not_depend_on_the_schedule(rounds):
    counts = Counter()
    for seed in range(rounds * NUM_SCHEDULES):
        rng = random.Random(seed)
        scheduler, model, states = random_scheduler(rng)
        requests = []
        for turn in range(3):
            turn_requests = [random_request(rng, f"{turn}-{i}", ROOM, requests) for i in range(8)]
            expected = [
                expected_output(
                    request,
                    ROOM,
                    model.windows,
                    two_arithmetics=model.two_arithmetics,
                    has_states=states is not None,
                )
                for request in turn_requests
            ]
            outputs = {r.id: o for r, (o, _) in zip(turn_requests, expected, strict=True)}
            serve(scheduler, model, turn_requests, rng, outputs if seed % 2 else None)
            for request, (output, reason) in zip(turn_requests, expected, strict=True):
                assert request.output == output, f"schedule {seed}"
                assert request.finish_reason == reason, f"schedule {seed}"
            requests += turn_requests
        stats = scheduler.stats()
        assert stats.num_referenced_pages == 0
        if states is not None:
            assert states.num_available == states.num_slots
            counts["hit with a state"] += stats.num_hit_tokens > 0
            counts["accepted with a state"] += any(r.num_accepted for r in requests)
        counts["preempted"] += stats.num_preemptions > 0
        counts["hit"] += stats.num_hit_tokens > 0
        counts["hit behind a window"] += stats.num_hit_tokens > 0 and model.windows != (None,)
    assert counts["hit with a state"] > NUM_SCHEDULES // 5
    assert counts["accepted with a state"] > NUM_SCHEDULES // 10
    assert counts["preempted"] > NUM_SCHEDULES // 10
    assert counts["hit"] > NUM_SCHEDULES // 2
    assert counts["hit behind a window"] > NUM_SCHEDULES // 4
