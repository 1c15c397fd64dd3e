"""What a proposer offers: tokens that may follow, and how sure it is of each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Protocol

from twostroke.core.tree import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan, StepResult

_AHEAD = (1, 2, 3, 4)  # guesses more


@dataclass(frozen=True, slots=True)
class Proposal:
    """Guesses of a request's next tokens; at least one.

    Each follows the one before it, or in a tree the one whose index is in `parents` (`ROOT`: the
    request's newest token). `odds[i]` is the chance that `tokens[i]` is right if those before it
    are. `source` tells where they come from, and `kinds[i]` what the odds of each were read from:
    the proposer hears of their fate by these.

    `worths[i]` is how many tokens a row for `tokens[i]` brings: the chance that it and all before
    it are right, unless the proposer says otherwise. It never grows along `tokens`, which in a tree
    stand in that order, each behind its parent (`best_first`): any beginning of a proposal is one.
    """

    source: str
    tokens: tuple[int, ...]
    odds: tuple[float, ...]
    kinds: tuple[int, ...]
    parents: tuple[int, ...] = ()
    worths: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Work out what rows are worth."""
        if not self.worths:
            if self.parents:
                worths = tuple(_chances(self.odds, self.parents))
            else:
                worths = tuple(accumulate(self.odds, mul))
            object.__setattr__(self, "worths", worths)

    @property
    def forks(self) -> Sequence[bool]:
        """Which of the tokens follow something that an earlier one follows, too."""
        if not self.parents:
            return (False,) * len(self.tokens)
        return [parent in self.parents[:i] for i, parent in enumerate(self.parents)]

    def first(self, count: int) -> Proposal:
        """Return the first `count` guesses alone."""
        if count >= len(self.tokens):
            return self
        return Proposal(
            self.source,
            self.tokens[:count],
            self.odds[:count],
            self.kinds[:count],
            self.parents[:count],
            self.worths[:count],
        )

    def best_first(self) -> Proposal:
        """Return the same tree with the tokens that are worth most at the beginning."""
        order = sorted(range(len(self.tokens)), key=lambda i: -self.worths[i])
        places = {old: new for new, old in enumerate(order)} | {ROOT: ROOT}
        return Proposal(
            self.source,
            tuple([self.tokens[i] for i in order]),
            tuple([self.odds[i] for i in order]),
            tuple([self.kinds[i] for i in order]),
            tuple([places[self.parents[i]] for i in order]),
            tuple([self.worths[i] for i in order]),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a proposal.

    `tried` are the indices of the tokens that were computed, in the order of their rows, and
    `right` those of them that were right, each following the one before. `drawn[0]` is the token
    behind the request's newest one, `drawn[1 + i]` the one behind `tried[i]`, which is what follows
    if that one is right.
    """

    tried: Sequence[int]
    right: Sequence[int]
    drawn: Sequence[int]

    def trials(self, proposal: Proposal) -> Iterator[tuple[int, bool]]:
        """Yield the tokens that had a chance, as all before them were right, and whether they were.

        Those behind a wrong one say nothing: they were guessed for another text.
        """
        if proposal.parents:
            right = {ROOT, *self.right}
            had_chance = (i for i in self.tried if proposal.parents[i] in right)
            yield from ((i, i in right) for i in had_chance)
            return
        yield from ((i, True) for i in self.right)
        if len(self.right) < len(self.tried):
            yield len(self.right), False


@dataclass(frozen=True, slots=True)
class Price:
    """What guesses cost in the step that is being planned.

    `row_chance` is the chance of being right from which on a guess is worth its row, and `rate` how
    many tokens a second there are without guesses. Of one request at most `most` are taken.
    `seconds` is how long the step takes with so many guesses, where that is known.
    """

    row_chance: float
    rate: float
    most: int
    seconds: Callable[[int], float] | None = None

    def least_chance(self, seconds: float) -> float:
        """Return the chance from which on a guess pays that takes `seconds` to be made."""
        return self.row_chance + self.rate * seconds

    def rate_with(self, num_guesses: int, num_tokens: float, seconds: float) -> float:
        """Return how many tokens a second come of a step that is expected to bring `num_tokens`.

        It took `seconds` to make its guesses. Without any, where it is not known what they cost.
        """
        if self.seconds is None:
            return self.rate
        return num_tokens / (self.seconds(num_guesses) + seconds)

    def least_next(self, num_guesses: int, rate: float, seconds: float) -> float:
        """Return the chance from which on one more guess pays that takes `seconds` to be made.

        There are `num_guesses` already, of all requests, with which `rate` tokens a second are
        expected: what brings fewer for its time makes the step slower. Rows are cheap up to the end
        of a kernel and dear behind it, so the way on is as dear as the cheapest of some numbers.
        """
        if self.seconds is None:
            return self.least_chance(seconds)
        step_s = self.seconds(num_guesses)
        row_s = min((self.seconds(num_guesses + more) - step_s) / more for more in _AHEAD)
        return max(self.rate, rate) * (max(0.0, row_s) + seconds)


class Watcher(Protocol):
    """Sees what every step drew, whether or not anything was guessed."""

    def see(self, plan: StepPlan, result: StepResult) -> None:
        """Hear what a step drew; the requests have taken over their tokens by now."""

    def finish(self, request: Request) -> None:
        """Hear that a request has ended."""


class Proposer(Protocol):
    """Guesses what follows."""

    name: str

    def propose(self, requests: Sequence[Request], price: Price) -> list[Proposal | None]:
        """Return guesses for each request, which has one token to compute, or None."""

    def learn(self, request: Request, proposal: Proposal, outcome: Outcome) -> None:
        """Hear what became of a proposal."""

    def finish(self, request: Request) -> None:
        """Hear that a request has ended: drop what is kept for it, or keep what it teaches."""

    def close(self) -> None:
        """Give back memory and threads."""


def _chances(odds: Sequence[float], parents: Sequence[int]) -> list[float]:
    """Return the chance of each token of a tree that it and all before it are right."""
    chances: list[float] = []
    for odd, parent in zip(odds, parents, strict=True):
        chances.append(odd if parent == ROOT else odd * chances[parent])
    return chances
