"""Which guesses are worth their time, and whether a proposer's have been."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from twostroke.core.config import MAX_DRAFTS
from twostroke.spec.proposal import Price

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.program import BatchShape
    from twostroke.spec.proposal import Proposal
    from twostroke.spec.step_time import Outlook, StepTime

_LEAST_GAIN = 1.08  # in tokens a second, for guesses to be worth the risk
_MOST_PROBED = 16  # guesses
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


class Chooser(Protocol):
    """Decides how many of the proposed guesses a step takes."""

    def budget(self, batch: BatchShape) -> DraftBudget:
        """Return the budget of a step; it holds for others with as many rows, too."""


class DraftBudget(Protocol):
    """What guesses cost beside a step, and so how many of them to take."""

    def price(self, most_rows: int) -> Price | None:
        """Return what guesses cost if `most_rows` may be added; None if none can pay."""

    def counts(self, most_rows: int, proposals: Sequence[Proposal]) -> list[int]:
        """Return how many of the first guesses of each to take, `most_rows` at most in all."""


@dataclass(frozen=True, slots=True)
class Always:
    """Takes `count` guesses of every proposal, whatever they cost."""

    count: int

    def budget(self, batch: BatchShape) -> DraftBudget:
        """Return the same for each step."""
        del batch
        return self

    def price(self, most_rows: int) -> Price | None:
        """Return that they cost nothing."""
        return Price(0.0, 0.0, min(self.count, most_rows)) if most_rows else None

    def counts(self, most_rows: int, proposals: Sequence[Proposal]) -> list[int]:
        """Return `count` for each, or as many as there are."""
        taken = []
        for proposal in proposals:
            taken.append(min(self.count, len(proposal.tokens), most_rows))
            most_rows -= taken[-1]
        return taken


@dataclass(frozen=True, slots=True)
class WhilePaying:
    """Takes the guesses that bring the most expected tokens a second, over the whole batch.

    Guesses are taken in the order of their worth. Each makes the step longer, as `step_time`
    predicts. If the best number does not bring 8% more tokens a second than none, none is taken.
    Now and then a step goes without, so that it stays known what guesses are compared with.
    """

    step_time: StepTime

    def budget(self, batch: BatchShape) -> DraftBudget:
        """Return the budget by what is known of such steps."""
        return _PayingBudget(batch.num_sampled, self.step_time.outlook(batch), self.step_time)


@dataclass(slots=True)
class _PayingBudget:
    """The budget of `WhilePaying` for a step that brings `num_tokens` without guesses."""

    num_tokens: int
    outlook: Outlook
    step_time: StepTime
    _prices: dict[int, Price | None] = field(default_factory=dict)  # by the most guesses

    def price(self, most_rows: int) -> Price | None:
        """Return what guesses cost, by the cheapest of some numbers of rows."""
        most = min(MAX_DRAFTS, most_rows)
        if most not in self._prices:
            self._prices[most] = self._price(most)
        return self._prices[most]

    def _price(self, most: int) -> Price | None:
        outlook = self.outlook
        plain_s = outlook.seconds(0)
        rate = self.num_tokens / plain_s
        probes = outlook.probes(min(most, _MOST_PROBED))
        row_s = min([(outlook.seconds(n) - plain_s) / n for n in probes], default=plain_s)
        chance = max(0.0, rate * row_s) * _LEAST_GAIN
        return Price(chance, rate, most, outlook.seconds) if chance < 1 else None

    def counts(self, most_rows: int, proposals: Sequence[Proposal]) -> list[int]:
        """Return how many guesses of each proposal pay."""
        guesses = [
            (worth, owner, is_fork)
            for owner, proposal in enumerate(proposals)
            for worth, is_fork in zip(proposal.worths, proposal.forks, strict=True)
        ]
        guesses.sort(key=lambda guess: -guess[0])  # stable: a proposal's own stay in order
        expected, outlook = float(self.num_tokens), self.outlook
        plain = expected / outlook.seconds(0)
        best = _LEAST_GAIN * plain
        num_best = num_forks = 0
        for count, (worth, _, is_fork) in enumerate(guesses[:most_rows], 1):
            expected += worth
            num_forks += is_fork
            rate = expected / outlook.seconds(count, num_forks)
            if rate >= best:
                best, num_best = rate, count
            elif count >= num_best + _FAR:
                break
        taken = [0] * len(proposals)
        stale = _STALE if best < _MUCH * plain else _STALE_IF_MUCH
        if num_best and self.step_time.age(outlook.num_rows) > stale:
            return taken
        for _, owner, _ in guesses[:num_best]:
            taken[owner] += 1
        return taken


@dataclass(slots=True)
class Account:
    """The steps that a proposer's guesses have saved, less those that they cost.

    Rates and predicted times are estimates that may be wrong together; this is what came of them.
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
