"""Several steps in flight: the requests in each step, and the pages that steps keep."""

from __future__ import annotations

from collections import deque

import pytest

from support.invariants import check_pool, check_scheduler
from support.steps import Steps
from twostroke.core.request import FinishReason


def sizes(steps, count):
    """Return the number of rows in each of the next steps, with the maximum number in flight."""
    in_flight = deque()
    rows = []
    while len(rows) < count:
        plan = None
        if len(in_flight) <= steps.scheduler.config.steps_ahead:
            plan = steps.scheduler.plan()
        if plan is not None:
            rows.append(plan.num_rows)
            in_flight.append(plan)
        else:
            steps.land(in_flight.popleft())
    while in_flight:
        steps.land(in_flight.popleft())
    return rows


def test_steps_take_turns_with_the_running_requests():
    """Micro-batches have equal sizes, also after requests come and go."""
    steps = Steps(512, max_running=32, steps_ahead=1)
    for i in range(16):
        steps.add(f"r{i}", [i], max_tokens=None)
    assert sizes(steps, 12) == [16, *[8] * 11]
    for i in range(3):
        steps.cancel(f"r{i}")
    assert sizes(steps, 12)[2:] == [7, 6] * 5
    for i in range(5):
        steps.add(f"new{i}", [20 + i], max_tokens=None)
    assert sizes(steps, 20)[-10:] == [9] * 10
    for num_ahead in (2, 3):
        steps = Steps(512, max_running=32, steps_ahead=num_ahead)
        for i in range(12):
            steps.add(f"r{i}", [i], max_tokens=None)
        assert sizes(steps, 20)[1:] == [12 // (1 + num_ahead)] * 19


def test_chunks_of_a_prompt_follow_each_other():
    steps = Steps(token_budget=24, steps_ahead=2)
    request = steps.add("r", 20, max_tokens=2)
    plans = [steps.plan() for _ in range(3)]
    slices = [(p.start, p.count, p.samples) for plan in plans for p in plan.slices]
    assert slices == [(0, 8, False), (8, 8, False), (16, 4, True)]
    assert (request.num_computed, request.num_planned, request.num_pending) == (0, 20, 0)
    steps.land(plans[0])
    assert steps.scheduler.plan() is None, "the next token is not known"
    for plan in plans[1:]:
        steps.land(plan)
    assert [(p.start, p.count) for p in steps.plan().slices] == [(20, 1)]


def test_a_chunk_in_flight_is_not_found_by_others():
    steps = Steps(token_budget=16, steps_ahead=1)
    steps.add("first", 20, max_tokens=1)
    steps.plan()
    steps.add("second", 20, max_tokens=1)
    [slice_] = steps.plan().slices
    assert (slice_.request.id, slice_.start) == ("first", 8)


@pytest.mark.parametrize("reason", [FinishReason.CANCEL, FinishReason.STOP])
def test_pages_stay_until_the_last_step_that_uses_them(reason):
    steps = Steps(token_budget=24, steps_ahead=2)
    finished = steps.add("gone", 40)
    plans = [steps.plan() for _ in range(3)]
    assert steps.scheduler.finish(finished, reason)
    assert not steps.scheduler.has_work
    stays = steps.add("gone", [40, 41, 42], max_tokens=1)  # the id is free
    for plan in plans:
        assert finished.pages
        assert steps.land(plan) == []
    assert (finished.pages, finished.output) == ([], [])
    steps.finish()
    assert stays.num_output == 1


def test_drafts_in_flight_are_taken_while_another_step_runs():
    steps = Steps(steps_ahead=1)
    for name, first in (("a", 1), ("b", 20)):
        steps.add(name, [*range(first, first + 5)], max_tokens=9)
    steps.step()
    plans = [steps.plan(), steps.plan()]
    assert [plan.slices[0].request.id for plan in plans] == ["a", "b"]
    slice_ = plans[1].slices[0]
    steps.scheduler.add_drafts(slice_, (10, 11, 12, 13), (-1, -1, 0, 1))
    assert slice_.branches
    check_scheduler(steps.scheduler)
    for plan in plans:
        steps.land(plan)
    steps.finish()


def test_pages_are_taken_from_others_only_when_no_step_is_in_flight():
    steps = Steps(num_pages=4, cache=False, steps_ahead=1)
    first = steps.add("a", 4, max_tokens=12)
    last = steps.add("b", 4, max_tokens=12)
    in_flight = deque()
    while steps.scheduler.has_work:
        plan = steps.scheduler.plan() if len(in_flight) < 2 else None
        if plan is None:
            steps.land(in_flight.popleft())
            continue
        assert not plan.preempted or not in_flight
        in_flight.append(plan)
        check_scheduler(steps.scheduler)
    assert first.num_preemptions == 0
    assert last.num_preemptions > 0
    assert (first.num_output, last.num_output) == (12, 12)
    check_pool(steps.pool)


def test_an_urgent_request_waits_for_steps_in_flight_and_not_longer():
    steps = Steps(token_budget=16, max_running=1, steps_ahead=1)
    slow = steps.add("slow", 60, max_tokens=1, priority=1)
    plans = [steps.plan()]
    steps.add("urgent", [40, 41], max_tokens=1)
    plans.append(steps.plan())
    assert [slice_.request.id for plan in plans for slice_ in plan.slices] == ["slow", "slow"]
    steps.land(plans[0])
    assert steps.scheduler.plan() is None
    steps.land(plans[1])
    plan = steps.plan()
    assert plan.preempted == (slow,)
    assert [slice_.request.id for slice_ in plan.slices] == ["urgent"]
    steps.land(plan)
    steps.finish()


def test_a_recalled_step_is_planned_again():
    steps = Steps(token_budget=16, steps_ahead=1)
    request = steps.add("a", 12, max_tokens=2)
    first, second = steps.plan(), steps.plan()
    steps.scheduler.undo_newest_step()
    check_scheduler(steps.scheduler)
    repeated_plan = steps.plan()
    assert repeated_plan.slices == second.slices
    steps.land(first)
    steps.land(repeated_plan)
    assert request.num_output == 1
    steps.finish()


def test_all_pages_can_be_lost():
    steps = Steps(steps_ahead=1, token_budget=16)
    for first, (name, priority) in enumerate({"a": 0, "b": 1, "c": -1}.items()):
        steps.add(name, [10 * first + i for i in range(6)], priority=priority)
    order = [list(steps.step()) for _ in range(2)]
    assert order == [["c", "a"], ["c", "a", "b"]]
    plans = [steps.plan(), steps.plan()]
    assert plans[1].slices
    cancelled = steps.cancel("c")
    steps.scheduler.preempt_all()
    check_scheduler(steps.scheduler)
    stats = steps.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 2)
    assert stats.num_free_pages == steps.pool.num_pages
    assert cancelled.pages == []
    assert [slice_.request.id for slice_ in steps.plan().slices] == ["a", "b"]


