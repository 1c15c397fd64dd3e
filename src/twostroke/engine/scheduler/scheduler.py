"""Gives each request slices of a token budget, so that computed catches up with its tokens."""

from __future__ import annotations

import time
from bisect import insort
from functools import partial
from typing import TYPE_CHECKING

from twostroke.core.draft_tree import ROOT
from twostroke.core.errors import RequestError, UsageError
from twostroke.core.step import Slice, StepPlan
from twostroke.engine.scheduler.config import SchedulerStats, SchedulerView, max_len
from twostroke.engine.scheduler.draft_pages import DraftPages
from twostroke.engine.scheduler.fast_forward import do_quiet, num_quiet
from twostroke.engine.scheduler.kv_cache_manager import (
    InFlightSteps,
    KvCacheManager,
    PrefixCache,
    held,
)
from twostroke.engine.scheduler.queue import Deadlines, WaitingQueue
from twostroke.engine.scheduler.request_state import RequestState, rank_of
from twostroke.engine.scheduler.results import ResultReader
from twostroke.engine.scheduler.step_builder import StepBuilder, in_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.core.errors import DeadlineError
    from twostroke.core.request import FinishReason, Request
    from twostroke.core.step import RequestDelta, StepResult
    from twostroke.engine.kv_cache import PagePool, PrefixHit, PrefixIndex
    from twostroke.engine.scheduler.config import SchedulerConfig
    from twostroke.engine.scheduler.policy import Policy


