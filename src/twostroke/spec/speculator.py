"""Puts guesses into steps where they pay, and hears what became of them."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from twostroke.core.tree import right_drafts
from twostroke.program import BatchShape
from twostroke.spec.balance import Balance
from twostroke.spec.proposal import Outcome
from twostroke.spec.stats import SpeculationStats, TimedStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.core.request import Request
    from twostroke.core.step import Slice, StepPlan, StepResult
    from twostroke.spec.choice import Chooser, Terms
    from twostroke.spec.pace import Pace
    from twostroke.spec.proposal import Price, Proposal, Proposer, Watcher

    AddDrafts = Callable[[Slice, Sequence[int], Sequence[int]], Sequence[int]]

_logger = logging.getLogger("twostroke.spec")

_TERMS_STEPS = 16
_REST = 32  # steps for which nobody is asked, once no guess could have paid
_ENOUGH = 2.0  # right tokens to be expected of a proposal, for nobody else to be asked


@dataclass(slots=True)
class _Guess:
    """What a proposer says of one slice, and which of its tokens are tried."""

    part: Slice
    proposer: Proposer
    proposal: Proposal
    tried: Sequence[int] = ()

    @property
    def num_expected(self) -> float:
        """How many tokens it will bring, on average."""
        return sum(self.proposal.worths)


class Speculator:
    """Lets proposers guess behind the slices of a plan, as many tokens as a chooser says."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        chooser: Chooser,
        pace: Pace,
        on_request: Sequence[Proposer] = (),
        watchers: Sequence[Watcher] = (),
    ) -> None:
        """Ask `proposers` in order, later ones where earlier ones do not expect much.

        Those `on_request` are asked only about requests that name them. All steps are shown to the
        `watchers`, which may be proposers, too: then they hear of ends twice.
        """
        self.stats = SpeculationStats()
        self._proposers, self._watchers = (*proposers, *on_request), tuple(watchers)
        self._failed: list[Proposer] = []
        self.methods = tuple(proposer.name for proposer in self._proposers)
        self._by_default = {proposer.name for proposer in proposers}
        self._chooser = chooser
        self._pace = pace
        self._tried: dict[int, _Guess] = {}  # by the slice's identity
        self._asking_s = 0.0  # in the step in flight
        self._asked: dict[str, float] = {}  # names, and the seconds that each has taken of these
        self._balances: defaultdict[tuple[str, int], Balance] = defaultdict(Balance)
        self._terms: Terms | None = None
        self._terms_size = (0, 0, 0)  # slices, rows and tokens that they hold for
        self._terms_age = 0  # steps
        self._rest = 0  # steps
        self._rest_slices = 0  # and only while there are as many slices

    def extend(self, plan: StepPlan, add_drafts: AddDrafts) -> None:
        """Add drafts to the plan's slices, as many as pay; `add_drafts` as `Scheduler`'s."""
        began_s = time.monotonic()
        self._extend(plan, add_drafts)
        self._asking_s = time.monotonic() - began_s

    def _extend(self, plan: StepPlan, add_drafts: AddDrafts) -> None:
        if not self._may_ask(plan):
            return
        terms = self._current_terms(plan)
        price = terms.price(plan.budget)
        if price is None:
            self._rest, self._rest_slices = _REST, len(plan.slices)
            self._terms = None
            return
        parts = [  # those of one output token, behind which drafts may stand
            part
            for part in plan.slices
            if part.count == 1 and part.samples and part.start >= part.request.num_prompt
        ]
        for proposer in self._proposers:
            if not price.rate or self._balance(proposer.name, plan).may_ask():
                self._ask(proposer, parts, price)
        if not self._tried:
            return
        guesses = list(self._tried.values())
        proposals = [guess.proposal for guess in guesses]
        counts = terms.counts(plan.budget, proposals)
        for guess, count in zip(guesses, counts, strict=True):
            if count:
                tokens, parents = guess.proposal.tokens[:count], guess.proposal.parents[:count]
                guess.tried = add_drafts(guess.part, tokens, parents)

    def learn(
        self, plan: StepPlan, batch: BatchShape, result: StepResult, elapsed_s: float
    ) -> None:
        """Hear what a step drew, and how long it took with all that was done for it.

        What proposers took says nothing about steps of this size: it is put to their accounts.
        """
        for watcher in self._watchers:
            with self._trusting_nobody(watcher):
                watcher.see(plan, result)
        step_s = elapsed_s - self._asking_s
        if self._proposers:
            self._pace.learn(batch, step_s)
        num_plain = _num_drawing(plan)
        tried, right = self._hear(plan, result) if self._tried else (Counter(), Counter())
        num_tried, num_tokens = tried.total(), num_plain + right.total()
        self.stats.recent.append(
            TimedStep(batch.num_rows, num_tried, num_plain, num_tokens, step_s, self._asking_s)
        )
        asked, self._asked = self._asked, {}
        if not tried:  # then the step itself tells how long it takes without
            for name, asking_s in asked.items():
                self._balance(name, plan).add(0.0, asking_s / max(step_s, 1e-6))
            self.stats.saved_s -= sum(asked.values())
            return
        plain = BatchShape(tuple(plan.starts), tuple(plan.counts), num_plain)
        plain_s = self._pace.seconds(plain)
        longer_s = max(0.0, self._pace.seconds(batch) - plain_s)
        for name, asking_s in asked.items():
            spent = (asking_s + longer_s * tried[name] / num_tried) / plain_s
            self._balance(name, plan).add(right[name] / num_plain, spent)
        self.stats.saved_s += plain_s * num_tokens / num_plain - elapsed_s

    def _hear(self, plan: StepPlan, result: StepResult) -> tuple[Counter[str], Counter[str]]:
        """Tell proposers what became of their guesses; count them, and those that were right."""
        num_tried, num_right = Counter[str](), Counter[str]()
        tokens = iter(result.tokens)
        for part in plan.slices:
            drawn = list(islice(tokens, part.num_drawn))
            guess = self._tried.get(id(part))
            if guess is None:
                continue
            tried, name = guess.tried, guess.proposer.name
            right = [tried[i] for i in right_drafts(part.drafts, part.branches, drawn)]
            num_tried[name] += len(tried)
            num_right[name] += len(right)
            with self._trusting_nobody(guess.proposer):
                guess.proposer.learn(part.request, guess.proposal, Outcome(tried, right, drawn))
            self.stats.add(guess.proposal.source, len(right), len(tried))
        self._tried = {}
        return +num_tried, num_right

    def finish(self, request: Request) -> None:
        """Hear that a request has ended."""
        everyone: tuple[Proposer | Watcher, ...] = (*self._proposers, *self._watchers)
        for one in everyone:
            with self._trusting_nobody(one):
                one.finish(request)

    def close(self) -> None:
        """Give back what proposers hold."""
        for proposer in (*self._proposers, *self._failed):
            proposer.close()

    @contextmanager
    def _trusting_nobody(self, one: Proposer | Watcher) -> Iterator[None]:
        """Go on without a proposer or watcher that fails: no answer depends on it."""
        try:
            yield
        except Exception:  # guesses must cost no answer, whatever goes wrong with them
            if any(other is one for other in (*self._proposers, *self._watchers)):
                _logger.exception("%s failed, and is asked no more.", type(one).__name__)
            self._failed += [proposer for proposer in self._proposers if proposer is one]
            self._proposers = tuple([other for other in self._proposers if other is not one])
            self._watchers = tuple([other for other in self._watchers if other is not one])

    def _balance(self, name: str, plan: StepPlan) -> Balance:
        """Return a proposer's account at about as many requests."""
        return self._balances[name, len(plan.slices).bit_length()]

    def _current_terms(self, plan: StepPlan) -> Terms:
        """Return what guesses cost; worked out now and then, as it changes slowly."""
        size = len(plan.slices), sum(plan.counts), _num_drawing(plan)
        known = self._terms
        if known is None or self._terms_size != size or self._terms_age >= _TERMS_STEPS:
            known = self._terms = self._chooser.terms(BatchShape.of(plan))
            self._terms_size, self._terms_age = size, 0
        self._terms_age += 1
        return known

    def _may_ask(self, plan: StepPlan) -> bool:
        if not self._proposers or not plan.budget:
            return False
        if self._rest and len(plan.slices) >= self._rest_slices:
            self._rest -= 1
            return False
        self._rest = 0
        return True

    def _ask(self, proposer: Proposer, parts: Sequence[Slice], price: Price) -> None:
        """Ask about the slices of which no one expects much yet, and keep the better guesses."""
        known = self._tried
        names = {proposer.name, "auto"} if proposer.name in self._by_default else {proposer.name}
        asked = [
            part
            for part in parts
            if part.request.hints.speculate in names
            and (not known or id(part) not in known or known[id(part)].num_expected < _ENOUGH)
        ]
        if not asked:
            return
        requests = [part.request for part in asked]
        began_s = time.monotonic()
        proposals: Sequence[Proposal | None] = ()
        with self._trusting_nobody(proposer):
            proposals = proposer.propose(requests, price)
        self._asked[proposer.name] = time.monotonic() - began_s
        for part, offered in zip(asked, proposals, strict=False):  # none, if it has failed
            proposal = _as_allowed(offered, part.request)
            if proposal is not None:
                guess = _Guess(part, proposer, proposal)
                if id(part) not in known or guess.num_expected > known[id(part)].num_expected:
                    known[id(part)] = guess


def _num_drawing(plan: StepPlan) -> int:
    """In how many slices a token is drawn."""
    if plan.is_decode:
        return len(plan.slices)
    return sum([part.samples for part in plan.slices])


def _as_allowed(proposal: Proposal | None, request: Request) -> Proposal | None:
    """Return the beginning of a chain that the request's constraint allows, or None."""
    if proposal is None or request.matcher is None or proposal.parents:
        return proposal
    count = request.matcher.count_allowed(request.output, proposal.tokens)
    return proposal.first(count) if count else None
