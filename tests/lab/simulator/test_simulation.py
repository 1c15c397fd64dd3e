"""Simulations compared with queueing theory, with the planner, and with hand counts."""

from __future__ import annotations

import json
import random
from itertools import product

import pytest
from msgspec.structs import replace

from support.configs import write_config
from support.tiny import tiny_of, write_tiny_gguf
from twostroke.backends.interface import BackendFacts
from twostroke.backends.kv_size import CacheSize
from twostroke.core.distributed_options import DISAGGREGATE
from twostroke.core.errors import MemoryLimitError, UnreachableError, UsageError
from twostroke.core.options import BatchOptions, CacheOptions
from twostroke.engine.engine import build_scheduler
from twostroke.fleet.routing.policy import POLICIES
from twostroke.lab.measure.requests import Objectives
from twostroke.lab.planner import Question, find_device, load_planned_model, make_plan
from twostroke.lab.planner.calibration import Calibration, MeasuredStep
from twostroke.lab.planner.roofline import Roofline, Totals
from twostroke.lab.simulator import (
    RequestArrival,
    SimulationSetup,
    SyntheticWorkload,
    Workload,
    simulate,
    sweep,
)
from twostroke.lab.simulator.fleet import START_S, SimulatedFleet
from twostroke.lab.simulator.replica import Clock, SimulatedReplica
from twostroke.model.program.batch import BatchShape, DecodeRun

