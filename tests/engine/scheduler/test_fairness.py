"""Fair shares between tenants, and limits on how often a request is overtaken."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from support.requests import make_request
from support.steps import Steps
from twostroke.core.errors import OverloadedError
from twostroke.core.request import FinishReason
from twostroke.core.step import StepResult
from twostroke.engine.kv_cache import PagePool, PrefixIndex
from twostroke.engine.scheduler import Continuous, Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from typing import Any

    from twostroke.core.request import Request

_LIMITS = {"context_length": 4096, "max_running": 16, "token_budget": 64}


class Service:
    """A scheduler whose steps cost nothing, with the tokens computed for each tenant."""

    def __init__(self, *, cache: bool = False, **limits: int) -> None:
        pool = PagePool(4000, 8)
        config = SchedulerConfig(**{**_LIMITS, **limits})
        index = PrefixIndex(pool) if cache else None
        self.scheduler = Scheduler(config, pool, index, Continuous())
        self.computed: Counter[str] = Counter()
        self.started: list[str] = []
        self.num_added = 0

    def add(self, tenant: str, prompt: list[int] | int, **options: Any) -> Request:
        self.num_added += 1
        request = make_request(f"{tenant}{self.num_added}", prompt, tenant=tenant, **options)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        plan = self.scheduler.plan()
        assert plan is not None
        for slice_ in plan.slices:
            self.computed[slice_.request.tenant] += slice_.count
            if slice_.start == slice_.request.num_cached and slice_.request.num_output == 0:
                self.started.append(slice_.request.id)
        num_drawn = sum(slice_.num_drawn for slice_ in plan.slices)
        self.scheduler.commit(plan, StepResult([1] * num_drawn, [None] * num_drawn))


class Backlog:
    """Keeps requests of one tenant waiting; `draw` gives their lengths."""

    def __init__(
        self, service: Service, tenant: str, weight: float, seed: int, max_queued: int
    ) -> None:
        self._service, self._tenant, self._weight = service, tenant, weight
        self._rng, self._max_queued = random.Random(seed), max_queued
        self.open: list[Request] = []

    def fill(self, depth: int) -> None:
        self.open = [request for request in self.open if not request.is_finished]
        while len(self.open) < depth:
            prompt = [
                self._rng.randrange(1, 999) for _ in range(self._rng.randint(1, self._max_queued))
            ]
            max_tokens = self._rng.randint(1, self._max_queued)
            options = {"weight": self._weight, "max_tokens": max_tokens}
            self.open.append(self._service.add(self._tenant, prompt, **options))


@pytest.mark.parametrize("max_queued", [(20, 20), (5, 60)], ids=["alike", "short and long"])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tenants_with_a_backlog_get_tokens_by_their_weights(max_queued, weight):
    service = Service()
    light = Backlog(service, "light", 1.0, 1, max_queued[0])
    heavy = Backlog(service, "heavy", weight, 2, max_queued[1])
    at_half: Counter[str] = Counter()
    for number in range(1000):
        light.fill(40)
        heavy.fill(40)
        service.step()
        if number == 250:
            at_half = Counter(service.computed)
    later_tokens = service.computed - at_half
    assert later_tokens["heavy"] / later_tokens["light"] == pytest.approx(weight, rel=0.05)


def test_cached_prompts_are_not_charged():
    service = Service(cache=True)
    shared = list(range(1, 49))
    requests: dict[str, list[Request]] = {"same": [], "fresh": []}
    finished_counts: Counter[str] = Counter()
    for number in range(2000):
        for tenant, mine in requests.items():
            finished_counts[tenant] += sum(request.is_finished for request in mine)
            mine[:] = [request for request in mine if not request.is_finished]
            while len(mine) < 30:
                prompt = shared if tenant == "same" else [number % 997 + 1, *shared]
                mine.append(service.add(tenant, prompt, max_tokens=8))
        service.step()
    assert service.computed["same"] / service.computed["fresh"] == pytest.approx(1, rel=0.05)
    assert finished_counts["same"] > 2 * finished_counts["fresh"]


def test_one_tenant_is_served_in_the_order_of_arrival_and_priority():
    rng, max_overtakes = random.Random(5), 7
    scheduler = Service(max_overtakes=max_overtakes, max_running=2, token_budget=4).scheduler
    arrivals = []
    for arrival in range(300):
        request = make_request(f"r{arrival}", rng.randint(1, 30), priority=rng.randint(-2, 2))
        scheduler.add(request)
        arrivals.append((arrival + max_overtakes * request.priority, arrival, request.id))
        if rng.random() < 0.5:
            plan = scheduler.plan()
            num = sum(slice_.num_drawn for slice_ in plan.slices)
            scheduler.commit(plan, StepResult([1] * num, [None] * num))
    by_rank = sorted(scheduler._states.values(), key=lambda state: state.priority_key)
    alive = {state.request.id for state in by_rank}
    right = [name for _, _, name in sorted(arrivals) if name in alive]
    assert [state.request.id for state in by_rank] == right
    assert len(right) > 100


@pytest.mark.parametrize("max_overtakes", [0, 1, 8, 50])
def test_a_request_is_passed_by_a_bounded_number_of_later_ones(max_overtakes):
    """This holds for any tenants, also for tenants that were served little before."""
    rng, service = random.Random(max_overtakes), Service(max_overtakes=max_overtakes)
    waiting: list[tuple[int, Request]] = []
    num_passed = 0
    for arrival in range(350):
        tenant = f"new{arrival}" if rng.random() < 0.3 else rng.choice("abc")
        options: dict[str, Any] = {"weight": rng.choice((0.1, 1.0, 9.0))}
        options |= {"priority": rng.choice((0, 0, 0, 1, -1)), "max_tokens": rng.randint(1, 40)}
        waiting.append((arrival, service.add(tenant, rng.randint(1, 60), **options)))
        if rng.random() < 0.4:
            service.step()
        if rng.random() < 0.05:
            service.scheduler.finish(rng.choice(waiting)[1], FinishReason.CANCEL)
        waiting = [(number, request) for number, request in waiting if not request.is_finished]
        ranks = [
            (service.scheduler._states[waiting_request.id].priority_key, number, waiting_request)
            for number, waiting_request in waiting
        ]
        for at, (rank, number, request) in enumerate(ranks):
            for other, later, passer in ranks[at + 1 :]:
                if other < rank:
                    levels = request.priority - passer.priority
                    assert later - number < max_overtakes * (levels + 1), "too far"
                    num_passed += 1
    assert num_passed >= 100 * bool(max_overtakes)


def test_every_request_ends_in_a_bounded_number_of_steps_while_new_tenants_keep_coming():
    service = Service(max_running=2, token_budget=4, max_overtakes=20, max_waiting_requests=30)
    service.add("flood", 8, max_tokens=8)
    last = [service.add("flood", 8, max_tokens=8) for _ in range(20)][-1]
    num_steps = 0
    while not last.is_finished:
        for number in range(2):
            try:
                service.add(f"new{num_steps}.{number}", 4, max_tokens=4)
            except OverloadedError:
                break
        service.step()
        num_steps += 1
        # At most 20 requests of 16 tokens and 20 that pass, of 8, on 2 places.
        assert num_steps < (21 * 16 + 20 * 8) / 2 + 40, "it starves"


def test_a_trickle_starts_at_once_beside_a_flood_and_reads_before_its_long_prompts():
    service = Service()
    for _ in range(100):
        service.add("flood", 400, max_tokens=20)
    for _ in range(10):
        service.step()
    trickle = service.add("trickle", 40, max_tokens=2)
    service.step()
    assert trickle.num_output == 1, "the flood's half-read prompt went before it"
    second_request = service.add("trickle", 40, max_tokens=2)
    service.step()
    assert second_request.num_output == 0, "its second one waits for its turn"


def test_a_tenant_cannot_save_up_what_it_did_not_use():
    service = Service()
    busy = Backlog(service, "busy", 1.0, 3, 30)
    for _ in range(500):
        busy.fill(30)
        service.step()
    late_tenant = Backlog(service, "late", 1.0, 4, 30)
    before = service.computed["busy"]
    for _ in range(500):
        busy.fill(30)
        late_tenant.fill(30)
        service.step()
    assert service.computed["late"] / (service.computed["busy"] - before) < 1.1


def test_a_full_queue_has_room_for_requests_before_the_flood():
    service = Service(max_running=1, max_waiting_requests=10, max_waiting_tokens=100)
    for _ in range(10):
        service.add("flood", 5, max_tokens=5)
    with pytest.raises(OverloadedError, match="10 requests wait, and at most 10 may"):
        service.add("flood", 5)
    assert service.scheduler.stats().num_waiting == 10
    with pytest.raises(OverloadedError):
        service.add("flood", 5, priority=1)
    service.add("trickle", 5)
    service.add("flood", 5, priority=-1)
    with pytest.raises(OverloadedError, match="110 tokens would wait"):
        service.add("trickle", 90)
    for number in range(50):
        with contextlib.suppress(OverloadedError):
            service.add(f"tenant{number}", 1, priority=-number)
    assert service.scheduler.stats().num_waiting == 20


def test_idle_tenants_are_forgotten():
    service = Service()
    service.add("steady", 5, max_tokens=4000)
    for number in range(5000):
        service.add(f"tenant{number}", 1, max_tokens=1)
        service.step()
    level = service.scheduler._waiting.order._levels[0]
    assert len(level._accounts) < 1100
    assert len(level._unfinished) < 20


def test_partly_prefilled_requests_keep_their_pages_when_others_overtake():
    """A tenant that overtakes others in the queue does not preempt running requests."""
    steps = Steps(num_pages=12, token_budget=8)
    first = steps.add("a", 40, max_tokens=2, tenant="flood")
    steps.step()
    steps.add("b", 16, max_tokens=2, tenant="trickle")
    steps.finish()
    assert first.num_preemptions == 0
