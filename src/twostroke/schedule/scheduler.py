"""Gives each request slices of a token budget, so that computed catches up with its tokens."""

from __future__ import annotations

import time
from bisect import insort
from itertools import count as count_up
from itertools import islice
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.core.errors import RequestError, UsageError
from twostroke.core.request import FinishReason
from twostroke.core.step import UNASKED, Delta, Slice, StepPlan
from twostroke.core.tree import ROOT
from twostroke.schedule.config import SchedulerStats, SchedulerView, check_queue, max_len
from twostroke.schedule.drafting import Drafting, accept
from twostroke.schedule.holdings import Holdings, held
from twostroke.schedule.prefixes import Prefixes
from twostroke.schedule.sketch import StepSketch
from twostroke.schedule.waiting import Ticket, WaitingLine, rank_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from twostroke.cache import PagePool, PrefixHit, PrefixIndex
    from twostroke.core.request import Request
    from twostroke.core.step import StepResult, TokenLogprobs
    from twostroke.schedule.config import SchedulerConfig
    from twostroke.schedule.policy import Policy


class Scheduler:
    """Plans steps and takes in their results. Not thread-safe: one loop owns it.

    A request waits (for the policy, then for room), runs (holds pages), and ends. Its rank is
    fixed: priority, then arrival, bounded by `max_overtakes`. The best-ranked request never loses
    its pages and computes a token in every step, and only finitely many can rank before a given
    one, so every request ends.

    Between `plan` and `commit` a step is in flight: requests may be added and finished, but the
    pages of running ones stay theirs until the commit.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        index: PrefixIndex | None,
        policy: Policy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if policy.size is not None and policy.size > config.max_running:
            reason = f"A batch of {policy.size} exceeds {{field}} ({config.max_running})."
            raise UsageError(reason, field="max_running")
        self.config = config
        self._pool = pool
        self._clock = clock
        self._prefixes = Prefixes(index, pool)
        self._holdings = Holdings(pool, config.token_budget)
        self._drafting = Drafting(pool, self._holdings)
        self._most_tokens = pool.groups.most_tokens(pool.num_pages, config.context_length)
        self._arrivals = count_up()
        self._tickets: dict[str, Ticket] = {}
        self._waiting = WaitingLine(policy, clock)
        self._running: list[Ticket] = []  # with pages, by rank
        self._flight: list[Ticket] | None = None  # owners of the slices of the step in flight
        self._num_prompt_tokens = 0
        self._num_hit_tokens = 0
        self._num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._tickets)

    @property
    def wait_s(self) -> float | None:
        """Seconds until `plan` may return a step if nothing but time changes; None for never."""
        return 0.0 if self._running else self._waiting.wait_s

    def add(self, request: Request) -> None:
        """Queue a request; stamps `arrival_s` unless the caller did.

        Raises:
            RequestError: no prompt, or the id of another request that has not ended.
            ContextLengthError: it could never fit.
            OverloadedError: the queue is full.
        """
        limit = self.max_len(request)
        if request.id in self._tickets:
            raise RequestError(f"A request with the id {request.id!r} is running.", param="id")
        check_queue(self.config, len(self._waiting), self._waiting.num_tokens, request)
        request.arrival_s = request.arrival_s or self._clock()
        arrival = next(self._arrivals)
        rank = (arrival + request.priority * self.config.max_overtakes, arrival)
        ticket = Ticket(request, rank, limit, self._prefixes.chain(request.salt))
        self._tickets[request.id] = ticket
        self._waiting.add(ticket)

    def max_len(self, request: Request) -> int:
        """Return how many tokens would end a request; raises if it could never fit."""
        return max_len(request, self.config.context_length, self._most_tokens)

    def flush(self) -> None:
        """Let waiting requests start without waiting for more, because no more will come."""
        self._waiting.flush()

    def finish(self, request: Request, reason: FinishReason) -> bool:
        """End a request at any time, without a delta; return False if it has ended already.

        If a step is in flight, the commit drops its results and releases the request's pages.
        """
        ticket = self._tickets.get(request.id)
        if ticket is None or ticket.request is not request:
            return False
        del self._tickets[request.id]
        request.finish_reason = reason
        if not ticket.is_running:
            self._waiting.remove(ticket)
        elif self._flight is None:
            self._running.remove(ticket)
            self._give_back(ticket)
        return True

    def rewrite(self, request: Request, num_kept: int, tokens: Sequence[int]) -> None:
        """Replace a request's tokens after the first `num_kept`, between steps.

        The kept tokens stay computed. This is for the sequences of a model that guesses: wrong
        guesses are replaced, and nothing happens while no token is pending.
        """
        ticket = self._tickets[request.id]
        if not ticket.is_running:
            self._waiting.num_tokens += num_kept + len(tokens) - len(request.tokens)
        request.tokens[num_kept:] = tokens
        request.num_computed = min(request.num_computed, num_kept)

    def plan(self, budget: int | None = None) -> StepPlan | None:
        """Decide the next step, or None if there is nothing to compute now.

        First come the running requests with one pending token, then, by rank, those with more
        and waiting ones. Allocates the pages that the step writes to. `budget` is the most tokens
        it computes, if less than usual; each request with one pending token is always served.
        """
        assert self._flight is None, "the step in flight must be committed first"
        self._waiting.make_ready(len(self._running))
        sketch = StepSketch(budget or self.config.token_budget, self.config.most_scored)
        page_size = self._pool.page_size
        slices, owners = sketch.slices, sketch.owners
        behind: list[Ticket] = []
        for ticket in self._running:
            request = ticket.request
            start = request.num_computed
            if len(request.tokens) - start != 1 or request.pooling is not None:
                behind.append(ticket)
            elif start < len(request.pages[0]) * page_size or self._make_room(ticket, 1, sketch):
                slices.append(Slice(request, start, 1, True))  # noqa: FBT003 - keywords cost time
                owners.append(ticket)
        sketch.budget = max(0, sketch.budget - len(slices))
        for ticket in behind:
            self._admit(sketch, ticket)
            if ticket.is_running and sketch.budget:
                self._give_slice(ticket, sketch)
        self._admit(sketch, None)
        if not slices:
            assert not any(t.request.num_pending for t in self._running), "no progress"
            return None
        self._flight = owners
        return StepPlan(tuple(slices), tuple(sketch.preempted), sketch.budget)

    def add_drafts(
        self, piece: Slice, drafts: Sequence[int], parents: Sequence[int] = ()
    ) -> Sequence[int]:
        """Put drafts into a slice of the step in flight, as many as there is room for.

        They are a chain, or a tree if `parents` say which draft each follows (-1 for none); a slice
        with a tree has one row. Returns the drafts that were taken, in the order of their rows.
        """
        ticket = self._tickets.get(piece.request.id)
        if ticket is None:  # it has ended
            return ()
        most = ticket.max_len - piece.start - piece.count - 1
        return self._drafting.add(piece, drafts, parents, most, len(self._running))

    def commit(self, plan: StepPlan, result: StepResult) -> list[Delta]:
        """Take in a step: drawn tokens, full pages for the prefix cache, ends and their pages.

        Returns a delta for each request that got something or ended, in the plan's order.
        """
        owners = self._flight
        assert owners is not None, "no plan is in flight"
        self._flight = None
        deltas = []
        drawn = zip(result.tokens, result.logprobs, strict=True)
        scores, states = iter(result.scores), iter(result.states)
        for ticket, piece in zip(owners, plan.slices, strict=True):
            delta = self._advance(ticket, piece, drawn, scores, states)
            if delta is not None:
                deltas.append(delta)
        assert next(drawn, None) is None, "more tokens than slices that sample"
        assert next(scores, None) is None, "more scores than scored rows"
        assert next(states, None) is None, "more states than pooled slices"
        if len(self._tickets) < len(self._running) + len(self._waiting):
            self._sweep()
        return deltas

    def stats(self) -> SchedulerStats:
        """Return requests and pages by state, and counts since the start."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
            num_free_pages=self._pool.num_free,
            num_cached_pages=self._pool.num_cached,
            num_referenced_pages=self._pool.num_referenced,
            num_prompt_tokens=self._num_prompt_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_preemptions=self._num_preemptions,
        )

    def view(self) -> SchedulerView:
        """Return a copy of the running requests and of the state of all pages."""
        counts, cached = self._pool.contents()
        return SchedulerView(
            stats=self.stats(),
            running=tuple([ticket.request for ticket in self._running]),
            held=tuple([tuple(map(tuple, ticket.request.pages)) for ticket in self._running]),
            counts=counts,
            cached=cached,
            waiting_since_s=min((t.request.arrival_s for t in self._waiting), default=None),
        )

    def _advance(
        self,
        ticket: Ticket,
        piece: Slice,
        drawn: Iterator[tuple[int, TokenLogprobs | None]],
        scores: Iterator[TokenLogprobs | None],
        states: Iterator[NDArray[np.float32]],
    ) -> Delta | None:
        """Take in what a slice computed, drew and reports; return a delta if it did either."""
        request, delta, pooled = piece.request, None, None
        scored: tuple[TokenLogprobs | None, ...] = ()
        is_reported = piece.start < request.num_prompt and request.hints.shows_progress
        computed = piece.start + piece.count
        if piece.drafts:
            tokens = tuple(islice(drawn, piece.num_drawn))
        elif piece.samples:
            token, logprob = next(drawn)
        if piece.num_scored or piece.num_pooled:
            scored, is_reported = tuple(islice(scores, piece.num_scored)), True
            pooled = next(states) if piece.num_pooled else None
        if request.finish_reason is not None:  # it was ended while the step ran
            self._drafting.settle(piece, ROOT)
            return None
        if piece.drafts:
            delta, last = accept(ticket, piece, tokens)
            computed += len(delta.tokens) - 1
            self._drafting.settle(piece, last)
        elif piece.samples:
            if token in request.end_ids or len(request.tokens) + 1 >= ticket.max_len:
                delta, _ = accept(ticket, piece, [(token, logprob)])
            else:  # the usual case, quickly
                request.tokens.append(token)
                delta = Delta(request, (token,), (logprob,) if logprob else UNASKED)
        elif request.pooling is not None and computed == len(request.tokens):
            request.finish_reason = FinishReason.LENGTH
        if is_reported:
            delta = replace(delta or Delta(request, ()), scores=scored, states=pooled)
            request.num_scored += len(scored)
        request.num_computed = computed
        if computed >= ticket.due_at:
            self._settle(ticket)
        if request.finish_reason is not None:
            del self._tickets[request.id]
        return delta

    def _give_slice(self, ticket: Ticket, sketch: StepSketch) -> None:
        request = ticket.request
        wanted = min(len(request.tokens) - request.num_computed, sketch.budget)
        count = self._make_room(ticket, sketch.most_rows(request, wanted), sketch)
        if count:
            sketch.add(ticket, count)

    def _make_room(self, ticket: Ticket, wanted: int, sketch: StepSketch) -> int:
        """Give a request pages for up to `wanted` tokens, for one even at the cost of others."""
        request, page_size = ticket.request, self._pool.page_size
        room = len(request.pages[0]) * page_size - request.num_computed
        if room < wanted:
            while not room and not self._holdings.can_grow:
                victim = self._running[-1]
                if victim is ticket:
                    return 0
                self._preempt(victim, sketch)
            room += page_size * self._holdings.grow(request, -(-(wanted - room) // page_size))
        return min(room, wanted)

    def _admit(self, sketch: StepSketch, before: Ticket | None) -> None:
        """Start the ready requests that rank before one, in order, until the budget is spent."""
        at = 0
        ready = self._waiting.ready
        while at < len(ready) and sketch.budget:
            ticket = ready[at]
            if before is not None and before.rank < ticket.rank:
                return
            if not sketch.most_rows(ticket.request, 1):
                return
            hit = self._prefixes.match(ticket)
            if hit is None:
                at += 1
                continue
            num_victims = self._num_victims(ticket, hit, sketch)
            if num_victims is None or ticket.request in sketch.preempted:
                return
            for _ in range(num_victims):
                self._preempt(self._running[-1], sketch)
            self._waiting.remove(ticket)
            sketch.reserved = self._reserve(sketch)
            self._start(ticket, hit)
            self._give_slice(ticket, sketch)
            sketch.reserved += self._holdings.num_reserved(ticket.request)

    def _num_victims(self, ticket: Ticket, hit: PrefixHit, sketch: StepSketch) -> int | None:
        """Return how many of the last running requests to preempt so that `ticket` can start.

        Only less urgent ones are preempted; None if that is not enough. Running requests keep the
        pages that their tokens still need and one a group to grow into: a request that is soon
        preempted computes its tokens twice. When nothing runs, anything fits that `add` let in.
        """
        holdings = self._holdings
        room = self._pool.num_available - holdings.num_taken(ticket.request, hit)
        room -= self._reserve(sketch)
        num_running = len(self._running)
        for num_victims in range(num_running + 1):
            num_left = num_running - num_victims
            if not num_left or (room >= 0 and num_left < self.config.max_running):
                return num_victims
            victim = self._running[num_left - 1]
            is_urgent = ticket.request.priority < victim.request.priority
            if not is_urgent or victim.rank < ticket.rank:
                return None
            room += holdings.num_own(victim.request, hit) + holdings.num_reserved(victim.request)
        return None

    def _reserve(self, sketch: StepSketch) -> int:
        """Pages that the running requests may still need soon."""
        if sketch.reserved is None:
            reserved = self._holdings.num_reserved
            sketch.reserved = sum(reserved(ticket.request) for ticket in self._running)
        return sketch.reserved

    def _start(self, ticket: Ticket, hit: PrefixHit) -> None:
        request = ticket.request
        self._pool.share(held(hit.pages))
        request.pages, ticket.num_known = hit.pages, hit.num_known
        request.num_computed = hit.num_places * self._pool.page_size
        if not request.num_preemptions:
            request.started_s = self._clock()
            request.num_cached = request.num_computed
            self._num_prompt_tokens += request.num_prompt
            self._num_hit_tokens += request.num_cached
        self._prefixes.start(ticket)
        self._settle(ticket)
        ticket.is_running = True
        insort(self._running, ticket, key=rank_of)

    def _preempt(self, victim: Ticket, sketch: StepSketch) -> None:
        """Release the pages of the running request that ranks last; it will compute them again."""
        assert victim is self._running[-1]
        self._running.pop()
        sketch.preempt(victim)
        self._give_back(victim)
        victim.request.num_computed = 0
        victim.request.num_preemptions += 1
        victim.request.num_moves += 1
        self._num_preemptions += 1
        self._waiting.put_back(victim)

    def _give_back(self, ticket: Ticket) -> None:
        ticket.is_running = False
        self._prefixes.stop(ticket)
        self._holdings.give_back(ticket.request)

    def _settle(self, ticket: Ticket) -> None:
        """Publish full pages, release those that windows passed; note when more are due."""
        self._prefixes.publish(ticket)
        ticket.due_at = ticket.publish_at
        if self._pool.groups.has_windows:
            self._holdings.release_passed(ticket)

    def _sweep(self) -> None:
        """Release the pages of running requests that have ended."""
        for ticket in [t for t in self._running if t.request.finish_reason is not None]:
            self._running.remove(ticket)
            self._give_back(ticket)