LLAMA = {
    "model_type": "llama", "max_position_embeddings": 8192, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip


DECODE = MeasuredStep(
    streams=1, context=128, prompt=0, attention_s=1e-3, products_s=5e-3, rest_s=1e-3
)
PREFILL = MeasuredStep(
    streams=0, context=0, prompt=256, attention_s=1e-3, products_s=8e-3, rest_s=2e-3
)


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "llama.json"
    path.write_text(json.dumps(LLAMA))
    batch = BatchOptions(token_budget=2048)
    return SimulationSetup(load_planned_model(str(path)), find_device("H100-SXM"), batch=batch)


def serve(load, totals):
    """Serve a workload one request at a time, with equal totals for each step.

    Returns the replica and the request logs.
    """
    clock, batch = Clock(START_S), BatchOptions(max_running=1, max_waiting_requests=1 << 20)
    facts = BackendFacts(
        name="simulated",
        detail="",
        num_threads=1,
        num_pages=8,
        page_size=16,
        windows=(None,),
        weight_bytes=0,
        cache_bytes=0,
    )
    size = CacheSize(64, 8, 16, 0)
    scheduler = build_scheduler(
        CacheOptions(prefix_cache=False), batch, size=size, facts=facts, clock=clock.read
    )
    replica = SimulatedReplica(scheduler, lambda _: totals, clock, 100, 16)
    fleet = SimulatedFleet([replica], "round-robin", clock=clock, vocab_size=100)
    fleet.run(load)
    return replica, fleet.logs


def test_the_first_step_after_a_pause_has_none_before_it():
    arrivals = RequestArrival(0.0, 4, 3), RequestArrival(9.0, 4, 3), RequestArrival(9.1, 4, 3)
    replica, logs = serve(Workload("three", arrivals), Totals(1.0, 1, 1, 0.4))
    assert [logs[n].latencies["tpot"] for n in range(3)] == pytest.approx([1.0] * 3)
    assert [logs[n].latencies["ttft"] for n in range(3)] == pytest.approx([0.6, 0.6, 3.5])
    assert replica.busy_s == pytest.approx(9 - 2 * 0.4)


def test_a_queue_waits_as_theory_says():
    # One request at a time, each a step of a second: M/D/1, whose mean wait is rho / (2 (1 - rho)).
    load = SyntheticWorkload(0.7, count=10_000, prompt=4, output=1).load(seed=3)
    replica, logs = serve(load, Totals(1.0, 1, 1))
    waits = [log.latencies["ttft"] - 1 for log in logs.values()]
    assert sum(waits) / len(waits) == pytest.approx(0.7 / (2 * 0.3), rel=0.1)
    assert replica.busy_s == 10_000


def test_one_request_takes_what_the_planner_says(setup):
    load = Workload("one", (RequestArrival(0.0, 2048, 101),))
    report = simulate(setup, load).report
    plan = make_plan(setup.model, setup.device, Question(prompt=2048, output=101, streams=1))
    assert report.latencies["ttft"].mean == pytest.approx(plan.ttft_s, rel=1e-6)
    assert report.latencies["tpot"].mean == pytest.approx(plan.chosen_row.tpot_s, rel=1e-3)


@pytest.fixture
def sliding(setup, tmp_path):
    """Return a setup whose model has a sliding window in half of its layers."""
    config = write_config(tmp_path / "sliding.json", "8B", model_type="gemma2", sliding_window=512)
    return replace(setup, model=load_planned_model(config))


def test_models_with_windows_are_simulated(sliding):
    load = Workload("one", (RequestArrival(0.0, 2048, 101),))
    tpot_s = simulate(sliding, load).report.latencies["tpot"].mean
    plan = make_plan(sliding.model, sliding.device, Question(prompt=2048, output=101, streams=1))
    assert tpot_s == pytest.approx(plan.chosen_row.tpot_s, rel=1e-3)
    several = simulate(
        sliding, Workload("many", tuple(RequestArrival(n / 9, 900, 60) for n in range(40)))
    )
    assert several.report.num_completed == 40


@pytest.mark.seeds(3)
def test_quick_times_are_those_of_the_roofline(setup, sliding, seed):
    rng = random.Random(seed)
    for _ in range(20):
        model = rng.choice((setup, sliding)).model
        count = rng.randint(1, 20)
        starts = tuple(rng.randint(0, 4000) for _ in range(count))
        counts = tuple(rng.choice((1, 1, 1, 300)) for _ in range(count))
        batch = BatchShape(starts, counts, rng.randint(0, count))
        question = Question(count=rng.choice((1, 2)), mfu=0.5)
        for calibration in (None, Calibration((DECODE, PREFILL), "", 1)):
            roofline = Roofline(model, setup.device, question, calibration)
            for shape in (batch, replace(batch, num_sampled=count), batch):
                step, quick = roofline.step(shape), roofline.totals(shape)
                expected = step.seconds, step.flops, step.bytes
                assert quick[:3] == pytest.approx(expected, rel=0.05 if calibration else 1e-9)


@pytest.mark.seeds(3)
def test_times_of_a_run_are_those_of_its_steps(setup, sliding, seed):
    rng = random.Random(seed)
    for calibration, simulated in product(
        (None, Calibration((DECODE, PREFILL), "", 1)), (setup, sliding)
    ):
        roofline = Roofline(simulated.model, setup.device, Question(), calibration)
        starts = tuple(rng.randint(0, 4000) for _ in range(rng.randint(1, 20)))
        run = DecodeRun.of_steps(starts, 50)
        steps = [roofline.totals(run.shape_at(step))[:3] for step in range(50)]
        assert [*zip(*roofline.totals(run)[:3], strict=True)] == steps
        for window in (None, 1, 500, 2000):
            counts = [run.shape_at(step).num_attended(window) for step in range(50)]
            assert run.num_attended(window).tolist() == counts
            assert run.num_context(window).tolist() == counts


def test_the_same_seed_gives_the_same_report(setup):
    load = SyntheticWorkload(40.0, "gamma", count=100, prompt=700, output=60, spread=1.0)
    busy = replace(setup, replicas=3, routing="two-choices", acceptance=0.7, draft_cost=0.05)
    simulation = simulate(busy, load.load(5))
    assert simulation == simulate(busy, load.load(5))
    assert simulation != simulate(busy, load.load(6))
    assert simulation.report.num_completed == 100


def test_prefix_hits_are_counted_in_whole_pages(setup):
    # The second prompt shares two blocks of 24 tokens: three pages of 16.
    arrivals = (
        RequestArrival(0.0, 60, 4, (0, 1, 2), 24),
        RequestArrival(9.0, 70, 4, (0, 1, 3), 24),
        RequestArrival(18.0, 50, 4),
    )
    simulation = simulate(setup, Workload("three", arrivals))
    assert [log.num_cached for log in simulation.logs] == [0, 48, 0]
    assert simulation.report.hit_rate == pytest.approx(48 / 180)
    off = replace(setup, cache=CacheOptions(prefix_cache=False))
    assert simulate(off, Workload("three", arrivals)).report.hit_rate == 0


def test_routing_by_prefix_finds_more_hits(setup):
    rng = random.Random(0)
    arrivals = [
        RequestArrival(n / 20, 600 + rng.randrange(200), 20, (rng.randrange(12), 99 + n), 512)
        for n in range(300)
    ]
    rates = {}
    for routing in POLICIES:
        several = replace(setup, replicas=8, routing=routing)
        rates[routing] = simulate(several, Workload("shared", tuple(arrivals))).report.hit_rate
    assert rates["prefix"] > 0.65
    assert rates["prefix"] > 1.1 * max(rates["round-robin"], rates["two-choices"])


def test_replicas_share_the_load_and_its_price(setup):
    load = SyntheticWorkload(30.0, count=400, prompt=512, output=64).load(0)
    single, four = simulate(setup, load), simulate(replace(setup, replicas=4), load)
    assert len(four.busy) == 4
    assert sum(four.busy) / 4 < sum(single.busy)
    assert four.usd_per_1k == pytest.approx(4 * single.usd_per_1k, rel=0.1)
    assert four.report.latencies["tpot"].mean < single.report.latencies["tpot"].mean


def test_speculation_follows_the_real_controller(setup):
    alone = Workload("one", (RequestArrival(0.0, 64, 2000),))
    plain = simulate(setup, alone)
    times = {
        chance: plain.report.duration_s
        / simulate(replace(setup, acceptance=chance), alone).report.duration_s
        for chance in (0.02, 0.7, 0.9)
    }
    # Eight free drafts: (1 - a^9) / (1 - a) tokens a step, less steps that keep times known.
    assert 2.5 < times[0.7] < 1.05 * (1 - 0.7**9) / 0.3
    assert 5.0 < times[0.9] < 1.05 * (1 - 0.9**9) / 0.1
    assert times[0.02] > 0.97, "drafts that do not pay are not proposed"
    costly = simulate(replace(setup, acceptance=0.7, draft_cost=0.9), alone)
    assert costly.report.duration_s < 1.05 * plain.report.duration_s


def test_requests_that_never_fit_are_refused(setup):
    arrivals = (
        RequestArrival(0.0, 100, 5),
        RequestArrival(0.1, 9000, 5),
        RequestArrival(0.2, 8000, 500),
    )
    simulation = simulate(setup, Workload("long", arrivals), Objectives(ttft_s=1.0))
    assert simulation.report.num_refused == 2
    assert simulation.report.good_share == pytest.approx(1 / 3)
    assert "request 2: This model's maximum context length is 8192 tokens." in simulation.refusal
    with pytest.raises(UsageError, match="Every request is refused; request 1: This model's"):
        simulate(setup, Workload("long", arrivals[1:]))


def test_a_full_queue_refuses(setup):
    small = replace(setup, batch=BatchOptions(max_running=2, max_waiting_requests=3))
    load = Workload("burst", tuple(RequestArrival(0.0, 50, 50) for _ in range(10)))
    simulation = simulate(small, load)
    assert simulation.report.num_completed == 3
    assert "The queue is full" in simulation.refusal


def test_time_outside_the_engine_is_added_to_the_first_token(setup):
    load = SyntheticWorkload(5.0, count=30, prompt=512, output=16).load(0)
    plain, delayed = (simulate(replace(setup, overhead_s=s), load).report for s in (0.0, 0.02))
    for name, added_s in (("ttft", 0.02), ("e2e", 0.02), ("queue", 0.02), ("tpot", 0.0)):
        means_s = [report.latencies[name].mean for report in (plain, delayed)]
        assert means_s[1] - means_s[0] == pytest.approx(added_s, abs=1e-6)


def test_prompts_can_be_prefilled_on_other_replicas(setup):
    # Of 1,024 tokens 63 pages are moved: 132 MB, over 1 GB/s. The last page is computed again.
    load = Workload("one", (RequestArrival(0.0, 1024, 101),))
    split_setup = replace(setup, replicas=2, prefill_replicas=1, link=1e9, disaggregate="always")
    together, split = (simulate(s, load).report.latencies for s in (setup, split_setup))
    assert split["tpot"].mean == pytest.approx(together["tpot"].mean)
    last_s = (
        simulate(setup, Workload("page", (RequestArrival(0.0, 16, 1),)))
        .report.latencies["ttft"]
        .mean
    )
    expected_s = 1008 * 131_072 / 1e9 + 0.005 + last_s
    assert split["ttft"].mean == pytest.approx(expected_s, rel=0.02)


def test_a_prompt_is_handed_over_with_its_recurrent_state(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_of("qwen3.5", context_length=4096))
    load = Workload("one", (RequestArrival(0.0, 1024, 11),))
    split_setup = SimulationSetup(
        load_planned_model(str(path)),
        find_device("H100-SXM"),
        batch=BatchOptions(token_budget=2048, max_running=8),
        replicas=2,
        prefill_replicas=1,
        link=1e9,
        disaggregate="always",
    )
    simulation = simulate(split_setup, load)
    assert simulation.decisions == {"there": 1}
    assert [log.num_cached for log in simulation.logs] == [1008]


@pytest.mark.parametrize(
    ("prompt", "output", "rate"), [(1024, 64, 30), (1024, 64, 70), (100, 200, 60)]
)
def test_the_rule_auto_is_as_good_as_the_better_of_always_and_never(setup, prompt, output, rate):
    load = SyntheticWorkload(float(rate), count=200, prompt=prompt, output=output, spread=0.5).load(
        0
    )
    split_setup = replace(setup, replicas=2, prefill_replicas=1, link=10e9)
    simulations = {
        rule: simulate(replace(split_setup, disaggregate=rule), load) for rule in DISAGGREGATE
    }
    mean_s = {
        rule: simulation.report.latencies["e2e"].mean for rule, simulation in simulations.items()
    }
    assert mean_s["auto"] <= min(mean_s["always"], mean_s["never"]) / 0.97
    assert {simulation.report.num_completed for simulation in simulations.values()} == {200}
    assert simulations["never"].decisions == {}
    assert simulations["always"].decisions.keys() <= {"there", "short"}


def test_a_prompt_that_a_full_replica_refuses_is_prefilled_by_its_own(setup):
    batch = BatchOptions(token_budget=2048, max_waiting_requests=4)
    split_setup = replace(setup, batch=batch, replicas=4, prefill_replicas=1, link=10e9)
    burst = Workload("burst", tuple(RequestArrival(0.0, 1024, 4) for _ in range(12)))
    simulation = simulate(replace(split_setup, disaggregate="always", routing="round-robin"), burst)
    assert (simulation.report.num_completed, simulation.decisions) == (12, {"there": 12})
    assert sum(log.num_cached > 0 for log in simulation.logs) == 4, "the others computed all"


def test_batches_start_when_they_may(setup):
    load = Workload("five", tuple(RequestArrival(float(n), 64, 8) for n in range(5)))
    for policy, expected in (("static", (1.0, 0.0, 1.0, 0.0, 0.0)), ("dynamic", (0.5,) * 5)):
        batch = BatchOptions(policy=policy, batch_size=2, max_wait_s=0.5)
        simulation = simulate(replace(setup, batch=batch), load)
        queues = [log.latencies["queue"] for log in simulation.logs]
        assert queues == pytest.approx(expected), "the last batch of a static policy is flushed"


def test_pages_that_run_short_preempt(setup):
    one_page = setup.model.program.page_bytes(16)
    cache = CacheOptions(memory_bytes=40 * one_page, context_length=512)
    load = Workload("burst", tuple(RequestArrival(0.0, 60, 200) for _ in range(12)))
    simulation = simulate(replace(setup, cache=cache), load)
    assert simulation.preemptions > 0
    assert simulation.report.num_completed == 12


def test_a_model_that_does_not_fit(setup):
    small = replace(setup.device, memory_bytes=10e9)
    with pytest.raises(MemoryLimitError, match=r"take 16.1 GB, and 1 x H100-SXM offers 9.0"):
        simulate(replace(setup, device=small), Workload("one", (RequestArrival(0.0, 1, 1),)))
    unknown = replace(setup.device, memory_bytes=None)
    with pytest.raises(UsageError, match="memory_bytes must be given"):
        simulate(replace(setup, device=unknown), Workload("one", (RequestArrival(0.0, 1, 1),)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"replicas": 0}, "replicas must be from 1"), ({"overhead_s": 99}, "overhead_s must be"),
     ({"prefill_replicas": 1}, "prefill_replicas must be from 0 to less than replicas"),
     ({"disaggregate": "alway"}, "Did you mean 'always'"),
     ({"routing": "prefx"}, "Did you mean 'prefix'"),
     ({"acceptance": 1.0}, "acceptance must be"), ({"draft_cost": -1.0}, "draft_cost must be")],
)  # fmt: skip
def test_setups_out_of_range(setup, changes, message):
    with pytest.raises(UsageError, match=message):
        replace(setup, **changes)


