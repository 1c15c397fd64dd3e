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
    """Draft tokens for the next tokens of a request, at least one.

    Any beginning of a proposal is a proposal.

    Attributes:
        source: where the drafts come from, for metrics.
        tokens: the drafts. In a tree each comes after its parent.
        chances: the probability that each draft is right if the drafts before it are.
        kinds: the kind of each draft, by which its acceptance rate is learned.
        parents: index of the draft that each draft follows, or `ROOT` for the request's newest
            token; empty for a chain.
        values: the expected number of tokens that a row for each draft brings, in falling order. By
            default the probability that the draft and all drafts before it are right.
    """

    source: str
    tokens: tuple[int, ...]
    chances: tuple[float, ...]
    kinds: tuple[int, ...]
    parents: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Compute the expected value of each draft if `values` was not given."""
        if not self.values:
            values: list[float] = []
            for chance, parent in zip(self.chances, self.parent_indices, strict=True):
                values.append(chance if parent == ROOT else chance * values[parent])
            force_setattr(self, "values", tuple(values))

    @property
    def parent_indices(self) -> Sequence[int]:
        """The index of the draft that each draft token follows, or `ROOT`; also for a chain."""
        return self.parents or range(-1, len(self.tokens) - 1)

    @property
    def forks(self) -> Sequence[bool]:
        """Whether each draft begins another path: an earlier draft has the same parent."""
        if not self.parents:
            return (False,) * len(self.tokens)
        return [parent in self.parents[:index] for index, parent in enumerate(self.parents)]

    def first(self, count: int) -> Proposal:
        """Return a proposal of the first `count` drafts."""
        return self if count >= len(self.tokens) else self._pick(range(count))

    def best_first(self) -> Proposal:
        """Return the same tree of drafts, sorted by falling value."""
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
    """Which draft tokens of a proposal a step computed, and which were right.

    Attributes:
        tried: indices of the drafts that were computed, in the order of their rows.
        accepted: indices of the drafts that were right, each following the one before.
        sampled: the token sampled after the request's newest token, then after each tried draft.
    """

    tried: Sequence[int]
    accepted: Sequence[int]
    sampled: Sequence[int]

    def trials(self, proposal: Proposal) -> list[tuple[int, bool]]:
        """Return the computed drafts that follow right drafts, and whether each was right.

        Drafts after a wrong draft are left out, since they were made for another text.
        """
        parents, accepted = proposal.parent_indices, {ROOT, *self.accepted}
        return [(draft, draft in accepted) for draft in self.tried if parents[draft] in accepted]


class DraftCost(Frozen):
    """What draft tokens cost in the step that is being planned.

    Attributes:
        row_chance: the probability of being right from which a draft pays for its row.
        tokens_per_s: tokens per second without drafts; 0 if time does not count.
        max_drafts: the maximum number of drafts of one request.
        seconds: the time of the step with a number of drafts, if it is known.
    """

    row_chance: float
    tokens_per_s: float
    max_drafts: int
    seconds: Callable[[int], float] | None = None

    def min_chance(self, seconds: float) -> float:
        """Return the probability of being right from which a draft pays for `seconds` of making."""
        return self.row_chance + self.tokens_per_s * seconds

    def min_next_chance(
        self, num_drafts: int, num_tokens: float, spent_s: float, next_s: float
    ) -> float:
        """Return the probability of being right from which one more draft pays for its making.

        The present `num_drafts` took `spent_s` to make, another takes `next_s`, and the step is
        expected to bring `num_tokens` with the present drafts. If another draft brings fewer tokens
        for its time, the rate falls. Kernels compute some rows together, so the cost of a draft's
        row is the lowest cost per row over some numbers of further rows.
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
    """Is shown the result of every step of the target model, with or without drafts."""

    def see(self, plan: StepPlan, result: StepResult) -> None:
        """Take in the result of a step, for example the hidden states.

        The requests have the step's tokens already.
        """

    def finish(self, request: Request) -> None:
        """Drop all data about a request, because it has ended."""


class Proposer(Protocol):
    """Proposes draft tokens for requests, which the target model verifies.

    Attributes:
        name: the name of the method, which requests may ask for.
    """

    name: str

    def propose(self, requests: Sequence[Request], cost: DraftCost) -> list[Proposal | None]:
        """Return draft tokens for each request; None for no drafts.

        Each request has one pending token.
        """

    def learn(self, request: Request, proposal: Proposal, outcome: DraftOutcome) -> None:
        """Learn from which draft tokens of a request's proposal were right."""

    def finish(self, request: Request) -> None:
        """Drop the proposer's data of a request that has ended."""

    def close(self) -> None:
        """Release the proposer's memory and threads."""


def sampled_rows(plan: StepPlan, result: StepResult) -> Iterator[tuple[Slice, list[int]]]:
    """Yield each slice of a step that samples, and the sampled rows that its request keeps.

    Rows are counted over all sampled rows of the step. A request that ended may have kept fewer.
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
