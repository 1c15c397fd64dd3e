"""Decides how many drafts are worth their time, and measures whether a proposer saves time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen
from twostroke.core.options import MAX_DRAFTS
from twostroke.engine.speculation.proposal import DraftCost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.engine.speculation.proposal import Proposal
    from twostroke.engine.speculation.step_time import StepTimeModel
    from twostroke.model.program import BatchShape

_MIN_GAIN = 1.08  # ratio of tokens per second from which drafts are worth the risk
_MAX_PROBED_DRAFTS = 16
_MAX_ROWS_TOGETHER = 8  # that any kernel computes together
_MAX_SEARCH_AHEAD = 8  # drafts beyond the best number so far, after which the search ends
# Steps with drafts after which a step without drafts is measured: more if the gain is large.
_MAX_STEPS_UNMEASURED = 24
_LARGE_GAIN = 1.5
_MAX_STEPS_UNMEASURED_AT_LARGE_GAIN = 96
_START_STEPS = 1.0  # saved steps with which a proposer starts
_MAX_SAVED_STEPS = 2.0  # small, so that a change of text is noticed soon
_MIN_SAVED_STEPS = -1.0
_MAX_LOST_STEPS = 0.5  # in one round: the prefill of a draft model pays off over many rounds
_MIN_COUNTED_STEPS = 0.005  # shorter times of a proposer are not counted
_FIRST_REST_ROUNDS = 64
_MAX_REST_ROUNDS = 1024


def budget_function(
    step_time: StepTimeModel, count: int | None
) -> Callable[[BatchShape], FixedDraftBudget | PayingDraftBudget]:
    """Return a function that makes the draft budget for steps of a given shape.

    The budget is `count` drafts for each request or, if `count` is None, the drafts that pay.
    """
    return (
        partial(PayingDraftBudget, step_time)
        if count is None
        else lambda _: FixedDraftBudget(count)
    )


class FixedDraftBudget(Frozen):
    """A budget of `count` drafts for each proposal, whatever time they take."""

    count: int

    def cost(self, max_rows: int) -> DraftCost | None:
        """Return a cost of zero for up to `max_rows` drafts of a step; None if no rows are left."""
        return DraftCost(0.0, 0.0, min(self.count, max_rows)) if max_rows else None

    def counts(self, max_rows: int, proposals: Sequence[Proposal]) -> list[int]:
        """Return how many drafts to compute of each proposal, at most `max_rows` in all."""
        counts: list[int] = []
        for proposal in proposals:
            count = min(self.count, len(proposal.tokens), max_rows)
            counts.append(count)
            max_rows -= count
        return counts


class PayingDraftBudget:
    """A budget of the drafts that bring the most expected tokens per second, over the batch.

    The most valuable drafts are added first, and `step_time` predicts how much longer each makes
    the step. No drafts are used unless the best number of drafts brings 8% more tokens per second.
    Now and then a step has no drafts, so that the time of such steps stays known.

    A budget is valid for some steps that are similar to `batch`.
    """

    def __init__(self, step_time: StepTimeModel, batch: BatchShape) -> None:
        """Compute the budget of draft tokens for steps like `batch`."""
        self._step_time = step_time
        self._num_rows = batch.num_rows
        self._num_tokens = batch.num_sampled
        self._seconds = step_time.with_drafts(batch)
        self._cached_cost = cache(self._compute_cost)

    def cost(self, max_rows: int) -> DraftCost | None:
        """Return the cost of up to `max_rows` draft tokens in a step; None if none can pay.

        A proposer gets this cost, and makes only drafts that are likely enough for it.
        """
        return self._cached_cost(min(MAX_DRAFTS, max_rows))

    def _compute_cost(self, max_drafts: int) -> DraftCost | None:
        """Return the cost of a draft in steps with the cheapest number of drafts.

        The cheapest number has the lowest predicted cost per draft. None if no draft can pay.
        """
        seconds = self._seconds
        plain_s = seconds(0, 0)
        probes = cheap_numbers(self._num_rows, min(max_drafts, _MAX_PROBED_DRAFTS))
        row_s = min([(seconds(n, 0) - plain_s) / n for n in probes], default=plain_s)
        tokens_per_s = self._num_tokens / plain_s
        row_chance = max(0.0, tokens_per_s * row_s) * _MIN_GAIN
        if row_chance >= 1:
            return None
        return DraftCost(row_chance, tokens_per_s, max_drafts, lambda n: seconds(n, 0))

    def counts(self, max_rows: int, proposals: Sequence[Proposal]) -> list[int]:
        """Return how many drafts of each proposal pay, at most `max_rows` in all."""
        drafts = [
            (value, owner, is_fork)
            for owner, proposal in enumerate(proposals)
            for value, is_fork in zip(proposal.values, proposal.forks, strict=True)
        ]
        drafts.sort(key=lambda draft: -draft[0])  # stable: drafts of a proposal stay in order
        num_expected = float(self._num_tokens)
        plain_rate = num_expected / self._seconds(0, 0)
        best_rate = _MIN_GAIN * plain_rate
        num_best = num_forks = 0
        for count, (value, _, is_fork) in enumerate(drafts[:max_rows], 1):
            num_expected += value
            num_forks += is_fork
            rate = num_expected / self._seconds(count, num_forks)
            if rate >= best_rate:
                best_rate, num_best = rate, count
            elif count >= num_best + _MAX_SEARCH_AHEAD:
                break
        counts = [0] * len(proposals)
        max_age = _MAX_STEPS_UNMEASURED
        if best_rate >= _LARGE_GAIN * plain_rate:
            max_age = _MAX_STEPS_UNMEASURED_AT_LARGE_GAIN
        if num_best and self._step_time.age(self._num_rows) > max_age:
            return counts
        for _, owner, _ in drafts[:num_best]:
            counts[owner] += 1
        return counts


def cheap_numbers(num_rows: int, max_drafts: int) -> set[int]:
    """Return candidates for the number of drafts in a step that has the lowest cost per draft.

    Kernels are fastest with powers of two. So the candidates are the powers of two up to
    `max_drafts`, and the numbers that bring the step's `num_rows` other rows up to a power of two.
    """
    numbers = {1 << exponent for exponent in range(max_drafts.bit_length())}
    numbers |= {(1 << exponent) - num_rows for exponent in range(_MAX_ROWS_TOGETHER.bit_length())}
    return {number for number in numbers if 0 < number <= max_drafts}


@dataclass(slots=True)
class ProposerGain:
    """Measures how much time a proposer's drafts save or lose, and pauses the proposer at a loss.

    The learned acceptance rates and step times may be wrong, so this class measures the time that
    drafts really save. A proposer that has lost time is not asked for some rounds. If it loses time
    again at once, the next pause is twice as long.

    Attributes:
        saved: the time saved so far (negative if lost), measured in steps without drafts.
    """

    saved: float = _START_STEPS
    _rest: int = 0
    _next_rest: int = _FIRST_REST_ROUNDS

    def may_ask(self) -> bool:
        """Return whether to ask the proposer for drafts in this round, or to let it pause.

        Call this once in each round, since it counts the rounds of a pause.
        """
        if self._rest:
            self._rest -= 1
        return not self._rest

    def add(self, won: float, spent: float) -> None:
        """Add the time that a round of drafts won and spent; the unit is a step without drafts.

        `won` is the number of accepted drafts per token that the step brings without drafts.
        `spent` is the time of drafting and of the drafts' rows. The proposer pauses if the sum of
        `won` minus `spent` gets too low.
        """
        change = won - (spent if spent > _MIN_COUNTED_STEPS else 0.0)
        self.saved += max(-_MAX_LOST_STEPS, change)
        if self.saved >= _MAX_SAVED_STEPS:
            self.saved = _MAX_SAVED_STEPS
            self._next_rest = _FIRST_REST_ROUNDS
        elif self.saved < _MIN_SAVED_STEPS:
            self.saved, self._rest = 0.0, self._next_rest
            self._next_rest = min(2 * self._next_rest, _MAX_REST_ROUNDS)
