"""The number of drafts in a step is chosen by the predicted times of steps."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from twostroke.core.hardware import Hardware
from twostroke.engine.speculation import (
    DraftCost,
    DraftOutcome,
    FixedDraftBudget,
    PayingDraftBudget,
    Proposal,
    StepTimeModel,
)
from twostroke.engine.speculation.payoff import cheap_numbers
from twostroke.model.program import BatchShape
from twostroke.model.program.work import Cost, StepCost, each_row, once

if TYPE_CHECKING:
    from collections.abc import Sequence

HARDWARE = Hardware("test", 1, 1 << 30, bandwidth=1e9, peak=1e9, peak_kind="any", source="test")


def step_time_of(fixed_s: float, row_s: float) -> StepTimeModel:
    """Return a model of steps that take `fixed_s`, and `row_s` more for each row."""
    cost = StepCost(((once, Cost(0, round(fixed_s * 1e9))), (each_row, Cost(round(row_s * 1e9)))))
    return StepTimeModel(cost, HARDWARE, rows_together=8)


def decode(num_streams: int) -> BatchShape:
    return BatchShape.decode((100,) * num_streams)


def chain(odds: Sequence[float]) -> Proposal:
    return Proposal("test", tuple(range(len(odds))), tuple(odds), (0,) * len(odds))


def best_by_search(
    step_time: StepTimeModel, batch: BatchShape, odds: list[tuple[float, ...]]
) -> float:
    """Return the most tokens per second that any numbers of drafts can give."""

    def rates(request_index: int, expected: float, rows: int):
        if request_index == len(odds):
            larger_batch = batch.with_request(100, rows)
            yield expected / step_time.seconds(larger_batch if rows else batch)
            return
        chance = 1.0
        gained = 0.0
        yield from rates(request_index + 1, expected, rows)
        for count, odd in enumerate(odds[request_index], 1):
            chance *= odd
            gained += chance
            yield from rates(request_index + 1, expected + gained, rows + count)

    return max(rates(0, float(batch.num_sampled), 0))


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_brings_more_tokens_a_second(seed):
    rng = random.Random(seed)
    step_time = step_time_of(0.01, rng.choice((0.0001, 0.001, 0.004)))
    batch = decode(3)
    odds = [tuple(rng.uniform(0.2, 1) for _ in range(rng.randint(0, 4))) for _ in range(3)]
    counts = PayingDraftBudget(step_time, batch).counts(100, [chain(each) for each in odds])
    gained = 0.0
    for count, each in zip(counts, odds, strict=True):
        chance = 1.0
        for odd in each[:count]:
            chance *= odd
            gained += chance
    larger_batch = batch.with_request(100, sum(counts))
    rate = (3 + gained) / step_time.seconds(larger_batch if sum(counts) else batch)
    best = best_by_search(step_time, batch, odds)
    plain = 3 / step_time.seconds(batch)
    assert rate == pytest.approx(best if best >= 1.08 * plain else plain)


def test_probable_drafts_are_taken_where_rows_are_cheap():
    assert PayingDraftBudget(step_time_of(0.01, 0.0001), decode(1)).counts(
        100, [chain((0.95,) * 8)]
    ) == [8]


def test_improbable_drafts_are_left_where_rows_cost():
    assert PayingDraftBudget(step_time_of(0.01, 0.005), decode(1)).counts(
        100, [chain((0.3,) * 8)]
    ) == [0]


def test_the_likelier_proposal_gets_the_rows():
    offers = [chain((0.9,) * 8), chain((0.4,) * 8)]
    counts = PayingDraftBudget(step_time_of(0.01, 0.002), decode(2)).counts(100, offers)
    assert counts[0] > counts[1]


def test_a_busy_batch_takes_no_drafts_and_has_no_cost():
    step_time = step_time_of(0.01, 0.002)
    assert PayingDraftBudget(step_time, decode(1)).cost(100) is not None
    busy = PayingDraftBudget(step_time, decode(64))
    assert busy.counts(100, [chain((0.9,) * 8)] * 64) == [0] * 64
    assert PayingDraftBudget(step_time, decode(256)).cost(100) is None


def test_no_more_drafts_are_taken_than_the_budget_allows():
    offers = [chain((0.99,) * 8)] * 3
    assert sum(PayingDraftBudget(step_time_of(0.01, 0.0), decode(3)).counts(5, offers)) == 5
    assert FixedDraftBudget(4).counts(6, offers) == [4, 2, 0]
    assert FixedDraftBudget(4).cost(0) is None
    assert PayingDraftBudget(step_time_of(0.01, 0.0), decode(3)).cost(0) is None


def test_a_draft_that_takes_longer_to_make_must_be_likelier():
    price = PayingDraftBudget(step_time_of(0.01, 0.002), decode(1)).cost(100)
    assert price is not None
    assert price.min_chance(0.0) == pytest.approx(0.002 / 0.012, rel=0.1)
    assert price.min_chance(0.006) == pytest.approx(0.008 / 0.012, rel=0.1)


def test_step_time_learns_what_steps_of_a_size_take():
    step_time = step_time_of(0.01, 0.001)
    for _ in range(40):
        step_time.learn(decode(1), 2 * 0.011)
        step_time.learn(decode(4), 5 * 0.014)
    assert step_time.seconds(decode(1)) == pytest.approx(0.022, rel=0.03)
    assert step_time.seconds(decode(4)) == pytest.approx(0.070, rel=0.03)
    # What was never seen lies between its neighbours.
    assert 0.025 < step_time.seconds(decode(2)) < 0.06


def test_prompts_and_single_rows_tell_what_some_rows_take():
    """Memory traffic takes twice, arithmetic four times as long as at the machine's limits."""
    step_time = step_time_of(0.01, 0.001)
    for _ in range(30):
        step_time.learn(BatchShape.prefill(300), 2 * 0.01 + 4 * 0.3)
        for _ in range(20):
            step_time.learn(decode(1), 2 * 0.01 + 4 * 0.001)
    for count in (4, 8, 16, 30):
        expected = 2 * 0.01 + 4 * 0.001 * count
        assert step_time.seconds(decode(count)) == pytest.approx(expected, rel=0.15)


