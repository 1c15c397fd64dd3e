"""Which guesses are worth their time, and whether a proposer's have been."""

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

_LEAST_GAIN = 1.08  # in tokens a second, for guesses to be worth the risk
_MOST_PROBED = 16  # guesses
_MOST_TOGETHER = 8  # rows: no kernel takes more at once
_FAR = 8  # guesses beyond the best number so far, after which the search ends
_STALE = 24  # steps after which one without guesses is measured again,
_MUCH = 1.5  # or later, where guesses bring this many times the tokens a second
_STALE_IF_MUCH = 96
_START = 1.0  # an account is in steps without guesses
_MOST_SAVED = 2.0  # a change of text must not take long to notice
_LEAST_SAVED = -1.0
_MOST_LOST = 0.5  # in one round: a prompt that is read once pays over many
_UNSEEN = 0.005  # of a step: less time than this is not counted
_FIRST_REST = 64  # rounds
_LAST_REST = 1024


def budgets(
    step_time: StepTimeModel, count: int | None
) -> Callable[[BatchShape], Always | WhilePaying]:
    """Return a function from a step to its budget: `count` guesses a request, or those that pay."""
    return partial(WhilePaying, step_time) if count is None else lambda _: Always(count)


class Always(Frozen):
    """Takes `count` guesses of every proposal, whatever they cost."""

    count: int

    def price(self, most_rows: int) -> DraftCost | None:
        """Return that guesses cost nothing, `most_rows` in all; None if there is no room."""
        return DraftCost(0.0, 0.0, min(self.count, most_rows)) if most_rows else None

    def counts(self, most_rows: int, proposals: Sequence[Proposal]) -> list[int]:
        """Return how many of the first guesses of each to take, `most_rows` at most in all."""
        taken = []
        for proposal in proposals:
            taken.append(min(self.count, len(proposal.tokens), most_rows))
            most_rows -= taken[-1]
        return taken


class WhilePaying:
    """Takes the guesses that bring the most expected tokens a second, over the whole batch.

    Guesses are taken in the order of their worth. Each makes the step longer, as `step_time`
    predicts. If the best number does not bring 8% more tokens a second than none, none is taken.
    Now and then a step goes without, so that it stays known what guesses are compared with.

    A budget holds for some steps that are like `batch`.
    """

    def __init__(self, step_time: StepTimeModel, batch: BatchShape) -> None:
        self._step_time = step_time
        self._num_rows, self._num_tokens = batch.num_rows, batch.num_sampled
        self._seconds = step_time.outlook(batch)
        self._price = cache(self._find_price)

    def price(self, most_rows: int) -> DraftCost | None:
        """Return what guesses cost if `most_rows` may be added; None if none can pay."""
        return self._price(min(MAX_DRAFTS, most_rows))

    def _find_price(self, most: int) -> DraftCost | None:
        """Return what guesses cost, by the cheapest of some numbers of them."""
        seconds = self._seconds
        plain_s = seconds(0, 0)
        probes = cheap_numbers(self._num_rows, min(most, _MOST_PROBED))
        row_s = min([(seconds(n, 0) - plain_s) / n for n in probes], default=plain_s)
        rate = self._num_tokens / plain_s
        chance = max(0.0, rate * row_s) * _LEAST_GAIN
        return DraftCost(chance, rate, most, lambda n: seconds(n, 0)) if chance < 1 else None

    def counts(self, most_rows: int, proposals: Sequence[Proposal]) -> list[int]:
        """Return how many of the first guesses of each pay, `most_rows` at most in all."""
        guesses = [
            (worth, owner, is_fork)
            for owner, proposal in enumerate(proposals)
            for worth, is_fork in zip(proposal.worths, proposal.forks, strict=True)
        ]
        guesses.sort(key=lambda guess: -guess[0])  # stable: a proposal's own stay in order
        expected = float(self._num_tokens)
        plain = expected / self._seconds(0, 0)
        best = _LEAST_GAIN * plain
        num_best = num_forks = 0
        for count, (worth, _, is_fork) in enumerate(guesses[:most_rows], 1):
            expected += worth
            num_forks += is_fork
            rate = expected / self._seconds(count, num_forks)
            if rate >= best:
                best, num_best = rate, count
            elif count >= num_best + _FAR:
                break
        taken = [0] * len(proposals)
        stale = _STALE if best < _MUCH * plain else _STALE_IF_MUCH
        if num_best and self._step_time.age(self._num_rows) > stale:
            return taken
        for _, owner, _ in guesses[:num_best]:
            taken[owner] += 1
        return taken


def cheap_numbers(num_rows: int, most: int) -> set[int]:
    """Return numbers of guesses up to `most`, one of which costs (nearly) least a guess.

    These are the powers of two, and those that make the `num_rows` others one: kernels like these
    best.
    """
    numbers = {1 << exponent for exponent in range(most.bit_length())}
    numbers |= {(1 << exponent) - num_rows for exponent in range(_MOST_TOGETHER.bit_length())}
    return {number for number in numbers if 0 < number <= most}


@dataclass(slots=True)
class ProposerGain:
    """The steps that a proposer's guesses have saved, less those that they cost.

    Rates and predicted times are estimates that may be wrong together; this measures the result.
    A proposer with an overdrawn account rests, and each time for twice as long if it loses again
    at once.
    """

    saved: float = _START
    _rest: int = 0
    _next_rest: int = _FIRST_REST

    def may_ask(self) -> bool:
        """Return whether to ask the proposer in this round."""
        if self._rest:
            self._rest -= 1
        return not self._rest

    def add(self, won: float, spent: float) -> None:
        """Take in what a round's guesses brought and cost, in steps without any."""
        change = won - (spent if spent > _UNSEEN else 0.0)
        self.saved += max(-_MOST_LOST, change)
        if self.saved >= _MOST_SAVED:
            self.saved, self._next_rest = _MOST_SAVED, _FIRST_REST
        elif self.saved < _LEAST_SAVED:
            self.saved, self._rest = 0.0, self._next_rest
            self._next_rest = min(2 * self._next_rest, _LAST_REST)
