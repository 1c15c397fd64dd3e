"""How many guesses a step takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from twostroke.core.config import MAX_DRAFTS
from twostroke.spec.proposal import Price

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.program import BatchShape
    from twostroke.spec.pace import Outlook, Pace
    from twostroke.spec.proposal import Proposal

_LEAST_GAIN = 1.08  # in tokens a second, for guesses to be worth the risk
_MOST_PROBED = 16  # guesses
_STALE = 24  # steps after which the time of those without guesses is measured anew,
_MUCH = 1.5  # or more where guesses bring so many times the tokens a second
_STALE_IF_MUCH = 96
_FAR = 8  # guesses beyond the best number so far, after which no better one is looked for


class Chooser(Protocol):
    """Decides how many of the proposed guesses a step takes."""

    def terms(self, batch: BatchShape) -> Terms:
        """Return what guesses cost beside a step; it holds for others of as many rows, too."""


class Terms(Protocol):
    """What guesses cost, and so how many of them to take."""

    def price(self, budget: int) -> Price | None:
        """Return what guesses cost, if `budget` rows may be added; None if none can pay."""

    def counts(self, budget: int, proposals: Sequence[Proposal]) -> list[int]:
        """Return how many of the first guesses of each to take, `budget` at most in all."""


@dataclass(frozen=True, slots=True)
class Always:
    """Takes `count` guesses of every proposal, whatever they cost: to measure what they bring."""

    count: int

    def terms(self, batch: BatchShape) -> Terms:
        """Return the same for each step."""
        del batch
        return self

    def price(self, budget: int) -> Price | None:
        """Return that they cost nothing."""
        return Price(0.0, 0.0, min(self.count, budget)) if budget else None

    def counts(self, budget: int, proposals: Sequence[Proposal]) -> list[int]:
        """Return `count` for each, or as many as there are."""
        taken = []
        for proposal in proposals:
            taken.append(min(self.count, len(proposal.tokens), budget))
            budget -= taken[-1]
        return taken


@dataclass(frozen=True, slots=True)
class WhilePaying:
    """Takes the guesses that bring the most tokens a second, over the whole batch.

    They are taken in the order of their worth, the chance that they and all before them are right.
    Each makes the step longer, as `pace` predicts, and one that leaves the path of others a little
    more, since it reads all keys and values anew. The best number has the most expected tokens a
    second. If that is not 8% more than without any, none is taken: a batch that keeps the
    arithmetic busy by itself leaves nothing to be gained.

    Now and then a step goes without, so that it is known what guesses are compared with.
    """

    pace: Pace

    def terms(self, batch: BatchShape) -> Terms:
        """Return what guesses cost by what is known of such steps."""
        return _PayingTerms(batch.num_sampled, self.pace.outlook(batch), self.pace)


@dataclass(slots=True)
class _PayingTerms:
    """Those of `WhilePaying` beside a step that brings `num_tokens` without guesses."""

    num_tokens: int
    outlook: Outlook
    pace: Pace
    _prices: dict[int, Price | None] = field(default_factory=dict)  # by the most rows

    def price(self, budget: int) -> Price | None:
        """Return what guesses cost, as the cheapest of some numbers of rows has it."""
        most = min(MAX_DRAFTS, budget)
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

    def counts(self, budget: int, proposals: Sequence[Proposal]) -> list[int]:
        """Return how many guesses of each proposal pay."""
        guesses = [
            (worth, who, is_fork)
            for who, proposal in enumerate(proposals)
            for worth, is_fork in zip(proposal.worths, proposal.forks, strict=True)
        ]
        guesses.sort(key=lambda guess: -guess[0])  # stable: a proposal's own stay in order
        expected, outlook = float(self.num_tokens), self.outlook
        plain = expected / outlook.seconds(0)
        best = _LEAST_GAIN * plain
        num_best = num_forks = 0
        for count, (worth, _, is_fork) in enumerate(guesses[:budget], 1):
            expected += worth
            num_forks += is_fork
            rate = expected / outlook.seconds(count, num_forks)
            if rate >= best:
                best, num_best = rate, count
            elif count >= num_best + _FAR:
                break
        taken = [0] * len(proposals)
        stale = _STALE if best < _MUCH * plain else _STALE_IF_MUCH
        if num_best and self.pace.age(outlook.num_rows) > stale:
            return taken
        for _, who, _ in guesses[:num_best]:
            taken[who] += 1
        return taken
