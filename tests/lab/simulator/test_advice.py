"""Advice about options: better under the load, worse in no check, and never forbidden ones."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from support.configs import write_config
from twostroke.core.errors import UsageError
from twostroke.core.options import BatchOptions
from twostroke.lab.measure.requests import Objectives
from twostroke.lab.planner import Question, find_device, load_planned_model
from twostroke.lab.simulator import (
    RequestArrival,
    SimulationSetup,
    SyntheticWorkload,
    simulate,
)
from twostroke.lab.simulator import advice as advice_module
from twostroke.lab.simulator.advice import (
    Estimate,
    OptionChoices,
    advise,
    advise_fleet,
    changed_setup,
    estimate_load,
)
from twostroke.lab.simulator.gain import expected_gain, measured_gain, objective_ratios
from twostroke.lab.simulator.load import sorted_workload
from twostroke.lab.simulator.machine_speed import MachineSpeed

# A step of 1,024 prompt tokens takes several times as long as a decode step of all streams.
LOAD = SyntheticWorkload(12.0, count=120, prompt=1500, output=40, spread=1.0).load(0)
TIGHT = Objectives(ttft_s=2.0, tpot_s=0.009)


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    path = write_config(
        tmp_path_factory.mktemp("model") / "config.json", "8B", max_position_embeddings=16384
    )
    batch = BatchOptions(token_budget=4096, max_running=256)
    question = Question(mfu=0.5, mbu=0.8)
    return SimulationSetup(load_planned_model(path), find_device("H100-SXM"), question, batch=batch)


@pytest.fixture(scope="module")
def search(setup):
    """The advice for LOAD, and all changes that were tried for it."""
    tried = []
    return advise(setup, LOAD, TIGHT, watch=lambda changes, _: tried.append(changes)), tried


def test_advice_is_better_under_the_load_as_estimated(setup, search):
    advice, _ = search
    assert advice.changes
    assert advice.advised.is_better_than(advice.default)
    assert advice.default == estimate_load(setup, LOAD, TIGHT)
    assert advice.advised == estimate_load(changed_setup(setup, advice.changes), LOAD, TIGHT)
    assert advice.changes == advice.best
    assert advice.gain.share.low <= advice.gain.share.expected <= advice.gain.share.high
    assert advice.gain.is_beyond_noise
    assert advice.machine.num_recorded == 0


def test_a_search_without_time_keeps_the_best_setting_so_far(setup):
    tried = []

    def watch(changes, estimate):
        tried.append((estimate, changes))

    advice = advise(setup, LOAD, TIGHT, watch=watch, has_time=lambda: len(tried) < 4)
    assert len(tried) == 4
    assert advice.changes in ({}, *(changes for _, changes in tried))
    assert (advice.gain is None) is (not advice.best)


def test_options_that_change_answers_are_tried_only_if_allowed(setup, search):
    _, tried = search
    assert not any("kv_format" in changes for changes in tried)
    assert tried
    small = replace(setup, cache=replace(setup.cache, memory_bytes=5 << 29))
    fixed = ("token_budget", "max_running")
    advice = advise(small, LOAD, TIGHT, choices=OptionChoices(fixed, kv_formats=("int8",)))
    assert advice.changes in ({}, {"kv_format": "int8"})


def test_fixed_options_stay(setup):
    advice = advise(setup, LOAD, TIGHT, choices=OptionChoices(("token_budget",)))
    assert "token_budget" not in advice.changes


def test_without_a_better_setting_the_advice_is_no_change(setup, search):
    advice = advise(setup, LOAD, Objectives(ttft_s=1e4), choices=OptionChoices(("max_running",)))
    if not advice.changes:
        assert advice.default == advice.advised
    tuned = changed_setup(setup, search[0].changes)
    again = advise(tuned, LOAD, TIGHT)
    assert not again.default.is_better_than(again.advised)


def test_a_fleet_is_as_small_as_the_objectives_allow(setup):
    busy = LOAD.changed(speed=4)
    fleet = advise_fleet(setup, busy, Objectives(ttft_s=0.5), max_replicas=4)
    assert fleet.is_enough
    assert fleet.replicas > 1
    fewer = advise_fleet(setup, busy, Objectives(ttft_s=0.5), max_replicas=fleet.replicas - 1)
    assert not fewer.is_enough


def test_a_fleet_that_only_the_slowest_machine_needs_is_found(setup, monkeypatch):
    def estimate(servers, load, objectives, slowness):
        is_enough = slowness < 1.25 or servers.replicas > 2
        return Estimate(1.0 if is_enough else 0.5, 1.0, 0.4, 0.01, 0.8)  # equal at the median speed

    monkeypatch.setattr(advice_module, "estimate_load", estimate)
    fleet = advise_fleet(
        setup, LOAD, Objectives(ttft_s=0.5), max_replicas=4, machine=MachineSpeed()
    )
    assert fleet.is_enough
    assert fleet.replicas == 3


def test_a_search_that_ends_early_is_marked(setup):
    checks = iter([True, True, False])
    part = advise(setup, LOAD, TIGHT, has_time=lambda: next(checks, False))
    assert part.is_partial
    assert part.num_tried == 3  # the defaults, too
    assert (part.gain is not None) is bool(part.best)


def test_a_search_for_a_fleet_that_ends_early_is_marked(setup):
    busy, objectives = LOAD.changed(speed=4), Objectives(ttft_s=0.5)
    fleet = advise_fleet(setup, busy, objectives, max_replicas=4, watch=lambda *_: False)
    assert (fleet.replicas, fleet.is_partial, fleet.is_enough) == (1, True, False)


def test_few_requests_and_missing_objectives_are_refused(setup):
    with pytest.raises(UsageError, match="advice needs at least 100"):
        advise(setup, LOAD.first(99), TIGHT)
    with pytest.raises(UsageError, match="needs an objective"):
        advise(setup, LOAD, Objectives())


def test_a_gain_that_a_slower_machine_loses_is_inside_the_noise():
    bad, good = np.full(200, 2.0), np.full(200, 0.5)
    gain = expected_gain([bad, bad, bad, bad, good], [good, good, good, good, bad])
    assert gain.share.low == -1.0
    assert gain.share.expected > 0
    assert not gain.is_beyond_noise
    never_worse = expected_gain([bad, bad, good], [good, good, good])
    assert never_worse.share.low == 0.0
    assert never_worse.is_beyond_noise
    assert never_worse.rank > gain.rank


def test_a_larger_page_cache_is_advised_if_prompts_repeat(setup):
    arrivals = [
        RequestArrival(0.5 * n, 8000, 2, blocks=(n % 20,), block_size=8000) for n in range(120)
    ]
    repeated = sorted_workload("repeated", arrivals)
    small = replace(setup, cache=replace(setup.cache, memory_bytes=3 << 30))
    objectives = Objectives(ttft_s=0.25)
    fixed = ("token_budget", "max_running")
    cached = replace(small, page_cache_speed=20e9)
    advice = advise(
        cached, repeated, objectives, choices=OptionChoices(fixed, page_cache_sizes=(10**11,))
    )
    assert advice.changes == {"page_cache_size": 10**11}
    assert advice.gain.is_beyond_noise


def test_objective_ratios_are_good_up_to_one(setup):
    simulation = simulate(setup, LOAD, TIGHT)
    ratios = objective_ratios(simulation.logs, TIGHT)
    assert np.mean(ratios <= 1) == simulation.report.good_share


def test_equal_settings_have_no_gain_beyond_the_noise():
    ratios = [np.linspace(0.5, 1.5, 200)]
    gain = expected_gain(ratios, ratios)
    assert (gain.share.low, gain.share.high) == (0.0, 0.0)
    assert not gain.is_beyond_noise


def test_bursts_that_are_bad_together_prove_less_than_as_many_independent_requests():
    estimated = [np.arange(400) % 4 > 0]  # three quarters are good
    in_bursts = (np.arange(400) // 40) % 5 < 3  # three fifths, but 40 at a time
    independent = np.random.default_rng(0).permutation(in_bursts)
    bursty, clear = measured_gain(estimated, in_bursts), measured_gain(estimated, independent)
    assert bursty.expected == clear.expected == pytest.approx(-0.15)
    assert bursty.high > 0
    assert clear.high < 0


def test_a_measured_gain_counts_with_all_speeds_of_the_machine():
    measured = np.arange(200) % 2 == 0
    gain = measured_gain([np.full(200, True), np.full(200, False)], measured)
    assert gain.low < -0.4
    assert gain.high > 0.4


def test_without_good_requests_a_gain_has_no_ratio():
    gain = expected_gain([np.full(200, np.inf)], [np.full(200, 0.5)])
    assert gain.goodput is None
    assert gain.tail is None
    assert gain.share.expected == 1.0


def test_a_lower_token_budget_is_tried_together_with_fewer_running_requests(setup):
    tried = []
    full = replace(setup, batch=BatchOptions(token_budget=256, max_running=256))
    limits = {"token_budget": 256, "max_running": 256}
    advise(
        full, LOAD, TIGHT, choices=OptionChoices(limits=limits), watch=lambda c, _: tried.append(c)
    )
    assert {"token_budget": 64, "max_running": 64} in tried
    tried.clear()
    fixed = OptionChoices(("max_running",), limits={"token_budget": 256})
    advise(full, LOAD, TIGHT, choices=fixed, watch=lambda c, _: tried.append(c))
    assert tried == [{}]  # 256 requests need 256 tokens
