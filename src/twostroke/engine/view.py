"""The running requests and pages of an engine at one moment, without any text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen
from twostroke.core.request import DEFAULT_SERVICE
from twostroke.engine.scheduler import SchedulerStats  # noqa: TC001 - read when a message is decoded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.core.request import Request
    from twostroke.engine.request_listener import RequestListener
    from twostroke.engine.scheduler import SchedulerView

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
        for request, pages in zip(seen.running, seen.held, strict=True)
    ]
    return RunningRequests(
        seen.stats, tuple(running), seen.counts, seen.cached, seen.waiting_since_s
    )


def _request(request: Request, listener: RequestListener | None, pages: Pages) -> RequestView:
    return RequestView(
        id=request.id,
        service=DEFAULT_SERVICE if listener is None else listener.service,
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
