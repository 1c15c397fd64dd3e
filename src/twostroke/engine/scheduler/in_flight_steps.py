"""Steps in flight, in the order of their plans, and ended requests whose pages they use."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.core.step import StepPlan
    from twostroke.engine.scheduler.kv_cache_manager import KvCacheManager
    from twostroke.engine.scheduler.request_state import RequestState


class InFlightSteps:
    """Keeps the plans of steps until their commit, and pages until no step uses them.

    Attributes:
        steps: each plan with the owners of its slices, the oldest first.
        ended: requests that have ended, with pages that steps in flight use.
    """

    def __init__(self, holdings: KvCacheManager) -> None:
        self.steps: deque[tuple[StepPlan, list[RequestState]]] = deque()
        self.ended: list[RequestState] = []
        self._holdings = holdings
        self._must_land = False  # because a request waits for the pages of others

    def __len__(self) -> int:
        return len(self.steps)

    def let_preempt(self) -> bool:
        """Whether requests may lose their pages now; if not, all steps must land first."""
        self._must_land = bool(self.steps)
        return not self._must_land

    def must_land(self) -> bool:
        """Whether they must land before another step is planned."""
        self._must_land = self._must_land and bool(self.steps)
        return self._must_land

    def land(self, plan: StepPlan) -> list[RequestState]:
        """Take out the oldest step, which has this plan; return the owners of its slices."""
        oldest, owners = self.steps.popleft()
        assert plan.slices is oldest.slices, "steps are committed in the order of their plans"
        return owners

    def give_back(self, ticket: RequestState) -> None:
        """Release the pages of a request that stops running, now or after the last step."""
        if ticket.request.is_in_flight:
            self.ended.append(ticket)
        else:
            self._holdings.give_back(ticket.request)

    def release_ended(self) -> None:
        """Release the pages of ended requests that no step in flight uses any more."""
        for ticket in [t for t in self.ended if not t.request.is_in_flight]:
            self.ended.remove(ticket)
            self._holdings.give_back(ticket.request)