def test_steps_are_committed_in_their_order():
    steps = Steps(token_budget=16, steps_ahead=1)
    steps.add("a", 20)
    plans = [steps.plan(), steps.plan()]
    with pytest.raises(AssertionError, match="commit steps in flight first"):
        steps.scheduler.plan()
    with pytest.raises(AssertionError, match="order"):
        steps.scheduler.commit(plans[1], steps.model.run(plans[1]))


def play(steps):
    """Run to the end with the maximum number of steps in flight; return each step's requests."""
    in_flight, names = deque(), []
    while steps.scheduler.has_work or in_flight:
        may_start = len(in_flight) <= steps.scheduler.config.steps_ahead
        plan = steps.scheduler.plan() if may_start else None
        check_scheduler(steps.scheduler)
        if plan is None:
            steps.land(in_flight.popleft())
        else:
            in_flight.append(plan)
            names.append("".join(slice_.request.id for slice_ in plan.slices))
    return names


@pytest.mark.parametrize("steps_ahead", [1, 2])
def test_requests_sample_ahead_of_tokens_that_are_not_known(steps_ahead):
    steps = Steps(steps_ahead=steps_ahead, samples_ahead=True)
    ours = steps.add("a", [1, 2, 3], max_tokens=7)
    steps.add("b", [4, 5], max_tokens=3)
    assert play(steps) == ["ab"] * 3 + ["a"] * 4
    alone = Steps()
    right = alone.add("a", [1, 2, 3], max_tokens=7)
    alone.finish()
    assert ours.output == right.output
    check_pool(steps.pool)


def test_requests_that_wait_for_their_tokens_delay_nobody_and_go_together():
    steps = Steps(steps_ahead=1, samples_ahead=True)
    steps.add("a", [1, 2, 3], max_tokens=8)
    for name in "pq":
        steps.add(name, [4, 5], max_tokens=4, presence_penalty=1.0)
    assert play(steps) == ["apq", "a"] * 4
    steps = Steps(steps_ahead=1, samples_ahead=True)
    steps.add("p", [1, 2], max_tokens=9, presence_penalty=1.0)
    in_flight = deque([steps.plan()])
    steps.add("q", [3, 4], max_tokens=9, presence_penalty=1.0)  # in the step between
    in_flight.append(steps.plan())
    steps.land(in_flight.popleft())
    in_flight.append(steps.plan())
    assert [[p.request.id for p in plan.slices] for plan in in_flight] == [["q"], ["p"]]
    steps.land(in_flight.popleft())
    assert steps.scheduler.plan() is None, "it would be a step for one of them"
    steps.land(in_flight.popleft())
    assert play(steps)[:3] == ["pq"] * 3


@pytest.mark.parametrize("drawn_token", [9, None])
def test_rows_past_an_end_are_dropped(drawn_token):
    """A request ends by a token, or is cancelled while steps are in flight."""
    steps = Steps(steps_ahead=2, samples_ahead=True)
    first = steps.add("r", [1, 2, 3], end_ids=frozenset({9}))
    plans = [steps.plan() for _ in range(3)]
    assert [plan.slices[0].start for plan in plans] == [0, 3, 4]
    if drawn_token is None:
        steps.scheduler.finish(first, FinishReason.STOP)
    assert [request.id for request in steps.land(plans[0], token=9)] == ["r"] * (
        drawn_token is not None
    )
    assert first.finish_reason is FinishReason.STOP
    same_request = steps.add("r", [1, 2, 3], max_tokens=1)
    for plan in plans[1:]:
        assert first.pages, "steps in flight use them"
        assert steps.land(plan) == []
    assert (first.output, first.pages) == ([9] * (drawn_token is not None), [])
    steps.finish()
    assert same_request.num_output == 1


def test_each_step_that_samples_ahead_has_the_whole_budget():
    steps = Steps(token_budget=16, steps_ahead=1, samples_ahead=True)
    steps.add("r", 40)
    assert [steps.plan().num_rows for _ in range(2)] == [16, 16]
