"""One engine under virtual time: the real scheduler, pages and speculation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.step import StepResult
from twostroke.program.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan
    from twostroke.planner.roofline import Totals
    from twostroke.schedule import Scheduler
    from twostroke.spec import Guesses, Speculator


_STRIDE: Final = 7919  # from a request's token to its next


class Clock:
    """Virtual time in seconds."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def read(self) -> float:
        """Return the time."""
        return self.now_s


class Replica:
    """Does what the engine's loop does, except that a step takes what `totals` says of its shape.

    A request's next token follows from its seed and place (`drawn`), whatever was guessed.

    Attributes:
        num_requests, num_tokens: those that have not ended, and the tokens that they have.
        ends_s: when the step in flight ends; None while nothing runs.
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
        self.num_requests = self.num_tokens = self.num_steps = 0
        self.busy_s = self.flops = self.bytes = 0.0
        self.ends_s: float | None = None
        self._totals, self._clock, self._vocab_size = totals, clock, vocab_size
        self._speculator = speculator
        self._fresh: list[Request] = []  # without a token yet
        self._flight: tuple[StepPlan, BatchShape, Guesses | None, float] | None = None

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ContextLengthError, OverloadedError: as the scheduler's `add`.
        """
        self.scheduler.add(request)
        self.num_requests += 1
        self.num_tokens += len(request.tokens)
        self._fresh.append(request)

    def start(self) -> float | None:
        """Start a step if there is work, and return when it ends; None without work."""
        plan = self.scheduler.plan()
        if plan is None:
            return None
        clock, began_s, guesses = self._clock, self._clock.now_s, None
        if self._speculator is not None:
            guesses = self._speculator.extend(plan, self.scheduler.add_drafts)
        asked_s, clock.now_s = clock.now_s, began_s  # proposers took time of this replica alone
        if plan.is_decode and guesses is None:  # the usual case, quickly
            batch = BatchShape(tuple(plan.starts), tuple(plan.counts), len(plan.slices))
        else:
            batch = BatchShape.of(plan)
        totals = self._totals(batch)
        self.ends_s = asked_s + totals.seconds
        self._flight = plan, batch, guesses, began_s
        self.num_steps += 1
        self.busy_s += self.ends_s - began_s
        self.flops += totals.flops
        self.bytes += totals.bytes
        return self.ends_s

    def finish(self) -> tuple[list[Request], list[Request]]:
        """Take in the step in flight, at its end; return requests that have begun, and ended."""
        assert self._flight is not None
        begun: list[Request] = []
        plan, batch, guesses, began_s = self._flight
        self._flight = self.ends_s = None
        result = self._result(plan)
        deltas = self.scheduler.commit(plan, result)
        if self._speculator is not None and guesses is not None:
            elapsed_s = self._clock.now_s - began_s
            self._speculator.learn(plan, guesses, batch, result, elapsed_s)
            self.num_tokens += sum([len(delta.tokens) for delta in deltas])
        else:
            self.num_tokens += len(deltas)
        fresh, self._fresh = self._fresh, []
        for request in fresh:
            (begun if request.num_output else self._fresh).append(request)
        ended = [d.request for d in deltas if d.request.finish_reason is not None]
        for request in ended:
            self._end(request)
        return begun, ended

    def _end(self, request: Request) -> None:
        self.num_requests -= 1
        self.num_tokens -= len(request.tokens)
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
