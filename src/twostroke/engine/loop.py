"""The engine's loop: plan, run, commit, deliver, on its own thread."""

from __future__ import annotations

import threading
import time
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.errors import EngineStoppedError, RequestError, TwostrokeError
from twostroke.core.request import FinishReason
from twostroke.core.step import NO_TOKEN, StepPlan, StepResult
from twostroke.core.tree import right_drafts
from twostroke.engine.counters import Counters
from twostroke.engine.mail import post
from twostroke.engine.view import View, take_view
from twostroke.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.backends import BackendFacts, Runner
    from twostroke.core.request import Request
    from twostroke.core.step import Delta, Slice
    from twostroke.engine.choice import Listener
    from twostroke.engine.counters import Snapshot
    from twostroke.engine.mail import Mailbox
    from twostroke.engine.output import Output, Timings
    from twostroke.engine.seconds import Span
    from twostroke.program.cost import StepCost
    from twostroke.schedule import Scheduler, SchedulerConfig
    from twostroke.spec import Speculator

_STALLED_AFTER_S = 60.0


class Health(Enum):
    """Whether the engine can answer."""

    READY = "ready"
    STALLED = "stalled"  # one step has been running for a minute
    STOPPED = "stopped"


class EngineLoop:
    """Owns the scheduler and the backend; everything else speaks to it through `submit`.

    The lock guards the scheduler and the choices. It is free while a step runs, so a request can
    be added or cancelled at any time; the scheduler keeps pages in flight until the commit.
    Outputs are posted under the lock: nothing may come to a caller after a choice's last output.
    """

    def __init__(
        self, backend: Runner, scheduler: Scheduler, speculator: Speculator, cost: StepCost
    ) -> None:
        """Start the thread. `cost` counts the work of steps."""
        self._backend = backend
        self._scheduler = scheduler
        self.speculator = speculator
        self._counters = Counters(cost, scheduler.stats, speculator.stats)
        self._choices: dict[str, Listener] = {}
        self._ended: list[Request] = []
        self._condition = threading.Condition()
        self._stopping = False
        self._failure: str | None = None
        self._step_began_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="twostroke-engine", daemon=True)
        self._thread.start()

    def submit(self, choices: Iterable[Listener]) -> None:
        """Queue choices; all of them or, when one is refused, none.

        Raises:
            ContextLengthError: one can never fit.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine no longer runs.
        """
        with self._condition:
            self._check_running()
            added: list[Listener] = []
            try:
                for choice in choices:
                    choice.request.arrival_s = time.monotonic()
                    choice.counter = self._counters.services[choice.service]
                    self._scheduler.add(choice.request)
                    self._choices[choice.request.id] = choice
                    added.append(choice)
            except BaseException:  # an interrupt must not leave orphaned requests
                for choice in added:
                    self._forget(choice, FinishReason.CANCEL)
                raise
            self._condition.notify()

    def check(self, request: Request) -> None:
        """Refuse a request that could never run, however empty the queue is.

        Raises:
            RequestError, ContextLengthError: as `submit`.
        """
        self._scheduler.max_len(request)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """End requests at once, wherever they are; unknown or finished ones are left alone."""
        with self._condition:
            mail: list[tuple[Mailbox, Output]] = []
            for request_id in request_ids:
                choice = self._choices.get(request_id)
                if choice is not None:
                    self._end(choice, FinishReason.CANCEL)
                    mail.append((choice.mailbox, choice.cut(FinishReason.CANCEL)))
            post(mail)
            self._condition.notify()

    def flush(self) -> None:
        """Let a policy that waits for a full batch start: its callers have no more requests."""
        with self._condition:
            self._scheduler.flush()
            self._condition.notify()

    def snapshot(self) -> Snapshot:
        """Return everything that the engine counts, as of now."""
        with self._condition:
            return self._counters.snapshot()

    def span(self, seconds: int) -> Span[Snapshot]:
        """Return snapshots of both ends of the last whole seconds, at most 60."""
        with self._condition:
            return self._counters.span(seconds)

    def view(self) -> View:
        """Return the running requests and the pages' contents, as of now."""
        with self._condition:
            return take_view(self._scheduler.view(), self._choices)

    @property
    def facts(self) -> BackendFacts:
        """The backend's properties."""
        return self._backend.facts

    @property
    def config(self) -> SchedulerConfig:
        """The scheduler's limits."""
        return self._scheduler.config

    @property
    def health(self) -> Health:
        """Whether the engine can answer."""
        began = self._step_began_s
        if self._failure is not None or self._stopping or not self._thread.is_alive():
            return Health.STOPPED
        if began is not None and time.monotonic() - began > _STALLED_AFTER_S:
            return Health.STALLED
        return Health.READY

    def close(self, drain_s: float = 0.0) -> None:
        """Stop: wait up to `drain_s` seconds for running requests, then cut off the rest."""
        deadline = time.monotonic() + drain_s
        self.flush()
        while time.monotonic() < deadline and self._choices and self._thread.is_alive():
            time.sleep(0.02)
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join(timeout=_STALLED_AFTER_S)
        if not self._thread.is_alive():
            self.speculator.close()
            self._backend.close()

    def _check_running(self) -> None:
        if self._failure is not None:
            raise EngineStoppedError(f"The engine stopped: {self._failure}")
        if self._stopping:
            raise EngineStoppedError("The engine is shutting down.")

    def _end(self, choice: Listener, reason: FinishReason, timings: Timings | None = None) -> None:
        """Forget a choice, end its request and count it; the lock is held."""
        self._forget(choice, reason)
        choice.count_end(reason, timings)

    def _forget(self, choice: Listener, reason: FinishReason) -> None:
        """Have a request end; the lock is held.

        The backend may be computing it at this moment, so it hears of the end between steps.
        """
        self._choices.pop(choice.request.id, None)
        if not choice.request.is_finished:
            self._scheduler.finish(choice.request, reason)
        self._ended.append(choice.request)

    def _run(self) -> None:
        try:
            while self._step():
                pass
            reason = "it was shut down."
        except BaseException as error:  # noqa: BLE001 the thread's outermost boundary: callers must hear of it, of a panic in a library, too
            reason = f"{type(error).__name__}: {error}"
            self._failure = reason
        stopped = TwostrokeError(f"The engine stopped: {reason}")
        with self._condition:
            left = list(self._choices.values())
            self._choices.clear()
            for choice in left:
                choice.count_end(FinishReason.ERROR)
            post([(c.mailbox, c.cut(FinishReason.ERROR, stopped)) for c in left])

    def _step(self) -> bool:
        """Do one step, or wait for work; return False once the engine is to stop."""
        with self._condition:
            if self._stopping:
                return False
            while self._ended:
                ended = self._ended.pop()
                self._backend.forget(ended)
                self.speculator.finish(ended)
            plan = self._scheduler.plan()
            if plan is None or not plan.slices:
                self._condition.wait(timeout=self._scheduler.wait_s)
                return True
            began_s = self._step_began_s = time.monotonic()
        self.speculator.extend(plan, self._add_drafts)
        result = self._compute(plan)
        self._fail_undrawn(plan, result)
        with self._condition:
            self._counters.turn(time.monotonic())
            deltas = self._scheduler.commit(plan, result)
            batch = BatchShape.of(plan)
            self._counters.add_step(plan, batch, result)
            self.speculator.learn(plan, batch, result, time.monotonic() - began_s)
            self._step_began_s = None
            post(self._take(deltas))
        return True

    def _add_drafts(
        self, part: Slice, drafts: Sequence[int], parents: Sequence[int]
    ) -> Sequence[int]:
        with self._condition:
            return self._scheduler.add_drafts(part, drafts, parents)

    def _take(self, deltas: list[Delta]) -> list[tuple[Mailbox, Output]]:
        """Turn a step's tokens into outputs, each with its mailbox."""
        now_s = time.monotonic()
        mail: list[tuple[Mailbox, Output]] = []
        for delta in deltas:
            choice = self._choices.get(delta.request.id)
            if choice is None:  # cancelled while the step ran
                continue
            output = choice.take(delta, now_s)
            if output.finish_reason is not None:
                self._end(choice, output.finish_reason, output.timings)
            mail.append((choice.mailbox, output))
        self._counters.count_gaps(now_s)
        return mail

    def _compute(self, plan: StepPlan) -> StepResult:
        """Run a plan; if it fails, find the request that poisons it so that it fails alone."""
        try:
            return self._backend.run(plan)
        except Exception as error:  # noqa: BLE001 a kernel's failure must not take the other requests along
            if len(plan.slices) == 1:
                return self._poisoned(plan, error)
        parts = [self._compute(StepPlan((part,))) for part in plan.slices]
        tokens = [token for part in parts for token in part.tokens]
        logprobs = [p for part in parts for p in part.logprobs]
        scores = [score for part in parts for score in part.scores]
        states = [rows for part in parts for rows in part.states]
        return StepResult(tokens, logprobs, scores=scores, states=states)

    def _poisoned(self, plan: StepPlan, error: Exception) -> StepResult:
        part = plan.slices[0]
        if not isinstance(error, RequestError):  # which is the request's own fault
            error = _failure(f"{type(error).__name__}: {error}")
        self._fail(part.request, error)
        tokens = [NO_TOKEN] * part.num_drawn
        states = [np.zeros((0, 0), np.float32)] if part.num_pooled else []
        scores = [None] * part.num_scored
        return StepResult(tokens, [None] * len(tokens), scores=scores, states=states)

    def _fail_undrawn(self, plan: StepPlan, result: StepResult) -> None:
        """End requests whose next token could not be drawn.

        Undrawn tokens after a wrong draft, or after the request's end, do not matter. Missing
        log-probabilities of the prompt, or hidden states, end the request too.
        """
        if result.states:
            pooled = [part.request for part in plan.slices if part.num_pooled]
            for request, states in zip(pooled, result.states, strict=True):
                if not np.isfinite(states).all():
                    self._fail(request, _failure("its hidden states are not numbers."))
        if None in result.scores:
            asked = [part.request for part in plan.slices for _ in range(part.num_scored)]
            for request, score in zip(asked, result.scores, strict=True):
                if score is None:
                    self._fail(request, _failure("its logits are not numbers."))
        if NO_TOKEN not in result.tokens:
            return
        tokens = iter(result.tokens)
        for part in plan.slices:
            drawn = list(islice(tokens, part.num_drawn))
            right = right_drafts(part.drafts, part.branches, drawn)
            for token in drawn[:1] + [drawn[1 + draft] for draft in right]:
                if token == NO_TOKEN:
                    self._fail(part.request, _failure("its logits leave no token to draw."))
                if token in part.request.end_ids:
                    break

    def _fail(self, request: Request, error: TwostrokeError) -> None:
        """End one request whose computation failed; the others go on."""
        with self._condition:
            choice = self._choices.get(request.id)
            if choice is not None:
                self._end(choice, FinishReason.ERROR)
                post([(choice.mailbox, choice.cut(FinishReason.ERROR, error))])


def _failure(why: str) -> TwostrokeError:
    return TwostrokeError(f"The engine failed on this request: {why}")
