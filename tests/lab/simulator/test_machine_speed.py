"""The speed of a machine, from the times of the requests that it recorded."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from support.configs import write_config
from twostroke.core.options import BatchOptions
from twostroke.core.recorded_trace import ServerSettings
from twostroke.lab.planner import Question, find_device, load_planned_model
from twostroke.lab.simulator import SimulationSetup, SyntheticWorkload, read_trace, simulate
from twostroke.lab.simulator.machine_speed import MachineSpeed, recorded_speed, slowed

LOAD = SyntheticWorkload(8.0, count=200, prompt=500, output=40, spread=0.5).load(0)
SETTINGS = ServerSettings(512, 64)


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    path = write_config(
        tmp_path_factory.mktemp("model") / "config.json", "8B", max_position_embeddings=16384
    )
    batch = BatchOptions(token_budget=SETTINGS.token_budget, max_running=SETTINGS.max_running)
    question = Question(mfu=0.5, mbu=0.8)
    return SimulationSetup(load_planned_model(path), find_device("H100-SXM"), question, batch=batch)


def recorded(setup, slowness):
    """The load with the times that a machine of this slowness has."""
    logs = simulate(*slowed(setup, LOAD, slowness)).logs
    arrivals = tuple(
        replace(arrival, recorded_e2e_s=slowness * log.timings.e2e_s)
        for arrival, log in zip(LOAD.arrivals, logs, strict=True)
    )
    return replace(LOAD, arrivals=arrivals, settings=SETTINGS)


def test_a_slower_machine_takes_longer_for_all_steps(setup):
    half = replace(setup, question=Question(mfu=0.25, mbu=0.4))
    expected = [log.timings.e2e_s for log in simulate(half, LOAD).logs]
    slow = [2 * log.timings.e2e_s for log in simulate(*slowed(setup, LOAD, 2.0)).logs]
    assert slow == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("slowness", [0.8, 1.0, 1.3])
def test_the_slowness_of_a_recorded_load_is_found(setup, slowness):
    speed = recorded_speed(setup, recorded(setup, slowness))
    assert speed.num_recorded == 200
    assert speed.middle == pytest.approx(slowness, rel=0.05)
    assert speed.slowness[0] <= speed.middle / 1.1
    assert speed.slowness[-1] >= speed.middle * 1.1
    assert not speed.is_out_of_range


def test_the_settings_of_the_recorded_server_are_simulated(setup):
    other = replace(setup, batch=BatchOptions(token_budget=64, max_running=2))
    load = recorded(setup, 1.3)
    assert recorded_speed(other, load) == recorded_speed(setup, load)


def test_a_machine_that_is_far_from_its_measured_steps_is_named(setup):
    assert recorded_speed(setup, recorded(setup, 2.5)).is_out_of_range


def test_without_recorded_times_the_speed_is_assumed(setup):
    few = recorded(setup, 1.3).first(50)
    unknown = replace(recorded(setup, 1.3), settings=None)
    for load in (LOAD, few, unknown):
        assert recorded_speed(setup, load) == MachineSpeed()


def test_only_requests_with_the_last_settings_have_recorded_times(tmp_path):
    def header(**settings):
        return {"recorded_trace": 1, "block_tokens": 16, **settings}

    row = {"prompt_tokens": 9, "output_tokens": 2, "e2e_s": 0.5}
    present = {"settings": {"token_budget": 512, "max_running": 64}}
    lines = [
        header(settings={"token_budget": 32, "max_running": 4}),
        {"arrival_s": 1.0, **row},
        header(**present),
        {"arrival_s": 2.0, **row},
        header(**present),
        {"arrival_s": 3.0, **row},
        {"arrival_s": 4.0, **row, "outcome": "cancelled"},
    ]
    path = tmp_path / "trace"
    path.write_text("\n".join(map(json.dumps, lines)))
    load = read_trace(str(path))
    assert load.settings == SETTINGS
    assert [arrival.recorded_e2e_s for arrival in load.arrivals] == [None, 0.5, 0.5, None]