def test_a_sweep_finds_the_capacity(setup):
    load = SyntheticWorkload(1.0, count=150, prompt=1024, output=32).load(0)
    probes = []
    result = sweep(setup, load, Objectives(ttft_s=0.2), watch=probes.append)
    assert len(probes) == len(result.probes)
    assert result.best.simulation.report.good_share >= 0.9
    worse = min((p.speed for p in result.probes if not p.meets), default=None)
    assert worse is not None
    assert result.best.speed < worse <= 1.03 * result.best.speed
    # A prompt needs 16 ms of arithmetic, so no more than about sixty a second can be served.
    assert 20 < result.best.rate < 70


def test_sweeps_that_cannot_be(setup):
    load = SyntheticWorkload(1.0, count=3, prompt=1024, output=32).load(0)
    with pytest.raises(UsageError, match="needs an objective"):
        sweep(setup, load, Objectives())
    probes = []
    with pytest.raises(
        UnreachableError, match=r"only 0% meet the objectives \(P90 of TTFT is .* times"
    ):
        sweep(setup, load, Objectives(ttft_s=1e-3), watch=probes.append)
    assert len(probes) == 2  # no load between helps if requests that are alone are too slow
    with pytest.raises(UsageError, match=r"meet the objectives even if .* more than 3"):
        sweep(setup, load, Objectives(ttft_s=100.0))
