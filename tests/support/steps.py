"""A scheduler with its pool and a model that costs nothing, run step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.fake_model import FakeModel
from support.invariants import check_pool, check_scheduler
from support.requests import make_request
from twostroke.core.request import FinishReason
from twostroke.engine.kv_cache import PagePool, PrefixIndex
from twostroke.engine.scheduler import Continuous, Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from typing import Any

    from support.fake_model import Windows
    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan


class Steps:
    """Runs a continuous scheduler over pages of 4 tokens and checks it after every step."""

    def __init__(
        self, num_pages: int = 64, windows: Windows = (None,), *, cache: bool = True, **limits: Any
    ) -> None:
        limits = {"context_length": 64, "max_running": 8, "token_budget": 64, **limits}
        self.pool = PagePool(num_pages, 4, windows)
        self.index = PrefixIndex(self.pool) if cache else None
        self.model = FakeModel(num_pages, 4, windows)
        self.scheduler = Scheduler(
            SchedulerConfig(**limits), self.pool, self.index, Continuous(), lambda: 0.0
        )

    def add(self, request_id: str, prompt: list[int] | int = 5, **options: Any) -> Request:
        request = make_request(request_id, prompt, **options)
        self.scheduler.add(request)
        return request

    def cancel(self, request_id: str) -> Request | None:
        """Cancel a request, as its caller may at any time; None if it has ended."""
        state = self.scheduler._states.get(request_id)
        if state is None:
            return None
        assert self.scheduler.finish(state.request, FinishReason.CANCEL)
        return state.request

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        check_scheduler(self.scheduler)
        return plan

    def land(self, plan: StepPlan, token: int | None = None) -> list[Request]:
        """Run and commit a plan; return the requests that got a token.

        They sample `token` if it is given.
        """
        result = self.model.run(plan)
        if token is not None:
            result.tokens[:] = [token] * len(result.tokens)
        deltas = self.scheduler.commit(plan, result)
        check_scheduler(self.scheduler)
        return [delta.request for delta in deltas]

    def step(self, token: int | None = None) -> dict[str, int]:
        """Run a step; return how many tokens each request computed, in the plan's order."""
        plan = self.plan()
        self.land(plan, token)
        return {slice_.request.id: slice_.count for slice_ in plan.slices}

    def finish(self, max_steps: int = 1000) -> None:
        """Run steps until all requests have ended; check that they released their pages."""
        while self.scheduler.has_work:
            self.step()
            max_steps -= 1
            assert max_steps, "no end in sight"
        check_pool(self.pool)
