"""The scheduler: slices of the token budget, ends of requests, refusals, cancellation."""

from __future__ import annotations

import pytest

from support.invariants import check_scheduler
from support.requests import make_request
from support.steps import Steps
from twostroke.core.errors import ContextLengthError, OverloadedError, RequestError, UsageError
from twostroke.core.request import BATCH_SERVICE_TIER, SERVICE_TIERS, FinishReason
from twostroke.engine.scheduler import SchedulerConfig

LINE = SERVICE_TIERS[BATCH_SERVICE_TIER]


def test_idle_scheduler_has_nothing_to_plan():
    steps = Steps()
    assert steps.scheduler.plan() is None
    assert not steps.scheduler.has_work


def test_prompt_is_computed_at_once_if_the_budget_allows():
    steps = Steps()
    request = steps.add("a", 10, max_tokens=3)
    assert steps.step() == {"a": 10}
    assert request.num_output == 1
    assert steps.step() == {"a": 1}


def test_prompt_is_chunked_to_the_budget_and_only_its_end_samples():
    steps = Steps(token_budget=8)
    request = steps.add("a", 18)
    assert [(p.start, p.count, p.samples) for p in steps.plan().slices] == [(0, 8, False)]
    steps = Steps(token_budget=8)
    request = steps.add("a", 18)
    assert [steps.step(), request.num_output] == [{"a": 8}, 0]
    assert [steps.step(), request.num_output] == [{"a": 8}, 0]
    assert [steps.step(), request.num_output] == [{"a": 2}, 1]


def test_requests_with_one_pending_token_go_first_and_prompts_share_what_is_left():
    steps = Steps(token_budget=8, cache=False)
    steps.add("a", 3, max_tokens=9)
    assert steps.step() == {"a": 3}
    steps.add("b", 10, max_tokens=9)
    steps.add("c", 10, max_tokens=9)
    assert steps.step() == {"a": 1, "b": 7}
    assert steps.step() == {"a": 1, "b": 3, "c": 4}
    assert steps.step() == {"a": 1, "b": 1, "c": 6}
    assert steps.step() == {"a": 1, "b": 1, "c": 0 + 1}


def test_batch_requests_pause_while_other_requests_prefill():
    steps = Steps(token_budget=16, cache=False)
    steps.add("line", 3, priority=LINE, max_tokens=9)
    steps.add("more", 20, priority=LINE, max_tokens=9)
    assert steps.step() == {"line": 3, "more": 13}
    steps.add("user", 20, max_tokens=3)
    assert steps.step() == {"line": 1, "user": 15}, "the first of all that run goes on"
    assert steps.step() == {"user": 5}
    assert steps.step() == {"user": 1, "line": 1, "more": 1}
    assert steps.step() == {"user": 1, "line": 1, "more": 1}
    assert steps.step() == {"line": 1, "more": 5}
    steps.finish()


def test_few_batch_requests_decode_while_other_requests_run():
    steps = Steps(token_budget=16, cache=False)
    for name in "abc":
        steps.add(name, 3, priority=LINE, max_tokens=4)
    assert steps.step() == {"a": 3, "b": 3, "c": 3}
    steps.add("user", 3, max_tokens=9)
    steps.add("d", 3, priority=LINE, max_tokens=4)
    assert steps.step() == {"a": 1, "user": 3}
    for _ in range(2):
        assert steps.step() == {"user": 1, "a": 1, "b": 1}
    assert steps.step() == {"user": 1, "b": 1, "c": 1}
    for _ in range(2):
        assert steps.step() == {"user": 1, "c": 1, "d": 1}
    assert steps.step() == {"user": 1, "d": 1}
    steps.finish()


def test_batch_requests_continue_if_no_other_prompt_can_be_prefilled():
    steps = Steps(num_pages=12, token_budget=40, cache=False)
    steps.add("user", 24, max_tokens=8)
    assert steps.step() == {"user": 24}
    steps.add("line", 5, priority=LINE, max_tokens=9)
    assert steps.step() == {"user": 1, "line": 5}
    steps.add("next", 36, max_tokens=2)
    assert steps.step() == {"user": 1, "line": 1}, "pages for the next one are missing"
    steps.finish()


