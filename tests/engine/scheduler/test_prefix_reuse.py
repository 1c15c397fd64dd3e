"""The prefix cache in the scheduler: hits, and waiting for pages that another request computes."""

from __future__ import annotations

from support.invariants import check_index, check_pool, check_scheduler
from support.requests import make_request
from support.steps import Steps
from twostroke.engine.kv_cache import PagePool, PrefixIndex
from twostroke.engine.kv_cache.prefix import PrefixChain
from twostroke.engine.scheduler import Continuous, Scheduler, SchedulerConfig


def test_cached_prefix_is_not_computed_again():
    steps = Steps()
    steps.add("a", 10, max_tokens=1)
    steps.finish()
    request = steps.add("b", 10, max_tokens=1)
    assert steps.step() == {"b": 2}
    assert request.num_cached == 8


def test_next_turn_finds_prompt_and_answer_of_the_last():
    steps = Steps()
    first = steps.add("a", 7, max_tokens=6)
    steps.finish()
    second = steps.add("b", [*first.tokens, 30, 31], max_tokens=1)
    steps.finish()
    assert second.num_cached == 12


def test_wholly_cached_prompt_still_computes_a_token():
    steps = Steps()
    steps.add("a", 8, max_tokens=4)
    steps.finish()
    request = steps.add("b", 8, max_tokens=1)
    assert steps.step() == {"b": 4}
    assert request.num_cached == 4


def test_tenants_do_not_share():
    steps = Steps()
    steps.add("a", 10, max_tokens=1, salt=b"one")
    steps.finish()
    request = steps.add("b", 10, max_tokens=1, salt=b"two")
    steps.finish()
    assert request.num_cached == 0


def test_without_a_cache_everything_is_computed():
    steps = Steps(cache=False)
    for name in "ab":
        request = steps.add(name, 10, max_tokens=1)
        assert steps.step() == {name: 10}
        assert request.num_cached == 0
    assert steps.pool.num_free == steps.pool.num_pages


def test_same_prompts_together_are_computed_once():
    steps = Steps(token_budget=8)
    requests = [steps.add(f"r{i}", 21, max_tokens=1, seed=i) for i in range(4)]
    assert steps.step() == {"r0": 8}
    assert steps.step() == {"r0": 8}
    assert steps.step() == {"r0": 5}
    assert steps.step() == {"r1": 1, "r2": 1, "r3": 1}
    assert [request.num_cached for request in requests] == [0, 20, 20, 20]


def test_other_requests_pass_one_that_waits_for_a_prefix():
    steps = Steps(token_budget=10)
    steps.add("a", 20, max_tokens=1)
    steps.add("same", 20, max_tokens=1)
    steps.add("other", [40, 41, 42], max_tokens=1)
    assert steps.step() == {"a": 10}
    assert steps.step() == {"a": 10}
    assert steps.step() == {"same": 4, "other": 3}


def test_wait_for_a_prefix_ends_when_its_owner_is_cancelled():
    steps = Steps(token_budget=8)
    steps.add("a", 20, max_tokens=1)
    steps.add("b", 20, max_tokens=1)
    assert steps.step() == {"a": 8}
    steps.cancel("a")
    assert steps.step() == {"b": 8}
    steps.finish()


def test_more_urgent_request_does_not_wait_for_a_prefix():
    steps = Steps(token_budget=8)
    steps.add("a", 20, max_tokens=1)
    assert steps.step() == {"a": 8}
    urgent = steps.add("urgent", 20, max_tokens=1, priority=-1)
    steps.finish()
    assert urgent.num_cached == 8


def test_page_computed_twice_is_indexed_once():
    steps = Steps(token_budget=8)
    steps.add("a", 20, max_tokens=3)
    steps.step()
    steps.add("urgent", 20, max_tokens=3, priority=-1)
    steps.finish()
    check_index(steps.index)
    assert steps.pool.num_cached == len(steps.index)


def test_shared_page_is_never_written():
    steps = Steps()
    steps.add("a", 9, max_tokens=12)
    steps.step()
    requests = [steps.add(f"r{i}", 9, max_tokens=12, seed=i) for i in range(3)]
    steps.step()
    assert len({tuple(request.pages[0][:2]) for request in requests}) == 1
    assert len({request.pages[0][2] for request in requests}) == 3
    steps.finish()


def test_pages_from_another_engine_are_found():
    steps = Steps(num_pages=8)
    steps.add("a", 10, max_tokens=1)
    steps.finish()
    request = make_request("b", 23)  # two pages are known, three come from elsewhere
    assert steps.scheduler.prefix_cache.receive(request, PrefixChain(4, request.salt))
    check_pool(steps.pool)
    check_index(steps.index)
    steps.scheduler.add(request)
    steps.plan()
    assert request.num_cached == 20

    large = make_request("c", list(range(40, 60)))
    assert not steps.scheduler.prefix_cache.receive(large, PrefixChain(4, large.salt)), (
        "b holds the pages"
    )
    check_scheduler(steps.scheduler)
    unindexed = Steps(cache=False).scheduler
    assert not unindexed.prefix_cache.receive(request, PrefixChain(4, request.salt))


def test_received_pages_serve_every_cache_group():
    pool = PagePool(32, 4, (None, 8))
    scheduler = Scheduler(SchedulerConfig(64, 8, 64), pool, PrefixIndex(pool), Continuous())
    request = make_request("b", 23)
    assert scheduler.prefix_cache.receive(request, PrefixChain(4, request.salt))
    scheduler.add(request)
    assert scheduler.plan() is not None
    assert request.num_cached == 20
    check_scheduler(scheduler)
