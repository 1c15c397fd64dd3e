"""When requests are over because their time is: before they start, or while they run."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.core.request import Request
    from twostroke.engine.scheduler.request_state import RequestState

_MOST_STALE: Final = 1000  # entries of requests that have ended


class Deadlines:
    """Finds requests past their timeout, and those whose turn has not come in time.

    A timeout ends a request wherever it is. A turn has not come if, after the deadline, a step was
    planned without it: a request is not given up where it only waits for a step to end.
    """

    def __init__(self) -> None:
        self._timeouts, self._turns = _Due(), _Due()
        self._planned_s = -math.inf

    @property
    def next_s(self) -> float | None:
        """When the next timeout may be, by the clock; None for never."""
        return self._timeouts.next_s

    def add(self, ticket: RequestState, num_open: int) -> None:
        """Watch a request, one of `num_open`."""
        request = ticket.request
        self._timeouts.add(request.end_by_s, ticket, num_open)
        if request.start_within_s < request.left_s:
            self._turns.add(request.start_by_s, ticket, num_open)

    def pop(self, now_s: float) -> list[tuple[Request, DeadlineError]]:
        """Return requests that are over, each with the error that says so; a plan follows.

        The fact `is_unrun` of an error says that nothing was computed for its request.
        """
        over = []
        for ticket in self._timeouts.pop(now_s):
            request, text = ticket.request, "was stopped: it took longer than"
            if not ticket.has_started:
                text = "was not run: its turn did not come within"
            error = DeadlineError.of_timeout(request.timeout_s, text)
            error.facts["is_unrun"] = not ticket.has_started
            over.append((request, error))
        for ticket in self._turns.pop(self._planned_s):
            request = ticket.request
            if not ticket.has_started and now_s < request.end_by_s:
                reason = (
                    f"The request was not run: no turn came within {request.start_within_s:g} s."
                )
                over.append((request, DeadlineError(reason, is_unrun=True)))
        self._planned_s = now_s
        return over


class _Due:
    """Tickets by a time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestState]] = []
        self._num_added = 0

    @property
    def next_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def add(self, at_s: float, ticket: RequestState, num_open: int) -> None:
        if at_s == math.inf:
            return
        if len(self._heap) > num_open + _MOST_STALE:
            self._heap = [one for one in self._heap if not one[2].request.is_finished]
            heapq.heapify(self._heap)
        self._num_added += 1
        heapq.heappush(self._heap, (at_s, self._num_added, ticket))

    def pop(self, now_s: float) -> Iterator[RequestState]:
        while self._heap and self._heap[0][0] <= now_s:
            _, _, ticket = heapq.heappop(self._heap)
            if not ticket.request.is_finished:
                yield ticket
