"""What proposers are asked for, what they offer, and what becomes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec.structs import force_setattr

from twostroke.core.draft_tree import ROOT, right_drafts
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.core.request import Request
    from twostroke.core.step import Slice, StepPlan, StepResult

_AHEAD = (1, 2, 3, 4)  # further guesses, of which the cheapest number counts


class Proposal(Frozen):
    """Guesses of a request's next tokens; at least one.

    Each follows the one before it, or in a tree the one whose index is in `parents` (`ROOT`: the
    request's newest token). `odds[i]` is the chance that `tokens[i]` is right if those before it
    are. `source` names where they come from; `kinds[i]` is the kind by which the proposer learns
    their acceptance rate.

    `worths[i]` is how many tokens a row for `tokens[i]` brings: the chance that it and all before
    it are right, unless the proposer says otherwise. It never grows along `tokens`, and each token
    of a tree comes after its parent (`best_first`), so any beginning of a proposal is a proposal.
    """

    source: str
    tokens: tuple[int, ...]
    odds: tuple[float, ...]
    kinds: tuple[int, ...]
    parents: tuple[int, ...] = ()
    worths: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Work out the worths."""
        if not self.worths:
            chances: list[float] = []
            for odd, parent in zip(self.odds, self.before, strict=True):
                chances.append(odd if parent == ROOT else odd * chances[parent])
            force_setattr(self, "worths", tuple(chances))

    @property
    def before(self) -> Sequence[int]:
        """The index of the guess that each one follows, or `ROOT`."""
        return self.parents or range(-1, len(self.tokens) - 1)

    @property
    def forks(self) -> Sequence[bool]:
        """Whether each token follows the same one as an earlier token does."""
        if not self.parents:
            return (False,) * len(self.tokens)
        return [parent in self.parents[:i] for i, parent in enumerate(self.parents)]

    def first(self, count: int) -> Proposal:
        """Return the first `count` guesses alone."""
        return self if count >= len(self.tokens) else self._pick(range(count))

    def best_first(self) -> Proposal:
        """Return the same tree with the tokens that are worth most first."""
        return self._pick(sorted(range(len(self.tokens)), key=lambda i: -self.worths[i]))

    def _pick(self, order: Sequence[int]) -> Proposal:
        places = {old: new for new, old in enumerate(order)} | {ROOT: ROOT}
        return Proposal(
            self.source,
            tuple([self.tokens[i] for i in order]),
            tuple([self.odds[i] for i in order]),
            tuple([self.kinds[i] for i in order]),
            tuple([places[self.parents[i]] for i in order]) if self.parents else (),
            tuple([self.worths[i] for i in order]),
        )


class DraftOutcome(Frozen):
    """What became of a proposal.

    `tried` are the indices of the tokens that were computed, in the order of their rows; `right`
    are those of them that were right, each following the one before. `drawn[0]` was drawn after
    the request's newest token, `drawn[1 + i]` after `tried[i]`.
    """

    tried: Sequence[int]
    right: Sequence[int]
    drawn: Sequence[int]

    def trials(self, proposal: Proposal) -> list[tuple[int, bool]]:
        """Return the tokens that follow right ones only, and whether they were right.

        Those after a wrong one tell nothing: they were guessed for another text.
        """
        before, right = proposal.before, {ROOT, *self.right}
        return [(i, i in right) for i in self.tried if before[i] in right]


class DraftCost(Frozen):
    """What guesses cost in the step that is being planned.

    Attributes:
        row_chance: the chance of being right from which on a guess pays for its row.
        rate: tokens a second without guesses; 0 where time does not count.
        most: guesses of one request.
        seconds: the time of the step with a number of guesses, if it is known.
    """

    row_chance: float
    rate: float
    most: int
    seconds: Callable[[int], float] | None = None

    def least_chance(self, seconds: float) -> float:
        """Return the chance from which on a guess pays that takes `seconds` to make."""
        return self.row_chance + self.rate * seconds

    def least_next(
        self, num_guesses: int, num_tokens: float, spent_s: float, next_s: float
    ) -> float:
        """Return the chance from which on one more guess pays that takes `next_s` to make.

        The `num_guesses` that there are took `spent_s` to make, and the step is expected to bring
        `num_tokens` with them. Another guess competes with this rate: if it brings fewer tokens
        for its time, the step gets slower. A kernel computes some rows at once, so the next
        rows cost what the cheapest number of them does.
        """
        if self.seconds is None:
            return self.least_chance(next_s)
        step_s = self.seconds(num_guesses)
        rate = max(self.rate, num_tokens / (step_s + spent_s))
        row_s = min((self.seconds(num_guesses + more) - step_s) / more for more in _AHEAD)
        return rate * (max(0.0, row_s) + next_s)


class Watcher(Protocol):
    """Sees what every step drew, whether or not anything was guessed."""

    def see(self, plan: StepPlan, result: StepResult) -> None:
        """Take in what a step drew; the requests have their new tokens by now."""

    def finish(self, request: Request) -> None:
        """Take note that a request has ended."""


class Proposer(Protocol):
    """Guesses what follows."""

    name: str

    def propose(self, requests: Sequence[Request], price: DraftCost) -> list[Proposal | None]:
        """Return guesses for each request, which has one token to compute, or None."""

    def learn(self, request: Request, proposal: Proposal, outcome: DraftOutcome) -> None:
        """Take in what became of a proposal."""

    def finish(self, request: Request) -> None:
        """Drop what is kept for a request that has ended, or keep what it teaches."""

    def close(self) -> None:
        """Release memory and threads."""


def drawn_rows(plan: StepPlan, result: StepResult) -> Iterator[tuple[Slice, list[int]]]:
    """Yield each slice that drew, and the drawn rows that its request keeps, in their order.

    A request that ended may have kept fewer.
    """
    first = 0
    for part in plan.slices:
        if not part.samples:
            continue
        rows = [first]
        if part.drafts:
            drawn = result.tokens[first : first + part.num_drawn]
            rows += [first + 1 + i for i in right_drafts(part.drafts, part.branches, drawn)]
        yield part, rows
        first += part.num_drawn
