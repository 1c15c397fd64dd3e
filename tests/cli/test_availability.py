"""`twostroke simulate` with failures: its report, its search for replicas, and its refusals."""

from __future__ import annotations

import json

import pytest

from twostroke.cli.availability import show_availability, show_cost
from twostroke.cli.simulate import command
from twostroke.lab.simulator.availability import (
    DEFAULT_NUM_FAILURES,
    DEFAULT_TIMES,
    Availability,
)
from twostroke.lab.simulator.availability_cost import (
    DEFAULT_MAX_REPLICAS,
    AvailabilityCost,
    Candidate,
)
from twostroke.lab.simulator.failures import FailureRates

SMALL = ("--on", "h100-sxm", "--rate", "2", "--requests", "30", "--prompt", "64", "--output", "4")
FAILING = (*SMALL, "--mtbf", "1", "--cold-start", "8", "--failures", "4")


def test_the_availability_is_reported_after_the_undisturbed_load(cli, config):
    arguments = (*FAILING, "--engine-mtbf", "2", "--engine-start", "3", "--ttft", "500")
    ran = cli("simulate", config, *arguments)
    assert ran.code == 0
    plain = cli("simulate", config, *SMALL, "--ttft", "500")
    assert plain.out.splitlines()[5:] == ran.out.splitlines()[7 : len(plain.out.splitlines()) + 2]
    assert "Availability: 99." in ran.out
    assert "minutes of downtime a month." in ran.out
    assert "A machine is back after 8 s, an engine after 3 s." in ran.out
    assert "failures simulated" in ran.err
    assert cli("simulate", config, *arguments) == ran
    other = cli("simulate", config, *arguments, "--seed", "7")
    assert other.out != ran.out


def test_too_few_failures_are_named(cli, config):
    out = cli("simulate", config, *FAILING).out
    assert "These are too few failures to say more" in out
    enough = cli("simulate", config, *FAILING, "--failures", "14").out
    assert "too few failures" not in enough


def test_json_has_the_availability_and_the_undisturbed_simulation(cli, config):
    printed = json.loads(cli("simulate", config, *FAILING, "--json").out)
    availability = printed["availability"]
    assert availability["low"] <= availability["share"] <= availability["high"]
    assert availability["failures_per_month"]["replica"] > 0
    assert printed["without_failures"]["report"]["num_completed"] == 30


def test_the_table_shows_nines_against_the_price(cli, config):
    arguments = (*FAILING, "--ttft", "500", "--availability", "99.95")
    ran = cli("simulate", config, *arguments)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("REPLICAS"))
    assert lines[head].split()[:4] == ["REPLICAS", "SPOT", "$/HOUR", "AVAILABILITY"]
    assert [line.split()[0] for line in lines[head + 1 : head + 3]] == ["1", "2"]
    assert "99.95% takes 2 replicas for " in ran.out
    assert "without failures 1 replica would be enough." in ran.out
    assert "1 replica: 99." in ran.err
    cost = json.loads(cli("simulate", config, *arguments, "--json").out)
    assert cost["best"]["num_on_demand"] == 2


def test_a_target_that_cannot_be_met_says_why(cli, config):
    arguments = ("--ttft", "1", "--availability", "99.99", "--max-replicas", "2")
    ran = cli("simulate", config, *FAILING, *arguments)
    assert ran.code == 9
    assert "No number of replicas up to 2 meets 99.99%: the best is 1 with 0%" in ran.err
    assert "because requests miss the objective of TTFT." in ran.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--availability", "99.9"), "--availability needs failures: give --mtbf, --engine-mtbf"),
        (("--mtbf", "0"), "--mtbf must be greater than 0"),
        (("--mtbf", "5", "--availability", "100"), "must be a percentage from 50 to 99.9999"),
        (("--mtbf", "5", "--availability", "1.5"), "such as 99.9, got 1.5."),
        (
            ("--mtbf", "5", "--availability", "99", "--replicas", "3"),
            "--availability cannot be combined with --replicas",
        ),
        (("--cold-start", "5"), "--cold-start has no effect without --mtbf"),
        (("--mtbf", "5", "--spot-notice", "9"), "--spot-notice has no effect without --spot-mtbf"),
        (("--mtbf", "5", "--spot-price", "1"), "--spot-price has no effect without --availability"),
        (
            ("--spot-mtbf", "5", "--availability", "99"),
            "--spot-price is needed to compare spot machines.",
        ),
        (
            ("--spot-mtbf", "5", "--spot-notice", "500"),
            "--spot-notice must be shorter than the load, which lasts ",
        ),
        (
            ("--spot-mtbf", "5", "--spot-replicas", "3"),
            "--spot-replicas must be at most --replicas",
        ),
        (("--mtbf", "5", "--sweep", "--ttft", "9"), "--mtbf cannot be combined with --sweep."),
        (
            ("--mtbf", "5", "--prefill-replicas", "1", "--replicas", "2"),
            "--mtbf cannot be combined with --prefill-replicas.",
        ),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(cli, config, arguments, words):
    ran = cli("simulate", config, *SMALL, *arguments)
    assert ran.code == 2
    assert words in ran.err
    assert not ran.out


def test_python_and_the_command_have_the_same_defaults():
    defaults = {param.name: param.default for param in command.params}
    for name in ("detection_s", "wait_s", "resume_wait_s"):
        assert defaults[name] == getattr(DEFAULT_TIMES, name)
    assert defaults["notice_s"] == FailureRates().notice_s
    assert defaults["num_failures"] == DEFAULT_NUM_FAILURES
    assert defaults["max_replicas"] == DEFAULT_MAX_REPLICAS


def availability_of(share: float, low: float, **causes: float) -> Availability:
    return Availability(
        share=share,
        low=low,
        high=1.0,
        time_share=share,
        undisturbed_share=1.0,
        num_undisturbed=60,
        causes=causes,
        num_failures=12,
        failures_per_month={"replica": 3.0},
        num_pauses=0,
        pause_p99_s=None,
        longest_pause_s=None,
    )


def test_nines_that_were_not_seen_to_break_are_a_lower_bound(capsys):
    show_availability(availability_of(1.0, 0.999), FailureRates(mtbf_s=1.0))
    shown = capsys.readouterr().out
    assert "(at least 3.0 nines; 99.90% to 100.0%)" in shown
    assert "all nines" not in shown


def test_a_tiny_share_of_a_cause_is_not_shown_as_zero(capsys):
    show_availability(availability_of(0.9, 0.8, TTFT=1e-12), FailureRates(mtbf_s=1.0))
    assert "less than 0.0000001% of requests miss the TTFT objective." in capsys.readouterr().out


@pytest.mark.parametrize(("low", "is_certain"), [(0.998, False), (0.9995, True)])
def test_a_result_whose_interval_begins_below_the_target_says_so(capsys, low, is_certain):
    best = Candidate(2, 0, 1.0, availability_of(0.9999, low))
    show_cost(AvailabilityCost(0.999, 1, (best,), best), FailureRates(mtbf_s=1.0))
    shown = capsys.readouterr().out
    assert f"from {2.7 if low == 0.998 else 3.3}" in shown
    assert ("This is not certain: the 95% interval begins at 99.80%." in shown) is not is_certain
