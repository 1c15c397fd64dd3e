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
from twostroke.engine.delivery import deliver
from twostroke.engine.view import View, take_view
from twostroke.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.backends import BackendFacts, Runner
    from twostroke.core.request import Request
    from twostroke.core.step import Delta, Slice
    from twostroke.engine.counters import Snapshot
    from twostroke.engine.delivery import Mailbox
    from twostroke.engine.listener import Listener
    from twostroke.engine.output import Output
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
    """Owns the scheduler and the backend, and runs steps while there are requests.

    The lock guards the scheduler and the listeners. It is free while a step runs, so requests can
    be added and cancelled at any time; the scheduler keeps pages in flight until the commit.
    Outputs are delivered under the lock, so that no output follows a request's last one.
    """

    def __init__(
        self, backend: Runner, scheduler: Scheduler, speculator: Speculator, cost: StepCost
    ) -> None:
        """Start the thread. `cost` counts the work of steps."""
        self._backend = backend
        self._scheduler = scheduler
        self.speculator = speculator
        self._counters = Counters(cost, scheduler.stats, speculator.stats)
        self._listeners: dict[str, Listener] = {}
        self._ended: list[Request] = []
        self._condition = threading.Condition()
        self._stopping = False
        self._failure: str | None = None
        self._step_began_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="twostroke-engine", daemon=True)
        self._thread.start()

    def submit(self, listeners: Iterable[Listener]) -> None:
        """Queue the listeners' requests; all of them or, when one is refused, none.

        Raises:
            ContextLengthError: one can never fit.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine no longer runs.
        """
        with self._condition:
            self._check_running()
            added: list[Listener] = []
            self._counters.seconds.turn(time.monotonic())  # as it was, perhaps idle
            try:
                for listener in listeners:
                    listener.request.arrival_s = time.monotonic()
                    listener.counter = self._counters.services[listener.service]
                    self._scheduler.add(listener.request)
                    self._listeners[listener.request.id] = listener
                    added.append(listener)
            except BaseException:  # an interrupt must not leave requests that nobody reads
                for listener in added:
                    self._forget(listener, FinishReason.CANCEL)
                raise
            self._condition.notify()

    def check(self, request: Request) -> None:
        """Refuse a request that could never run, even alone.

        Raises:
            RequestError, ContextLengthError: as `submit`.
        """
        self._scheduler.max_len(request)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """End requests at once, waiting or running; unknown and finished ones are ignored."""
        with self._condition:
            for request_id in request_ids:
                listener = self._listeners.get(request_id)
                if listener is not None:
                    self._cut(listener, FinishReason.CANCEL)
            self._condition.notify()

    def flush(self) -> None:
        """Start a batch that is not full: no more requests come now."""
        with self._condition:
            self._scheduler.flush()
            self._condition.notify()

    def snapshot(self) -> Snapshot:
        """Return everything that the engine counts, as of now."""
        with self._condition:
            return self._counters.snapshot()

    def span(self, seconds: int, ago_s: int = 0) -> Span[Snapshot]:
        """Return snapshots of both ends of some whole seconds that ended `ago_s` seconds ago.

        Only the last `MAX_SECONDS` are known.
        """
        with self._condition:
            return self._counters.seconds.span(seconds, ago_s)

    def view(self) -> View:
        """Return the running requests and the pages' contents, as of now."""
        with self._condition:
            return take_view(self._scheduler.view(), self._listeners)

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
        while time.monotonic() < deadline and self._listeners and self._thread.is_alive():
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

    # The lock is held while these three are called.

    def _cut(
        self, listener: Listener, reason: FinishReason, error: TwostrokeError | None = None
    ) -> None:
        """End a request now, and deliver its last output."""
        output = listener.cut(reason, error)
        self._end(listener, output)
        deliver([(listener.mailbox, output)])

    def _end(self, listener: Listener, output: Output) -> None:
        """End the request of a last output, and count it."""
        assert output.finish_reason is not None
        self._forget(listener, output.finish_reason)
        listener.counter.end(listener.request, output)

    def _forget(self, listener: Listener, reason: FinishReason) -> None:
        """End a request; the backend, which may be computing it, is told between steps."""
        self._listeners.pop(listener.request.id, None)
        if not listener.request.is_finished:
            self._scheduler.finish(listener.request, reason)
        self._ended.append(listener.request)

    def _run(self) -> None:
        try:
            while self._step():
                pass
            reason = "it was shut down."
        except BaseException as error:  # noqa: BLE001 the thread's outermost boundary: callers must learn of any failure, of a panic in a library too
            reason = f"{type(error).__name__}: {error}"
            self._failure = reason
        stopped = TwostrokeError(f"The engine stopped: {reason}")
        with self._condition:
            for listener in self._listeners.values():  # without the scheduler, which may be broken
                output = listener.cut(FinishReason.ERROR, stopped)
                listener.counter.end(listener.request, output)
                deliver([(listener.mailbox, output)])
            self._listeners.clear()

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
        self._fail_unusable(plan, result)
        with self._condition:
            self._counters.seconds.turn(time.monotonic())
            deltas = self._scheduler.commit(plan, result)
            batch = BatchShape.of(plan)
            self._counters.add_step(plan, batch, result)
            self.speculator.learn(plan, batch, result, time.monotonic() - began_s)
            self._step_began_s = None
            deliver(self._take(deltas))
        return True

    def _add_drafts(
        self, part: Slice, drafts: Sequence[int], parents: Sequence[int]
    ) -> Sequence[int]:
        with self._condition:
            return self._scheduler.add_drafts(part, drafts, parents)

    def _take(self, deltas: list[Delta]) -> list[tuple[Mailbox, Output]]:
        """Return a step's outputs, each with its mailbox."""
        now_s = time.monotonic()
        outputs: list[tuple[Mailbox, Output]] = []
        for delta in deltas:
            listener = self._listeners.get(delta.request.id)
            if listener is None:  # cancelled while the step ran
                continue
            output = listener.take(delta, now_s)
            if output is None:
                continue
            if output.finish_reason is not None:
                self._end(listener, output)
            outputs.append((listener.mailbox, output))
        self._counters.count_gaps(now_s)
        return outputs

    def _compute(self, plan: StepPlan) -> StepResult:
        """Run a plan; if it fails, run its requests one by one, so that only the bad ones fail."""
        try:
            return self._backend.run(plan)
        except Exception as error:  # noqa: BLE001 a kernel's failure must not end other requests
            if len(plan.slices) == 1:
                return self._failed(plan.slices[0], error)
        parts = [self._compute(StepPlan((part,))) for part in plan.slices]
        tokens = [token for part in parts for token in part.tokens]
        logprobs = [p for part in parts for p in part.logprobs]
        scores = [score for part in parts for score in part.scores]
        states = [rows for part in parts for rows in part.states]
        return StepResult(tokens, logprobs, scores=scores, states=states)

    def _failed(self, part: Slice, error: Exception) -> StepResult:
        """End a request that cannot be computed, and return an empty result for its slice."""
        if not isinstance(error, RequestError):  # such an error is the request's own
            error = _failure(f"{type(error).__name__}: {error}")
        self._fail(part.request, error)
        tokens = [NO_TOKEN] * part.num_drawn
        states = [np.zeros((0, 0), np.float32)] if part.num_pooled else []
        scores = [None] * part.num_scored
        return StepResult(tokens, [None] * len(tokens), scores=scores, states=states)

    def _fail_unusable(self, plan: StepPlan, result: StepResult) -> None:
        """End requests whose results are not numbers, or whose next token could not be drawn.

        Tokens after a wrong draft, or after the request's end, do not matter.
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
        """End one request whose computation failed; the others continue."""
        with self._condition:
            listener = self._listeners.get(request.id)
            if listener is not None:
                self._cut(listener, FinishReason.ERROR, error)


def _failure(why: str) -> TwostrokeError:
    return TwostrokeError(f"The engine failed on this request: {why}")
