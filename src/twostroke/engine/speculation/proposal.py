"""The interface of proposers: what drafts may cost, the proposed drafts, and their outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec.structs import force_setattr

from twostroke.core.draft_tree import ROOT, accepted_drafts
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.core.request import Request
    from twostroke.core.step import Slice, StepPlan, StepResult

_PROBED_DRAFTS = (1, 2, 3, 4)  # numbers of further drafts; the lowest cost per draft counts


class Proposal(Frozen):
    """Draft tokens that a proposer offers for a request's next tokens: at least one.

    They are a chain or a tree. The first drafts of a proposal, any number, are a proposal as well.

    Attributes:
        source: where the drafts come from, for metrics.
        tokens: the drafts. In a tree each comes after its parent.
        chances: the probability that each draft is right if the drafts before it are.
        kinds: the kind of each draft, by which its acceptance rate is learned.
        parents: index of the draft that each draft follows, or `ROOT` for the request's newest
            token; empty for a chain.
        values: the expected number of tokens that a row for each draft brings, in falling
            order. By default the probability that the draft and all drafts before it are right.
    """

    source: str
    tokens: tuple[int, ...]
    chances: tuple[float, ...]
    kinds: tuple[int, ...]
    parents: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Compute each draft's value from the probabilities if `values` was not given."""
        if not self.values:
            values: list[float] = []
            for chance, parent in zip(self.chances, self.parent_indices, strict=True):
                values.append(chance if parent == ROOT else chance * values[parent])
            force_setattr(self, "values", tuple(values))

    @property
    def parent_indices(self) -> Sequence[int]:
        """The index of the draft before each draft, or `ROOT` for the request's newest token.

        Also for a chain, whose `parents` are empty.
        """
        return self.parents or range(-1, len(self.tokens) - 1)

    @property
    def forks(self) -> Sequence[bool]:
        """Whether each draft begins another branch: an earlier draft has the same parent."""
        if not self.parents:
            return (False,) * len(self.tokens)
        return [parent in self.parents[:index] for index, parent in enumerate(self.parents)]

    def first(self, count: int) -> Proposal:
        """Return a proposal of the first `count` drafts."""
        return self if count >= len(self.tokens) else self._pick(range(count))

    def best_first(self) -> Proposal:
        """Return the same tree of drafts, the most valuable drafts first."""
        return self._pick(sorted(range(len(self.tokens)), key=lambda index: -self.values[index]))

    def _pick(self, order: Sequence[int]) -> Proposal:
        """Return a proposal of the draft tokens with these indices, in this order."""
        new_index = {old: new for new, old in enumerate(order)} | {ROOT: ROOT}
        parents: tuple[int, ...] = ()
        if self.parents:
            parents = tuple([new_index[self.parents[index]] for index in order])
        return Proposal(
            source=self.source,
            tokens=tuple([self.tokens[index] for index in order]),
            chances=tuple([self.chances[index] for index in order]),
            kinds=tuple([self.kinds[index] for index in order]),
            parents=parents,
            values=tuple([self.values[index] for index in order]),
        )


class DraftOutcome(Frozen):
    """Which drafts of a proposal a step computed, and which of them were right.

    Attributes:
        tried: indices of the drafts that were computed, in the order of their rows.
        accepted: indices of the drafts that were right, each following the one before.
        sampled: the token sampled after the request's newest token, then after each tried
            draft.
    """

    tried: Sequence[int]
    accepted: Sequence[int]
    sampled: Sequence[int]

    def trials(self, proposal: Proposal) -> list[tuple[int, bool]]:
        """Return the computed drafts whose parents were right, and whether each draft was right.

        Drafts after a wrong draft say nothing about acceptance rates, since they follow another
        text.
        """
        parents, accepted = proposal.parent_indices, {ROOT, *self.accepted}
        return [(draft, draft in accepted) for draft in self.tried if parents[draft] in accepted]


class DraftCost(Frozen):
    """The cost of draft tokens in the step that is being planned, for proposers.

    Attributes:
        row_chance: how probably a draft must be right to be worth its row in the step.
        tokens_per_s: tokens per second without drafts; 0 if time does not count.
        max_drafts: the maximum number of drafts of one request.
        seconds: predicts the time of the step with a number of drafts; None if it is not known.
    """

    row_chance: float
    tokens_per_s: float
    max_drafts: int
    seconds: Callable[[int], float] | None = None

    def min_chance(self, seconds: float) -> float:
        """Return how probably a draft must be right if it takes `seconds` to make."""
        return self.row_chance + self.tokens_per_s * seconds

    def min_next_chance(
        self, num_drafts: int, num_tokens: float, spent_s: float, next_s: float
    ) -> float:
        """Return how probably one more draft must be right to pay for its making and its row.

        The present `num_drafts` took `spent_s` to make, another takes `next_s`, and the step is
        expected to bring `num_tokens` with the present drafts. One more draft pays if it does not
        lower the step's tokens per second. Kernels compute several rows together, so the cost of a
        row is the lowest cost per row over several numbers of added rows.
        """
        if self.seconds is None:
            return self.min_chance(next_s)
        step_s = self.seconds(num_drafts)
        rate = max(self.tokens_per_s, num_tokens / (step_s + spent_s))
        row_s = min(
            (self.seconds(num_drafts + num_more) - step_s) / num_more for num_more in _PROBED_DRAFTS
        )
        return rate * (max(0.0, row_s) + next_s)


class Watcher(Protocol):
    """Gets the result of each step of the target model, for example to take hidden states."""

    def see(self, plan: StepPlan, result: StepResult) -> None:
        """Take the result of a step, with or without drafts.

        The step's tokens have been appended to the requests already.
        """

    def finish(self, request: Request) -> None:
        """Drop all data about a request that has ended."""


class Proposer(Protocol):
    """Drafts tokens for requests, which the target model then verifies.

    Attributes:
        name: the name of the method, which requests may ask for.
    """

    name: str

    def propose(self, requests: Sequence[Request], cost: DraftCost) -> list[Proposal | None]:
        """Return draft tokens for each request; None for no drafts.

        The newest token of each request is not computed yet.
        """

    def learn(self, request: Request, proposal: Proposal, outcome: DraftOutcome) -> None:
        """Learn which of a proposal's drafts were right."""

    def finish(self, request: Request) -> None:
        """Drop the proposer's data of a request that has ended."""

    def close(self) -> None:
        """Release the proposer's memory and threads."""


def sampled_rows(plan: StepPlan, result: StepResult) -> Iterator[tuple[Slice, list[int]]]:
    """Yield each slice that samples, with the indices of the rows whose tokens its request keeps.

    The indices count all sampled rows of the step. A request that has ended may have kept fewer
    tokens.
    """
    first = 0
    for slice_ in plan.slices:
        if not slice_.samples:
            continue
        rows = [first]
        if slice_.drafts:
            tokens = result.tokens[first : first + slice_.num_drawn]
            accepted = accepted_drafts(slice_.drafts, slice_.branches, tokens)
            rows += [first + 1 + draft for draft in accepted]
        yield slice_, rows
        first += slice_.num_drawn
