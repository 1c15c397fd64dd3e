"""One simulated engine: real scheduler, page pool and speculation, virtual time, no computation."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.core.step import StepResult
from twostroke.model.program.batch import BatchShape, DecodeRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan
    from twostroke.engine.scheduler import Scheduler
    from twostroke.engine.scheduler.request_state import RequestState
    from twostroke.engine.speculation import Speculator, StepDrafts
    from twostroke.lab.planner.roofline import Totals


_TOKEN_STRIDE: Final = 7919  # difference between a request's token and its next token
_MAX_FAST_FORWARD_STEPS: Final = 64
_PREFILL_SPEED_WINDOW_S: Final = 10


class Clock:
    """The virtual time of a simulation, in seconds."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def read(self) -> float:
        """Return the current virtual time in seconds."""
        return self.now_s


class _FastForward(Frozen):
    """Decode steps that a simulation performs at once, as they need no decision of the scheduler.

    `times_s` has the start of the first step and the end of each step. `flops` and `bytes` have an
    entry for each planned step, also if the steps are interrupted.
    """

    requests: list[Request]
    times_s: list[float]
    flops: list[float]
    bytes: list[float]


class SimulatedReplica:
    """A simulated engine; `totals` says how much virtual time a step takes.

    The real scheduler plans the steps, and nothing is computed. A request's tokens are determined
    by its seed and their index (`token_at`), also with speculation. Decode steps that need no
    decision of the scheduler are performed at once (fast-forward). Call `interrupt` before
    submitting a request, and `catch_up` before reading the prefix cache.

    Attributes:
        num_requests: unfinished requests.
        ends_s: end of the steps in flight; None if there are none.
        num_steps, busy_s, flops, bytes: sums over all steps.
        records_prefill_speed: remember recent prefill steps for `prefill_flops_per_s`.
        may_fast_forward: perform decode steps at once where nothing depends on their order.
        last_end_s: end of the last step that has ended; 0 before the first.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        totals: Callable[[BatchShape], Totals],
        clock: Clock,
        vocab_size: int,
        page_size: int,
        speculator: Speculator | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.page_size = page_size
        self.num_requests = self._num_tokens = self.num_steps = 0
        self.busy_s = self.flops = self.bytes = 0.0
        self.ends_s: float | None = None
        self.records_prefill_speed = False
        self.may_fast_forward = True
        self.last_end_s = 0.0
        self._totals = totals
        self._clock = clock
        self._vocab_size = vocab_size
        self._speculator = speculator
        self._unstarted: list[tuple[Request, int]] = []  # with their tokens when they came
        self._step_in_flight: tuple[StepPlan, BatchShape, StepDrafts | None, float] | None = None
        self._fast_forward: _FastForward | None = None
        self._prefill_steps: list[tuple[float, float, float]] = []  # end, FLOPs and seconds

    @property
    def num_tokens(self) -> int:
        """The number of tokens, of prompts and answers, of all unfinished requests."""
        steps = self._fast_forward
        if steps is None:
            return self._num_tokens
        num_steps = bisect_right(steps.times_s, self._clock.now_s) - 1
        return self._num_tokens + num_steps * len(steps.requests)

    def prefill_flops_per_s(self) -> float:
        """Return the FLOPs per second of recent prefill steps, or else of all prefill steps.

        The result is 0 without prefill steps.
        """
        now_s = self._clock.now_s
        past = [step for step in self._prefill_steps if step[0] <= now_s]
        recent = [step for step in past if step[0] > now_s - _PREFILL_SPEED_WINDOW_S] or past
        self._prefill_steps = recent + self._prefill_steps[len(past) :]
        seconds = sum([step_s for _, _, step_s in recent])
        return sum([flops for _, flops, _ in recent]) / seconds if seconds else 0.0

    def submit(self, request: Request) -> RequestState:
        """Queue a request in the simulated engine; return its state in the scheduler.

        Raises:
            ContextLengthError, OverloadedError: as the scheduler's `add`.
        """
        state = self.scheduler.add(request)
        self.num_requests += 1
        self._num_tokens += len(request.tokens)
        self._unstarted.append((request, len(request.tokens)))
        return state

    def start(self) -> float | None:
        """Start one simulated step, or a fast-forward of decode steps; return the time of its end.

        Returns None without work.
        """
        if self._speculator is None and self.may_fast_forward:
            requests, num_steps = self.scheduler.fast_forward_steps(_MAX_FAST_FORWARD_STEPS)
            if num_steps > 1:
                return self._start_fast_forward(requests, num_steps)
        plan = self.scheduler.plan()
        if plan is None:
            return None
        clock = self._clock
        start_s = clock.now_s
        drafts = None
        if self._speculator is not None:
            drafts = self._speculator.extend(plan, self.scheduler.add_drafts)
        drafted_s = clock.now_s
        clock.now_s = start_s  # only this replica spent the time of its proposer
        batch = BatchShape.of(plan)
        totals = self._totals(batch)
        self.ends_s = drafted_s + totals.seconds
        if self.last_end_s < start_s:  # after a pause of the loop, no time passes between steps
            self.ends_s -= totals.between_s
        self._step_in_flight = plan, batch, drafts, start_s
        self._add_step(start_s, self.ends_s, totals.flops, totals.bytes)
        if self.records_prefill_speed and 2 * plan.num_prompt_rows > batch.num_rows:
            self._prefill_steps.append((self.ends_s, totals.flops, self.ends_s - start_s))
        return self.ends_s

    def _start_fast_forward(self, requests: list[Request], num_steps: int) -> float:
        starts = tuple([request.num_computed for request in requests])
        totals = self._totals(DecodeRun.of_steps(starts, num_steps))
        seconds, flops, num_bytes = [np.full(num_steps, v).tolist() for v in totals[:3]]
        times_s = list(accumulate(seconds, initial=self._clock.now_s))
        self._fast_forward = _FastForward(requests, times_s, flops, num_bytes)
        self.ends_s = times_s[-1]
        return self.ends_s

    def interrupt(self) -> float | None:
        """End a fast-forward after the decode step in flight; return when this step ends.

        Returns None if no step is in flight.
        """
        steps, now_s = self._fast_forward, self._clock.now_s
        if steps is not None:
            num_steps = bisect_left(steps.times_s, now_s)
            self.ends_s = steps.times_s[num_steps]
            if self.ends_s == now_s:
                self._apply_steps(num_steps)
            else:
                del steps.times_s[num_steps + 1 :]
        return self.ends_s

    def catch_up(self) -> float | None:
        """Apply the steps of a fast-forward that have ended by now, and continue as a single step.

        Requests that were submitted meanwhile do not join the step in flight. Returns the end of
        the step in flight, or None if no step is in flight.
        """
        steps, now_s = self._fast_forward, self._clock.now_s
        if steps is None:
            return self.ends_s
        index = bisect_right(steps.times_s, now_s) - 1
        self._apply_steps(index)
        start_s = steps.times_s[index]
        if start_s == now_s:
            return None
        if self._unstarted:
            self._fast_forward = _FastForward(
                steps.requests, steps.times_s[index:], steps.flops[index:], steps.bytes[index:]
            )
            self.ends_s = steps.times_s[-1]
            return self.ends_s
        plan = self.scheduler.plan()
        assert plan is not None, "fast-forward steps have work"
        self.ends_s = steps.times_s[index + 1]
        self._step_in_flight = plan, BatchShape.of(plan), None, start_s
        self._add_step(start_s, self.ends_s, steps.flops[index], steps.bytes[index])
        return self.ends_s

    def _apply_steps(self, num_steps: int) -> None:
        """Commit the first steps of a fast-forward to the scheduler, and drop the other steps."""
        steps, size = self._fast_forward, self._vocab_size
        assert steps is not None
        self._fast_forward = self.ends_s = None
        self.last_end_s = steps.times_s[num_steps]
        if not num_steps:
            return
        tokens = [
            [(request.seed + _TOKEN_STRIDE * i) % size for i in range(first, first + num_steps)]
            for request in steps.requests
            for first in (len(request.tokens),)
        ]
        self.scheduler.fast_forward(tokens)
        self._num_tokens += num_steps * len(tokens)
        self.num_steps += num_steps
        pairs = pairwise(steps.times_s[: num_steps + 1])
        self.busy_s = sum([end_s - start_s for start_s, end_s in pairs], self.busy_s)
        self.flops = sum(steps.flops[:num_steps], self.flops)
        self.bytes = sum(steps.bytes[:num_steps], self.bytes)

    def _add_step(self, start_s: float, end_s: float, flops: float, num_bytes: float) -> None:
        self.num_steps += 1
        self.busy_s += end_s - start_s
        self.flops += flops
        self.bytes += num_bytes

    def finish(self) -> tuple[list[Request], list[Request]]:
        """Commit the replica's step at its end; return the requests that started and finished.

        Started requests got their first token from this replica. Steps of a fast-forward start and
        finish no requests.
        """
        started: list[Request] = []
        self.last_end_s = self._clock.now_s
        if self._fast_forward is not None:
            self._apply_steps(len(self._fast_forward.times_s) - 1)
            return [], []
        assert self._step_in_flight is not None
        plan, batch, drafts, start_s = self._step_in_flight
        self._step_in_flight = self.ends_s = None
        result = self._result(plan)
        deltas = self.scheduler.commit(plan, result)
        if self._speculator is not None and drafts is not None:
            elapsed_s = self._clock.now_s - start_s
            self._speculator.learn(plan, drafts, batch, result, elapsed_s)
            self._num_tokens += sum([len(delta.tokens) for delta in deltas])
        else:
            self._num_tokens += len(deltas)
        unstarted, self._unstarted = self._unstarted, []
        for request, num_tokens in unstarted:
            if len(request.tokens) > num_tokens:
                started.append(request)
            else:
                self._unstarted.append((request, num_tokens))
        finished = [d.request for d in deltas if d.request.finish_reason is not None]
        for request in finished:
            self._end(request)
        return started, finished

    def _end(self, request: Request) -> None:
        self.num_requests -= 1
        self._num_tokens -= len(request.tokens)
        if self._speculator is not None:
            self._speculator.finish(request)

    def _result(self, plan: StepPlan) -> StepResult:
        size = self._vocab_size
        if self._speculator is not None:
            tokens = [
                token_at(slice_.request, len(slice_.request.tokens) + row, size)
                for slice_ in plan.slices
                for row in range(slice_.num_drawn)
            ]
        else:
            requests = plan.requests
            if not plan.is_decode:
                requests = [slice_.request for slice_ in plan.slices if slice_.samples]
            tokens = [(r.seed + _TOKEN_STRIDE * len(r.tokens)) % size for r in requests]
        return StepResult(tokens, [None] * len(tokens))


def token_at(request: Request, index: int, vocab_size: int) -> int:
    """Return the token at an index of a simulated request's sequence.

    The token depends only on the request's seed and the index, also after a prompt was computed
    again.
    """
    return (request.seed + _TOKEN_STRIDE * index) % vocab_size
