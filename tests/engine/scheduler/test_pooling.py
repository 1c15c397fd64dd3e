"""Texts to embed: each row reports hidden states once and in order, and no token is sampled."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from support.fake_model import expected_states
from support.invariants import check_pool, check_scheduler
from support.requests import make_request
from support.scheduler_machine import SchedulerMachine
from support.steps import Steps
from twostroke.core.errors import ContextLengthError
from twostroke.core.request import FinishReason, Pooling

if TYPE_CHECKING:
    from twostroke.core.request import Request

MEAN, LAST = Pooling.MEAN, Pooling.LAST
SETTINGS = settings(
    max_examples=20,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def states_of(steps: Steps, *requests: Request) -> list[list[float]]:
    """Run steps until all requests have ended; return the hidden states that each reported."""
    results: dict[Request, list[float]] = {request: [] for request in requests}
    while steps.scheduler.has_work:
        plan = steps.plan()
        for delta in steps.scheduler.commit(plan, steps.model.run(plan)):
            assert not delta.tokens or delta.request.pooling is None
            if delta.states is not None:
                results[delta.request] += delta.states[:, 0].tolist()
        check_scheduler(steps.scheduler)
    return [results[request] for request in requests]


@pytest.mark.parametrize("length", [1, 2, 9, 63, 64])
@pytest.mark.parametrize("pooling", Pooling)
def test_a_text_ends_without_a_token(pooling: Pooling, length: int) -> None:
    steps = Steps()
    request = steps.add("r", [i % 50 for i in range(length)], pooling=pooling)
    right = expected_states(request)
    assert states_of(steps, request) == [right[-1:] if pooling is LAST else right]
    assert (request.output, request.finish_reason) == ([], FinishReason.LENGTH)
    check_pool(steps.pool)


def test_a_long_text_is_computed_in_chunks_with_other_requests() -> None:
    steps = Steps(token_budget=10)
    mean = steps.add("mean", 15, pooling=MEAN)
    last = steps.add("last", [*range(20, 33)], pooling=LAST)
    plain = steps.add("plain", 3)
    right = expected_states(mean), expected_states(last)[-1:]
    cuts = []
    while not plain.is_finished:
        plan = steps.plan()
        cuts.append({p.request.id: (p.count, p.num_pooled, p.samples) for p in plan.slices})
        deltas = steps.scheduler.commit(plan, steps.model.run(plan))
        assert [delta.request for delta in deltas if delta.tokens] in ([], [plain])
    assert cuts[:3] == [
        {"mean": (10, 10, False)},
        {"mean": (5, 5, False), "last": (5, 0, False)},
        {"last": (8, 1, False), "plain": (2, 0, False)},
    ]
    repeated_requests = [
        steps.add(f"{r.id} again", r.prompt, pooling=r.pooling) for r in (mean, last)
    ]
    assert tuple(states_of(steps, *repeated_requests)) == right


def test_all_rows_of_a_mean_are_computed_and_a_last_one_takes_known_pages() -> None:
    steps = Steps()
    for pooling, num_cached in ((LAST, 0), (LAST, 8), (MEAN, 0), (LAST, 8)):
        request = steps.add("r", 12, pooling=pooling)
        right = expected_states(request)
        assert states_of(steps, request) == [right[-1:] if pooling is LAST else right]
        assert request.num_cached == num_cached
    plain = steps.add("plain", 12)
    steps.finish()
    assert plain.num_cached == 8


@pytest.mark.parametrize("pooling", Pooling)
def test_a_preempted_text_is_computed_again_from_the_start(pooling: Pooling) -> None:
    steps = Steps(num_pages=8, token_budget=8)
    victim = steps.add("victim", 20, priority=1, pooling=pooling)
    right = expected_states(victim)
    plan = steps.plan()
    steps.land(plan)
    steps.add("urgent", 30, priority=-1, max_tokens=1)
    (state,) = states_of(steps, victim)
    assert victim.num_preemptions == 1
    assert state == (right[-1:] if pooling is LAST else right)
    check_pool(steps.pool)


def test_a_cancelled_request_reports_nothing_more() -> None:
    steps = Steps(token_budget=8)
    cancelled = steps.add("gone", 6, pooling=MEAN)
    stays = steps.add("stays", 9, pooling=LAST)
    plan = steps.plan()
    steps.cancel("gone")
    assert steps.land(plan) == []
    assert cancelled.finish_reason is FinishReason.CANCEL
    steps.finish()
    assert stays.finish_reason is FinishReason.LENGTH


def test_a_text_may_fill_the_context_and_not_exceed_it() -> None:
    steps = Steps()
    steps.scheduler.max_len(make_request("r", 64, pooling=MEAN))
    with pytest.raises(ContextLengthError, match="resulted in 65 tokens"):
        steps.scheduler.max_len(make_request("r", 65, pooling=MEAN))
    with pytest.raises(ContextLengthError):
        steps.scheduler.max_len(make_request("r", 64))


def test_random_operations_do_not_change_the_rows() -> None:
    class Machine(SchedulerMachine):
        pools: ClassVar[bool] = True
        counts: ClassVar[Counter[str]] = Counter()

    run_state_machine_as_test(Machine, settings=SETTINGS)
    assert Machine.counts["vectors"] > 10
