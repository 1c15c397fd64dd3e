"""Log-probabilities of prompts: few rows in a step, and each row reported once."""

from __future__ import annotations

import pytest

from support.fake_model import expected_scores
from support.invariants import check_pool, check_scheduler
from support.steps import Steps
from twostroke.core.request import FinishReason, Request


def scores_of(steps: Steps, *requests: Request) -> list[list[object]]:
    """Run steps until all requests have ended; return the scores of each."""
    results: dict[Request, list[object]] = {request: [] for request in requests}
    while steps.scheduler.has_work:
        plan = steps.plan()
        for delta in steps.scheduler.commit(plan, steps.model.run(plan)):
            results.setdefault(delta.request, []).extend(delta.scores)
        check_scheduler(steps.scheduler)
    return [results[request] for request in requests]


def test_a_long_prompt_is_cut_so_that_few_rows_have_logits() -> None:
    steps = Steps(max_scored_rows=6)
    request = steps.add("r", 15, prompt_logprobs=0)
    cuts = []
    for _ in range(3):
        plan = steps.plan()
        cuts.append([(slice_.count, slice_.num_scored, slice_.samples) for slice_ in plan.slices])
        steps.land(plan)
    assert cuts == [[(6, 6, False)], [(6, 6, False)], [(3, 2, True)]]
    assert request.num_output == 1


def test_requests_share_the_rows_and_others_pass_them() -> None:
    steps = Steps(max_scored_rows=6)
    steps.add("long", 12, prompt_logprobs=0)
    steps.add("next", 4, prompt_logprobs=0)
    assert steps.step() == {"long": 6}
    steps.add("plain", [*range(30, 39)])
    assert steps.step() == {"long": 6, "next": 1, "plain": 9}
    assert steps.step() == {"long": 1, "next": 3, "plain": 1}


def test_a_preempted_prompt_goes_on_reporting_where_it_was() -> None:
    steps = Steps(num_pages=8, max_scored_rows=5)
    victim = steps.add("victim", 20, priority=1, prompt_logprobs=0, max_tokens=0)
    right = expected_scores(victim)
    plan = steps.plan()
    (delta,) = steps.scheduler.commit(plan, steps.model.run(plan))
    steps.add("urgent", 30, priority=-1, max_tokens=1)
    (rest,) = scores_of(steps, victim)
    assert victim.num_preemptions == 1
    assert [*delta.scores, *rest] == right
    check_pool(steps.pool)


def test_rows_computed_again_are_not_scored_again() -> None:
    steps = Steps(num_pages=8, max_scored_rows=5, cache=False)
    victim = steps.add("victim", 20, priority=1, prompt_logprobs=0)
    steps.step()
    steps.add("urgent", 30, priority=-1, max_tokens=1)
    steps.step()
    plan = steps.plan()
    assert [(slice_.count, slice_.num_scored) for slice_ in plan.slices] == [(10, 5)]
    assert plan.slices[0].request is victim
    steps.land(plan)
    steps.finish()


def test_cached_pages_are_not_used_by_requests_that_report_on_rows() -> None:
    steps = Steps()
    (first,) = scores_of(steps, steps.add("first", 12, prompt_logprobs=0))
    repeated_request = steps.add("again", 12, prompt_logprobs=0)
    assert scores_of(steps, repeated_request) == [first]
    assert repeated_request.num_cached == 0
    plain = steps.add("plain", 12)
    steps.finish()
    assert plain.num_cached == 8


@pytest.mark.parametrize("length", [1, 2, 9])
def test_a_request_for_nothing_but_scores_ends_without_a_token(length: int) -> None:
    steps = Steps()
    request = steps.add("r", length, prompt_logprobs=0, max_tokens=0)
    right = expected_scores(request)
    assert scores_of(steps, request) == [right]
    assert (request.output, request.finish_reason) == ([], FinishReason.LENGTH)
    assert len(right) == length - 1


def test_a_cancelled_request_reports_nothing_more() -> None:
    steps = Steps(max_scored_rows=3)
    cancelled = steps.add("gone", 9, prompt_logprobs=0)
    stays = steps.add("stays", 9)
    plan = steps.plan()
    steps.cancel("gone")
    assert steps.land(plan) == [stays]
    assert cancelled.num_scored == 0
    steps.finish()
