"""Replicas of fleets serve the load that plans with the same number of streams predict."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from support.configs import write_config
from twostroke.lab.planner import Question, find_device, load_planned_model, make_plan
from twostroke.lab.planner.planner import Planner
from twostroke.lab.planner.replicas import TIME_UNITS, DeviceGroup, Replicas

_MIXTURE = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.fixture(params=("70B", "8B mixture"))
def model(request, tmp_path):
    size, *is_mixture = request.param.split()
    config = write_config(tmp_path / "config.json", size, **(_MIXTURE if is_mixture else {}))
    return load_planned_model(config)


def test_replicas_serve_what_a_plan_of_their_streams_does(model):
    """A prompt in a decode step does not read the weights once more."""
    device, bounds = find_device("H100-SXM"), set()
    for question in (
        Question(prompt=2048, output=300, count=4, token_budget=2048, tpot_s=0.02),
        Question(prompt=4096, output=64, cached=0.3, count=4, token_budget=512),
        Question(prompt=40_000, output=20_000, count=4, token_budget=2048),
        Question(prompt=64, output=64, count=4, token_budget=2048),
    ):
        other = Planner(model, find_device("L4"), replace(question, count=1))
        group = DeviceGroup(device, 4, device.memory_bytes * 4 * 0.9, 0.0, "")
        replicas = Replicas(0, other, 1e9, 1.0).on_group(group)
        planner, plan = Planner(model, device, question), make_plan(model, device, question)
        full_time = [replica for replica in replicas if replica.time_units == TIME_UNITS]
        for replica in full_time:
            row = planner.row(replica.streams)
            assert replica.requests_per_s == pytest.approx(row.requests_per_s)
            assert replica.tpot_s == pytest.approx(row.tpot_s)
            assert replica.ttft_s == pytest.approx(row.ttft_s)
        assert 0.9 * plan.chosen_row.streams <= full_time[-1].streams <= plan.chosen_row.streams
        bounds.add(full_time[-1].bound)
    assert {"TPOT", "prompts", "the default"} <= bounds


def test_first_tokens_among_others_bound_the_streams(model):
    device, question = find_device("H100-SXM"), Question(prompt=512, count=4, token_budget=2048)
    planner = Planner(model, device, question)
    limit_s = (planner.ttft_s(1) + planner.ttft_s(128)) / 2
    question = replace(question, ttft_s=limit_s)
    plan = make_plan(model, device, question)
    row = plan.chosen_row
    assert plan.bound == "TTFT"
    assert 1 < row.streams < 128
    assert row.ttft_s == planner.ttft_s(row.streams) <= limit_s
    assert planner.ttft_s(row.streams + 1) > limit_s
    group = DeviceGroup(device, 4, device.memory_bytes * 4 * 0.9, 0.0, "")
    replicas = Replicas(0, Planner(model, device, question), 1e9, 1.0).on_group(group)
    assert max(replica.ttft_s for replica in replicas) <= limit_s
    full_time = [replica for replica in replicas if replica.time_units == TIME_UNITS][-1]
    assert (full_time.bound, full_time.ttft_s) == ("TTFT", planner.ttft_s(full_time.streams))


def test_a_twelfth_of_the_time_serves_a_twelfth_of_the_requests(model):
    device, question = find_device("H100-SXM"), Question(count=4, token_budget=2048)
    group = DeviceGroup(device, 4, device.memory_bytes * 4 * 0.9, 0.0, "")
    replicas = Replicas(0, Planner(model, device, question), 1e9, 1.0).on_group(group)
    largest = {
        share: [replica for replica in replicas if replica.time_units == share][-1]
        for share in (2, TIME_UNITS)
    }
    assert largest[2].streams == largest[TIME_UNITS].streams
    assert largest[2].requests_per_s == pytest.approx(
        2 / TIME_UNITS * largest[TIME_UNITS].requests_per_s
    )
    assert largest[TIME_UNITS].ttft_s == pytest.approx(2 / TIME_UNITS * largest[2].ttft_s)
