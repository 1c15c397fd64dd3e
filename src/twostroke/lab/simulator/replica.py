"""One engine under virtual time: the real scheduler, pages and speculation."""

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


_STRIDE: Final = 7919  # from a request's token to its next
_MOST_QUIET: Final = 32  # steps that are begun together
_RECENT_S: Final = 10  # over which the pace is measured


class Clock:
    """Virtual time in seconds."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def read(self) -> float:
        """Return the time."""
        return self.now_s


class _Quiet(Frozen):
    """Steps that were begun together, and change nothing until they end, or something happens.

    `times_s` are the begin of the first and the ends of all; `flops` and `bytes` are of each, and
    of steps that were interrupted.
    """

    requests: list[Request]
    times_s: list[float]
    flops: list[float]
    bytes: list[float]


class SimulatedReplica:
    """Does what the engine's loop does, except that a step takes what `totals` says of its shape.

    A request's next token follows from its seed and place (`drawn`), whatever was guessed. So steps
    that need no decision of the scheduler are done together. Before a request is submitted,
    `interrupt` ends them; before the prefix cache is looked at, `catch_up` does.

    Attributes:
        num_requests: those that have not ended.
        ends_s: when the steps in flight end; None while nothing runs.
        num_steps, busy_s, flops, bytes: sums over its steps.
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
        self.scheduler, self.page_size = scheduler, page_size
        self.num_requests = self._num_tokens = self.num_steps = 0
        self.busy_s = self.flops = self.bytes = 0.0
        self.ends_s: float | None = None
        self._ended_s = 0.0  # the last step
        self._totals, self._clock, self._vocab_size = totals, clock, vocab_size
        self._speculator = speculator
        self._fresh: list[Request] = []  # without a token yet
        self._flight: tuple[StepPlan, BatchShape, StepDrafts | None, float] | None = None
        self._quiet: _Quiet | None = None
        self._prompt_steps: list[tuple[float, float, float]] = []  # ends, FLOPs and seconds
        self.notes_pace = False

    @property
    def num_tokens(self) -> int:
        """The tokens that the requests have which have not ended."""
        quiet = self._quiet
        if quiet is None:
            return self._num_tokens
        num_steps = bisect_right(quiet.times_s, self._clock.now_s) - 1
        return self._num_tokens + num_steps * len(quiet.requests)

    def prefill_pace(self) -> float:
        """Return the FLOP/s of steps that read prompts: of the last seconds, or since the start."""
        now_s = self._clock.now_s
        ended = [one for one in self._prompt_steps if one[0] <= now_s]
        recent = [one for one in ended if one[0] > now_s - _RECENT_S] or ended
        self._prompt_steps = recent + self._prompt_steps[len(ended) :]
        seconds = sum([took_s for _, _, took_s in recent])
        return sum([flops for _, flops, _ in recent]) / seconds if seconds else 0.0

    def submit(self, request: Request) -> RequestState:
        """Queue a request; return its ticket.

        Raises:
            ContextLengthError, OverloadedError: as the scheduler's `add`.
        """
        ticket = self.scheduler.add(request)
        self.num_requests += 1
        self._num_tokens += len(request.tokens)
        self._fresh.append(request)
        return ticket

    def start(self) -> float | None:
        """Start a step, or several quiet ones; return when they end. None without work."""
        if self._speculator is None:
            requests, num_steps = self.scheduler.fast_forward_steps(_MOST_QUIET)
            if num_steps > 1:
                return self._start_quiet(requests, num_steps)
        plan = self.scheduler.plan()
        if plan is None:
            return None
        clock, began_s, guesses = self._clock, self._clock.now_s, None
        if self._speculator is not None:
            guesses = self._speculator.extend(plan, self.scheduler.add_drafts)
        asked_s, clock.now_s = clock.now_s, began_s  # proposers took time of this replica alone
        batch = BatchShape.of(plan)
        totals = self._totals(batch)
        self.ends_s = asked_s + totals.seconds
        if self._ended_s < began_s:  # the loop has paused
            self.ends_s -= totals.between_s
        self._flight = plan, batch, guesses, began_s
        self._count(began_s, self.ends_s, totals.flops, totals.bytes)
        if self.notes_pace and 2 * plan.num_prompt_rows > batch.num_rows:
            self._prompt_steps.append((self.ends_s, totals.flops, self.ends_s - began_s))
        return self.ends_s

    def _start_quiet(self, requests: list[Request], num_steps: int) -> float:
        starts = tuple([request.num_computed for request in requests])
        totals = self._totals(DecodeRun.of_steps(starts, num_steps))
        seconds, *work = [np.full(num_steps, values).tolist() for values in totals[:3]]
        times_s = list(accumulate(seconds, initial=self._clock.now_s))
        self._quiet = _Quiet(requests, times_s, *work)
        self.ends_s = times_s[-1]
        return self.ends_s

    def interrupt(self) -> float | None:
        """Let quiet steps end with the one in flight; return its end, None if there is none."""
        quiet, now_s = self._quiet, self._clock.now_s
        if quiet is not None:
            num_steps = bisect_left(quiet.times_s, now_s)
            self.ends_s = quiet.times_s[num_steps]
            if self.ends_s == now_s:
                self._do_quiet(num_steps)
            else:
                del quiet.times_s[num_steps + 1 :]
        return self.ends_s

    def catch_up(self) -> float | None:
        """Do quiet steps that have ended by now; only the one in flight goes on. Return its end."""
        quiet, now_s = self._quiet, self._clock.now_s
        if quiet is None:
            return self.ends_s
        step = bisect_right(quiet.times_s, now_s) - 1
        self._do_quiet(step)
        began_s = quiet.times_s[step]
        if began_s == now_s:
            return None
        plan = self.scheduler.plan()
        assert plan is not None, "quiet steps have work"
        self.ends_s = quiet.times_s[step + 1]
        self._flight = plan, BatchShape.of(plan), None, began_s
        self._count(began_s, self.ends_s, quiet.flops[step], quiet.bytes[step])
        return self.ends_s

    def _do_quiet(self, num_steps: int) -> None:
        """Do the first of the quiet steps, and forget the others."""
        quiet, size = self._quiet, self._vocab_size
        assert quiet is not None
        self._quiet = self.ends_s = None
        self._ended_s = quiet.times_s[num_steps]
        if not num_steps:
            return
        tokens = [
            [(one.seed + _STRIDE * place) % size for place in range(first, first + num_steps)]
            for one in quiet.requests
            for first in (len(one.tokens),)
        ]
        self.scheduler.fast_forward(tokens)
        self._num_tokens += num_steps * len(tokens)
        self.num_steps += num_steps
        pairs = pairwise(quiet.times_s[: num_steps + 1])
        self.busy_s = sum([ends_s - began_s for began_s, ends_s in pairs], self.busy_s)
        self.flops = sum(quiet.flops[:num_steps], self.flops)
        self.bytes = sum(quiet.bytes[:num_steps], self.bytes)

    def _count(self, began_s: float, ends_s: float, flops: float, moved: float) -> None:
        self.num_steps += 1
        self.busy_s += ends_s - began_s
        self.flops += flops
        self.bytes += moved

    def finish(self) -> tuple[list[Request], list[Request]]:
        """Take in the step in flight, at its end; return requests that have begun, and ended."""
        begun: list[Request] = []
        self._ended_s = self._clock.now_s
        if self._quiet is not None:
            self._do_quiet(len(self._quiet.times_s) - 1)
            return [], []
        assert self._flight is not None
        plan, batch, guesses, began_s = self._flight
        self._flight = self.ends_s = None
        result = self._result(plan)
        deltas = self.scheduler.commit(plan, result)
        if self._speculator is not None and guesses is not None:
            elapsed_s = self._clock.now_s - began_s
            self._speculator.learn(plan, guesses, batch, result, elapsed_s)
            self._num_tokens += sum([len(delta.tokens) for delta in deltas])
        else:
            self._num_tokens += len(deltas)
        fresh, self._fresh = self._fresh, []
        for request in fresh:
            (begun if request.num_output else self._fresh).append(request)
        ended = [d.request for d in deltas if d.request.finish_reason is not None]
        for request in ended:
            self._end(request)
        return begun, ended

    def _end(self, request: Request) -> None:
        self.num_requests -= 1
        self._num_tokens -= len(request.tokens)
        if self._speculator is not None:
            self._speculator.finish(request)

    def _result(self, plan: StepPlan) -> StepResult:
        size = self._vocab_size
        if self._speculator is not None:
            tokens = [
                drawn(part.request, len(part.request.tokens) + row, size)
                for part in plan.slices
                for row in range(part.num_drawn)
            ]
        else:
            requests = plan.requests
            if not plan.is_decode:
                requests = [part.request for part in plan.slices if part.samples]
            tokens = [(one.seed + _STRIDE * len(one.tokens)) % size for one in requests]
        return StepResult(tokens, [None] * len(tokens))


def drawn(request: Request, place: int, vocab_size: int) -> int:
    """Return the token of a request at a place after its prompt."""
    return (request.seed + _STRIDE * place) % vocab_size
