"""The scheduler: `plan` chooses the tokens of the next step, `commit` applies its result.

A request has tokens and a count of computed tokens; each step lets the count catch up with the
tokens. Prefill, chunked prefill, decode, prefix hits and preemption all follow from this rule.
"""

from __future__ import annotations

import time
from bisect import insort
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.errors import RequestError, UsageError
from twostroke.core.step import Slice, StepPlan
from twostroke.engine.scheduler.config import SchedulerStats, SchedulerView, max_len
from twostroke.engine.scheduler.draft_pages import DraftPages
from twostroke.engine.scheduler.fast_forward import fast_forward, num_fast_forward_steps
from twostroke.engine.scheduler.kv_cache_manager import (
    KvCacheManager,
    PrefixCache,
    StepsInFlight,
    all_pages,
)
from twostroke.engine.scheduler.queue import Deadlines, WaitingQueue
from twostroke.engine.scheduler.recurrent_states import RecurrentStates, slots_per_request
from twostroke.engine.scheduler.request_state import RequestState, priority_key
from twostroke.engine.scheduler.results import ResultReader
from twostroke.engine.scheduler.step_builder import StepBuilder, schedulable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.core.errors import DeadlineError
    from twostroke.core.request import FinishReason, Request
    from twostroke.core.step import RequestDelta, StepResult
    from twostroke.engine.kv_cache import PagePool, PrefixHit, PrefixIndex, StatePool
    from twostroke.engine.scheduler.config import SchedulerConfig
    from twostroke.engine.scheduler.policy import Policy

_MAX_LOOKAHEAD: Final = 16  # waiting requests whose prompts are compared with running requests