def test_one_slow_step_changes_little():
    step_time = step_time_of(0.01, 0.001)
    for _ in range(20):
        step_time.learn(decode(1), 0.011)
        step_time.learn(decode(4), 0.014)
    before = step_time.seconds(decode(4)) / step_time.seconds(decode(1))
    step_time.learn(decode(4), 11.0)
    assert step_time.seconds(decode(4)) / step_time.seconds(decode(1)) < 1.1 * before
    for _ in range(20):
        step_time.learn(decode(1), 0.011)
    assert step_time.seconds(decode(1)) == pytest.approx(0.011, rel=0.1)


def test_a_slow_period_does_not_change_how_sizes_compare():
    step_time = step_time_of(0.01, 0.001)
    for _ in range(100):
        step_time.learn(decode(1), 0.011)
    for step in range(30):  # others have half of the processor, and this size is met then alone
        size, seconds = (4, 0.014) if step % 3 == 0 else (1, 0.011)
        step_time.learn(decode(size), 2 * seconds)
    for _ in range(100):
        step_time.learn(decode(1), 0.011)
    assert step_time.seconds(decode(4)) / step_time.seconds(decode(1)) == pytest.approx(
        14 / 11, rel=0.1
    )


def test_an_old_measurement_fades():
    step_time = step_time_of(0.01, 0.001)
    step_time.learn(decode(1), 0.011)
    step_time.learn(decode(2), 0.5)
    before = step_time.seconds(decode(2))
    for _ in range(3000):
        step_time.learn(decode(1), 0.011)
    assert step_time.seconds(decode(2)) < 0.2 * before


def test_step_time_learns_without_the_machines_limits():
    step_time = StepTimeModel(step_time_of(0.01, 0.001).cost, None)
    for _ in range(40):
        step_time.learn(decode(1), 0.5)
    assert step_time.seconds(decode(1)) == pytest.approx(0.5, rel=0.01)


def test_of_a_tree_the_best_products_are_taken():
    odds = (0.5, 0.4, 0.9, 0.9, 0.2, 0.8)
    parents = (-1, -1, 0, 1, 0, 3)
    tree = Proposal("test", (1, 2, 3, 4, 5, 6), odds, (0,) * 6, parents).best_first()
    assert tree.values == pytest.approx((0.5, 0.45, 0.4, 0.36, 0.288, 0.1))
    assert tree.tokens == (1, 3, 2, 4, 6, 5)
    assert tree.parents == (-1, 0, -1, 2, 3, 0)
    assert tree.forks == [False, False, True, False, False, True]
    for row_s, expected_count in ((0.0001, 6), (0.0021, 3), (0.0056, 3), (0.02, 0)):
        [count] = PayingDraftBudget(step_time_of(0.01, row_s), decode(1)).counts(100, [tree])
        assert count == expected_count


def test_outcomes_of_a_tree_count_only_drafts_after_right_ones():
    tree = Proposal("test", (1, 2, 3, 4, 5), (0.5,) * 5, (0,) * 5, (-1, -1, 0, 1, 2))
    outcome = DraftOutcome((0, 2, 1, 3), (1,), (2, 9, 9, 7, 9))
    assert list(outcome.trials(tree)) == [(0, False), (1, True), (3, False)]
    line = Proposal("test", (1, 2, 3), (0.5,) * 3, (0,) * 3)
    assert list(DraftOutcome(range(3), range(1), ()).trials(line)) == [(0, True), (1, False)]
    assert list(DraftOutcome(range(2), range(2), ()).trials(line)) == [(0, True), (1, True)]


@pytest.mark.parametrize("together", [1, 2, 4, 8])
def test_the_cheapest_number_of_drafts_is_probed(together: int):
    cost = step_time_of(0.001, 0.001).cost
    for num_rows in range(1, 12):
        step_time = StepTimeModel(cost, HARDWARE, together)
        seconds = step_time.with_drafts(decode(num_rows))
        each_s = {n: (seconds(n, 0) - seconds(0, 0)) / n for n in range(1, 9)}
        probed = cheap_numbers(num_rows, 8)
        assert probed <= set(each_s)
        assert min(each_s[n] for n in probed) == pytest.approx(min(each_s.values()))


def test_one_more_draft_must_pay_for_the_rows_that_it_adds() -> None:
    """Two rows take as long as one; each further row takes a third of that."""

    def seconds(num_drafts: int) -> float:
        return 0.03 + 0.01 * max(0, num_drafts - 1)

    price = DraftCost(0.0, 1 / 0.03, 24, seconds)
    first, second = (price.min_next_chance(n, 0.0, 0.0, 0.012) for n in (0, 1))
    assert first == pytest.approx(0.012 / 0.03), "its row costs nothing"
    assert second == pytest.approx((0.01 + 0.012) / 0.03)
    faster = price.min_next_chance(1, 2.0, 0.0, 0.012)
    assert faster == pytest.approx(2 * second), "it competes with the other drafts"
    slower = price.min_next_chance(1, 2.0, 0.01, 0.012)
    assert slower == pytest.approx(1.5 * second), "these took time to make"
    unknown = DraftCost(0.25, 10.0, 24)
    assert unknown.min_next_chance(3, 50.0, 0.0, 0.01) == unknown.min_chance(0.01)
