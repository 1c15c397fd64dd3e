"""Adds drafts to steps where they pay, and learns from their outcomes."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from twostroke.core.draft_tree import accepted_drafts
from twostroke.core.frozen import Frozen
from twostroke.engine.speculation.payoff import ProposerGain
from twostroke.engine.speculation.proposal import DraftOutcome
from twostroke.model.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.core.request import Request
    from twostroke.core.step import Slice, StepPlan, StepResult
    from twostroke.engine.speculation.payoff import FixedDraftBudget, PayingDraftBudget
    from twostroke.engine.speculation.proposal import DraftCost, Proposal, Proposer, Watcher
    from twostroke.engine.speculation.step_time import StepTimeModel

    AddDrafts = Callable[[Slice, Sequence[int], Sequence[int]], Sequence[int]]
    DraftBudget = FixedDraftBudget | PayingDraftBudget

_logger = logging.getLogger("twostroke.spec")

_BUDGET_STEPS = 16  # steps for which a budget is valid
_PAUSE_STEPS = 32  # without asking proposers, after a step in which no draft could pay
_ENOUGH_TOKENS = 2.0  # expected tokens of a proposal after which no other proposer is asked
_NUM_RECENT_STEPS = 1024


class TimedStep(Frozen):
    """The rows, tokens and time of one step, recorded for statistics.

    Attributes:
        num_rows: all rows, drafts included.
        num_drafts: rows of drafts.
        num_plain: tokens that the step would have brought without drafts.
        num_tokens: tokens that the step brought.
        step_s: the step's time, in seconds.
        asking_s: the seconds that proposers took before the step.
    """

    num_rows: int
    num_drafts: int
    num_plain: int
    num_tokens: int
    step_s: float
    asking_s: float


@dataclass(slots=True)
class SpeculationStats:
    """Counts of draft tokens since the start.

    Attributes:
        proposed: drafts that were computed, by source.
        accepted: drafts that were right, by source.
        accepted_at: how often the draft at each depth was right.
        passes: number of slices with drafts; each slice brought one token besides its accepted
            drafts.
        saved_s: time saved, compared with `StepTimeModel`'s time for the same tokens without
            drafts.
        recent: the last steps, with or without drafts.
    """

    proposed: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    passes: int = 0
    saved_s: float = 0.0
    recent: deque[TimedStep] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT_STEPS))


@dataclass(slots=True)
class _SliceDraft:
    """The drafts proposed for one slice of a step; `tried` are the indices of computed drafts."""

    slice_: Slice
    proposer: Proposer
    proposal: Proposal
    tried: Sequence[int] = ()

    @property
    def num_expected(self) -> float:
        """How many drafts of the proposal are expected to be right."""
        return sum(self.proposal.values)


@dataclass(slots=True)
class StepDrafts:
    """The drafts proposed for one step, and the time that proposers took.

    Attributes:
        by_slice: the proposals by the identity (`id`) of their slices.
        asking_s: the seconds of each proposer that was asked, by name.
    """

    by_slice: dict[int, _SliceDraft] = field(default_factory=dict)
    asking_s: dict[str, float] = field(default_factory=dict)


class Speculator:
    """Asks proposers for drafts, adds the drafts that pay to a step, and learns from the result.

    Attributes:
        stats: counts since the start.
        methods: the names of all proposers.
        step_time: predicts the times of steps.
        times_steps: whether `learn` updates `step_time`, which takes some time itself.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        budget_of: Callable[[BatchShape], DraftBudget],
        step_time: StepTimeModel,
        on_request: Sequence[Proposer] = (),
        watchers: Sequence[Watcher] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask `proposers` for draft tokens, in order.

        A proposer is asked only about requests for which the proposers before it expect few tokens.
        The proposers in `on_request` are asked only about requests that name them. The `watchers`
        get the results of all steps; a proposer may also be a watcher. `budget_of` returns a step's
        draft budget, which is also used for some later steps of the same size.
        """
        self.stats = SpeculationStats()
        self.methods = tuple(proposer.name for proposer in (*proposers, *on_request))
        self.step_time = step_time
        self.times_steps = bool(self.methods)
        self._proposers: tuple[Proposer, ...] = (*proposers, *on_request)
        self._watchers = tuple(watchers)
        self._failed: list[Proposer] = []
        self._default_names = {proposer.name for proposer in proposers}
        self._budget_of = budget_of
        self._clock = clock
        self._asking_s = 0.0  # since the last call of `learn`
        self._gains: defaultdict[tuple[str, int], ProposerGain] = defaultdict(ProposerGain)
        self._budget: DraftBudget | None = None
        self._budget_size = (0, 0, 0)  # slices, rows and sampled tokens for which it is valid
        self._budget_age = 0  # in steps
        self._pause = 0  # in steps
        self._pause_slices = 0  # the pause ends if a step has fewer slices

    def extend(self, plan: StepPlan, add_drafts: AddDrafts) -> StepDrafts:
        """Ask proposers for draft tokens, and add the drafts that pay to the slices of a plan.

        `add_drafts` is `Scheduler.add_drafts`. The returned drafts are passed to `learn` after the
        step.
        """
        began_s = self._clock()
        step_drafts = StepDrafts()
        self._extend(plan, step_drafts, add_drafts)
        self._asking_s += self._clock() - began_s
        return step_drafts

    def learn(
        self,
        plan: StepPlan,
        step_drafts: StepDrafts,
        batch: BatchShape,
        result: StepResult,
        elapsed_s: float,
    ) -> None:
        """Learn from a step's result which drafts were right, and how long such steps take.

        `elapsed_s` is the time of the step, including the time in which proposers were asked for
        drafts. That time is subtracted before the step time is learned; it counts as a cost of the
        proposers.
        """
        for watcher in self._watchers:
            with self._dropping_failed(watcher):
                watcher.see(plan, result)
        asking_s, self._asking_s = self._asking_s, 0.0
        step_s = max(0.0, elapsed_s - asking_s)  # proposers were asked for lost steps, too
        if self.times_steps:
            self.step_time.learn(batch, step_s)
        num_plain = _num_sampling(plan)
        num_tried, num_accepted = self._apply_outcomes(plan, step_drafts, result)
        num_drafts = num_tried.total()
        num_tokens = num_plain + num_accepted.total()
        self.stats.recent.append(
            TimedStep(
                num_rows=batch.num_rows,
                num_drafts=num_drafts,
                num_plain=num_plain,
                num_tokens=num_tokens,
                step_s=step_s,
                asking_s=asking_s,
            )
        )
        if not num_tried:  # the step itself has the time of a step without drafts
            for name, seconds in step_drafts.asking_s.items():
                self._gain(name, plan).add(0.0, seconds / max(step_s, 1e-6))
            self.stats.saved_s -= sum(step_drafts.asking_s.values())
            return
        plain = BatchShape(tuple(plan.starts), tuple(plan.counts), num_plain)
        plain_s = self.step_time.seconds(plain)
        drafts_s = max(0.0, self.step_time.seconds(batch) - plain_s)
        for name, seconds in step_drafts.asking_s.items():
            spent = (seconds + drafts_s * num_tried[name] / num_drafts) / plain_s
            self._gain(name, plan).add(num_accepted[name] / num_plain, spent)
        self.stats.saved_s += plain_s * num_tokens / num_plain - elapsed_s

    def finish(self, request: Request) -> None:
        """Tell proposers and watchers that a request has ended."""
        observers: tuple[Proposer | Watcher, ...] = (*self._proposers, *self._watchers)
        for observer in observers:
            with self._dropping_failed(observer):
                observer.finish(request)

    def close(self) -> None:
        """Release the memory and threads of proposers."""
        for proposer in (*self._proposers, *self._failed):
            proposer.close()

    def _extend(self, plan: StepPlan, step_drafts: StepDrafts, add_drafts: AddDrafts) -> None:
        if not self._proposers or not plan.budget:
            return
        if self._pause and len(plan.slices) >= self._pause_slices:
            self._pause -= 1
            return
        budget = self._current_budget(plan)
        cost = budget.cost(plan.budget)
        if cost is None:
            self._pause = _PAUSE_STEPS
            self._pause_slices = len(plan.slices)
            self._budget = None
            return
        self._pause = 0
        decoding = [
            slice_
            for slice_ in plan.slices
            if slice_.count == 1 and slice_.samples and slice_.start >= slice_.request.num_prompt
        ]
        for proposer in self._proposers:
            if not cost.tokens_per_s or self._gain(proposer.name, plan).may_ask():
                self._ask(proposer, decoding, cost, step_drafts)
        if not step_drafts.by_slice:
            return
        drafts = list(step_drafts.by_slice.values())
        counts = budget.counts(plan.budget, [draft.proposal for draft in drafts])
        for draft, count in zip(drafts, counts, strict=True):
            if count:
                tokens, parents = draft.proposal.tokens[:count], draft.proposal.parents[:count]
                draft.tried = add_drafts(draft.slice_, tokens, parents)

    def _current_budget(self, plan: StepPlan) -> DraftBudget:
        """Return the draft budget for a step.

        A budget takes time to compute and changes slowly, so it is used again for some similar
        steps.
        """
        size = len(plan.slices), sum(plan.counts), _num_sampling(plan)
        budget = self._budget
        if budget is None or size != self._budget_size or self._budget_age >= _BUDGET_STEPS:
            budget = self._budget = self._budget_of(BatchShape.of(plan))
            self._budget_size = size
            self._budget_age = 0
        self._budget_age += 1
        return budget

    def _ask(
        self,
        proposer: Proposer,
        slices: Sequence[Slice],
        cost: DraftCost,
        step_drafts: StepDrafts,
    ) -> None:
        """Ask a proposer for drafts for the slices for which earlier proposers expect few tokens.

        The proposals are stored in `step_drafts`. A proposal replaces an earlier one for the same
        slice if it is expected to bring more tokens.
        """
        by_slice, names = step_drafts.by_slice, {proposer.name}
        if proposer.name in self._default_names:
            names.add("auto")
        candidates = [
            slice_
            for slice_ in slices
            if slice_.request.hints.speculate in names
            and (id(slice_) not in by_slice or by_slice[id(slice_)].num_expected < _ENOUGH_TOKENS)
        ]
        if not candidates:
            return
        began_s = self._clock()
        proposals: Sequence[Proposal | None] = ()
        with self._dropping_failed(proposer):
            proposals = proposer.propose([slice_.request for slice_ in candidates], cost)
        step_drafts.asking_s[proposer.name] = self._clock() - began_s
        # There are no proposals if the proposer has failed.
        for slice_, unconstrained in zip(candidates, proposals, strict=False):
            proposal = _allowed_part(unconstrained, slice_.request)
            if proposal is not None:
                draft = _SliceDraft(slice_, proposer, proposal)
                previous = by_slice.get(id(slice_))
                if previous is None or draft.num_expected > previous.num_expected:
                    by_slice[id(slice_)] = draft

    def _apply_outcomes(
        self, plan: StepPlan, step_drafts: StepDrafts, result: StepResult
    ) -> tuple[Counter[str], Counter[str]]:
        """Tell proposers which of their drafts were right.

        Returns the numbers of computed and accepted drafts, by the name of their source.
        """
        num_tried, num_accepted = Counter[str](), Counter[str]()
        if not step_drafts.by_slice:
            return num_tried, num_accepted
        tokens, stats = iter(result.tokens), self.stats
        for slice_ in plan.slices:
            sampled = list(islice(tokens, slice_.num_drawn))
            draft = step_drafts.by_slice.get(id(slice_))
            if draft is None:
                continue
            tried, name, source = draft.tried, draft.proposer.name, draft.proposal.source
            rows = accepted_drafts(slice_.drafts, slice_.branches, sampled)
            accepted = [tried[row] for row in rows]
            with self._dropping_failed(draft.proposer):
                outcome = DraftOutcome(tried, accepted, sampled)
                draft.proposer.learn(slice_.request, draft.proposal, outcome)
            if tried:
                num_tried[name] += len(tried)
                num_accepted[name] += len(accepted)
                stats.passes += 1
                stats.proposed[source] += len(tried)
                stats.accepted[source] += len(accepted)
                stats.accepted_at.update(range(len(accepted)))
        return num_tried, num_accepted

    @contextmanager
    def _dropping_failed(self, observer: Proposer | Watcher) -> Iterator[None]:
        """Return a context manager that drops a proposer or watcher if its call raises an error.

        Answers do not depend on drafts, so the engine continues without the proposer.
        """
        try:
            yield
        except Exception:  # a fault of speculation must not cost an answer
            if any(other is observer for other in (*self._proposers, *self._watchers)):
                _logger.exception("%s failed and is not used any more.", type(observer).__name__)
            self._failed += [proposer for proposer in self._proposers if proposer is observer]
            self._proposers = tuple(
                [proposer for proposer in self._proposers if proposer is not observer]
            )
            self._watchers = tuple(
                [watcher for watcher in self._watchers if watcher is not observer]
            )

    def _gain(self, name: str, plan: StepPlan) -> ProposerGain:
        """Return the `ProposerGain` of a proposer in steps of about the plan's number of slices.

        A proposer may save time in small steps and lose time in large ones.
        """
        return self._gains[name, len(plan.slices).bit_length()]


def _num_sampling(plan: StepPlan) -> int:
    """Return the number of a plan's slices that sample a token."""
    if plan.is_decode:
        return len(plan.slices)
    return sum([slice_.samples for slice_ in plan.slices])


def _allowed_part(proposal: Proposal | None, request: Request) -> Proposal | None:
    """Cut a chain of drafts at the first token that the request's constraint forbids.

    None if no draft is left. A tree of drafts is returned unchanged.
    """
    if proposal is None or request.matcher is None or proposal.parents:
        return proposal
    count = request.matcher.count_allowed(request.output, proposal.tokens)
    return proposal.first(count) if count else None