def test_a_batch_request_that_was_overtaken_often_does_not_pause():
    steps = Steps(token_budget=8, cache=False, max_overtakes=2)
    line = steps.add("line", 3, priority=LINE, max_tokens=20)
    steps.step()
    for number in range(12):
        steps.add(f"user{number}", 12, max_tokens=1)
    while line.num_output < 4:
        assert sum(steps.step().values()) <= 8
    assert len(steps.scheduler.view().running) > 1 or len(steps.scheduler._waiting)
    steps.finish()


def test_no_more_requests_run_than_allowed():
    steps = Steps(max_running=2, cache=False)
    for name in "abc":
        steps.add(name, max_tokens=2)
    assert set(steps.step()) == {"a", "b"}
    assert set(steps.step()) == {"a", "b"}
    assert set(steps.step()) == {"c"}


def test_end_token_ends_and_is_kept():
    steps = Steps()
    request = steps.add("a", end_ids=frozenset({7}), max_tokens=9)
    steps.step(token=3)
    assert not request.is_finished
    steps.step(token=7)
    assert request.finish_reason is FinishReason.STOP
    assert request.output == [3, 7]
    assert request.pages == []
    assert not steps.scheduler.has_work


def test_end_token_does_not_end_before_min_tokens():
    steps = Steps()
    request = steps.add("a", end_ids=frozenset({7}), max_tokens=9, min_tokens=2)
    steps.step(token=7)
    steps.step(token=7)
    assert not request.is_finished
    steps.step(token=7)
    assert request.finish_reason is FinishReason.STOP


def test_max_tokens_ends():
    steps = Steps()
    request = steps.add("a", max_tokens=3)
    steps.finish()
    assert request.num_output == 3
    assert request.finish_reason is FinishReason.LENGTH


def test_context_ends_a_request_without_max_tokens():
    steps = Steps(context_length=20)
    request = steps.add("a", 5, max_tokens=None)
    steps.finish()
    assert len(request.tokens) == 20
    assert request.finish_reason is FinishReason.LENGTH


def test_pool_smaller_than_the_context_ends_a_request_without_max_tokens():
    steps = Steps(num_pages=3)
    request = steps.add("a", 5, max_tokens=None)
    steps.finish()
    assert len(request.tokens) == 12


def test_request_that_fills_context_and_pool_to_the_last_token_is_served():
    steps = Steps(num_pages=4, context_length=16)
    request = steps.add("a", 15, max_tokens=1)
    steps.finish()
    assert request.num_output == 1


@pytest.mark.parametrize("num_prompt", [64, 65, 1000])
def test_prompt_longer_than_the_context_is_refused(num_prompt):
    steps = Steps()
    wording = (
        r"This model's maximum context length is 64 tokens\. "
        rf"However, your prompt resulted in {num_prompt} tokens"
    )
    with pytest.raises(ContextLengthError, match=wording) as caught:
        steps.add("a", num_prompt, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert not steps.scheduler.has_work


def test_answer_longer_than_the_context_is_refused():
    wording = r"you requested 65 tokens \(60 in the prompt, 5 in the completion\)"
    with pytest.raises(ContextLengthError, match=wording) as caught:
        Steps().add("a", 60, max_tokens=5)
    assert caught.value.field == "max_tokens"


@pytest.mark.parametrize(("num_pages", "num_output"), [(16, 14), (15, 10)])
def test_limit_above_context_or_pool_can_be_cut(num_pages, num_output):
    steps = Steps(num_pages=num_pages)
    request = steps.add("a", 50, max_tokens=2**31 - 1, cuts_limit=True)
    steps.finish()
    assert request.num_output == num_output
    assert request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(8, 5), (12, None), (13, 1)])
def test_request_larger_than_the_pool_is_refused(num_prompt, max_tokens):
    with pytest.raises(ContextLengthError, match="there is memory for 12"):
        Steps(num_pages=3).add("a", num_prompt, max_tokens=max_tokens)


def test_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="empty"):
        Steps().add("a", [])


