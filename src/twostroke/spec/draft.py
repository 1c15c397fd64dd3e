"""Guesses of a smaller model."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import count as count_up
from typing import TYPE_CHECKING

from twostroke.cache import PagePool, PrefixIndex
from twostroke.core.request import Request
from twostroke.core.step import NO_TOKEN, Slice, StepPlan
from twostroke.program import BatchShape
from twostroke.schedule.holdings import Holdings
from twostroke.schedule.prefixes import Prefixes
from twostroke.schedule.ticket import Ticket
from twostroke.spec.follower import HOPE, PRIOR, Follower, Words
from twostroke.spec.guesses import PLAIN
from twostroke.spec.hope import Hope
from twostroke.spec.odds import Odds
from twostroke.spec.round import Round

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.backends import Runner
    from twostroke.spec.pace import Pace
    from twostroke.spec.proposal import Outcome, Price, Proposal

_LENGTH_STEP = 0.05
_DECLINED_RETURN = 0.02  # of hope's way back to the beginning, when a prompt did not pay
# What draws in words of its own: the likeliest token, as nothing else fits another vocabulary.
_OWN_WORDS = PLAIN | {"temperature": 0.0, "logprobs": 0}


class DraftModel:
    """Lets a second, smaller model write ahead, in batches, on pages of its own.

    It draws as the request would: with the request's parameters, its seed and the token's index, so
    that two models that agree on a distribution agree on the token, at any temperature. How sure
    it was of a token says how likely the token is right; what that means is learned. For each
    request it stops once the next guess would not be worth its time. A draft with a vocabulary of
    its own reads the request's text in its own tokens, and takes the likeliest.

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
        own_vocab_size: int,
        context_length: int,
        token_budget: int,
        words: Words | None = None,
    ) -> None:
        """Write with `runner`, whose steps take what `pace` says, `token_budget` rows a step.

        `vocab_size` is the target's: the draft, with `own_vocab_size`, may have rows for tokens
        that nobody has, or too few for control tokens that only the target has. `words` are
        needed where its vocabulary is another one.
        """
        facts = runner.facts
        self._runner = runner
        self._pace = pace
        self._vocab_size, self._own_vocab_size = vocab_size, own_vocab_size
        self._context_length = context_length
        self._token_budget = token_budget
        self._words = words
        self._pool = PagePool(facts.num_pages, facts.page_size, facts.windows)
        index = PrefixIndex(self._pool, reuse_generated=words is None)
        self._prefixes = Prefixes(index, self._pool)
        self._holdings = Holdings(self._pool, token_budget)
        self._followers: dict[Request, Follower] = {}  # the one asked about longest ago first
        self._declined: set[Request] = set()
        self._arrivals = count_up()
        self._odds = Odds(PRIOR)
        self._length = 100.0  # of an answer, on average
        self._hope = Hope(HOPE, HOPE)  # of all requests

    def propose(self, requests: Sequence[Request], price: Price) -> list[Proposal | None]:
        """Return guesses for each request, which has one token to compute, or None."""
        step_s = self._pace.seconds(BatchShape.decode((1,) * len(requests)))
        least = price.least_chance(step_s / len(requests))
        found = {request: self._follow(request, price, least) for request in requests}
        ready = self._catch_up([follower for follower in found.values() if follower is not None])
        this_round = Round(len(requests), price, step_s)
        for _ in range(price.most - 1):
            self._stop(ready, this_round)
            active = [f for f in ready if not f.is_done]
            active = [f for f in active if self._grow(f, 1, ready)]
            if not active:
                break
            self._run([Slice(f.mirror, f.mirror.num_computed, 1, samples=True) for f in active])
        return [f.proposal(price.most) if (f := found[r]) else None for r in requests]

    def learn(self, request: Request, proposal: Proposal, outcome: Outcome) -> None:
        """Hear what became of a proposal."""
        follower = self._followers.get(request)
        if follower is not None and outcome.tried:
            follower.odds.learn(proposal, outcome)
            follower.hope.learn(right=bool(outcome.right))
            self._hope.learn(right=bool(outcome.right))

    def finish(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
        if request.num_output:
            self._length += _LENGTH_STEP * (request.num_output - self._length)
        self._declined.discard(request)
        self._drop(request)

    def close(self) -> None:
        """Give back memory and threads."""
        self._runner.close()

    def _drop(self, request: Request) -> None:
        follower = self._followers.pop(request, None)
        if follower is not None:
            self._release(follower)
            self._runner.forget(follower.mirror)

    def _follow(self, request: Request, price: Price, least: float) -> Follower | None:
        """Return the draft's view of a request, brought up to date; None if it is not worth it."""
        follower = self._followers.pop(request, None) or self._meet(request)
        if follower is None:
            return None
        is_new = follower.is_new
        follower.go_on(request)
        self._followers[request] = follower
        has_met = is_new and not follower.is_new
        if has_met and not self._pays(request, follower, price, least):
            self._hope.come_back(_DECLINED_RETURN)
            self._decline(request)
            return None
        if len(follower.mirror.tokens) + price.most > self._context_length:
            self._decline(request)
            return None
        if request.params.has_penalties:
            self._runner.forget(follower.mirror)  # it knows guesses that were wrong
        if follower.mirror.pages:
            self._prefixes.publish(follower.ticket)
            if self._pool.groups.has_windows:
                self._leave_behind(follower)
        return None if follower.hope.is_lost(least) else follower

    def _pays(self, request: Request, follower: Follower, price: Price, least: float) -> bool:
        """Whether what the guesses may save is more than computing the prompt takes.

        Each guess costs as much time as `least` tokens take without any.
        """
        if not follower.mirror.tokens:
            return False
        hit = self._prefixes.match(follower.ticket)
        num_known = hit.num_places * self._pool.page_size if hit is not None else 0
        num_new = max(1, len(follower.mirror.tokens) - num_known)
        left = max(self._length - request.num_output, self._length / 4)
        if request.params.max_tokens is not None:
            left = min(left, request.params.max_tokens - request.num_output)
        prompt_s = self._pace.seconds(BatchShape.prefill(num_new, num_known))
        return _share_saved(self._hope.value, least, price.most) * left >= price.rate * prompt_s

    def _meet(self, request: Request) -> Follower | None:
        """Return the draft's view of a new request, or None once it was found not to pay."""
        if request in self._declined:
            return None
        if len(request.tokens) < self._context_length:
            return self._new_follower(request)
        self._declined.add(request)
        return None

    def _decline(self, request: Request) -> None:
        self._drop(request)
        self._declined.add(request)

    def _new_follower(self, request: Request) -> Follower:
        params, end_ids = replace(request.params, logprobs=0), request.end_ids
        if self._words is not None:
            params = replace(request.params, **_OWN_WORDS)
            end_ids = self._words.to_target.source.eos_ids
        mirror = Request(
            request.id,
            [],
            request.num_prompt,
            params,
            request.seed,
            end_ids=end_ids,
            salt=request.salt,
        )
        arrival = next(self._arrivals)
        chain = self._prefixes.chain(request.salt)
        ticket = Ticket(mirror, (arrival, arrival), self._context_length, chain)
        hope = Hope(HOPE, self._hope.value)
        odds = self._odds.for_request()
        return Follower(mirror, ticket, odds, self._words, hope, self._own_vocab_size)

    def _catch_up(self, followers: Sequence[Follower]) -> list[Follower]:
        """Compute what the draft has not seen yet; return those that then have a first guess.

        Those with the least to do come first; what does not fit into a step waits for the next
        time.
        """
        ready, computed, slices, budget = [], [], [], self._token_budget
        for follower in followers:
            if not (follower.is_done or follower.mirror.pages or self._start(follower)):
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
            computed.append(follower)
            if samples:
                ready.append(follower)
        if slices:
            self._run(slices)
        for follower in computed:  # what others may have in common with it
            self._prefixes.publish(follower.ticket)
        return ready

    def _start(self, follower: Follower) -> bool:
        """Give a follower the pages of what the draft knows of its beginning."""
        hit = self._prefixes.match(follower.ticket)
        if hit is None:  # another one is about to compute it
            return False
        self._holdings.start(follower.ticket, hit)
        follower.mirror.num_computed = hit.num_places * self._pool.page_size
        self._prefixes.start(follower.ticket)
        return True

    def _grow(self, follower: Follower, count: int, kept: Sequence[Follower]) -> bool:
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

    def _leave_behind(self, follower: Follower) -> None:
        """Give back pages behind windows; what may still be said anew must be kept until then."""
        mirror = follower.mirror
        num_computed = mirror.num_computed
        mirror.num_computed = min(num_computed, follower.num_same)
        self._holdings.leave_behind(follower.ticket)
        mirror.num_computed = num_computed

    def _release(self, follower: Follower) -> None:
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
            is_known = self._words is not None or token < self._vocab_size
            if logprobs is None or token == NO_TOKEN or not is_known:
                follower.is_done = True
                continue
            follower.add(token, math.exp(logprobs.logprob))

    def _stop(self, followers: Sequence[Follower], this_round: Round) -> None:
        """Mark those for which another guess would not be worth its time."""
        num_active = sum(not follower.is_done for follower in followers)
        start = max((f.mirror.num_computed for f in followers), default=0)
        step_s = self._pace.seconds(BatchShape.decode((start,) * max(1, num_active)))
        num_guesses = sum([len(follower.guesses) for follower in followers])
        num_expected = sum([follower.expected for follower in followers])
        least = this_round.least_next(num_guesses, num_expected, num_active, step_s)
        for follower in followers:
            if follower.is_done:
                continue
            next_chance = follower.chance * max(follower.hope.value, 0.5)
            if next_chance < least or follower.guesses[-1] in follower.mirror.end_ids:
                follower.is_done = True


def _share_saved(chance: float, cost: float, most: int) -> float:
    """Return which share of the time the best number of guesses up to `most` saves.

    Each is right with `chance` if those before it are, and costs as much as `cost` tokens.
    """
    expected = taken = right = 1.0
    best = 0.0
    for _ in range(most):
        right *= chance
        expected += right
        taken += cost
        best = max(best, 1 - taken / expected)
    return best
