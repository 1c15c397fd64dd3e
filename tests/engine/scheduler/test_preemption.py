"""Preemption: which requests run first, which lose their pages, and that no request starves."""

from __future__ import annotations

from support.steps import Steps


def test_urgent_requests_are_admitted_first():
    steps = Steps(max_running=1)
    steps.add("later", priority=1, max_tokens=1)
    steps.add("normal", max_tokens=1)
    steps.add("urgent", priority=-1, max_tokens=1)
    assert [list(steps.step()) for _ in range(3)] == [["urgent"], ["normal"], ["later"]]


def test_equally_urgent_requests_are_served_in_order_of_arrival():
    steps = Steps(max_running=1)
    for name in "abc":
        steps.add(name, max_tokens=1)
    assert [list(steps.step()) for _ in range(3)] == [["a"], ["b"], ["c"]]


def test_urgent_request_preempts_a_less_urgent_one():
    steps = Steps(max_running=2, cache=False)
    first = steps.add("a", 5, max_tokens=9)
    second = steps.add("b", 5, max_tokens=9, priority=1)
    steps.step()
    steps.add("urgent", max_tokens=1)
    plan = steps.plan()
    assert plan.preempted == (second,)
    assert [slice_.request.id for slice_ in plan.slices] == ["a", "urgent"]
    assert (second.pages, second.num_computed, second.num_preemptions) == ([], 0, 1)
    steps.land(plan)
    steps.finish()
    assert (first.num_output, second.num_output) == (9, 9)


def test_urgent_prompt_is_computed_before_one_that_has_begun():
    steps = Steps(token_budget=8)
    steps.add("long", 50, max_tokens=1)
    assert steps.step() == {"long": 8}
    steps.add("urgent", [40, 41, 42, 43, 44], max_tokens=1, priority=-1)
    assert steps.step() == {"urgent": 5, "long": 3}


def test_equally_urgent_request_waits():
    steps = Steps(max_running=1)
    steps.add("a", max_tokens=9)
    steps.step()
    steps.add("b", max_tokens=1)
    assert steps.plan().preempted == ()


def test_no_request_is_preempted_in_vain():
    steps = Steps(num_pages=6, max_running=3, cache=False)
    steps.add("first", 12, max_tokens=4, priority=-1)
    steps.add("less", 4, max_tokens=4, priority=1)
    assert set(steps.step()) == {"first", "less"}
    steps.add("urgent", 12, max_tokens=1)
    plan = steps.plan()
    assert plan.preempted == (), "even the pages of both would not be enough"
    steps.land(plan)
    steps.finish()


def test_last_to_arrive_loses_its_pages_when_they_run_out():
    steps = Steps(num_pages=4, cache=False)
    first = steps.add("a", 4, max_tokens=12)
    last = steps.add("b", 4, max_tokens=12)
    steps.finish()
    assert first.num_preemptions == 0
    assert last.num_preemptions > 0
    assert (first.num_output, last.num_output) == (12, 12)


def test_least_urgent_loses_its_pages_even_if_it_came_first():
    steps = Steps(num_pages=4, cache=False)
    first = steps.add("a", 4, max_tokens=12, priority=1)
    last = steps.add("b", 4, max_tokens=12)
    steps.finish()
    assert first.num_preemptions > 0
    assert last.num_preemptions == 0


def test_preempted_request_finds_its_pages_again():
    steps = Steps(num_pages=16, max_running=1)
    slow = steps.add("slow", 17, max_tokens=9, priority=1)
    steps.step()
    steps.add("quick", [40, 41], max_tokens=1)
    assert steps.step() == {"quick": 2}
    assert steps.step() == {"slow": 2}, "its 16 tokens in full pages were still there"
    assert slow.num_cached == 0, "only what the first admission found counts"
    assert steps.scheduler.stats().num_hit_tokens == 0


def test_best_ranked_request_computes_in_every_step_however_scarce_the_pages():
    steps = Steps(num_pages=5, token_budget=8)
    first = steps.add("a", 6, max_tokens=14)
    for name in "bcdef":
        steps.add(name, 6, max_tokens=14)
    before = 0
    while not first.is_finished:
        steps.step()
        assert first.num_preemptions == 0
        assert first.is_finished or first.num_computed > before
        before = first.num_computed
    steps.finish()


def test_request_is_not_admitted_into_pages_that_others_are_about_to_need():
    steps = Steps(num_pages=8, token_budget=8, cache=False)
    steps.add("a", 24, max_tokens=4)
    steps.add("b", 12, max_tokens=4)
    assert steps.step() == {"a": 8}
    assert steps.step() == {"a": 8}
    assert steps.step() == {"a": 8}, "a holds 6 pages; b's 3 would not fit beside them"
    assert steps.scheduler.stats().num_preemptions == 0


def test_a_stream_of_urgent_requests_cannot_starve_the_others():
    steps = Steps(max_running=1, max_overtakes=5)
    patient = steps.add("patient", max_tokens=3, priority=2)
    for i in range(100):
        steps.add(f"urgent{i}", max_tokens=1)
        steps.step()
        if patient.is_finished:
            break
    assert patient.is_finished
    assert 10 <= i <= 16, "two levels of priority let ten later arrivals pass"


def test_slice_of_a_preempted_request_goes_back_into_the_budget():
    steps = Steps(num_pages=4, token_budget=8, cache=False)
    first = steps.add("a", 4, max_tokens=12, priority=0)
    steps.add("b", 4, max_tokens=12, priority=1)
    while first.num_preemptions == 0 and not first.is_finished:
        plan = steps.plan()
        assert plan.num_rows <= 8
        assert not {slice_.request for slice_ in plan.slices} & set(plan.preempted)
        steps.land(plan)
    steps.finish()


def test_a_lower_limit_lets_an_urgent_request_preempt_only_one():
    steps = Steps(num_pages=64, max_running=8)
    for name in "abcdefgh":
        steps.add(name, 3, max_tokens=9)
    steps.step()
    steps.scheduler.change_limits(64, 2)
    steps.add("urgent", 3, max_tokens=9, priority=-1)
    plan = steps.plan()
    assert [request.id for request in plan.preempted] == ["h"]
    assert "urgent" in [slice_.request.id for slice_ in plan.slices]
    steps.land(plan)
    steps.finish()


def test_after_a_lower_limit_an_urgent_request_preempts_more_only_for_pages():
    steps = Steps(num_pages=16, max_running=8, cache=False)
    for name in "abcdefgh":
        steps.add(name, 3, max_tokens=4)
    steps.step()
    steps.scheduler.change_limits(64, 2)
    steps.add("urgent", 30, max_tokens=9, priority=-1)
    plan = steps.plan()
    assert 1 < len(plan.preempted) < 7
    steps.land(plan)
    steps.finish()
