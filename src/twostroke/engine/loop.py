"""The engine loop: plans, runs and commits steps, and delivers outputs, in its own thread."""

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
from twostroke.engine.status import Health, LoopHeartbeat, RunningRequests, view_running
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

_LAST_STEP_TIMEOUT_S = 60.0  # for the step that runs when the engine is closed
_MAX_RANK_LOSSES = 3  # in a row, without a step that succeeds
_RANK_CHECK_INTERVAL_S = 0.2  # while there are no requests


class EngineLoop:
    """The thread that owns the scheduler and the backend, and runs steps for requests.

    Up to `SchedulerConfig.steps_ahead` further steps are started before the oldest is finished;
    steps finish in the order of their start.

    A lock guards the scheduler and the listeners. It is free while a step runs, so requests can be
    added and cancelled at any time: the scheduler keeps the pages of a running step until its
    commit. Outputs are delivered under the lock, so no output follows a request's last output.

    Attributes:
        speculator: proposes draft tokens.
        on_step: called with each plan before it is computed.
        pages: access to the pages for threads that transfer them.
    """

    def __init__(
        self, backend: Runner, scheduler: Scheduler, speculator: Speculator, cost: StepCost
    ) -> None:
        """Start the loop's thread.

        `backend` runs the steps that `scheduler` plans and `speculator` extends. `cost` gives the
        work of a step, for the counters.
        """
        self._backend = backend
        self._ranks = cast("RankRunner", backend)  # used only if the backend has ranks
        self._starter = cast("StartRunner", backend)  # used only if `steps_ahead` > 0
        self._scheduler = scheduler
        self.speculator = speculator
        self._listeners: dict[str, RequestListener] = {}
        self._ended_requests: list[Request] = []
        self._condition = threading.Condition()
        self._stopping = False
        self._failure: str | None = None
        self._steps: deque[StepInFlight] = deque()
        self._heartbeat = LoopHeartbeat()
        self._num_rank_losses = 0  # since a step succeeded
        self._step_limit = StepLimit(scheduler.config.step_budget)
        self.on_step: Callable[[StepPlan], None] | None = None
        self.pages = PoolAccess(
            scheduler, backend.pages, self._condition, state_memory=backend.state_memory
        )
        self._counters = Counters(
            cost,
            scheduler=scheduler.stats,
            speculation=speculator.stats,
            tiers=self.pages.totals,
            step_limit=self._step_limit,
        )
        self._thread = threading.Thread(target=self._run, name="twostroke-engine", daemon=True)
        self._thread.start()

    def submit(self, listeners: Iterable[RequestListener], waited_s: float = 0.0) -> None:
        """Queue requests, all or none after an error; their listeners get the results of steps.

        `waited_s` is the time in seconds that the requests have waited before they reached the
        loop; it counts in their deadlines.

        Raises:
            ContextLengthError: a request is longer than the context or the KV cache.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine no longer runs.
        """
        with self._condition:
            self._check_running()
            added: list[RequestListener] = []
            self._counters.history.advance(time.monotonic())  # before the counts change
            try:
                for listener in listeners:
                    listener.request.arrival_s = time.monotonic() - waited_s
                    listener.counter = self._counters.services[listener.service_tier]
                    state = self._scheduler.add(listener.request)
                    self._listeners[listener.request.id] = listener
                    added.append(listener)
                    self.pages.on_request_queued(state)
            except BaseException:  # also after Ctrl-C, no request stays without a reader
                for listener in added:
                    self._forget(listener, FinishReason.CANCEL)
                raise
            self._condition.notify()

    def check(self, request: Request) -> None:
        """Refuse a request that could never run, even on an idle engine.

        Raises:
            RequestError: the prompt is empty.
            ContextLengthError: the request is longer than the context or the KV cache.
        """
        self.max_output(request)

    def max_output(self, request: Request) -> int:
        """Return how many tokens the answer to a request that was not submitted yet can have.

        Raises:
            RequestError, ContextLengthError: as `check`.
        """
        return self._scheduler.max_len(request) - len(request.tokens)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Cancel waiting and running requests at once; ignore unknown and finished requests."""
        with self._condition:
            for listener in filter(None, map(self._listeners.get, request_ids)):
                self._end_now(listener, FinishReason.CANCEL)
            self._condition.notify()

    def flush(self) -> None:
        """Start a static or dynamic batch that is not full, because no more requests will come."""
        with self._condition:
            self._scheduler.flush()
            self._condition.notify()

    def change_limits(self, token_budget: int, max_running: int) -> None:
        """Change the limits of later steps; no answer depends on them.

        `token_budget` is the maximum number of tokens of a step, `max_running` of running requests.

        Raises:
            UsageError: as `Scheduler.change_limits`.
        """
        with self._condition:
            self._scheduler.change_limits(token_budget, max_running)
            self._step_limit.change_budget(self.config.step_budget)
            self._condition.notify()

    def snapshot(self) -> Snapshot:
        """Return all counts of the engine at this moment."""
        with self._condition:
            return self._counters.snapshot()

    def span(self, seconds: int, ago_s: int = 0) -> TimeSpan[Snapshot]:
        """Return the engine's counts at both ends of a span of seconds that ended `ago_s` ago.

        A rate is the difference of two counts, divided by the span's length. `ago_s` is in seconds.
        """
        with self._condition:
            return self._counters.history.span(seconds, ago_s)

    def view(self) -> RunningRequests:
        """Return the running requests and the state of all KV pages at this moment."""
        with self._condition:
            return view_running(self._scheduler.view(), self._listeners)

    def ranks(self) -> Sequence[RankState]:
        """Return the state of each rank; an empty list if the model runs in one process."""
        return self._ranks.states() if self.facts.ranks else ()

    @property
    def progress(self) -> StepProgress:
        """The number of finished steps, and the age of the current step."""
        return self._heartbeat.progress

    @property
    def facts(self) -> BackendFacts:
        """The properties of the backend that runs the model."""
        return self._backend.facts

    @property
    def backend(self) -> Runner:
        """The backend that runs the model; call its methods only while there are no requests."""
        return self._backend

    @property
    def config(self) -> SchedulerConfig:
        """The limits of the loop's scheduler."""
        return self._scheduler.config

    @property
    def health(self) -> Health:
        """Whether the engine can answer requests."""
        if self._failure is not None or self._stopping or not self._thread.is_alive():
            return Health.STOPPED
        return self._heartbeat.health

    def close(self, drain_s: float = 0.0) -> None:
        """Stop the engine; wait up to `drain_s` seconds for running requests before ending them."""
        deadline = time.monotonic() + drain_s
        self.flush()
        while time.monotonic() < deadline and self._listeners and self._thread.is_alive():
            time.sleep(0.02)
        with self._condition:
            self._stopping = True
            self._condition.notify()
            if self._heartbeat.is_recovering:
                self._ranks.give_up()
        self._thread.join(timeout=_LAST_STEP_TIMEOUT_S)
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

    # The caller of the three methods below holds the lock.

    def _end_now(
        self, listener: RequestListener, reason: FinishReason, error: TwostrokeError | None = None
    ) -> None:
        """End a request between steps, such as a cancelled one, and deliver its last output."""
        output = listener.cut(reason, error)
        self._end(listener, output)
        deliver([(listener.mailbox, output)])

    def _end(self, listener: RequestListener, output: Output) -> None:
        """Remove a request whose last output is `output`, and count it as ended."""
        assert output.finish_reason is not None
        self._forget(listener, output.finish_reason)
        listener.counter.end(listener.request, output)

    def _forget(self, listener: RequestListener, reason: FinishReason) -> None:
        """Remove a request from the loop and the scheduler.

        `_release_ended` frees the backend's state of the request, once no step in flight computes
        it.
        """
        self._listeners.pop(listener.request.id, None)
        if not listener.request.is_finished:
            self._scheduler.finish(listener.request, reason)
        self._ended_requests.append(listener.request)
        self.pages.on_request_end(listener.request)

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
            for (
                listener
            ) in self._listeners.values():  # the scheduler may be broken, so it is not asked
                output = listener.cut(FinishReason.ERROR, stopped)
                listener.counter.end(listener.request, output)
                deliver([(listener.mailbox, output)])
            self._listeners.clear()

    def _step(self) -> bool:
        """Start a step, or finish the oldest step, or sleep without work; return False to stop.

        The loop's thread calls this again and again.
        """
        with self._condition:
            self._release_ended()
            if self._stopping:
                return False
            for request, error in self._scheduler.pop_overdue():
                self._fail(request, error)
            plan = (
                self._scheduler.plan(self._step_limit.lowered_tokens) if self._may_start else None
            )
            is_idle = plan is None and not self._steps
            if is_idle:
                self._heartbeat.pause(self._condition, self._idle_s)
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
        """The maximum number of seconds to sleep while no request runs.

        After this time, a waiting request may start or expire, or the ranks need a check. None
        means to sleep until a request arrives.
        """
        wait_s = self._scheduler.wait_s
        if not self.facts.ranks:
            return wait_s
        return _RANK_CHECK_INTERVAL_S if wait_s is None else min(wait_s, _RANK_CHECK_INTERVAL_S)

    @property
    def _may_start(self) -> bool:
        """Whether another step may be started now, besides the steps in flight."""
        return len(self._steps) <= self.config.steps_ahead

    def _release_ended(self) -> None:
        """Free the state that the backend and the draft proposers have of ended requests.

        The state of requests in steps in flight is freed later.
        """
        ended_requests, self._ended_requests = self._ended_requests, []
        for request in ended_requests:
            if request.is_in_flight:
                self._ended_requests.append(request)
            else:
                self._backend.forget(request)
                self.speculator.finish(request)

    def _start(self, plan: StepPlan) -> None:
        """Let proposers add draft tokens to a planned step, and start it.

        A backend that cannot have steps in flight computes the step in `_finish`.
        """
        self._heartbeat.begin()
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
        """Wait for the oldest step in flight, commit its result, and deliver the outputs."""
        step = self._steps[0]
        plan = step.plan
        result = self._result(step)
        if result is None:
            return
        for request, error in find_unusable(plan, result):
            self._fail(request, error)
        with self._condition:
            self._counters.history.advance(time.monotonic())
            deltas = self._scheduler.commit(plan, result)
            self._steps.popleft()
            self._num_rank_losses = 0
            self._step_limit.count_success()
            batch = BatchShape.of(plan)
            step_s = self._heartbeat.finish(time.monotonic(), is_last=not self._steps)
            self._counters.add_step(plan, batch, result, interval_s=self._heartbeat.interval_s)
            self.speculator.learn(plan, step.drafts, batch, result, step_s)
            deliver(self._outputs_of(deltas))

    def _result(self, step: StepInFlight) -> StepResult | None:
        """Return the result of the oldest step; if the step failed, run its requests one by one.

        Returns None if the step was too large for the memory: all steps in flight are undone, and
        later steps are smaller.
        """
        error = step.error
        if error is None:
            try:
                if self.config.steps_ahead:
                    return self._starter.finish()
                return self._backend.run(step.plan)
            except FATAL:
                raise
            except Exception as run_error:  # noqa: BLE001 a failure must not end other requests
                error = run_error
        _undo_later_steps(self._steps, self._starter, self._recall)
        if not self._step_limit.lower(step.plan, error):
            return run_each(step.plan, error, self._backend.run, self._fail)
        self._steps.clear()
        self._heartbeat.busy_since_s = None
        self._recall()
        return None

    def _recall(self) -> None:
        """Undo the newest planned step in the scheduler, as if it had not been planned."""
        with self._condition:
            self._scheduler.undo_newest_step()

    def _recover(self, error: RanksLostError) -> None:
        """Replace ranks that died; preempt running requests, so that they are computed again."""
        _logger.warning("%s Running requests wait until lost ranks are replaced.", error)
        self._num_rank_losses += bool(self._steps)  # losses without a running step do not count
        if self._num_rank_losses > _MAX_RANK_LOSSES:
            raise error
        with self._condition:
            if self._stopping:
                return
            self._heartbeat.is_recovering = True
            self._steps.clear()
            self._heartbeat.busy_since_s = None
            self._scheduler.preempt_all()
        self._ranks.recover()
        self._heartbeat.is_recovering = False
        _logger.info("Lost ranks were replaced; running requests continue.")

    def _add_drafts(
        self, slice_: Slice, drafts: Sequence[int], parents: Sequence[int]
    ) -> Sequence[int]:
        with self._condition:
            return self._scheduler.add_drafts(slice_, drafts, parents)

    def _outputs_of(self, deltas: list[RequestDelta]) -> list[tuple[Mailbox, Output]]:
        """Return the outputs that a step's deltas give for its requests, each with its mailbox.

        Requests with their last output are removed from the loop.
        """
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
        """End one request with an error; the other requests continue."""
        with self._condition:
            listener = self._listeners.get(request.id)
            if listener is not None:
                self._end_now(listener, FinishReason.ERROR, error)


@dataclass(slots=True)
class StepInFlight:
    """A planned step that is not finished; `error` is set if the backend could not start it."""

    plan: StepPlan
    drafts: StepDrafts
    error: Exception | None = None


def _undo_later_steps(
    steps: deque[StepInFlight], runner: StartRunner, recall: Callable[[], None]
) -> None:
    """Undo all steps in flight but the oldest, which failed.

    The later steps depend on rows of the failed step. `recall` undoes the newest planned step in
    the scheduler.
    """
    while len(steps) > 1:
        step = steps.pop()
        if step.error is None:
            try:
                runner.finish()
            except FATAL:
                raise
            except Exception:  # its requests are computed again
                _logger.debug("A step failed after another one.", exc_info=True)
        recall()
