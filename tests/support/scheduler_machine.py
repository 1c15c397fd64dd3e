"""A state machine that performs every operation of an engine and its users on a scheduler."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter, deque
from typing import TYPE_CHECKING, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace

from support.drafts import add_random_drafts
from support.fake_model import (
    VOCAB_SIZE,
    FakeModel,
    FakePipeline,
    expected_output,
    expected_scores,
    expected_states,
)
from support.invariants import check_index, check_pool, check_scheduler
from support.random_transfers import RandomTransfers
from support.requests import random_request, random_windows
from twostroke.core.errors import OverloadedError
from twostroke.core.request import NO_PAGE, FinishReason, Pooling
from twostroke.engine.kv_cache import PagePool, PrefixIndex, StatePool
from twostroke.engine.scheduler import Batched, Continuous, Scheduler, SchedulerConfig
from twostroke.engine.scheduler.kv_cache_manager import all_pages
from twostroke.engine.scheduler.recurrent_states import slots_per_request
from twostroke.model.program.kv_layout import PageGroups

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.core.step import RequestDelta, StepPlan, TokenLogprobs
    from twostroke.engine.scheduler.request_state import PriorityKey

_SEEDS = st.integers(0, 2**32 - 1)
_WEIGHTS = {"": 1.0, "one": 3.0, "two": 0.5}
_DEADLINES_S = [(math.inf, math.inf)] * 5 + [(0.5, math.inf), (1.0, 8.0), (math.inf, 3.0)]


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, plans, runs, commits, cancels and finishes in any order, with checks after each step.

    `counts` counts, over all runs of a class, how often each operation was performed: one add, one
    cancel, one step are one operation each, however many of them a rule performs. If it `pools`,
    some requests are texts to embed. Up to `steps_ahead` steps may be in flight when another one is
    planned, and they may follow tokens that are not known.
    """

    pools: ClassVar[bool] = False
    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_added = 0
        self.num_done = 0
        self.live: dict[str, tuple[Request, list[int], FinishReason]] = {}
        self.scores: dict[Request, list[TokenLogprobs | None]] = {}
        self.num_read: dict[Request, int] = {}
        self.earlier: list[Request] = []
        self.in_flight: deque[StepPlan] = deque()
        self.num_started = 0  # of these
        self.budgets: dict[int, int] = {}

    @initialize(seed=_SEEDS, num_pages=st.integers(1, 20))
    def build(self, seed: int, num_pages: int) -> None:
        rng = random.Random(seed)
        page_size = rng.choice((1, 1, 3, 4, 8))
        max_running = rng.choice((1, 3, 8))
        windows = random_windows(rng)
        num_pages = max(num_pages * len(windows), PageGroups(page_size, windows).num_needed(12))
        self.pool = PagePool(num_pages, page_size, windows)
        self.two_arithmetics = rng.random() < 0.5
        self.index = None
        if rng.random() < 0.8:
            self.index = PrefixIndex(self.pool, reuse_generated=not self.two_arithmetics)
        self.windows, self.steps_ahead = windows, rng.choice((0, 0, 1, 2))
        self.has_states = seed % 12 == 5
        num_states = 0
        if self.has_states:
            num_states = max_running * slots_per_request(self.steps_ahead) + rng.choice((0, 2, 10))
        stages = [
            FakeModel(
                num_pages,
                page_size,
                windows,
                two_arithmetics=self.two_arithmetics,
                num_states=num_states,
            )
            for _ in range(max(2, 1 + self.steps_ahead))
        ]
        self.model = FakePipeline(stages, rng)
        context_length = rng.choice((48, 30, 20))  # a short one leaves pages for transfers
        self.room = PageGroups(page_size, windows).max_tokens(num_pages, context_length)
        config = SchedulerConfig(
            context_length=context_length,
            max_running=max_running,
            token_budget=max_running + rng.choice((0, 1, 20, 40)),
            max_scored_rows=rng.choice((1, 5, 128)),
            max_waiting_requests=30,
            max_waiting_tokens=600,
            max_overtakes=rng.choice((1, 4, 1000)),
            steps_ahead=self.steps_ahead,
            samples_ahead=self.steps_ahead > 0 and rng.random() < 0.5,
        )
        self.first_config = config
        self.batch_size = batch = rng.randint(1, max_running)
        policy = rng.choice((Continuous(), Continuous(), Batched(batch, 1.0), Batched(batch)))
        states = StatePool(num_states) if self.has_states else None
        self.scheduler = Scheduler(config, self.pool, self.index, policy, self.clock, states=states)
        self.transfers = RandomTransfers(self.scheduler, self.model, self.counts)

    def clock(self) -> float:
        return self.now_s

    @rule(seed=_SEEDS, count=st.integers(1, 8))
    def add(self, seed: int, count: int) -> None:
        rng = self.rng_of(seed)
        for _ in range(count):
            self.num_added += 1
            request = random_request(rng, f"r{self.num_added}", self.room, self.earlier)
            request.tenant = request.salt.decode()
            request.weight = _WEIGHTS[request.tenant]
            request.start_within_s, request.timeout_s = rng.choice(_DEADLINES_S)
            request.arrival_s = self.now_s
            output, reason = expected_output(
                request,
                self.room,
                self.windows,
                two_arithmetics=self.two_arithmetics,
                has_states=self.has_states,
            )
            if self.pools and self.num_added % 3 == 0:
                request.pooling = rng.choice((Pooling.MEAN, Pooling.LAST))
                request.params = replace(
                    request.params, prompt_logprobs=None, max_tokens=1, min_tokens=0
                )
                output, reason = [], FinishReason.LENGTH
            try:
                self.scheduler.add(request)
            except OverloadedError:
                assert self.scheduler.stats().num_waiting > 0
                self.count_operation("refuse")
                continue
            self.live[request.id] = (request, output, reason)
            self.transfers.expect(rng, request)
            self.count_operation("add")

    @rule(seed=_SEEDS, count=st.integers(1, 5))
    def move(self, seed: int, count: int) -> None:
        """Let KV transfers and leases make progress."""
        for _ in range(count):
            self.transfers.move(self.rng_of(seed))
            self.count_operation("move")

    @precondition(lambda self: self.live)
    @rule(seed=_SEEDS, count=st.integers(1, 3))
    def end(self, seed: int, count: int) -> None:
        """Cancel a request, or finish it as a stop string would, in any state."""
        rng = self.rng_of(seed)
        ids = sorted(self.live)
        if rng.random() < 0.5:
            ids = [id_ for id_ in ids if self.live[id_][0].is_in_flight] or ids
        for request_id in rng.sample(ids, min(count, len(ids))):
            request = self.live.pop(request_id)[0]
            if rng.random() < 0.5:
                assert self.scheduler.finish(request, FinishReason.CANCEL)
            else:
                assert self.scheduler.finish(request, FinishReason.STOP)
            assert not self.scheduler.finish(request, FinishReason.ERROR)
            self.count_operation("end in flight" if request.is_in_flight else "end")

    @precondition(lambda self: len(self.in_flight) <= self.steps_ahead)
    @rule()
    def plan(self) -> None:
        self.start()
        self.expire()
        plan = self.scheduler.plan()
        if plan is not None:
            self.check_plan(plan)
            self.in_flight.append(plan)
            self.counts["tokens drawn ahead"] += sum(slice_.is_blind for slice_ in plan.slices)
            self.counts["chunks that follow"] += sum(
                slice_.start > slice_.request.num_computed for slice_ in plan.slices
            )
        elif not self.in_flight:
            assert self.scheduler.wait_s != 0, "somebody could run, and nobody does"
        self.count_operation("plan")

    def expire(self) -> None:
        """End requests that are past a deadline, as the engine loop does before each step."""
        for request, _ in self.scheduler.pop_overdue():
            assert request.id in self.live, "over twice, or after its end"
            del self.live[request.id]
            is_late = self.now_s >= request.end_by_s
            assert is_late or (not request.output and self.now_s >= request.start_by_s), "too early"
            self.scheduler.finish(request, FinishReason.ERROR)
            self.count_operation("stop late" if is_late else "expire")
        for request, _, _ in self.live.values():
            assert self.now_s < request.end_by_s, "it should have been stopped"

    @precondition(lambda self: len(self.in_flight) > self.num_started)
    @rule(seed=_SEEDS)
    def add_drafts(self, seed: int) -> None:
        """Add drafts to the newest step, unless it has some already."""
        plan = self.in_flight[-1]
        if self.scheduler.config.samples_ahead or any(slice_.drafts for slice_ in plan.slices):
            return
        outputs = {request_id: output for request_id, (_, output, _) in self.live.items()}
        for slice_ in plan.slices:
            outputs.setdefault(slice_.request.id, [])  # it has ended meanwhile
        rng = self.rng_of(seed)
        self.counts["drafts"] += add_random_drafts(rng, plan, self.scheduler, outputs, VOCAB_SIZE)
        self.counts["branches"] += sum(len(slice_.branches) for slice_ in plan.slices)
        assert plan.num_rows <= self.budgets[id(plan)]
        self.count_operation("add drafts")

    def start(self) -> None:
        """Start the newest step, if it is not started."""
        for plan in list(self.in_flight)[self.num_started :]:
            self.model.start(plan)
        self.num_started = len(self.in_flight)

    @precondition(lambda self: self.in_flight)
    @rule()
    def land(self) -> None:
        """Finish and commit the oldest step in flight."""
        self.start()
        slices = [slice_ for plan in self.in_flight for slice_ in plan.slices]
        pages = {page for slice_ in slices for page in all_pages(slice_.request.pages)}
        pages.update(page for s in slices for branch in s.branches for page in branch.own_pages)
        assert all(self.pool.num_references(page) for page in pages), "freed while in flight"
        plan = self.in_flight.popleft()
        self.num_started -= 1
        moves = {slice_.request: slice_.request.num_moves for slice_ in plan.slices}
        result = self.model.finish()
        deltas = self.scheduler.commit(plan, result)
        for delta in deltas:
            self.counts["right drafts"] += max(0, len(delta.tokens) - 1)
            self.counts["scores"] += len(delta.scores)
            if delta.request.pooling is not None:
                self.check_states(delta)
            self.scores.setdefault(delta.request, []).extend(delta.scores)
            self.counts["moves"] += delta.request.num_moves - moves[delta.request]
            self.check_output(delta.request)
        self.count_operation("commit")

    @precondition(lambda self: len(self.in_flight) > self.num_started)
    @rule(seed=_SEEDS)
    def recall(self, seed: int) -> None:
        """Now and then undo a step that was not started."""
        if self.rng_of(seed).random() < 0.5:
            return
        self.in_flight.pop()
        self.scheduler.undo_newest_step()
        self.count_operation("recall")

    @precondition(lambda self: self.in_flight)
    @rule(seed=_SEEDS)
    def lose(self, seed: int) -> None:
        """Now and then lose ranks, with the steps in flight and the content of all pages."""
        if self.rng_of(seed).random() < 0.4:
            return
        self.in_flight.clear()
        self.num_started = 0
        self.transfers.end_all()
        self.scheduler.preempt_all()
        self.model.lose()
        assert self.pool.num_free == self.pool.num_pages
        self.count_operation("lose")

    @rule(
        count=st.integers(1, 25),
        dt_s=st.sampled_from((0.0, 0.1, 2.0)),
        draft_seed=st.none() | _SEEDS | _SEEDS,
    )
    def steps(self, count: int, dt_s: float, draft_seed: int | None = None) -> None:
        for number in range(count):
            self.now_s += dt_s
            num_in_flight = -1
            while num_in_flight < len(self.in_flight) <= self.steps_ahead:
                num_in_flight = len(self.in_flight)
                self.plan()
                if draft_seed is not None and len(self.in_flight) > self.num_started:
                    self.add_drafts(draft_seed + number)
            if not self.in_flight:
                return
            self.land()

    @rule(seed=_SEEDS)
    def change_limits(self, seed: int) -> None:
        rng, first = self.rng_of(seed), self.first_config
        max_running = rng.randint(self.batch_size, first.max_running)
        self.scheduler.change_limits(rng.randint(max_running, first.token_budget), max_running)
        self.counts["changed limits"] += 1

    @rule()
    def flush(self) -> None:
        self.scheduler.flush()
        self.count_operation("flush")

    def teardown(self) -> None:
        """Check that all requests end within a bounded number of steps, and release their pages."""
        if not hasattr(self, "scheduler"):
            return
        self.transfers.end_all()
        for _ in range((len(self.live) + 1) * (self.room + 1) * (self.steps_ahead + 1)):
            self.scheduler.flush()
            self.steps(1, 0.0)
            if not self.scheduler.has_work and not self.in_flight:
                break
        assert not self.live, "a request did not end"
        assert not self.scheduler.has_work
        check_pool(self.pool)
        stats = self.scheduler.stats()
        assert stats.num_referenced_pages == stats.num_waiting == stats.num_running == 0
        assert stats.num_waiting_tokens == 0
        self.counts["preemptions"] += stats.num_preemptions
        self.counts["hit tokens"] += stats.num_hit_tokens

    def step_budget(self, plan: StepPlan) -> int:
        """The most rows of a plan: each running request has one, also after a lower limit."""
        config = self.scheduler.config
        num_running = sum(1 for request, _, _ in self.live.values() if request.pages)
        num_running += len(plan.preempted)
        return replace(config, token_budget=max(config.token_budget, num_running)).step_budget

    def check_plan(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        self.budgets[id(plan)] = self.step_budget(plan)  # limits may change before its drafts
        assert 0 < plan.num_rows <= self.budgets[id(plan)]
        assert sum(slice_.num_scored for slice_ in plan.slices) <= config.max_scored_rows
        planned = [slice_.request for slice_ in plan.slices]
        assert len(set(planned)) == len(planned) <= self.first_config.max_running
        assert not set(planned) & set(plan.preempted)
        running = [request for request, _, _ in self.live.values() if request.pages]
        best = min(running, key=self.rank, default=None)
        assert self.in_flight or best in planned, "the first one starves"
        assert not self.in_flight or not plan.preempted, "pages in flight were taken"
        for victim in plan.preempted:
            assert all(self.rank(other) < self.rank(victim) for other in running), "wrong victim"
        for slice_ in plan.slices:
            assert slice_.request.id in self.live, "a step for a request that has ended"
            is_end = slice_.start + slice_.count >= len(slice_.request.tokens)
            assert slice_.samples == (is_end and slice_.request.pooling is None)
            if slice_.start + slice_.count < slice_.request.num_prompt:
                self.counts["chunks"] += 1

    def check_output(self, request: Request) -> None:
        _, output, reason = self.live[request.id]
        assert request.output == output[: request.num_output], "other tokens than expected"
        assert request.num_cached < request.num_prompt
        scores = self.scores[request]
        right = expected_scores(request, self.windows)
        assert scores == right[: len(scores)], "other scores than expected"
        assert not request.output or len(scores) == len(right), "scores are missing"
        if request.is_finished:
            assert request.output == output, "it ended too early"
            assert scores == right, "it ended before its prompt was reported on"
            assert request.finish_reason == reason
            del self.live[request.id]
            self.earlier = [*self.earlier[-3:], request]

    def check_states(self, delta: RequestDelta) -> None:
        """Check that a request's rows come in order, and from the beginning after a preemption."""
        request, right = delta.request, expected_states(delta.request, self.windows)
        end = request.num_computed
        states = [] if delta.states is None else delta.states[:, 0].tolist()
        assert states == right[end - len(states) : end], "other states than expected"
        if request.pooling is Pooling.LAST:
            assert len(states) == (end == request.num_prompt)
        else:
            first = end - len(states)
            assert first <= self.num_read.get(request, 0), "a row was passed over"
            self.num_read[request] = max(end, self.num_read.get(request, 0))
            assert not request.is_finished or self.num_read[request] == request.num_prompt
        self.counts["vectors"] += request.is_finished

    def rank(self, request: Request) -> PriorityKey:
        return self.scheduler._states[request.id].priority_key

    def rng_of(self, seed: int) -> random.Random:
        """Return random numbers that differ between operations, even with one seed."""
        return random.Random(f"{seed} {self.num_done}")

    def count_operation(self, operation: str) -> None:
        self.num_done += 1
        self.counts["operations"] += 1
        self.counts[operation] += 1
        check_scheduler(
            self.scheduler, self.transfers.held_pages(), held_slots=self.transfers.held_slots()
        )
        self.transfers.check()
        self.check_pages()
        if self.index is not None:
            check_index(self.index)

    def check_pages(self) -> None:
        """Check that each running request holds exactly the pages that its next rows read."""
        for request, _, _ in self.live.values():
            for pages, window in zip(request.pages, self.windows, strict=False):
                lowest = request.num_computed + 1 - (window or sys.maxsize)
                for index, page in enumerate(pages):
                    last = (index + 1) * self.pool.page_size - 1
                    assert (page != NO_PAGE) == (last >= lowest), "held, and not seen, or not held"
                    self.counts["empty places"] += page == NO_PAGE
