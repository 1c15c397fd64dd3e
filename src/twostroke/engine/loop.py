"""The engine's loop: plan, run, commit, deliver, on its own thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from twostroke.core.errors import EngineStoppedError, RanksLostError, TwostrokeError
from twostroke.core.request import FinishReason
from twostroke.engine.counters import Counters
from twostroke.engine.faults import FATAL, StepLimit, find_unusable, run_each
from twostroke.engine.output import deliver
from twostroke.engine.pool_access import PoolAccess
from twostroke.engine.status import Health, LoopHeartbeat, RunningRequests, take_view
from twostroke.model.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from twostroke.backends.interface import (
        BackendFacts,
        RankRunner,
        RankState,
        Runner,
        StartRunner,
    )
    from twostroke.core.request import Request
    from twostroke.core.step import RequestDelta, Slice, StepPlan, StepResult
    from twostroke.engine.counters import Snapshot, TimeSpan
    from twostroke.engine.output import Mailbox, Output
    from twostroke.engine.request_listener import RequestListener
    from twostroke.engine.scheduler import Scheduler, SchedulerConfig
    from twostroke.engine.speculation import Speculator, StepDrafts
    from twostroke.engine.status import StepProgress
    from twostroke.model.program.cost import StepCost

_logger = logging.getLogger("twostroke.engine")

_END_S = 60.0  # that the last step may take
_MOST_LOSSES = 3  # of ranks, one after another without a step that succeeds
_LOOK_S = 0.2  # between looks at ranks that have nothing to do


class EngineLoop:
    """Owns the scheduler and the backend, and runs steps while there are requests.

    Steps are started as long as more may be in flight (`SchedulerConfig.steps_ahead`), and finished
    in the same order. The lock guards the scheduler and the listeners. It is free while a
    step runs, so requests can be added and cancelled at any time; the scheduler keeps pages in
    flight until the commit. Outputs are delivered under the lock, so that no output follows a
    request's last one.
    """

    def __init__(
        self, backend: Runner, scheduler: Scheduler, speculator: Speculator, cost: StepCost
    ) -> None:
        """Start the thread. `cost` counts the work of steps."""
        self._backend = backend
        self._ranks = cast("RankRunner", backend)  # if it has ranks
        self._starter = cast("StartRunner", backend)  # if steps may be in flight
        self._scheduler = scheduler
        self.speculator = speculator
        self._listeners: dict[str, RequestListener] = {}
        self._ended: list[Request] = []
        self._condition = threading.Condition()
        self._stopping = False
        self._failure: str | None = None
        self._steps: deque[StepInFlight] = deque()
        self._vitals = LoopHeartbeat()
        self._num_losses = 0  # since a step succeeded
        self._limit = StepLimit(scheduler.config.step_budget)
        self.on_step: Callable[[StepPlan], None] | None = None  # before a step is computed
        self.pages = PoolAccess(scheduler, backend.pages, self._condition)
        given = scheduler.stats, speculator.stats, self.pages.totals, self._limit
        self._counters = Counters(cost, *given)
        self._thread = threading.Thread(target=self._run, name="twostroke-engine", daemon=True)
        self._thread.start()

    def submit(self, listeners: Iterable[RequestListener], waited_s: float = 0.0) -> None:
        """Queue requests, which have waited for `waited_s`; all or, when one is refused, none.

        Raises:
            ContextLengthError: one can never fit.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine no longer runs.
        """
        with self._condition:
            self._check_running()
            added: list[RequestListener] = []
            self._counters.seconds.turn(time.monotonic())  # as it was, perhaps idle
            try:
                for listener in listeners:
                    listener.request.arrival_s = time.monotonic() - waited_s
                    listener.counter = self._counters.services[listener.service]
                    ticket = self._scheduler.add(listener.request)
                    self._listeners[listener.request.id] = listener
                    added.append(listener)
                    self.pages.submitted(ticket)
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
            for listener in filter(None, map(self._listeners.get, request_ids)):
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

    def span(self, seconds: int, ago_s: int = 0) -> TimeSpan[Snapshot]:
        """Return snapshots of both ends of whole seconds that ended `ago_s` ago, if known."""
        with self._condition:
            return self._counters.seconds.span(seconds, ago_s)

    def view(self) -> RunningRequests:
        """Return the running requests and the pages' contents, as of now."""
        with self._condition:
            return take_view(self._scheduler.view(), self._listeners)

    def ranks(self) -> Sequence[RankState]:
        """Return how each rank is now, if there are several."""
        return self._ranks.states() if self.facts.ranks else ()

    @property
    def progress(self) -> StepProgress:
        """What the engine has computed."""
        return self._vitals.progress

    @property
    def facts(self) -> BackendFacts:
        """The backend's properties."""
        return self._backend.facts

    @property
    def backend(self) -> Runner:
        """The backend; its own methods may be called while there are no requests."""
        return self._backend

    @property
    def config(self) -> SchedulerConfig:
        """The scheduler's limits."""
        return self._scheduler.config

    @property
    def health(self) -> Health:
        """Whether the engine can answer."""
        if self._failure is not None or self._stopping or not self._thread.is_alive():
            return Health.STOPPED
        return self._vitals.health

    def close(self, drain_s: float = 0.0) -> None:
        """Stop: wait up to `drain_s` seconds for running requests, then cut off the rest."""
        deadline = time.monotonic() + drain_s
        self.flush()
        while time.monotonic() < deadline and self._listeners and self._thread.is_alive():
            time.sleep(0.02)
        with self._condition:
            self._stopping = True
            self._condition.notify()
            if self._vitals.is_recovering:
                self._ranks.give_up()
        self._thread.join(timeout=_END_S)
        if not self._thread.is_alive():
            pages_are_free = self.pages.close()
            self.speculator.close()
            if pages_are_free:
                self._backend.close()

    def _check_running(self) -> None:
        if self._failure is not None:
            raise EngineStoppedError(f"The engine stopped: {self._failure}")
        if self._stopping:
            raise EngineStoppedError("The engine is shutting down.")

    # The lock is held while these three are called.

    def _cut(
        self, listener: RequestListener, reason: FinishReason, error: TwostrokeError | None = None
    ) -> None:
        """End a request now, and deliver its last output."""
        output = listener.cut(reason, error)
        self._end(listener, output)
        deliver([(listener.mailbox, output)])

    def _end(self, listener: RequestListener, output: Output) -> None:
        """End the request of a last output, and count it."""
        assert output.finish_reason is not None
        self._forget(listener, output.finish_reason)
        listener.counter.end(listener.request, output)

    def _forget(self, listener: RequestListener, reason: FinishReason) -> None:
        """End a request; the backend is told when no step in flight computes it."""
        self._listeners.pop(listener.request.id, None)
        if not listener.request.is_finished:
            self._scheduler.finish(listener.request, reason)
        self._ended.append(listener.request)
        self.pages.ended(listener.request)

    def _run(self) -> None:
        try:
            while self._step():
                pass
            reason = "it was shut down."
        except BaseException as error:  # noqa: BLE001 the thread's outermost boundary: callers must learn of any failure, of a panic in a library too
            reason = str(error)
            if not isinstance(error, TwostrokeError):
                reason = f"{type(error).__name__}: {error}"
            self._failure = reason
        stopped = EngineStoppedError(f"The engine stopped: {reason}")
        with self._condition:
            for listener in self._listeners.values():  # without the scheduler, which may be broken
                output = listener.cut(FinishReason.ERROR, stopped)
                listener.counter.end(listener.request, output)
                deliver([(listener.mailbox, output)])
            self._listeners.clear()

    def _step(self) -> bool:
        """Start a step if more may be in flight, else finish the oldest, else wait; False: stop."""
        with self._condition:
            self._tell_ended()
            if self._stopping:
                return False
            for request, error in self._scheduler.pop_overdue():
                self._fail(request, error)
            plan = self._scheduler.plan(self._limit.most_tokens) if self._may_start else None
            is_idle = plan is None and not self._steps
            if is_idle:
                self._vitals.pause(self._condition, self._idle_s)
        try:
            if plan is not None:
                self._start(plan)
            if is_idle:
                if self.facts.ranks:
                    self._ranks.check()
            elif plan is None or not self._may_start:
                self._finish()
        except RanksLostError as error:
            self._recover(error)
        return True

    @property
    def _idle_s(self) -> float | None:
        """Seconds after which the loop looks for work, and for lost ranks."""
        wait_s = self._scheduler.wait_s
        if not self.facts.ranks:
            return wait_s
        return _LOOK_S if wait_s is None else min(wait_s, _LOOK_S)

    @property
    def _may_start(self) -> bool:
        """Whether another step may be in flight."""
        return len(self._steps) <= self.config.steps_ahead

    def _tell_ended(self) -> None:
        """Let the backend and proposers drop what they keep for requests that have ended."""
        ended, self._ended = self._ended, []
        for request in ended:
            if request.is_in_flight:
                self._ended.append(request)
            else:
                self._backend.forget(request)
                self.speculator.finish(request)

    def _start(self, plan: StepPlan) -> None:
        """Begin a step; a backend that takes one at a time computes it when it is finished."""
        self._vitals.begin()
        if self.on_step is not None:
            self.on_step(plan)
        step = StepInFlight(plan, self.speculator.extend(plan, self._add_drafts))
        self._steps.append(step)
        if not self.config.steps_ahead:
            return
        try:
            self._starter.start(plan)
        except FATAL:
            raise
        except Exception as error:  # noqa: BLE001 a failure must not end the other steps
            step.error = error

    def _finish(self) -> None:
        """Wait for the oldest step in flight, and take in and deliver what it brought."""
        step = self._steps[0]
        plan, result = step.plan, self._result(step)
        if result is None:
            return
        for request, error in find_unusable(plan, result):
            self._fail(request, error)
        with self._condition:
            self._counters.seconds.turn(time.monotonic())
            deltas = self._scheduler.commit(plan, result)
            self._steps.popleft()
            self._num_losses = 0
            self._limit.count_clean()
            batch = BatchShape.of(plan)
            took_s = self._vitals.finish(time.monotonic(), is_last=not self._steps)
            self._counters.add_step(plan, batch, result, self._vitals.turn_s)
            self.speculator.learn(plan, step.guesses, batch, result, took_s)
            deliver(self._take(deltas))

    def _result(self, step: StepInFlight) -> StepResult | None:
        """Return a step's result; if it failed, run its requests one by one.

        None: there was no memory for it; it was taken back, and the next steps are smaller.
        """
        error = step.error
        if error is None:
            try:
                if self.config.steps_ahead:
                    return self._starter.finish()
                return self._backend.run(step.plan)
            except FATAL:
                raise
            except Exception as its_own:  # noqa: BLE001 a failure must not end other requests
                error = its_own
        drop_later(self._steps, self._starter, self._recall)
        if not self._limit.lower(step.plan, error):
            return run_each(step.plan, error, self._backend.run, self._fail)
        self._steps.clear()
        self._vitals.busy_since_s = None
        self._recall()
        return None

    def _recall(self) -> None:
        with self._condition:
            self._scheduler.undo_newest_step()

    def _recover(self, error: RanksLostError) -> None:
        """Let lost ranks be replaced; all requests are computed again, and go on."""
        _logger.warning("%s Running requests wait until lost ranks are replaced.", error)
        self._num_losses += bool(self._steps)  # not while there was nothing to do
        if self._num_losses > _MOST_LOSSES:
            raise error
        with self._condition:
            if self._stopping:
                return
            self._vitals.is_recovering = True
            self._steps.clear()
            self._vitals.busy_since_s = None
            self._scheduler.preempt_all()
        self._ranks.recover()
        self._vitals.is_recovering = False
        _logger.info("Lost ranks were replaced; running requests continue.")

    def _add_drafts(
        self, part: Slice, drafts: Sequence[int], parents: Sequence[int]
    ) -> Sequence[int]:
        with self._condition:
            return self._scheduler.add_drafts(part, drafts, parents)

    def _take(self, deltas: list[RequestDelta]) -> list[tuple[Mailbox, Output]]:
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

    def _fail(self, request: Request, error: TwostrokeError) -> None:
        """End one request that failed or is over; the others continue."""
        with self._condition:
            listener = self._listeners.get(request.id)
            if listener is not None:
                self._cut(listener, FinishReason.ERROR, error)


@dataclass(slots=True)
class StepInFlight:
    """A step in flight, and the error with which it could not be started."""

    plan: StepPlan
    guesses: StepDrafts
    error: Exception | None = None


def drop_later(steps: deque[StepInFlight], runner: StartRunner, recall: Callable[[], None]) -> None:
    """Take back all steps but the oldest: they fail with it, or follow rows that failed."""
    while len(steps) > 1:
        step = steps.pop()
        if step.error is None:
            try:
                runner.finish()
            except FATAL:
                raise
            except Exception:  # computed again
                _logger.debug("A step failed after another one.", exc_info=True)
        recall()
