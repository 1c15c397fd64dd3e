"""A simulation and a real engine plan the same steps on the same KV pages."""

from __future__ import annotations

import random
import threading

import pytest

from support.engines import PAGE_SIZE, tiny_client
from support.tiny import Tiny, vocabulary
from twostroke.backends.interface import BackendFacts
from twostroke.backends.kv_size import CacheSize
from twostroke.core.options import BatchOptions, CacheOptions
from twostroke.core.sampling import SamplingParams
from twostroke.engine.engine import build_scheduler
from twostroke.lab.planner.roofline import Totals
from twostroke.lab.simulator.fleet import START_S, SimulatedFleet
from twostroke.lab.simulator.load import RequestArrival, Workload
from twostroke.lab.simulator.replica import Clock, SimulatedReplica

VOCAB_SIZE = len(vocabulary()[0])
NUM_PAGES, MAX_RUNNING, TOKEN_BUDGET, CONTEXT = 17, 4, 24, 256


def random_load(seed: int) -> Workload:
    """Return random requests that arrive during the first steps.

    Some share prefix blocks, and the pages are too few for all requests.
    """
    rng = random.Random(seed)
    arrivals = []
    for number in range(14):
        blocks = tuple(rng.choice(((0, 1, 2), (0, 1), (0, 3), (4 + number,), ())))
        prompt = max(1, 32 * len(blocks) - rng.randrange(20)) if blocks else 5
        step = 0 if number < 2 else rng.randrange(30)
        arrivals.append(RequestArrival(step + 0.5, prompt, rng.randint(1, 60), blocks, 32))
    ordered = sorted(arrivals, key=lambda arrival: arrival.at_s)
    return Workload("random", (RequestArrival(0.0, 40, 100), *ordered))


def steps_of(plan, names, steps):
    """Append a plan's work to `steps`, for comparison.

    The work is each slice with its request, tokens and pages, and the preempted requests.
    """
    parts = [
        (
            names(part.request),
            part.start,
            part.count,
            part.samples,
            tuple(map(tuple, part.request.pages)),
        )
        for part in plan.slices
    ]
    steps.append((parts, [names(request) for request in plan.preempted]))


def quiet_slice(request, start):
    """Return a slice as `steps_of` records it, for a step that the simulation fast-forwarded."""
    num_places = start // PAGE_SIZE + 1
    return int(request.id), start, 1, True, tuple(tuple(g[:num_places]) for g in request.pages)


def simulated(load: Workload, batch: BatchOptions):
    """Return the steps of a simulation, and its requests' first tokens and prefix hits.

    Each step takes a second.
    """
    clock, steps = Clock(START_S), []
    facts = BackendFacts(
        name="simulated",
        detail="",
        num_threads=1,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        windows=(None,),
        weight_bytes=0,
        cache_bytes=0,
    )
    size = CacheSize(CONTEXT, NUM_PAGES, PAGE_SIZE, 0)
    scheduler = build_scheduler(CacheOptions(), batch, size=size, facts=facts, clock=clock.read)
    plan_next = scheduler.plan

    def plan():
        step_plan = plan_next()
        if step_plan is not None:
            steps_of(step_plan, lambda request: int(request.id), steps)
        return step_plan

    find_quiet, decode, running = scheduler.fast_forward_steps, scheduler.fast_forward, []

    def quiet(max_steps):
        running[:], num_steps = find_quiet(max_steps)
        return running.copy(), num_steps

    def decode_quietly(tokens):
        starts = [(request, request.num_computed) for request in running]
        decode(tokens)
        steps.extend(
            ([quiet_slice(request, start + step) for request, start in starts], [])
            for step in range(len(tokens[0]))
        )

    scheduler.plan, scheduler.fast_forward_steps, scheduler.fast_forward = (
        plan,
        quiet,
        decode_quietly,
    )
    replica = SimulatedReplica(scheduler, lambda _: Totals(1.0, 1, 1), clock, VOCAB_SIZE, PAGE_SIZE)
    fleet = SimulatedFleet([replica], "round-robin", clock=clock, vocab_size=VOCAB_SIZE)
    fleet.run(load)
    return steps, [fleet.logs[number].num_cached for number in range(len(load.arrivals))]


def real(load: Workload, batch: BatchOptions, folder):
    """Return the steps of a real engine, with requests submitted in the same steps."""
    steps, due, generations, numbers = [], list(enumerate(load.arrivals)), [], {}
    running = []

    def submit(client):
        number, arrival = due.pop(0)
        prompt = arrival.tokens(number, VOCAB_SIZE)
        params = SamplingParams(max_tokens=arrival.num_output, temperature=0.0, ignore_eos=True)
        generations.append(client.generate(prompt, params))
        numbers[generations[-1].request_ids[0]] = number

    def prepare(backend):
        run = backend.run

        def observed(plan):
            running[0].wait(30)
            steps_of(plan, lambda request: numbers[request.id], steps)
            while due and due[0][1].at_s < len(steps):
                submit(running[1])
            return run(plan)

        backend.run = observed

    limits = {"max_running": batch.effective_max_running, "token_budget": batch.token_budget}
    with tiny_client(
        folder, Tiny(context_length=CONTEXT), NUM_PAGES, batch, prepare=prepare, **limits
    ) as (client, _):
        running += [threading.Event(), client]
        submit(client)
        running[0].set()
        answers = [generations[0].wait()[0]]  # the first outlasts all arrivals
        answers += [generation.wait()[0] for generation in generations[1:]]
        return steps, [generation.usage.cached_tokens for generation in answers]


@pytest.mark.seeds(2)
def test_steps_are_those_of_the_real_engine(seed, tmp_path):
    batch = BatchOptions(max_running=MAX_RUNNING, token_budget=TOKEN_BUDGET)
    load = random_load(seed)
    steps, hits = simulated(load, batch)
    real_steps, real_hits = real(load, batch, tmp_path)
    assert steps == real_steps
    assert hits == real_hits
    assert sum(hits) > 0
    assert any(preempted for _, preempted in steps), "pages should run short"
    assert any(count > 1 for parts, _ in steps[1:] for _, _, count, *_ in parts)