class Scheduler:
    """Plans steps and applies their results. Not thread-safe: one engine loop owns it.

    A request waits (first for the batching policy, then for room), runs (holds pages), and ends.
    Its priority key is fixed: its priority, then its tenant's fair turn (`FairOrder`), bounded by
    `max_overtakes`. The most urgent request is never preempted and computes a token in every step,
    and only a bounded number of later requests can overtake a request, so every request ends.

    Between `plan` and `commit` a step is in flight. With `steps_ahead`, further steps may be
    planned meanwhile; they are committed in the order of their plans. A request is in several steps
    in flight only with consecutive chunks of its prompt, since its next token is not known before
    the commit. With `samples_ahead` the backend knows that token: then requests whose sampling
    needs no earlier token are in every step, and rows after a request's last token are dropped at
    the commit.

    Requests may be added and finished at any time. A page belongs to its request until all steps
    that use the page are committed, so a request is preempted only while no step is in flight.

    Attributes:
        config: the limits.
        prefix_cache: the prefix cache, and the KV transfers that bring pages from KV offload or
            other engines.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: PagePool,
        index: PrefixIndex | None,
        policy: Policy,
        clock: Callable[[], float] = time.monotonic,
        states: StatePool | None = None,
    ) -> None:
        """Schedule requests on the KV pages of `pool`; without `index` there is no prefix cache.

        `policy` decides when waiting requests may start (continuous, dynamic or static batching).
        `clock` returns seconds. `states`: the slots for recurrent states, for models that have
        them.
        """
        if policy.size is not None and policy.size > config.max_running:
            reason = f"A batch of {policy.size} exceeds {{field}} ({config.max_running})."
            raise UsageError(reason, field="max_running")
        self.config = self._first_config = config
        self._recurrent = None
        if states is not None:
            is_ahead = config.steps_ahead > 0
            num_reserved = config.max_running * slots_per_request(config.steps_ahead)
            self._recurrent = RecurrentStates(
                states, pool.page_size, num_reserved if is_ahead else 0
            )
        self.prefix_cache = PrefixCache(index, pool, self._recurrent)
        self._pool = pool
        self._policy = policy
        self._clock = clock
        self._kv_cache = KvCacheManager(pool, config.max_tokens_in_flight, self._recurrent)
        self._draft_pages = DraftPages(pool, self._kv_cache, self._recurrent)
        self._max_tokens = pool.groups.max_tokens(pool.num_pages, config.context_length)
        self.prefix_cache.transfers.limit(
            self._max_tokens,
            config.token_budget,
            clock,
            config.max_running * slots_per_request(config.steps_ahead),
        )
        self._states: dict[str, RequestState] = {}  # unfinished requests by id
        self._waiting = WaitingQueue(config, policy, clock)
        self._deadlines = Deadlines()
        self._running: list[RequestState] = []  # requests that hold pages, by priority key
        self._in_flight = StepsInFlight(self._kv_cache)
        self._num_started = 0
        self._num_prompt_tokens = 0
        self._num_hit_tokens = 0
        self._num_preemptions = 0
        self._num_recoveries = 0

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._states)

    @property
    def wait_s(self) -> float | None:
        """Seconds that the engine loop may sleep if no request arrives; None for no limit.

        After this time `plan` or `pop_overdue` may return something.
        """
        if self._running:
            return 0.0
        start_s = self.prefix_cache.wait_s(self._waiting)
        timeout_s = self._deadlines.next_s
        waits = [start_s, None if timeout_s is None else max(0.0, timeout_s - self._clock())]
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def add(self, request: Request) -> RequestState:
        """Queue a request and return its state; set its `arrival_s` if the caller did not.

        Raises:
            RequestError: the prompt is empty, or an unfinished request has the same id.
            ContextLengthError: the request could never fit.
            OverloadedError: the queue is full, or too long for the request's deadline.
        """
        limit = self.max_len(request)
        if request.id in self._states:
            raise RequestError(f"A request with the id {request.id!r} is running.", param="id")
        key = self._waiting.check(request)
        request.arrival_s = request.arrival_s or self._clock()
        state = RequestState(request, key, limit, self.prefix_cache.chain(request.salt))
        state.may_sample_ahead = self.config.samples_ahead and request.can_sample_ahead
        self._states[request.id] = state
        self._waiting.add(state)
        self._deadlines.add(state, len(self._states))
        return state

    def pop_overdue(self) -> list[tuple[Request, DeadlineError]]:
        """Return each request whose deadline has passed, once, with its error.

        The caller must call `finish` for each of them.
        """
        return self._deadlines.pop(self._clock())

    def max_len(self, request: Request) -> int:
        """Return the number of tokens, prompt included, at which a request ends.

        Raises:
            RequestError: the prompt is empty.
            ContextLengthError: the request could never fit.
        """
        return max_len(request, self.config.context_length, self._max_tokens)

    @property
    def _step_budget(self) -> int:
        """The maximum number of tokens of the next step.

        After the limits were lowered, more requests may run than the budget has tokens; each of
        them still gets one.
        """
        config, num_running = self.config, len(self._running)
        if num_running > config.token_budget:
            config = replace(config, token_budget=num_running)
        return config.step_budget

    def change_limits(self, token_budget: int, max_running: int) -> None:
        """Change the limits of later steps. Requests that run already keep their pages.

        `token_budget` and `max_running` are as in `SchedulerConfig`.

        Raises:
            UsageError: a limit is above its value at the start, for which memory was reserved, or
                the limits are not possible together.
        """
        first = self._first_config
        new_limits = {"token_budget": token_budget, "max_running": max_running}
        for field, value in new_limits.items():
            if not 1 <= value <= getattr(first, field):
                reason = f"must be from 1 to {getattr(first, field)}, got {value}."
                raise UsageError(reason, field=field)
        if self._policy.size is not None and self._policy.size > max_running:
            reason = f"A batch of {self._policy.size} exceeds {{field}} ({max_running})."
            raise UsageError(reason, field="max_running")
        self.config = replace(self.config, **new_limits)

    def flush(self) -> None:
        """Start a static or dynamic batch that is not full, because no more requests will come."""
        self._waiting.flush()

    def plan(self, budget: int | None = None) -> StepPlan | None:
        """Plan the next step and allocate its pages; return None if there is nothing to compute.

        Running requests with one pending token (decode) come first. They are in every step, or
        take turns if several steps may be in flight. The rest of the budget goes to prefills of
        running and waiting requests, by priority key. Batch requests pause while other requests
        prefill, and few of them decode while other requests run.

        `budget` is the maximum number of tokens of this step, if smaller than usual.
        """
        assert len(self._in_flight) <= self.config.steps_ahead, "commit steps in flight first"
        if self._in_flight.must_drain():
            return None
        self._waiting.make_ready(len(self._running))
        step_budget = self._step_budget
        if budget is not None:
            step_budget = min(budget, step_budget)
        builder = StepBuilder(step_budget, self.config.max_scored_rows)
        slices, owners, page_size = builder.slices, builder.owners, self._pool.page_size
        prefilling: list[RequestState] = []
        for state in schedulable(self._running, self.config):
            request = state.request
            start = request.num_planned
            is_decode = len(request.tokens) - start == 1 or state.samples_ahead
            if not is_decode or request.pooling is not None:
                prefilling.append(state)
            elif start % page_size or self._allocate_pages(state, 1, builder):
                slices.append(Slice(request, start, 1, True))  # noqa: FBT003 - keywords cost time
                owners.append(state)
                request.num_planned = start + 1
        builder.pause_batch_requests(
            self._running,
            prefilling=prefilling,
            ready=self._waiting.ready,
            max_batch_rows=self.config.max_batch_rows,
        )
        builder.budget = max(0, builder.budget - len(slices))
        self._add_prefills(builder, prefilling)
        if builder.resume_batch_requests():
            self._add_prefills(builder, prefilling)
        if not slices:
            is_stuck = not self._in_flight and any(
                state.request.num_pending for state in self._running
            )
            assert not is_stuck, "no running request makes progress"
            return None
        num_drafts = builder.budget
        if self._recurrent is not None:
            self._recurrent.plan(slices)
            num_drafts = min(num_drafts, self._recurrent.num_spare)
        plan = StepPlan(tuple(slices), tuple(builder.preempted), num_drafts)
        self._in_flight.steps.append((plan, owners))
        return plan

    def add_drafts(
        self, slice_: Slice, drafts: Sequence[int], parents: Sequence[int] = ()
    ) -> Sequence[int]:
        """Add speculative drafts to a slice of the newest step in flight, while pages are free.

        Without `parents` the drafts are a chain. With `parents` they are a tree: `parents[i]` is
        the index of the draft before draft i, or -1 for the slice's newest token; the slice then
        has one row. Returns the indices of the drafts that were added, in the order of their rows.
        """
        state = self._states.get(slice_.request.id)
        if state is None:  # the request has ended
            return ()
        return self._draft_pages.add(
            slice_,
            drafts,
            parents,
            max_depth=state.max_len - slice_.start - slice_.count - 1,
            num_running=len(self._running),
        )

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        """Apply the result of the oldest step: sampled tokens, full pages, ended requests.

        Returns a delta for each request that got tokens, log-probabilities or hidden states, or
        that ended, in the plan's order.
        """
        owners = self._in_flight.pop_oldest(plan)
        if self._recurrent is not None:
            self._recurrent.commit(plan.slices)
        reader = ResultReader(result, self._draft_pages)
        deltas = reader.apply(owners, plan.slices, self._update_pages)
        reader.check_consumed()
        if self._recurrent is not None:
            self._recurrent.end_commit()
        if reader.has_ends:
            for state in [state for state in self._running if state.request.is_finished]:
                del self._states[state.request.id]
                self._waiting.order.end(state)
                self._running.remove(state)
                self._stop_running(state)
        self._in_flight.release_ended()
        return deltas

    def finish(self, request: Request, reason: FinishReason) -> bool:
        """End a request at any time; return False if it has ended already.

        No delta reports the end. Results of steps in flight are dropped, and the request's pages
        are released after these steps.
        """
        state = self._states.get(request.id)
        if state is None or state.request is not request:
            return False
        del self._states[request.id]
        self._waiting.order.end(state)
        request.finish_reason = reason
        if not state.is_running:
            self._waiting.remove(state)
        else:
            self._running.remove(state)
            self._stop_running(state)
        return True

    def undo_newest_step(self) -> None:
        """Undo the newest planned step, as if it had not been planned.

        The engine loop does so if an earlier step failed on which the newest step depends.
        """
        plan, _ = self._in_flight.steps.pop()
        for slice_ in plan.slices:
            self._draft_pages.undo(slice_)
            slice_.request.num_planned = slice_.start
        self._in_flight.release_ended()

    def preempt_all(self) -> None:
        """Preempt all running requests, undo all steps in flight, and evict all KV pages.

        The engine loop calls this after it lost the content of the pages, for instance with a rank
        that died. The requests wait and will be computed again.
        """
        while self._in_flight:
            self.undo_newest_step()
        while self._running:
            self._preempt_last()
        self._pool.evict_all()
        if self._recurrent is not None:
            self._recurrent.pool.evict_all()
        self._num_recoveries += 1

    def replace_tokens(self, request: Request, num_kept: int, tokens: Sequence[int]) -> None:
        """Replace all tokens of a request except the first `num_kept`, which stay in the KV cache.

        The draft model's copy of a request gets the tokens of the target model in this way.
        """
        state = self._states[request.id]
        if not state.is_running:
            self._waiting.tokens[request.priority] += num_kept + len(tokens) - len(request.tokens)
        request.tokens[num_kept:] = tokens
        request.num_computed = request.num_planned = min(request.num_computed, num_kept)

    def fast_forward_steps(self, max_steps: int) -> tuple[list[Request], int]:
        """Return how many decode steps a simulation may `fast_forward`, and the running requests.

        Returns the list of requests, and the number of steps, at most `max_steps`. If the number is
        0, the list is empty.
        """
        if self._in_flight or self.config.steps_ahead or len(self._waiting) or self._recurrent:
            return [], 0
        num_steps = num_fast_forward_steps(self._running, self._pool, max_steps)
        requests = [state.request for state in self._running] if num_steps else []
        return requests, num_steps

    def fast_forward(self, tokens: Sequence[Sequence[int]]) -> None:
        """Perform several decode steps at once, for a simulation that knows the sampled `tokens`.

        `tokens` is shaped (requests, steps), with the requests in the order in which
        `fast_forward_steps` returned them.
        """
        fast_forward(
            self._running,
            tokens,
            self._pool.page_size,
            allocate_page=partial(self._allocate_pages, num_tokens=1, builder=StepBuilder(0, 0)),
            update_pages=self._update_pages,
        )

    def stats(self) -> SchedulerStats:
        """Return requests and pages by state, and counts since the start."""
        return SchedulerStats(
            num_running=len(self._running) + len(self._in_flight.ended_requests),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
            num_free_pages=self._pool.num_free,
            num_cached_pages=self._pool.num_cached,
            num_referenced_pages=self._pool.num_referenced,
            num_prompt_tokens=self._num_prompt_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_preemptions=self._num_preemptions,
            num_recoveries=self._num_recoveries,
            num_uncomputed=sum([state.request.num_pending for state in self._running]),
            horizon_s=self._pool.horizon_s,
        )

    def backlog(self) -> tuple[int, list[int]]:
        """Return the remaining work: prompt tokens to prefill, and output tokens to decode.

        The first value counts the prompt tokens of waiting and running requests. The second value
        has, for each decoding request, the maximum number of output tokens that are still to come.
        Disaggregation estimates from both how long a new prompt would take in this engine.
        """
        num_prefill = self._waiting.num_tokens
        max_outputs = []
        for state in self._running:
            num_pending = state.request.num_pending
            if num_pending > 1:
                num_prefill += num_pending
            else:
                max_outputs.append(state.max_len - len(state.request.tokens))
        return num_prefill, max_outputs

    def view(self) -> SchedulerView:
        """Return a copy of the running requests and of the state of all KV pages."""
        reference_counts, cached_pages = self._pool.contents()
        running = tuple(
            [state.request for state in (*self._running, *self._in_flight.ended_requests)]
        )
        return SchedulerView(
            stats=self.stats(),
            running=running,
            pages=tuple([tuple(map(tuple, request.pages)) for request in running]),
            reference_counts=reference_counts,
            cached_pages=cached_pages,
            waiting_since_s=min((state.request.arrival_s for state in self._waiting), default=None),
        )

    def _add_prefills(self, builder: StepBuilder, prefilling: Sequence[RequestState]) -> None:
        """Add prefill slices of running and waiting requests, by priority key, to a step."""
        for state in prefilling:
            self._start_waiting(builder, before=state)
            if state.is_running and builder.budget and not builder.is_paused(state):
                self._add_prefill(state, builder)
        self._start_waiting(builder, before=None)
        if self._recurrent is not None:
            self._compare_waiting()

    def _compare_waiting(self) -> None:
        """Compare the prompts of the next waiting requests with running requests, after each start.

        A running request that computes a shared prefix is asked to keep a snapshot of its recurrent
        state where the two prompts part. It must be asked before it computes these tokens.
        """
        for state in self._waiting.ready[:_MAX_LOOKAHEAD]:
            if state.awaited_key is None and state.compared_at != self._num_started:
                state.compared_at = self._num_started
                self.prefix_cache.match(state)

    def _add_prefill(self, state: RequestState, builder: StepBuilder) -> None:
        """Add a slice with the next chunk of a request's tokens, if there is room."""
        num_tokens = min(state.request.num_pending, builder.rows_left(state))
        num_tokens = builder.max_rows(state.request, num_tokens)
        if self._recurrent is not None:
            num_tokens = self._recurrent.max_rows(state, num_tokens)
        if count := self._allocate_pages(state, num_tokens, builder):
            builder.add_slice(state, count)

    def _start_waiting(self, builder: StepBuilder, before: RequestState | None) -> None:
        """Start ready requests that go before the running request `before`, while there is room.

        If `before` is None, all ready requests may start. There is room while the step's token
        budget and the pool's pages last.
        """
        index = 0
        ready = self._waiting.ready
        while index < len(ready) and builder.budget:
            state = ready[index]
            if before is not None and before.priority_key < state.priority_key:
                return
            if not builder.max_rows(state.request, 1) or state.request in builder.preempted:
                return
            hit = None if builder.is_paused(state) else self.prefix_cache.match(state)
            if hit is None:  # it waits for a page; requests after it may start
                index += 1
                continue
            num_victims = self._kv_cache.num_victims(
                state,
                hit,
                running=self._running,
                num_reserved=self._num_reserved(builder),
                max_running=self.config.max_running,
            )
            if num_victims is None:
                return
            if num_victims and not self._in_flight.may_preempt():
                return
            for _ in range(num_victims):
                builder.remove_preempted(self._preempt_last())
            self._waiting.remove(state)
            builder.num_reserved = self._num_reserved(builder)
            self._start(state, hit)
            self._add_prefill(state, builder)
            builder.num_reserved += self._kv_cache.num_reserved(state.request)

    def _num_reserved(self, builder: StepBuilder) -> int:
        """Return how many more KV pages the running requests need until their tokens are computed.

        The number is counted once for each step and kept in `builder`.
        """
        if builder.num_reserved is None:
            builder.num_reserved = self._kv_cache.total_reserved(self._running)
        return builder.num_reserved

    def _allocate_pages(self, state: RequestState, num_tokens: int, builder: StepBuilder) -> int:
        """Allocate KV pages for up to `num_tokens` next tokens of a request.

        Returns the number of tokens for which there is room. Preempts less urgent requests only if
        there is no room for a single token.
        """
        request, page_size = state.request, self._pool.page_size
        room = len(request.pages[0]) * page_size - request.num_planned
        if room < num_tokens:
            while not room and not self._kv_cache.can_grow:
                if self._running[-1] is state or not self._in_flight.may_preempt():
                    return 0
                builder.remove_preempted(self._preempt_last())
            room += page_size * self._kv_cache.grow(request, -(-(num_tokens - room) // page_size))
        return min(room, num_tokens)

    def _start(self, state: RequestState, hit: PrefixHit) -> None:
        """Start a waiting request with its cached KV pages, the prefix `hit`."""
        request = state.request
        self._pool.share(all_pages(hit.pages))
        request.pages = hit.pages
        state.num_indexed = hit.num_indexed
        request.num_computed = request.num_planned = hit.num_pages * self._pool.page_size
        if self._recurrent is not None:
            self._recurrent.start(state, hit.state_slot)
        if not request.num_preemptions:
            request.started_s = self._clock()
            request.num_cached = request.num_computed
            self._num_prompt_tokens += request.num_prompt
            self._num_hit_tokens += request.num_cached
            self._waiting.order.start(state)
        self._waiting.start_rate.start(request.priority, len(request.tokens))
        self.prefix_cache.start(state)
        self._num_started += 1
        self._update_pages(state)
        state.is_running = True
        insort(self._running, state, key=priority_key)

    def _preempt_last(self) -> RequestState:
        """Preempt the least urgent running request: release its KV pages and queue it again."""
        victim = self._running.pop()
        victim.request.num_computed = victim.request.num_planned = 0
        victim.request.num_preemptions += 1
        victim.request.num_moves += 1
        self._num_preemptions += 1
        self._stop_running(victim)
        self._waiting.put_back(victim)
        return victim

    def _stop_running(self, state: RequestState) -> None:
        """Mark a request as not running, and release its KV pages.

        Pages that steps in flight use are released when these steps are committed.
        """
        state.is_running = False
        self.prefix_cache.stop(state)
        self._in_flight.release(state)

    def _update_pages(self, state: RequestState) -> None:
        """Publish a request's full KV pages; release pages that its sliding windows have passed."""
        self.prefix_cache.publish(state)
        if self._recurrent is not None:
            self._recurrent.keep_snapshot(state)
        state.update_at = state.publish_at
        if self._pool.groups.has_windows:
            self._kv_cache.release_out_of_window(state)
