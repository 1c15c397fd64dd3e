"""Deadlines: the order within a tenant, refusals at once, and requests that expire in the queue."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from support.requests import make_request
from twostroke.core.errors import OverloadedError
from twostroke.core.request import FinishReason
from twostroke.core.step import StepResult
from twostroke.engine.kv_cache import PagePool
from twostroke.engine.scheduler import Continuous, Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from typing import Any

    from twostroke.core.request import Request


class Line:
    """A scheduler that computes 10 tokens per second of one request at a time."""

    def __init__(self, **limits: int) -> None:
        self.now_s = 1.0
        config = {"context_length": 512, "max_running": 1, "token_budget": 10, **limits}
        pool = PagePool(2000, 8)
        self.scheduler = Scheduler(
            SchedulerConfig(**config), pool, None, Continuous(), lambda: self.now_s
        )
        self.started: list[str] = []
        self.errors: dict[str, str] = {}

    def add(self, name: str, num_prompt: int = 9, **fields: Any) -> Request:
        within_s, timeout_s = fields.pop("within_s", None), fields.pop("timeout_s", None)
        request = make_request(name, num_prompt, max_tokens=1, **fields)
        request.arrival_s = self.now_s
        request.start_within_s = within_s or request.start_within_s
        request.timeout_s = timeout_s or request.timeout_s
        self.scheduler.add(request)
        return request

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for request, error in self.scheduler.pop_overdue():
                self.errors[request.id] = str(error)
                assert self.scheduler.finish(request, FinishReason.ERROR)
            plan = self.scheduler.plan()
            self.now_s += 1.0
            if plan is not None:
                self.started += [slice_.request.id for slice_ in plan.slices if not slice_.start]
                num = sum(slice_.num_drawn for slice_ in plan.slices)
                self.scheduler.commit(plan, StepResult([1] * num, [None] * num))


def test_the_earliest_deadline_goes_first_within_a_tenant_and_class():
    line = Line()
    line.add("running", 20, priority=-1)
    line.step()
    for name, timeout_s in (("none", None), ("late", 60.0), ("soon", 30.0), ("later", 90.0)):
        line.add(name, timeout_s=timeout_s)
    line.add("urgent", priority=-1)
    line.add("objective", within_s=40.0)
    line.step(12)
    order = ["running", "urgent", "soon", "objective", "late", "later", "none"]
    assert line.started == order


def test_a_deadline_takes_nothing_from_other_tenants():
    line = Line(token_budget=10)
    rng = random.Random(3)
    for number in range(60):
        for tenant in ("calm", "hasty"):
            timeout_s = rng.uniform(500, 1000) if tenant == "hasty" else None
            line.add(f"{tenant}{number}", tenant=tenant, timeout_s=timeout_s)
    line.step(60)
    assert abs(sum(name.startswith("calm") for name in line.started) - 30) <= 1


def test_a_request_is_passed_by_a_bounded_number_of_earlier_deadlines():
    line = Line(max_overtakes=5)
    line.add("patient", timeout_s=500.0)
    for number in range(20):
        line.add(f"r{number}", timeout_s=400.0 - number)
    line.step(10)
    assert line.started.index("patient") == 5


def test_requests_that_would_miss_their_deadline_are_refused_at_once_and_flex_first():
    line = Line()
    for number in range(30):
        line.add(f"r{number}")
    line.step(10)  # 9 tokens a second; 20 requests of 9 tokens wait
    with pytest.raises(OverloadedError, match=r"takes about 2\d\.\d s, .* may wait 15\.0 s") as got:
        line.add("late", timeout_s=15.0)
    assert got.value.facts["room_s"] == pytest.approx(5, abs=2.5)
    with pytest.raises(OverloadedError):
        line.add("flex", timeout_s=15.0, priority=1)
    line.add("priority", timeout_s=15.0, priority=-1)
    line.add("other", timeout_s=15.0, tenant="other")
    line.add("patient", timeout_s=60.0)
    line.step(16)
    assert {"priority", "other"} <= set(line.started)
    assert not line.errors


def test_a_service_tier_that_gets_little_is_refused_earlier():
    """Its start rate is the speed that other service tiers leave."""
    line = Line()
    for number in range(100):
        line.add(f"flex{number}", priority=1)
    for number in range(30):
        if not number % 5:
            for index in range(4):
                line.add(f"default{number}.{index}")
        line.step()
    with pytest.raises(OverloadedError) as got:
        line.add("flex", priority=1, timeout_s=1.0)
    waiting = [t for t in line.scheduler._waiting if t.request.priority]
    assert got.value.facts["room_s"] > 3 * len(waiting)


def test_nothing_is_refused_for_its_deadline_when_nothing_waits_before_it():
    line = Line()
    line.add("long", 90, within_s=0.5)
    line.step(3)
    line.add("next", within_s=0.5)
    assert not line.errors


def test_requests_that_expire_in_the_queue_never_run():
    line = Line()
    line.add("running", 50)
    line.step()
    line.add("mine", timeout_s=3.0)
    line.add("class", within_s=2.0)
    line.add("both", within_s=9.0, timeout_s=3.5)
    line.step(10)
    assert line.started == ["running"]
    assert line.errors == {
        "mine": "The request was not run: its turn did not come within its timeout of 3 s.",
        "class": "The request was not run: no turn came within 2 s.",
        "both": "The request was not run: its turn did not come within its timeout of 3.5 s.",
    }


def test_an_objective_is_not_missed_while_only_a_step_is_waited_for():
    line = Line()
    line.add("first", 9)
    line.step()
    line.now_s -= 0.5
    line.add("second", within_s=0.1)
    line.now_s += 0.5
    line.step(2)
    assert line.started == ["first", "second"]


def test_a_running_request_ends_at_its_timeout_and_not_at_its_objective():
    line = Line()
    line.add("long", 500, within_s=2.0, timeout_s=7.5)
    line.step(7)
    assert not line.errors
    line.step(2)
    assert line.errors == {
        "long": "The request was stopped: it took longer than its timeout of 7.5 s."
    }
    assert not line.scheduler.has_work


def test_the_scheduler_says_when_the_next_timeout_is():
    line = Line()
    line.scheduler.flush()
    assert line.scheduler.wait_s is None
    line.add("a", timeout_s=3.0)
    assert line.scheduler.wait_s == 0
    line.step()
    assert line.scheduler.pop_overdue() == []


def test_ended_requests_are_not_remembered_for_their_deadlines():
    line = Line()
    for number in range(2500):
        line.add(f"r{number}", timeout_s=80000.0)
        line.step()
    assert len(line.scheduler._deadlines._timeouts._heap) < 1100


def test_a_full_queue_says_when_it_will_have_room():
    line = Line(max_waiting_requests=20)
    for number in range(20):
        line.add(f"r{number}")
    with pytest.raises(OverloadedError) as got:
        line.add("first")
    assert got.value.facts["room_s"] is None, "no pace is known yet"
    line.step(5)
    for number in range(20, 25):
        line.add(f"r{number}")
    with pytest.raises(OverloadedError) as got:
        line.add("next")
    assert got.value.facts["room_s"] == pytest.approx(10, abs=2.5)
    assert got.value.facts["turn_s"] == pytest.approx(1, abs=0.25)
