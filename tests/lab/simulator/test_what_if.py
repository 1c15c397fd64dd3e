"""The load that replicas take, and the objective that is missed first above that load."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from support.configs import write_config
from twostroke.core.errors import UsageError
from twostroke.core.options import BatchOptions
from twostroke.lab.measure.requests import Objectives
from twostroke.lab.planner import find_device, load_planned_model
from twostroke.lab.simulator import SimulationSetup, SyntheticWorkload, simulate
from twostroke.lab.simulator.what_if import QUEUE, REFUSED, find_load_limit

LOAD = SyntheticWorkload(10.0, count=120, prompt=800, output=60).load(0)


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    path = write_config(
        tmp_path_factory.mktemp("model") / "config.json", "8B", max_position_embeddings=8192
    )
    batch = BatchOptions(token_budget=2048)
    return SimulationSetup(load_planned_model(path), find_device("H100-SXM"), batch=batch)


def test_the_limit_is_between_loads_that_meet_and_miss_the_objectives(setup):
    objectives, probes = Objectives(ttft_s=0.03), []
    limit = find_load_limit(setup, LOAD, objectives, 0.9, probes.append)
    assert limit.missed == "ttft"
    assert limit.today == simulate(setup, LOAD, objectives)
    assert {p.meets for p in probes if p.speed <= limit.multiple} == {True}
    assert {p.meets for p in probes if p.speed > limit.multiple} == {False}
    assert min(p.speed for p in probes if not p.meets) <= 1.05 * limit.multiple


def test_twice_the_replicas_take_more_of_the_load(setup):
    objectives = Objectives(ttft_s=0.03)
    one = find_load_limit(setup, LOAD, objectives)
    two = find_load_limit(replace(setup, replicas=2), LOAD, objectives)
    assert two.multiple > 1.5 * one.multiple


def test_the_tightest_objective_is_missed_first(setup):
    assert find_load_limit(setup, LOAD, Objectives(10.0, 0.007)).missed == "tpot"
    assert find_load_limit(setup, LOAD, Objectives(0.03, 10.0)).missed == "ttft"


def test_an_objective_may_be_missed_at_every_load_or_at_none(setup):
    never = find_load_limit(setup, LOAD, Objectives(ttft_s=1e-6))
    assert (never.multiple, never.missed) == (0.0, "ttft")
    always = find_load_limit(setup, LOAD.first(15), Objectives(ttft_s=1e6))
    assert (always.multiple, always.missed) == (math.inf, "")


def test_a_growing_queue_and_refusals_are_named(setup):
    few = replace(setup, batch=BatchOptions(max_waiting_requests=2, max_running=1))
    assert find_load_limit(few, LOAD, Objectives(ttft_s=1e5)).missed == REFUSED
    assert find_load_limit(setup, LOAD, Objectives(ttft_s=1e5)).missed == QUEUE


def test_objectives_are_needed(setup):
    with pytest.raises(UsageError, match="needs an objective"):
        find_load_limit(setup, LOAD, Objectives())
