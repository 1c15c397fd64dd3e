"""Puts guesses into steps where they pay, and learns what became of them."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from twostroke.core.draft_tree import right_drafts
from twostroke.core.frozen import Frozen
from twostroke.engine.speculation.payoff import ProposerGain
from twostroke.engine.speculation.proposal import DraftOutcome
from twostroke.model.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.core.request import Request
    from twostroke.core.step import Slice, StepPlan, StepResult
    from twostroke.engine.speculation.payoff import Always, WhilePaying
    from twostroke.engine.speculation.proposal import DraftCost, Proposal, Proposer, Watcher
    from twostroke.engine.speculation.step_time import StepTimeModel

    AddDrafts = Callable[[Slice, Sequence[int], Sequence[int]], Sequence[int]]
    DraftBudget = Always | WhilePaying

_logger = logging.getLogger("twostroke.spec")

_BUDGET_STEPS = 16  # for which a budget holds
_PAUSE = 32  # steps without asking proposers, after one in which no guess could pay
_ENOUGH = 2.0  # expected right tokens of a proposal, after which no other proposer is asked
_NUM_RECENT = 1024  # steps


class TimedStep(Frozen):
    """One step of `num_rows`, `num_guesses` of them guesses, which brought `num_tokens`.

    Without guesses it would have brought `num_plain` tokens. Its time is `step_s`, after `asking_s`
    that proposers took.
    """

    num_rows: int
    num_guesses: int
    num_plain: int
    num_tokens: int
    step_s: float
    asking_s: float


@dataclass(slots=True)
class SpeculationStats:
    """Counts since the start.

    Attributes:
        proposed: guesses that were computed, by their source.
        accepted: those of them that were right.
        accepted_at: how often the guess at each place was right.
        passes: slices with guesses; each brought one token besides the accepted ones.
        saved_s: how much longer the same tokens would have taken without, by `StepTimeModel`.
        recent: the last steps, with or without guesses.
    """

    proposed: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    passes: int = 0
    saved_s: float = 0.0
    recent: deque[TimedStep] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT))


@dataclass(slots=True)
class _SliceDraft:
    """A proposal for a slice, and which of its tokens are tried."""

    part: Slice
    proposer: Proposer
    proposal: Proposal
    tried: Sequence[int] = ()

    @property
    def num_expected(self) -> float:
        """How many tokens it brings on average."""
        return sum(self.proposal.worths)


@dataclass(slots=True)
class StepDrafts:
    """The guesses of one step, by the identity of their slices.

    `asking_s` is how many seconds each proposer took that was asked.
    """

    by_slice: dict[int, _SliceDraft] = field(default_factory=dict)
    asking_s: dict[str, float] = field(default_factory=dict)


class Speculator:
    """Asks proposers for guesses, and adds as many to a step's slices as the budget allows."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        budget_of: Callable[[BatchShape], DraftBudget],
        step_time: StepTimeModel,
        on_request: Sequence[Proposer] = (),
        watchers: Sequence[Watcher] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask `proposers` in order, later ones where earlier ones do not expect much.

        Those `on_request` are asked only about requests that name them. All steps are shown to the
        `watchers`, which may be proposers, too. A budget holds for all steps with as many rows.
        """
        self.stats = SpeculationStats()
        self._proposers, self._watchers = (*proposers, *on_request), tuple(watchers)
        self._failed: list[Proposer] = []
        self._clock = clock
        self.methods = tuple(proposer.name for proposer in self._proposers)
        self._by_default = {proposer.name for proposer in proposers}
        self._budget_of = budget_of
        self.step_time = step_time
        self.times_steps = bool(self._proposers)  # learning takes time; others may want it, too
        self._asking_s = 0.0  # since the last step was learned from
        self._accounts: defaultdict[tuple[str, int], ProposerGain] = defaultdict(ProposerGain)
        self._budget: DraftBudget | None = None
        self._budget_size = (0, 0, 0)  # slices, rows and tokens that it holds for
        self._budget_age = 0  # steps
        self._pause = 0  # steps
        self._pause_slices = 0  # the pause ends when there are fewer slices

    def extend(self, plan: StepPlan, add_drafts: AddDrafts) -> StepDrafts:
        """Add drafts to the plan's slices, as many as pay; `add_drafts` as `Scheduler`'s."""
        began_s = self._clock()
        guesses = StepDrafts()
        self._extend(plan, guesses, add_drafts)
        self._asking_s += self._clock() - began_s
        return guesses

    def learn(
        self,
        plan: StepPlan,
        guesses: StepDrafts,
        batch: BatchShape,
        result: StepResult,
        elapsed_s: float,
    ) -> None:
        """Take in what a step drew, and how long it took with all that was done meanwhile.

        The time of proposers says nothing about steps of this size: their accounts pay for it.
        """
        for watcher in self._watchers:
            with self._surviving(watcher):
                watcher.see(plan, result)
        asking_s, self._asking_s = self._asking_s, 0.0
        step_s = max(0.0, elapsed_s - asking_s)  # lost steps were asked for, too
        if self.times_steps:
            self.step_time.learn(batch, step_s)
        num_plain = _num_drawing(plan)
        tried, right = self._outcomes(plan, guesses, result)
        num_tried, num_tokens = tried.total(), num_plain + right.total()
        self.stats.recent.append(
            TimedStep(batch.num_rows, num_tried, num_plain, num_tokens, step_s, asking_s)
        )
        asked = guesses.asking_s
        if not tried:  # the step itself tells how long it takes without guesses
            for name, its_asking_s in asked.items():
                self._account(name, plan).add(0.0, its_asking_s / max(step_s, 1e-6))
            self.stats.saved_s -= sum(asked.values())
            return
        plain = BatchShape(tuple(plan.starts), tuple(plan.counts), num_plain)
        plain_s = self.step_time.seconds(plain)
        longer_s = max(0.0, self.step_time.seconds(batch) - plain_s)
        for name, its_asking_s in asked.items():
            spent = (its_asking_s + longer_s * tried[name] / num_tried) / plain_s
            self._account(name, plan).add(right[name] / num_plain, spent)
        self.stats.saved_s += plain_s * num_tokens / num_plain - elapsed_s

    def finish(self, request: Request) -> None:
        """Tell proposers and watchers that a request has ended."""
        everyone: tuple[Proposer | Watcher, ...] = (*self._proposers, *self._watchers)
        for one in everyone:
            with self._surviving(one):
                one.finish(request)

    def close(self) -> None:
        """Release what proposers hold."""
        for proposer in (*self._proposers, *self._failed):
            proposer.close()

    def _extend(self, plan: StepPlan, guesses: StepDrafts, add_drafts: AddDrafts) -> None:
        if not self._proposers or not plan.budget:
            return
        if self._pause and len(plan.slices) >= self._pause_slices:
            self._pause -= 1
            return
        budget = self._current_budget(plan)
        price = budget.price(plan.budget)
        if price is None:
            self._pause, self._pause_slices = _PAUSE, len(plan.slices)
            self._budget = None
            return
        self._pause = 0
        parts = [  # those of one output token, which drafts may follow
            part
            for part in plan.slices
            if part.count == 1 and part.samples and part.start >= part.request.num_prompt
        ]
        for proposer in self._proposers:
            if not price.rate or self._account(proposer.name, plan).may_ask():
                self._ask(proposer, parts, price, guesses)
        if not guesses.by_slice:
            return
        found = list(guesses.by_slice.values())
        counts = budget.counts(plan.budget, [guess.proposal for guess in found])
        for guess, count in zip(found, counts, strict=True):
            if count:
                tokens, parents = guess.proposal.tokens[:count], guess.proposal.parents[:count]
                guess.tried = add_drafts(guess.part, tokens, parents)

    def _current_budget(self, plan: StepPlan) -> DraftBudget:
        """Return what guesses cost; it changes slowly, so it is kept for some steps."""
        size = len(plan.slices), sum(plan.counts), _num_drawing(plan)
        known = self._budget
        if known is None or size != self._budget_size or self._budget_age >= _BUDGET_STEPS:
            known = self._budget = self._budget_of(BatchShape.of(plan))
            self._budget_size, self._budget_age = size, 0
        self._budget_age += 1
        return known

    def _ask(
        self, proposer: Proposer, parts: Sequence[Slice], price: DraftCost, guesses: StepDrafts
    ) -> None:
        """Ask about the slices of which not much is expected yet, and keep the better guesses."""
        known, names = guesses.by_slice, {proposer.name}
        if proposer.name in self._by_default:
            names.add("auto")
        asked = [
            part
            for part in parts
            if part.request.hints.speculate in names
            and (id(part) not in known or known[id(part)].num_expected < _ENOUGH)
        ]
        if not asked:
            return
        began_s = self._clock()
        proposals: Sequence[Proposal | None] = ()
        with self._surviving(proposer):
            proposals = proposer.propose([part.request for part in asked], price)
        guesses.asking_s[proposer.name] = self._clock() - began_s
        for part, offered in zip(asked, proposals, strict=False):  # none, if it has failed
            proposal = _as_allowed(offered, part.request)
            if proposal is not None:
                guess = _SliceDraft(part, proposer, proposal)
                if id(part) not in known or guess.num_expected > known[id(part)].num_expected:
                    known[id(part)] = guess

    def _outcomes(
        self, plan: StepPlan, guesses: StepDrafts, result: StepResult
    ) -> tuple[Counter[str], Counter[str]]:
        """Tell proposers what became of their guesses; count these, and those that were right."""
        num_tried, num_right = Counter[str](), Counter[str]()
        if not guesses.by_slice:
            return num_tried, num_right
        tokens, stats = iter(result.tokens), self.stats
        for part in plan.slices:
            drawn = list(islice(tokens, part.num_drawn))
            guess = guesses.by_slice.get(id(part))
            if guess is None:
                continue
            tried, name, source = guess.tried, guess.proposer.name, guess.proposal.source
            right = [tried[i] for i in right_drafts(part.drafts, part.branches, drawn)]
            with self._surviving(guess.proposer):
                guess.proposer.learn(
                    part.request, guess.proposal, DraftOutcome(tried, right, drawn)
                )
            if tried:
                num_tried[name] += len(tried)
                num_right[name] += len(right)
                stats.passes += 1
                stats.proposed[source] += len(tried)
                stats.accepted[source] += len(right)
                stats.accepted_at.update(range(len(right)))
        return num_tried, num_right

    @contextmanager
    def _surviving(self, one: Proposer | Watcher) -> Iterator[None]:
        """Go on without a proposer or watcher that fails: no answer depends on it."""
        try:
            yield
        except Exception:  # guesses must cost no answer, whatever goes wrong with them
            if any(other is one for other in (*self._proposers, *self._watchers)):
                _logger.exception("%s failed and is not used any more.", type(one).__name__)
            self._failed += [proposer for proposer in self._proposers if proposer is one]
            self._proposers = tuple([other for other in self._proposers if other is not one])
            self._watchers = tuple([other for other in self._watchers if other is not one])

    def _account(self, name: str, plan: StepPlan) -> ProposerGain:
        """Return a proposer's account at about as many requests."""
        return self._accounts[name, len(plan.slices).bit_length()]


def _num_drawing(plan: StepPlan) -> int:
    """Return in how many slices a token is drawn."""
    if plan.is_decode:
        return len(plan.slices)
    return sum([part.samples for part in plan.slices])


def _as_allowed(proposal: Proposal | None, request: Request) -> Proposal | None:
    """Return the beginning of a chain that the request's constraint allows, or None."""
    if proposal is None or request.matcher is None or proposal.parents:
        return proposal
    count = request.matcher.count_allowed(request.output, proposal.tokens)
    return proposal.first(count) if count else None
