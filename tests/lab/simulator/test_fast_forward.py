"""A simulation that fast-forwards decode steps has the same results as one without."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from twostroke.backends.interface import BackendFacts
from twostroke.backends.kv_size import CacheSize
from twostroke.core.options import BatchOptions, CacheOptions
from twostroke.engine.engine import build_scheduler
from twostroke.fleet.routing.policy import POLICIES
from twostroke.lab.planner.roofline import Totals
from twostroke.lab.simulator.disaggregation import PrefillSettings
from twostroke.lab.simulator.fleet import START_S, SimulatedFleet, make_request
from twostroke.lab.simulator.load import RequestArrival, Workload
from twostroke.lab.simulator.page_cache import PageCacheSettings
from twostroke.lab.simulator.replica import Clock, SimulatedReplica
from twostroke.model.program.work import Cost, StepCost, each_row

if TYPE_CHECKING:
    from twostroke.engine.scheduler import Scheduler

VOCAB_SIZE, CONTEXT = 50, 256


def random_load(chance: random.Random) -> Workload:
    """Return random requests: some share prefix blocks, arrive together, or when a step ends."""
    arrivals, at_s = [], 0.0
    for number in range(60):
        blocks = tuple(chance.choice(((0, 1, 2), (0, 1), (0, 3), (9 + number,), ())))
        prompt = max(1, 32 * len(blocks) - chance.randrange(20)) if blocks else chance.randint(1, 9)
        at_s += chance.choice((0.0, 0.25, 1.0, 3.0, 40.0))
        arrivals.append(RequestArrival(at_s, prompt, chance.randint(1, 120), blocks, 32))
    return Workload("random", tuple(arrivals))


def times(shape) -> Totals:
    """Return step times in whole quarters of seconds, so that some steps end when requests come."""
    seconds = 0.25 + 0.25 * (shape.num_context(64) // 512)
    return Totals(seconds, shape.num_context() * 3, shape.num_attended(40) + 1)


def fleet_of(seed: int, seen: list[object], *, is_quiet: bool) -> SimulatedFleet:
    """Return a simulated fleet with few pages; `seen` gets the state of pages after each step."""
    rng, clock = random.Random(seed), Clock(START_S)
    count, size = rng.choice((1, 3)), rng.choice((4, 16))
    windows = rng.choice(((None,), (None, 24), (40,)))
    num_pages = rng.choice((300, 700, 5000)) // size * len(windows)
    batch = BatchOptions(
        policy=rng.choice(("continuous", "continuous", "static")),
        batch_size=3,
        max_running=rng.choice((3, 8)),
        token_budget=24,
    )
    facts = BackendFacts(
        name="simulated",
        detail="",
        num_threads=1,
        num_pages=num_pages,
        page_size=size,
        windows=windows,
        weight_bytes=0,
        cache_bytes=0,
    )
    cache = CacheOptions(prefix_cache=rng.random() < 0.8)
    prefill = None
    if count > 1 and cache.prefix_cache and rng.random() < 0.5:
        rule = rng.choice(("always", "auto"))
        prefill = PrefillSettings(1, rule, StepCost(((each_row, Cost(1)),)), size, 4.0)
    page_cache = None
    if prefill is None and cache.prefix_cache and rng.random() < 0.7:
        page_cache = PageCacheSettings(
            max_bytes=rng.choice((5, 20, 1000)) * size,
            bytes_per_s=size * rng.choice((16.0, 64.0)),
            page_bytes=size,
            num_groups=len(windows),
            state_bytes=0,
            token_budget=24,
            seconds=lambda shape: times(shape).seconds,
        )
    replicas = []
    for number in range(count):
        sizes = CacheSize(CONTEXT, num_pages, size, 0)
        scheduler = build_scheduler(cache, batch, size=sizes, facts=facts, clock=clock.read)
        watch(scheduler, number, clock, seen, is_quiet=is_quiet)
        replicas.append(SimulatedReplica(scheduler, times, clock, VOCAB_SIZE, size))
    routing = rng.choice(tuple(POLICIES))
    return SimulatedFleet(
        replicas,
        routing,
        clock=clock,
        vocab_size=VOCAB_SIZE,
        prefill=prefill,
        page_cache=page_cache,
    )


def watch(
    scheduler: Scheduler, number: int, clock: Clock, seen: list[object], *, is_quiet: bool
) -> None:
    """Record the state of a scheduler's pages after each change, except in fast-forwarded steps."""
    plan_next = scheduler.plan
    if not is_quiet:
        scheduler.fast_forward_steps = lambda max_steps: ([], 0)

    def plan(budget=None):
        step_plan = plan_next(budget)
        view = scheduler.view()
        parts = step_plan and [
            (s.request.id, s.start, s.count, s.samples) for s in step_plan.slices
        ]
        seen.append(
            (number, parts, view.pages, view.reference_counts, view.cached_pages, view.stats)
        )
        return step_plan

    scheduler.plan = plan


@pytest.mark.seeds(8)
def test_everything_is_as_in_single_steps(seed):
    load = random_load(random.Random(seed))
    single, together = [], []
    fleets = [fleet_of(seed, single, is_quiet=False), fleet_of(seed, together, is_quiet=True)]
    for fleet in fleets:
        fleet.run(load)
    assert fleets[0].logs == fleets[1].logs
    assert fleets[0].refusals == fleets[1].refusals
    assert fleets[0].num_page_loads == fleets[1].num_page_loads
    for replica, other in zip(*(fleet._replicas for fleet in fleets), strict=True):
        for name in ("num_steps", "num_requests", "num_tokens", "busy_s", "flops", "bytes"):
            assert getattr(replica, name) == pytest.approx(getattr(other, name), rel=1e-12)
    steps = iter(single)
    assert all(step in steps for step in together), "the other steps are among the single ones"
    if all(replica.may_fast_forward for replica in fleets[1]._replicas):
        assert len(together) < len(single), "some are done together"


def test_a_request_does_not_join_the_step_in_flight_when_a_fast_forward_is_caught_up():
    clock = Clock(START_S)
    facts = BackendFacts(
        name="simulated",
        detail="",
        num_threads=1,
        num_pages=64,
        page_size=16,
        windows=(None,),
        weight_bytes=0,
        cache_bytes=0,
    )
    size = CacheSize(CONTEXT, 64, 16, 0)
    scheduler = build_scheduler(
        CacheOptions(), BatchOptions(), size=size, facts=facts, clock=clock.read
    )
    replica = SimulatedReplica(scheduler, lambda _: Totals(1.0, 1, 1), clock, VOCAB_SIZE, 16)
    first, second = (
        make_request(number, RequestArrival(0.0, 5, 9), VOCAB_SIZE) for number in (0, 1)
    )
    replica.submit(first)
    assert replica.start() == 2.0
    clock.now_s = 2.0
    replica.finish()
    assert replica.start() > 5.0, "several steps are done together"
    clock.now_s = 4.5
    assert replica.interrupt() == 5.0
    replica.submit(second)
    clock.now_s = 4.75
    assert replica.catch_up() == 5.0
    assert replica.catch_up() == 5.0
    assert (first.num_output, second.started_s) == (3, 0.0)
    clock.now_s = 5.0
    replica.finish()
    assert replica.start() == 6.0
    assert (first.num_output, second.started_s) == (4, 5.0)
    assert replica.num_steps == 5
