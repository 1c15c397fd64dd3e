"""Guesses of a smaller model with the same vocabulary."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from itertools import count as count_up
from typing import TYPE_CHECKING

from twostroke.cache import PagePool, PrefixIndex
from twostroke.core.request import Request
from twostroke.core.step import Slice, StepPlan
from twostroke.core.tree import num_accepted
from twostroke.program import BatchShape
from twostroke.schedule.holdings import Holdings
from twostroke.schedule.prefixes import Prefixes
from twostroke.schedule.ticket import Ticket
from twostroke.spec.odds import Odds
from twostroke.spec.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.backends import Runner
    from twostroke.spec.odds import RequestOdds
    from twostroke.spec.pace import Pace
    from twostroke.spec.proposal import Outcome, Price

_NUM_KINDS = 10  # guesses are of a kind with those of which the draft was about as sure
_PRIOR = tuple((kind + 0.5) / _NUM_KINDS for kind in range(_NUM_KINDS))
_HOPE = 0.75  # that the first guess behind a text is right, before anything is known
_HOPE_STEP = 0.05
_HOPE_FADE = 0.002  # of the way back to the beginning, each time that nothing was guessed
_GAIN = 0.2  # of the time without guesses that these save, if the draft's prompt is to pay


@dataclass(slots=True, eq=False)
class _Follower:
    """A request as the draft knows it: the same tokens, and guesses behind them.

    `mirror.num_computed` rows have keys and values in the draft's pages. The first `num_true` of
    the mirror's tokens are the request's own, as of the last round; `guesses` follow.
    """

    mirror: Request
    ticket: Ticket
    odds: RequestOdds
    num_true: int = 0
    guesses: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  # that each is right if those before are
    kinds: list[int] = field(default_factory=list)
    hope: float = _HOPE
    is_done: bool = False

    def go_on(self, request: Request) -> None:
        """Take over what the request has become; what was guessed rightly is computed already."""
        mirror, first = self.mirror, self.num_true
        agreed = first + num_accepted(self.guesses, request.tokens[first:])
        mirror.tokens[first:] = request.tokens[first:]
        # One is always left over, to be computed for its logits.
        mirror.num_computed = min(mirror.num_computed, agreed, len(mirror.tokens) - 1)
        self.num_true = len(mirror.tokens)
        self.guesses, self.chances, self.kinds, self.is_done = [], [], [], False

    def add(self, token: int, kind: int) -> None:
        """Guess another token."""
        self.mirror.tokens.append(token)
        self.guesses.append(token)
        self.kinds.append(kind)
        self.chances.append(self.odds.of(kind))

    def proposal(self) -> Proposal | None:
        """Return the guesses."""
        if not self.guesses:
            return None
        return Proposal("draft", tuple(self.guesses), tuple(self.chances), tuple(self.kinds))


class DraftModel:
    """Lets a second, smaller model write ahead, in batches, on pages of its own.

    It draws as the request would: with the request's parameters, its seed and the token's index, so
    that two models that agree on a distribution agree on the token, at any temperature. How sure
    it was of a token says how likely the token is right; what that means is learned. For each
    request it stops once the next guess would not be worth its time.

    A request's prompt is computed here, too, when it is first asked for, unless the answer is too
    short to make up for it; a prefix that requests have in common is computed once. Where pages run
    short, those of requests that were not asked about lately are given up.
    """

    name = "draft"

    def __init__(
        self,
        runner: Runner,
        pace: Pace,
        *,
        vocab_size: int,
        context_length: int,
        token_budget: int,
    ) -> None:
        """Write with `runner`, whose steps take what `pace` says, `token_budget` rows a step.

        `vocab_size` is the target's: the draft may have rows for tokens that nobody has.
        """
        facts = runner.facts
        self._runner = runner
        self._pace = pace
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._token_budget = token_budget
        self._pool = PagePool(facts.num_pages, facts.page_size, facts.windows)
        self._prefixes = Prefixes(PrefixIndex(self._pool), self._pool)
        self._holdings = Holdings(self._pool, token_budget)
        self._followers: dict[Request, _Follower] = {}  # the one asked about longest ago first
        self._arrivals = count_up()
        self._odds = Odds(_PRIOR)
        self._length = 100.0  # of an answer, on average

    def propose(self, requests: Sequence[Request], price: Price) -> list[Proposal | None]:
        """Return guesses for each request, which has one token to compute, or None."""
        longest = self._context_length - price.most
        asked = [request for request in requests if len(request.tokens) <= longest]
        step_s = self._pace.seconds(BatchShape.decode((1,) * max(1, len(asked))))
        least = price.least_chance(step_s / max(1, len(asked)))
        found = {request: self._follow(request, price, least) for request in asked}
        active = self._catch_up([follower for follower in found.values() if follower is not None])
        for _ in range(price.most - 1):
            self._stop(active, price)
            active = [f for f in active if not f.is_done and self._grow(f, 1, active)]
            if not active:
                break
            self._run([Slice(f.mirror, f.mirror.num_computed, 1, samples=True) for f in active])
        return [f.proposal() if (f := found.get(request)) else None for request in requests]

    def learn(self, request: Request, proposal: Proposal, outcome: Outcome) -> None:
        """Hear what became of a proposal."""
        follower = self._followers.get(request)
        if follower is not None and outcome.tried:
            follower.odds.learn(proposal, outcome)
            follower.hope += _HOPE_STEP * (bool(outcome.right) - follower.hope)

    def finish(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
        if request.num_output:
            self._length += 0.05 * (request.num_output - self._length)
        follower = self._followers.pop(request, None)
        if follower is not None:
            self._release(follower)
            self._runner.forget(follower.mirror)

    def close(self) -> None:
        """Give back memory and threads."""
        self._runner.close()

    def _follow(self, request: Request, price: Price, least: float) -> _Follower | None:
        """Return the draft's view of a request, brought up to date; None if it is not worth it."""
        follower = self._followers.pop(request, None)
        if follower is None:
            if not self._pays(request, price):
                return None
            follower = self._meet(request)
        self._followers[request] = follower
        follower.go_on(request)
        if request.params.has_penalties:
            self._runner.forget(follower.mirror)  # it knows guesses that were wrong
        if follower.mirror.pages:
            self._prefixes.publish(follower.ticket)
            if self._pool.groups.has_windows:
                self._holdings.leave_behind(follower.ticket)
        if follower.hope < least:
            follower.hope += _HOPE_FADE * (_HOPE - follower.hope)
            return None
        return follower

    def _pays(self, request: Request, price: Price) -> bool:
        """Whether what the guesses may save is more than computing the prompt takes."""
        num_tokens = len(request.tokens)
        left = max(self._length - request.num_output, self._length / 4)
        if request.params.max_tokens is not None:
            left = min(left, request.params.max_tokens - request.num_output)
        prompt_s = self._pace.seconds(BatchShape.prefill(num_tokens))
        return _GAIN * left >= price.rate * prompt_s

    def _meet(self, request: Request) -> _Follower:
        params = replace(request.params, logprobs=0)
        mirror = Request(
            request.id,
            [],
            request.num_prompt,
            params,
            request.seed,
            end_ids=request.end_ids,
            salt=request.salt,
        )
        arrival = next(self._arrivals)
        chain = self._prefixes.chain(request.salt)
        ticket = Ticket(mirror, (arrival, arrival), self._context_length, chain)
        return _Follower(mirror, ticket, self._odds.for_request())

    def _catch_up(self, followers: Sequence[_Follower]) -> list[_Follower]:
        """Compute what the draft has not seen yet; return those that then have a first guess.

        Those with the least to do come first; what does not fit into a step waits for the next
        time.
        """
        ready, slices, budget = [], [], self._token_budget
        for follower in followers:
            if not follower.mirror.pages and not self._start(follower):
                follower.is_done = True
        waiting = [f for f in followers if not f.is_done]
        for follower in sorted(waiting, key=lambda f: f.mirror.num_pending):
            mirror = follower.mirror
            count = min(mirror.num_pending, budget)
            if not count or not self._grow(follower, count, followers):
                continue
            budget -= count
            samples = count == mirror.num_pending
            slices.append(Slice(mirror, mirror.num_computed, count, samples))
            if samples:
                ready.append(follower)
        if slices:
            self._run(slices)
        return ready

    def _start(self, follower: _Follower) -> bool:
        """Give a follower the pages of what the draft knows of its beginning."""
        hit = self._prefixes.match(follower.ticket)
        if hit is None:  # another one is about to compute it
            return False
        self._holdings.start(follower.ticket, hit)
        follower.mirror.num_computed = hit.num_places * self._pool.page_size
        self._prefixes.start(follower.ticket)
        return True

    def _grow(self, follower: _Follower, count: int, kept: Sequence[_Follower]) -> bool:
        """Have pages for `count` more tokens, if need be those of others that are not `kept`."""
        mirror, page_size = follower.mirror, self._pool.page_size
        num_places = -(-(mirror.num_computed + count) // page_size) - len(mirror.pages[0])
        if num_places <= 0:
            return True
        num_pages = num_places * len(mirror.pages)
        for other in list(self._followers.values()):
            if self._pool.num_available >= num_pages:
                break
            if other.mirror.pages and other is not follower and other not in kept:
                self._release(other)
        if self._pool.num_available < num_pages:
            follower.is_done = True
            return False
        self._holdings.grow(mirror, num_places)
        return True

    def _release(self, follower: _Follower) -> None:
        if follower.mirror.pages:
            self._prefixes.stop(follower.ticket)
            self._holdings.give_back(follower.mirror)
            follower.mirror.num_computed = 0
            follower.mirror.num_moves += 1

    def _run(self, slices: Sequence[Slice]) -> None:
        """Compute a step of the draft, and note what it drew."""
        plan = StepPlan(tuple(slices))
        began_s = time.monotonic()
        result = self._runner.run(plan)
        self._pace.learn(BatchShape.of(plan), time.monotonic() - began_s)
        drawn = zip(result.tokens, result.logprobs, strict=True)
        by_mirror = {follower.mirror: follower for follower in self._followers.values()}
        for part in slices:
            part.request.num_computed += part.count
            if not part.samples:
                continue
            follower = by_mirror[part.request]
            token, logprobs = next(drawn)
            if logprobs is None or not 0 <= token < self._vocab_size:
                follower.is_done = True
                continue
            sureness = math.exp(logprobs.logprob)
            follower.add(token, min(int(sureness * _NUM_KINDS), _NUM_KINDS - 1))

    def _stop(self, followers: Sequence[_Follower], price: Price) -> None:
        """Mark those for which another guess would not be worth its time."""
        num_active = max(1, sum(not follower.is_done for follower in followers))
        start = max((f.mirror.num_computed for f in followers), default=0)
        step_s = self._pace.seconds(BatchShape.decode((start,) * num_active))
        least = price.least_chance(step_s / num_active)
        for follower in followers:
            if follower.is_done:
                continue
            next_chance = math.prod(follower.chances) * max(follower.hope, 0.5)
            if next_chance < least or follower.guesses[-1] in follower.mirror.end_ids:
                follower.is_done = True
