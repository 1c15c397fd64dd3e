"""The state of a running engine: its health, the progress of its steps, its running requests."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.core.request import DEFAULT_SERVICE_TIER
from twostroke.engine.scheduler import SchedulerStats  # noqa: TC001 - read when a message is decoded

if TYPE_CHECKING:
    from collections.abc import Mapping
    from threading import Condition

    from twostroke.core.request import Request
    from twostroke.engine.request_listener import RequestListener
    from twostroke.engine.scheduler import SchedulerView

_STALLED_AFTER_S: Final = 60.0

Pages = tuple[tuple[int, ...], ...]


class Health(Enum):
    """Whether an engine can answer requests; the server's health checks report it."""

    READY = "ready"
    STALLED = "stalled"  # a step has been running for a minute
    RECOVERING = "recovering"  # lost ranks are being replaced; requests continue afterwards
    STOPPED = "stopped"


class StepProgress(Frozen):
    """The progress of an engine loop: its finished steps, and the age of the current step.

    A watchdog that sees no progress for long knows that the engine hangs.

    Attributes:
        num_steps: finished steps.
        step_s: seconds since the start of the current step; 0.0 between steps.
        is_recovering: whether lost ranks are being replaced.
    """

    num_steps: int
    step_s: float
    is_recovering: bool = False


class LoopHeartbeat:
    """Records the progress of an engine loop. Only the loop writes to it.

    Attributes:
        num_steps: finished steps.
        busy_since_s: time since which the loop waits for the oldest step in flight; None
            without a step.
        is_recovering: whether lost ranks are being replaced.
        interval_s: time between the ends of the last two steps; 0.0 if the loop paused between.
    """

    def __init__(self) -> None:
        """Start with no step in progress."""
        self.num_steps = 0
        self.busy_since_s: float | None = None
        self.is_recovering = False
        self.interval_s = 0.0
        self._step_end_s: float | None = None  # end of the last step; None after a pause

    def pause(self, condition: Condition, timeout_s: float | None) -> None:
        """Sleep until `condition` is notified or `timeout_s` is over; there are no requests."""
        self._step_end_s = None
        condition.wait(timeout=timeout_s)

    def begin(self) -> None:
        """Record the start of an engine step."""
        if self.busy_since_s is None:
            self.busy_since_s = time.monotonic()

    def finish(self, now_s: float, *, is_last: bool) -> float:
        """Record the end of an engine step, and return its duration in seconds.

        `is_last` means that no step is in flight now.
        """
        assert self.busy_since_s is not None
        step_s = now_s - self.busy_since_s
        self.num_steps += 1
        self.busy_since_s = None if is_last else now_s
        self.interval_s = 0.0 if self._step_end_s is None else now_s - self._step_end_s
        self._step_end_s = now_s
        return step_s

    @property
    def progress(self) -> StepProgress:
        """The engine's progress at this moment."""
        start_s = self.busy_since_s
        step_s = 0.0 if start_s is None else time.monotonic() - start_s
        return StepProgress(self.num_steps, step_s, self.is_recovering)

    @property
    def health(self) -> Health:
        """Whether a running engine can answer requests."""
        if self.is_recovering:
            return Health.RECOVERING
        return Health.STALLED if self.progress.step_s > _STALLED_AFTER_S else Health.READY


@dataclass(slots=True)  # not frozen: that would triple the time to make hundreds of them
class RequestView:
    """A running request, as the dashboard and `RunningRequests` show it.

    Counts are of tokens. Times are on the engine's clock; a time is 0 until its event. `pages` has
    the request's page indices, a tuple for each cache group; missing pages are `NO_PAGE`.
    """

    id: str
    service_tier: str
    num_prompt: int
    num_computed: int
    num_output: int
    num_cached: int
    num_drafted: int
    num_accepted: int
    num_preemptions: int
    arrival_s: float
    first_token_s: float
    last_token_s: float
    pages: Pages


class RunningRequests(Frozen):
    """A copy of an engine's running requests, sorted by priority, and of its pages' state.

    `counts` has the number of references to each page, and `cached` the pages that only the prefix
    cache keeps. `SchedulerView` describes the other fields.
    """

    stats: SchedulerStats
    running: tuple[RequestView, ...]
    counts: tuple[int, ...]
    cached: tuple[int, ...]
    waiting_since_s: float | None


def view_running(view: SchedulerView, listeners: Mapping[str, RequestListener]) -> RunningRequests:
    """Return the scheduler's running requests together with the progress of their output."""
    running = [
        _view_request(request, listeners.get(request.id), pages)
        for request, pages in zip(view.running, view.pages, strict=True)
    ]
    return RunningRequests(
        stats=view.stats,
        running=tuple(running),
        counts=view.reference_counts,
        cached=view.cached_pages,
        waiting_since_s=view.waiting_since_s,
    )


def _view_request(request: Request, listener: RequestListener | None, pages: Pages) -> RequestView:
    return RequestView(
        id=request.id,
        service_tier=DEFAULT_SERVICE_TIER if listener is None else listener.service_tier,
        num_prompt=request.num_prompt,
        num_computed=request.num_computed,
        num_output=request.num_output if listener is None else listener.num_output,
        num_cached=request.num_cached,
        num_drafted=request.num_drafted,
        num_accepted=request.num_accepted,
        num_preemptions=request.num_preemptions,
        arrival_s=request.arrival_s,
        first_token_s=0.0 if listener is None else listener.first_token_s,
        last_token_s=0.0 if listener is None else listener.last_token_s,
        pages=pages,
    )
