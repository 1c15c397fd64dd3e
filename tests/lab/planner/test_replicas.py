"""Replicas of fleets: they serve what plans of the same streams say."""

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
    """A prompt among others does not read the weights once more."""
    device, found = find_device("H100-SXM"), set()
    for asked in (
        Question(prompt=2048, output=300, count=4, token_budget=2048, tpot_s=0.02),
        Question(prompt=4096, output=64, cached=0.3, count=4, token_budget=512),
        Question(prompt=40_000, output=20_000, count=4, token_budget=2048),
        Question(prompt=64, output=64, count=4, token_budget=2048),
    ):
        other = Planner(model, find_device("L4"), replace(asked, count=1))
        place = DeviceGroup(device, 4, device.memory_bytes * 4 * 0.9, 0.0, "")
        replicas = Replicas(0, other, 1e9, 1.0).on_group(place)
        planner, plan = Planner(model, device, asked), make_plan(model, device, asked)
        whole = [one for one in replicas if one.time_units == TIME_UNITS]
        for one in whole:
            row = planner.row(one.streams)
            assert one.requests_per_s == pytest.approx(row.requests_per_s)
            assert one.tpot_s == pytest.approx(row.tpot_s)
            assert one.ttft_s == pytest.approx(row.ttft_s)
        assert 0.9 * plan.chosen_row.streams <= whole[-1].streams <= plan.chosen_row.streams
        found.add(whole[-1].bound)
    assert {"TPOT", "prompts", "the default"} <= found


def test_first_tokens_among_others_bound_the_streams(model):
    device, asked = find_device("H100-SXM"), Question(prompt=512, count=4, token_budget=2048)
    planner = Planner(model, device, asked)
    limit_s = (planner.ttft_s(1) + planner.ttft_s(128)) / 2
    asked = replace(asked, ttft_s=limit_s)
    plan = make_plan(model, device, asked)
    chosen = plan.chosen_row
    assert plan.bound == "TTFT"
    assert 1 < chosen.streams < 128
    assert chosen.ttft_s == planner.ttft_s(chosen.streams) <= limit_s
    assert planner.ttft_s(chosen.streams + 1) > limit_s
    place = DeviceGroup(device, 4, device.memory_bytes * 4 * 0.9, 0.0, "")
    replicas = Replicas(0, Planner(model, device, asked), 1e9, 1.0).on_group(place)
    assert max(one.ttft_s for one in replicas) <= limit_s
    whole = [one for one in replicas if one.time_units == TIME_UNITS][-1]
    assert (whole.bound, whole.ttft_s) == ("TTFT", planner.ttft_s(whole.streams))


def test_a_twelfth_of_the_time_serves_a_twelfth_of_the_requests(model):
    device, asked = find_device("H100-SXM"), Question(count=4, token_budget=2048)
    place = DeviceGroup(device, 4, device.memory_bytes * 4 * 0.9, 0.0, "")
    replicas = Replicas(0, Planner(model, device, asked), 1e9, 1.0).on_group(place)
    most = {
        share: [one for one in replicas if one.time_units == share][-1] for share in (2, TIME_UNITS)
    }
    assert most[2].streams == most[TIME_UNITS].streams
    assert most[2].requests_per_s == pytest.approx(2 / TIME_UNITS * most[TIME_UNITS].requests_per_s)
    assert most[TIME_UNITS].ttft_s == pytest.approx(2 / TIME_UNITS * most[2].ttft_s)