def test_duplicate_id_is_refused_until_the_first_has_ended():
    steps = Steps()
    first = steps.add("a")
    with pytest.raises(RequestError, match="'a'"):
        steps.add("a")
    steps.cancel("a")
    second = steps.add("a")
    assert not steps.scheduler.finish(first, FinishReason.ERROR)
    assert steps.cancel("a") is second


def test_full_queue_refuses_a_request():
    steps = Steps(max_waiting_requests=2)
    steps.add("a")
    steps.add("b")
    with pytest.raises(OverloadedError, match="at most 2 may") as caught:
        steps.add("c")
    assert caught.value.http_status == 429
    steps.step()
    steps.add("c")


def test_full_queue_refuses_tokens_but_never_the_first_request():
    steps = Steps(max_waiting_tokens=10)
    steps.add("a", 20)
    with pytest.raises(OverloadedError, match="at most 10 may"):
        steps.add("b", 1)
    steps.step()
    steps.add("b", 4)
    steps.add("c", 6)
    with pytest.raises(OverloadedError):
        steps.add("d", 1)


def test_arrival_is_stamped_unless_the_caller_did():
    steps = Steps()
    steps.scheduler._clock = lambda: 42.0
    early = make_request("a")
    late_request = make_request("b")
    late_request.arrival_s = 0.0
    steps.scheduler.add(early)
    steps.scheduler.add(late_request)
    assert (early.arrival_s, late_request.arrival_s) == (1.0, 42.0)


def test_cancel_while_queued_in_prefill_and_in_decode():
    steps = Steps(token_budget=8, max_running=1)
    decoding = steps.add("a", 3, max_tokens=9)
    steps.step()
    steps.add("b", 30)
    assert steps.cancel("b").finish_reason is FinishReason.CANCEL
    assert steps.cancel("a") is decoding
    assert decoding.pages == []
    steps.add("c", 30)
    steps.step()
    steps.cancel("c")
    assert not steps.scheduler.has_work
    check_scheduler(steps.scheduler)
    assert steps.pool.num_referenced == 0


def test_cancelling_an_unknown_or_finished_request_does_nothing():
    steps = Steps()
    steps.add("a", max_tokens=1)
    steps.finish()
    assert steps.cancel("a") is None
    assert steps.cancel("b") is None


def test_request_cancelled_in_flight_keeps_its_pages_until_the_commit():
    steps = Steps()
    cancelled = steps.add("a", 9)
    stays = steps.add("b", [40, 41, 42])
    plan = steps.plan()
    pages = list(cancelled.pages[0])
    steps.cancel("a")
    assert cancelled.pages == [pages]
    assert steps.pool.num_references(pages[0]) == 1
    steps.add("a", 4)
    assert steps.land(plan) == [stays], "no delta for the one who is gone"
    assert cancelled.output == []
    assert cancelled.pages == []
    steps.finish()


def test_finish_gives_the_engines_reason():
    steps = Steps()
    request = steps.add("a")
    steps.step()
    assert steps.scheduler.finish(request, FinishReason.STOP)
    assert request.finish_reason is FinishReason.STOP
    assert not steps.scheduler.has_work


def test_planning_twice_is_caught():
    steps = Steps()
    steps.add("a")
    steps.plan()
    with pytest.raises(AssertionError, match="in flight"):
        steps.scheduler.plan()


def test_stats_tell_states_and_counts():
    steps = Steps(max_running=1)
    steps.add("a", 9, max_tokens=1)
    steps.add("b", 9, max_tokens=5)
    stats = steps.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (0, 2, 18)
    steps.step()
    steps.step()
    stats = steps.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (1, 0, 0)
    assert (stats.num_prompt_tokens, stats.num_hit_tokens) == (18, 8)
    assert (stats.num_referenced_pages, stats.num_free_pages) == (3, 61)
    steps.finish()
    assert steps.scheduler.stats().num_cached_pages == 3


def test_budget_must_serve_all_who_run():
    with pytest.raises(UsageError, match="at least max_running"):
        SchedulerConfig(64, max_running=8, token_budget=7)
