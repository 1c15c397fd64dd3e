"""Whether an engine can answer, and how far it is."""

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


class Health(Enum):
    """Whether the engine can answer."""

    READY = "ready"
    STALLED = "stalled"  # one step has been running for a minute
    RECOVERING = "recovering"  # lost ranks are replaced; requests go on afterwards
    STOPPED = "stopped"


class StepProgress(Frozen):
    """How many steps an engine has finished, and for how long the present one has run.

    `step_s` is 0.0 between steps. `is_recovering`: lost ranks are replaced.
    """

    num_steps: int
    step_s: float
    is_recovering: bool = False


class LoopHeartbeat:
    """What tells whether an engine's loop gets on; it is written by the loop alone.

    `busy_since_s` is since when the oldest step in flight is the only one that keeps it waiting.
    """

    def __init__(self) -> None:
        """Begin with no step."""
        self.num_steps = 0  # that were finished
        self.busy_since_s: float | None = None
        self.is_recovering = False
        self.turn_s = 0.0  # between the ends of the last two steps; 0 if the loop paused there
        self._ended_s: float | None = None  # the last step, unless the loop has paused since

    def pause(self, condition: Condition, most_s: float | None) -> None:
        """Wait, for there is nothing to do."""
        self._ended_s = None
        condition.wait(timeout=most_s)

    def begin(self) -> None:
        """Note that a step was started."""
        if self.busy_since_s is None:
            self.busy_since_s = time.monotonic()

    def finish(self, now_s: float, *, is_last: bool) -> float:
        """Note that a step was finished, the last one in flight or not; return its seconds."""
        assert self.busy_since_s is not None
        took_s = now_s - self.busy_since_s
        self.num_steps += 1
        self.busy_since_s = None if is_last else now_s
        self.turn_s = 0.0 if self._ended_s is None else now_s - self._ended_s
        self._ended_s = now_s
        return took_s

    @property
    def progress(self) -> StepProgress:
        """How far the engine is."""
        began_s = self.busy_since_s
        step_s = 0.0 if began_s is None else time.monotonic() - began_s
        return StepProgress(self.num_steps, step_s, self.is_recovering)

    @property
    def health(self) -> Health:
        """Whether an engine that runs can answer."""
        if self.is_recovering:
            return Health.RECOVERING
        return Health.STALLED if self.progress.step_s > _STALLED_AFTER_S else Health.READY


Pages = tuple[tuple[int, ...], ...]


@dataclass(slots=True)  # not frozen, which would triple its cost: there may be hundreds
class RequestView:
    """A running request; times are on the engine's clock, 0 for what has not happened yet.

    `pages` are those that it holds, a tuple for each cache group (with `NO_PAGE`).
    """

    id: str
    service: str
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
    """Running requests, by rank; the other fields are those of `SchedulerView`."""

    stats: SchedulerStats
    running: tuple[RequestView, ...]
    counts: tuple[int, ...]
    cached: tuple[int, ...]
    waiting_since_s: float | None


def take_view(seen: SchedulerView, listeners: Mapping[str, RequestListener]) -> RunningRequests:
    """Return the scheduler's view, with the progress of each request."""
    running = [
        _request(request, listeners.get(request.id), pages)
        for request, pages in zip(seen.running, seen.pages, strict=True)
    ]
    return RunningRequests(
        seen.stats, tuple(running), seen.reference_counts, seen.cached_pages, seen.waiting_since_s
    )


def _request(request: Request, listener: RequestListener | None, pages: Pages) -> RequestView:
    return RequestView(
        id=request.id,
        service=DEFAULT_SERVICE_TIER if listener is None else listener.service,
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