class Scheduler:
    """Plans steps and takes in their results. Not thread-safe: one loop owns it.

    A request waits (for the policy, then for room), runs (holds pages), and ends. Its rank is
    fixed: priority, then its tenant's turn (`FairOrder`), bounded by `max_overtakes`. The
    best-ranked request never loses its pages and computes a token in every step, and only finitely
    many can rank before a given one, so every request ends.

    Between `plan` and `commit` a step is in flight; with `steps_ahead`, others may be planned
    meanwhile, and are committed in the same order. A request is in several of them only with
    consecutive chunks of its tokens, since the next token is not known before the commit. A backend
    that draws ahead knows it, though: then requests whose sampling needs no earlier token are in
    each step, and rows past the end of a request are dropped at the commit. Requests may be added
    and finished at any time, but pages stay where they are until all steps that use them are
    committed, so a request is preempted only while no step is in flight.

    `prefixes` knows what the prefix cache holds, and what comes from elsewhere.
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
        self.prefixes = PrefixCache(index, pool)
        self._holdings = KvCacheManager(pool, config.most_in_flight)
        self._drafting = DraftPages(pool, self._holdings)
        self._most_tokens = pool.groups.max_tokens(pool.num_pages, config.context_length)
        self.prefixes.transfers.limit(self._most_tokens, config.token_budget, clock)
        self._tickets: dict[str, RequestState] = {}
        self._waiting = WaitingQueue(config, policy, clock)
        self._deadlines = Deadlines()
        self._running: list[RequestState] = []  # with pages, by rank
        self._flights = InFlightSteps(self._holdings)
        self._num_prompt_tokens = self._num_hit_tokens = 0
        self._num_preemptions = self._num_recoveries = 0

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._tickets)

    @property
    def wait_s(self) -> float | None:
        """Seconds until `plan` or `overdue` may return something if only time changes."""
        if self._running:
            return 0.0
        due_s, start_s = self._deadlines.next_s, self.prefixes.wait_s(self._waiting)
        waits = [start_s, None if due_s is None else max(0.0, due_s - self._clock())]
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def add(self, request: Request) -> RequestState:
        """Queue a request, return its ticket; stamps `arrival_s` unless the caller did.

        Raises:
            RequestError: no prompt, or the id of another request that has not ended.
            ContextLengthError: it could never fit.
            OverloadedError: the queue is full, or too long for the request's deadline.
        """
        limit = self.max_len(request)
        if request.id in self._tickets:
            raise RequestError(f"A request with the id {request.id!r} is running.", param="id")
        rank = self._waiting.check(request)
        request.arrival_s = request.arrival_s or self._clock()
        ticket = RequestState(request, rank, limit, self.prefixes.chain(request.salt))
        ticket.may_draw_ahead = self.config.draws_ahead and request.draws_by_itself
        self._tickets[request.id] = ticket
        self._waiting.add(ticket)
        self._deadlines.add(ticket, len(self._tickets))
        return ticket

    def overdue(self) -> list[tuple[Request, DeadlineError]]:
        """Return, once, the requests whose time is over, with an error each; `finish` them now."""
        return self._deadlines.pop(self._clock())

    def max_len(self, request: Request) -> int:
        """Return how many tokens would end a request; raises if it could never fit."""
        return max_len(request, self.config.context_length, self._most_tokens)

    def flush(self) -> None:
        """Let waiting requests start without waiting for more, because no more will come."""
        self._waiting.flush()

    def finish(self, request: Request, reason: FinishReason) -> bool:
        """End a request at any time, without a delta; return False if it has ended already.

        The results of steps in flight are dropped, and its pages are released after these.
        """
        ticket = self._tickets.get(request.id)
        if ticket is None or ticket.request is not request:
            return False
        del self._tickets[request.id]
        self._waiting.order.end(ticket)
        request.finish_reason = reason
        if not ticket.is_running:
            self._waiting.remove(ticket)
        else:
            self._running.remove(ticket)
            self._give_back(ticket)
        return True

    def rewrite(self, request: Request, num_kept: int, tokens: Sequence[int]) -> None:
        """Replace a request's tokens after the first `num_kept`, which stay computed.

        This is for models that guess; nothing happens while no token is pending.
        """
        ticket = self._tickets[request.id]
        if not ticket.is_running:
            self._waiting.tokens[request.priority] += num_kept + len(tokens) - len(request.tokens)
        request.tokens[num_kept:] = tokens
        request.num_computed = request.num_planned = min(request.num_computed, num_kept)

    def plan(self, budget: int | None = None) -> StepPlan | None:
        """Decide the next step, or None; allocate the pages that it writes to.

        First come the running requests with one pending token, which are always served (or take
        turns, if steps may be in flight), then, by rank, those with more and waiting ones. While
        other prompts are read, lines of batches pause, and while others run, few of them go on.
        `budget` is the most tokens it computes, if less than usual.
        """
        assert len(self._flights) <= self.config.steps_ahead, "steps in flight come first"
        if self._flights.must_land():
            return None
        self._waiting.make_ready(len(self._running))
        sketch = StepBuilder(budget or self.config.step_budget, self.config.most_scored)
        slices, owners, page_size = sketch.slices, sketch.owners, self._pool.page_size
        behind: list[RequestState] = []
        for ticket in in_turn(self._running, self.config):
            request = ticket.request
            start = request.num_planned
            has_one = len(request.tokens) - start == 1 or ticket.draws_ahead
            if not has_one or request.pooling is not None:
                behind.append(ticket)
            elif start % page_size or self._make_room(ticket, 1, sketch):
                slices.append(Slice(request, start, 1, True))  # noqa: FBT003 - keywords cost time
                owners.append(ticket)
                request.num_planned = start + 1
        sketch.put_aside(self._running, behind, self._waiting.ready, self.config.most_lines)
        sketch.budget = max(0, sketch.budget - len(slices))
        self._read_prompts(sketch, behind)
        if sketch.take_back():
            self._read_prompts(sketch, behind)
        if not slices:
            is_stuck = not self._flights and any(t.request.num_pending for t in self._running)
            assert not is_stuck, "no progress"
            return None
        plan = StepPlan(tuple(slices), tuple(sketch.preempted), sketch.budget)
        self._flights.steps.append((plan, owners))
        return plan

    def add_drafts(
        self, piece: Slice, drafts: Sequence[int], parents: Sequence[int] = ()
    ) -> Sequence[int]:
        """Put drafts into a slice of the newest step in flight, as many as there is room for.

        They are a chain, or a tree if `parents` say which draft each follows (-1 for none); a slice
        with a tree has one row. Returns the drafts that were taken, in the order of their rows.
        """
        ticket = self._tickets.get(piece.request.id)
        if ticket is None:  # it has ended
            return ()
        most = ticket.max_len - piece.start - piece.count - 1
        return self._drafting.add(piece, drafts, parents, most, len(self._running))

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        """Take in the oldest step: drawn tokens, full pages for the prefix cache, ends.

        Returns a delta for each request that got something or ended, in the plan's order.
        """
        owners = self._flights.land(plan)
        reader = ResultReader(result, self._drafting)
        deltas = reader.take_all(owners, plan.slices, self._settle)
        reader.check_taken()
        if reader.has_ends:
            for ticket in [t for t in self._running if t.request.is_finished]:
                del self._tickets[ticket.request.id]
                self._waiting.order.end(ticket)
                self._running.remove(ticket)
                self._give_back(ticket)
        self._flights.release_ended()
        return deltas

    def quiet(self, most: int) -> tuple[list[Request], int]:
        """Return the running requests, by rank, and how many quiet steps are next."""
        if self._flights or self.config.steps_ahead or len(self._waiting):
            return [], 0
        num_steps = num_quiet(self._running, self._pool, most)
        return [t.request for t in self._running] if num_steps else [], num_steps

    def decode(self, tokens: Sequence[Sequence[int]]) -> None:
        """Do quiet steps in which the requests that `quiet` returned draw these tokens."""
        make_room = partial(self._make_room, wanted=1, sketch=StepBuilder(0, 0))
        do_quiet(self._running, tokens, self._pool.page_size, make_room, self._settle)

    def recall(self) -> None:
        """Take back the newest step in flight, as if it had not been planned."""
        plan, _ = self._flights.steps.pop()
        for piece in plan.slices:
            self._drafting.settle(piece, ROOT)
            piece.request.num_planned = piece.start
        self._flights.release_ended()

    def preempt_all(self) -> None:
        """Take back all steps and pages, whose content is lost; requests are computed again."""
        while self._flights:
            self.recall()
        while self._running:
            self._preempt_last()
        self._pool.evict_all()
        self._num_recoveries += 1

    def stats(self) -> SchedulerStats:
        """Return requests and pages by state, and counts since the start."""
        return SchedulerStats(
            num_running=len(self._running) + len(self._flights.ended),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
            num_free_pages=self._pool.num_free,
            num_cached_pages=self._pool.num_cached,
            num_referenced_pages=self._pool.num_referenced,
            num_prompt_tokens=self._num_prompt_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_preemptions=self._num_preemptions,
            num_recoveries=self._num_recoveries,
            num_uncomputed=sum([ticket.request.num_pending for ticket in self._running]),
            horizon_s=self._pool.horizon_s,
        )

    def backlog(self) -> tuple[int, list[int]]:
        """Return how many tokens prompts lack, and how many at most each answer that has begun."""
        pairs = [(one, one.request.num_pending) for one in self._running]
        missing = [one.max_len - len(one.request.tokens) for one, count in pairs if count <= 1]
        return self._waiting.num_tokens + sum(n for _, n in pairs if n > 1), missing

    def view(self) -> SchedulerView:
        """Return a copy of the running requests and of the state of all pages."""
        counts, cached = self._pool.contents()
        running = tuple([ticket.request for ticket in (*self._running, *self._flights.ended)])
        held = tuple([tuple(map(tuple, request.pages)) for request in running])
        since_s = min((ticket.request.arrival_s for ticket in self._waiting), default=None)
        return SchedulerView(self.stats(), running, held, counts, cached, since_s)

    def _read_prompts(self, sketch: StepBuilder, behind: Sequence[RequestState]) -> None:
        for ticket in behind:
            self._admit(sketch, ticket)
            if ticket.is_running and sketch.budget and not sketch.pauses(ticket):
                self._give_slice(ticket, sketch)
        self._admit(sketch, None)

    def _give_slice(self, ticket: RequestState, sketch: StepBuilder) -> None:
        wanted = min(ticket.request.num_pending, sketch.most_for(ticket))
        if count := self._make_room(ticket, sketch.most_rows(ticket.request, wanted), sketch):
            sketch.add(ticket, count)

    def _make_room(self, ticket: RequestState, wanted: int, sketch: StepBuilder) -> int:
        """Give a request pages for up to `wanted` tokens, for one even at the cost of others."""
        request, page_size = ticket.request, self._pool.page_size
        room = len(request.pages[0]) * page_size - request.num_planned
        if room < wanted:
            while not room and not self._holdings.can_grow:
                if self._running[-1] is ticket or not self._flights.let_preempt():
                    return 0
                sketch.preempt(self._preempt_last())
            room += page_size * self._holdings.grow(request, -(-(wanted - room) // page_size))
        return min(room, wanted)

    def _admit(self, sketch: StepBuilder, before: RequestState | None) -> None:
        """Start the ready requests that rank before one, in order, until the budget is spent."""
        at = 0
        ready = self._waiting.ready
        while at < len(ready) and sketch.budget:
            ticket = ready[at]
            if before is not None and before.rank < ticket.rank:
                return
            if not sketch.most_rows(ticket.request, 1) or ticket.request in sketch.preempted:
                return
            hit = None if sketch.pauses(ticket) else self.prefixes.match(ticket)
            if hit is None:
                at += 1
                continue
            reserved, most_running = self._reserve(sketch), self.config.max_running
            num_victims = self._holdings.num_victims(
                ticket, hit, self._running, reserved, most_running
            )
            if num_victims is None:
                return
            if num_victims and not self._flights.let_preempt():
                return
            for _ in range(num_victims):
                sketch.preempt(self._preempt_last())
            self._waiting.remove(ticket)
            sketch.reserved = self._reserve(sketch)
            self._start(ticket, hit)
            self._give_slice(ticket, sketch)
            sketch.reserved += self._holdings.num_reserved(ticket.request)

    def _reserve(self, sketch: StepBuilder) -> int:
        """Pages that the running requests may still need soon."""
        if sketch.reserved is None:
            sketch.reserved = self._holdings.reserve(self._running)
        return sketch.reserved

    def _start(self, ticket: RequestState, hit: PrefixHit) -> None:
        request = ticket.request
        self._pool.share(held(hit.pages))
        request.pages, ticket.num_known = hit.pages, hit.num_known
        request.num_computed = request.num_planned = hit.num_places * self._pool.page_size
        if not request.num_preemptions:
            request.started_s = self._clock()
            request.num_cached = request.num_computed
            self._num_prompt_tokens += request.num_prompt
            self._num_hit_tokens += request.num_cached
            self._waiting.order.start(ticket)
        self._waiting.pace.start(request.priority, len(request.tokens))
        self.prefixes.start(ticket)
        self._settle(ticket)
        ticket.is_running = True
        insort(self._running, ticket, key=rank_of)

    def _preempt_last(self) -> RequestState:
        """Release the pages of the running request that ranks last; it will compute them again."""
        victim = self._running.pop()
        victim.request.num_computed = victim.request.num_planned = 0
        victim.request.num_preemptions += 1
        victim.request.num_moves += 1
        self._num_preemptions += 1
        self._give_back(victim)
        self._waiting.put_back(victim)
        return victim

    def _give_back(self, ticket: RequestState) -> None:
        """Release the pages of a request that stops running, or do so after steps in flight."""
        ticket.is_running = False
        self.prefixes.stop(ticket)
        self._flights.give_back(ticket)

    def _settle(self, ticket: RequestState) -> None:
        """Publish full pages, release those that windows passed; note when more are due."""
        self.prefixes.publish(ticket)
        ticket.due_at = ticket.publish_at
        if self._pool.groups.has_windows:
            self._holdings.release_passed(ticket)
