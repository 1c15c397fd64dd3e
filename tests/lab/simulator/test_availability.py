"""Random failures, their episodes, and the availability that is estimated from them."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from support.configs import write_config
from twostroke.core.errors import UnreachableError, UsageError
from twostroke.core.options import BatchOptions
from twostroke.engine.output import Timings
from twostroke.lab.measure.requests import FAILED, REFUSED, Objectives, RequestLog
from twostroke.lab.planner import find_device, load_planned_model
from twostroke.lab.simulator import SimulationSetup, SyntheticWorkload
from twostroke.lab.simulator.availability import (
    SLOW_TPOT,
    SLOW_TTFT,
    AvailabilityQuestion,
    estimate_availability,
    find_outcome,
    num_nines,
)
from twostroke.lab.simulator.availability_cost import find_cheapest
from twostroke.lab.simulator.failing_fleet import LOST_STREAM, NO_REPLICA, NOT_VALID
from twostroke.lab.simulator.failures import (
    ENGINE,
    REPLICA,
    SPOT,
    Failure,
    FailureRates,
    RouterTimes,
    find_episodes,
    random_failures,
    share_of_time_short,
)

NO_WAIT = RouterTimes(detection_s=0.0, wait_s=0.0, resume_wait_s=0.0)
LOAD = SyntheticWorkload(2.0, count=120, prompt=64, output=4).load(0)


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    path = write_config(
        tmp_path_factory.mktemp("model") / "config.json", "8B", max_position_embeddings=8192
    )
    batch = BatchOptions(token_budget=2048)
    return SimulationSetup(load_planned_model(path), find_device("H100-SXM"), batch=batch)


def ask(rates, times=NO_WAIT, *, objectives=None, **fields):
    """Return a question about the load."""
    return AvailabilityQuestion(LOAD, objectives or Objectives(), rates, times, **fields)


def test_failures_come_at_their_rates_while_replicas_run():
    rates = FailureRates(
        mtbf_s=1000.0, engine_mtbf_s=500.0, spot_mtbf_s=2000.0, num_spot=2, cold_start_s=100.0,
        engine_start_s=10.0, notice_s=30.0,
    )  # fmt: skip
    duration_s = 1e6
    failures = random_failures(rates, 5, duration_s, np.random.default_rng(0))
    assert list(failures) == sorted(failures, key=lambda failure: failure.at_s)
    for index in range(5):
        own = [failure for failure in failures if failure.replica == index]
        for earlier, later in pairwise(own):
            assert later.at_s >= earlier.back_s
        up_s = duration_s - sum(failure.back_s - failure.at_s for failure in own)
        for kind, mtbf_s in ((ENGINE, 500.0), (REPLICA, 1000.0), (SPOT, 2000.0)):
            count = sum(failure.kind == kind for failure in own)
            expected = up_s / mtbf_s if kind != SPOT or index >= 3 else 0.0
            assert abs(count - expected) <= 4 * math.sqrt(expected), (index, kind)
    assert {failure.down_s for failure in failures if failure.kind == ENGINE} == {10.0}
    assert {failure.notice_s for failure in failures if failure.kind == SPOT} == {30.0}


@pytest.mark.seeds(2)
def test_episodes_have_all_failures_and_gaps_between_them(seed):
    rng = random.Random(seed)
    failures = sorted(
        (
            Failure(rng.uniform(0, 1000), rng.randrange(4), REPLICA, rng.uniform(0, 20))
            for _ in range(40)
        ),
        key=lambda failure: failure.at_s,
    )
    episodes = find_episodes(failures, 5.0)
    assert sum(len(episode.failures) for episode in episodes) == 40
    remaining, last_end_s = list(failures), -math.inf
    for episode in episodes:
        members, remaining = (
            remaining[: len(episode.failures)],
            remaining[len(episode.failures) :],
        )
        begin_s = members[0].at_s
        assert begin_s > last_end_s + 5.0
        last_end_s = begin_s + episode.duration_s
        assert last_end_s == pytest.approx(max(member.back_s for member in members))
        moments = [begin_s + episode.duration_s * share / 997 for share in range(998)]
        num_down = max(
            sum(member.at_s <= moment < member.back_s for member in members) for moment in moments
        )
        assert num_down <= episode.num_down <= len(members)
    short = share_of_time_short(failures, 1, 1000.0)
    moments = np.linspace(0, 1000, 20_001)
    counts = sum((moments >= failure.lost_s) & (moments < failure.back_s) for failure in failures)
    assert short == pytest.approx(float((counts > 1).mean()), abs=2e-3)


def log(at_s, *, ttft_s=0.1, tpot_s=0.01, outcome="completed"):
    """Return the log of a request with 11 tokens."""
    times = Timings(at_s, at_s, at_s + ttft_s, at_s + ttft_s + 10 * tpot_s)
    return RequestLog(times, at_s, num_prompt=5, num_output=11, outcome=outcome)


def test_an_outcome_counts_requests_and_the_time_that_they_stand_for():
    logs = [
        log(0.0, ttft_s=9.0),  # before the span
        log(1.0),
        log(2.0, ttft_s=0.6),
        log(2.5, tpot_s=0.2),
        log(4.0, outcome=FAILED),
        log(7.0, outcome=REFUSED),
        log(8.0, outcome=REFUSED),
    ]
    causes = {4: LOST_STREAM, 5: NOT_VALID, 6: NO_REPLICA}
    outcome = find_outcome(logs, causes, Objectives(0.5, 0.1), 0.5, 10.0)
    assert outcome.num_requests == 5
    assert outcome.causes == {SLOW_TTFT: 1, SLOW_TPOT: 1, LOST_STREAM: 1, NO_REPLICA: 1}
    assert outcome.num_bad == 4
    assert outcome.seconds == 9.5
    assert outcome.bad_s == pytest.approx(0.5 + 1.5 + 3.0 + 2.0)


def test_nines():
    assert num_nines(0.999) == pytest.approx(3)
    assert num_nines(0.5) == pytest.approx(0.301, abs=1e-3)
    assert num_nines(1.0) == math.inf
    assert f"{num_nines(0.0):.1f}" == "0.0"


def test_one_replica_that_nothing_waits_for_is_available_while_it_runs(setup):
    # All requests of an outage fail, and those that it interrupts: 30 s, the check, and a moment.
    rates = FailureRates(mtbf_s=10_000.0, cold_start_s=30.0)
    result = estimate_availability(setup, ask(rates, num_failures=40))
    expected = 30.25 / 10_030
    assert 1 - result.share == pytest.approx(expected, rel=0.1)
    assert result.low < 1 - expected < result.high
    assert 1 - result.time_share == pytest.approx(expected, rel=0.2)
    assert result.undisturbed_share == 1
    assert set(result.causes) <= {NO_REPLICA, LOST_STREAM}
    assert sum(result.causes.values()) == pytest.approx(1 - result.share)
    assert result.failures_per_month[REPLICA] == pytest.approx(262, rel=0.1)
    assert result.downtime_min_per_month == pytest.approx(132, rel=0.2)


def test_frequent_failures_are_played_without_episodes(setup):
    rates = FailureRates(mtbf_s=60.0, cold_start_s=30.0)
    result = estimate_availability(setup, ask(rates, num_failures=60))
    assert 1 - result.share == pytest.approx(30 / 90, rel=0.25)
    assert result.low < result.share < result.high


def test_equal_seeds_give_equal_results_and_waiting_helps(setup):
    rates = FailureRates(mtbf_s=2000.0, engine_mtbf_s=1000.0, cold_start_s=6.0, engine_start_s=2.0)
    without = estimate_availability(setup, ask(rates, num_failures=8))
    assert without == estimate_availability(setup, ask(rates, num_failures=8))
    patient = RouterTimes(detection_s=0.0, wait_s=30.0, resume_wait_s=30.0)
    waiting = estimate_availability(setup, ask(rates, patient, num_failures=8))
    assert without.share < waiting.share == 1.0
    assert waiting.low < 1
    assert 6.0 < waiting.longest_pause_s < 7.0
    assert not without.num_pauses
    strict = ask(rates, patient, objectives=Objectives(ttft_s=0.5), num_failures=8)
    assert set(estimate_availability(setup, strict).causes) == {SLOW_TTFT}


def test_rarer_failures_and_more_replicas_are_better(setup):
    shares = []
    for mtbf_s in (500.0, 5000.0, 50_000.0):
        rates = FailureRates(mtbf_s=mtbf_s, cold_start_s=6.0)
        shares.append(estimate_availability(setup, ask(rates, num_failures=8)).share)
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]
    rates = FailureRates(mtbf_s=500.0, cold_start_s=6.0)
    two = estimate_availability(replace(setup, replicas=2), ask(rates, num_failures=8))
    assert two.share > shares[0]


def test_the_cheapest_replicas_meet_the_target_and_fewer_do_not(setup):
    rates = FailureRates(mtbf_s=2000.0, cold_start_s=8.0)
    question = ask(rates, objectives=Objectives(ttft_s=0.5), num_failures=8)
    watched = []
    cost = find_cheapest(setup, question, 0.999, watch=watched.append)
    assert cost.num_needed == 1
    assert list(cost.candidates) == watched
    assert [candidate.num_replicas for candidate in watched] == [1, 2]
    assert cost.best.availability.share >= 0.999 > watched[0].availability.share
    assert cost.best.usd_per_hour == pytest.approx(2 * setup.device.usd_per_hour)


def test_spot_machines_are_mixed_by_price(setup):
    rates = FailureRates(mtbf_s=100_000.0, spot_mtbf_s=1000.0, cold_start_s=6.0, notice_s=3.0)
    question = ask(rates, num_failures=6)
    cost = find_cheapest(setup, question, 0.999, spot_usd_per_hour=0.3)
    prices = [candidate.usd_per_hour for candidate in cost.candidates]
    assert prices == sorted(prices)
    assert cost.best.num_spot > 0
    assert cost.best.num_on_demand == 0
    # Spot machines that cost as much are never worth it.
    dear = find_cheapest(setup, question, 0.999, spot_usd_per_hour=2 * setup.device.usd_per_hour)
    assert dear.best.num_spot == 0
    with pytest.raises(UsageError, match="spot_usd_per_hour is needed"):
        find_cheapest(setup, question, 0.999)


def test_impossible_targets_say_why(setup):
    rates = FailureRates(mtbf_s=50.0, cold_start_s=40.0)
    with pytest.raises(
        UnreachableError,
        match=r"No number of replicas up to 2 meets 99.99%: the best is 2 replicas",
    ):
        find_cheapest(setup, ask(rates, num_failures=10), 0.9999, max_replicas=2)
    strict = ask(rates, objectives=Objectives(ttft_s=1e-4))
    with pytest.raises(
        UnreachableError, match="even without failures, because requests miss the objective of TTFT"
    ):
        find_cheapest(setup, strict, 0.9999, max_replicas=2)
    for target in (1.0, 0.01, 1.5):
        with pytest.raises(UsageError, match="availability must be a percentage from 50 to"):
            find_cheapest(setup, ask(rates), target)


def test_questions_without_an_answer_are_refused(setup):
    with pytest.raises(UsageError, match="Which failures"):
        estimate_availability(setup, ask(FailureRates()))
    spot = FailureRates(spot_mtbf_s=1e5, notice_s=600.0)
    with pytest.raises(UsageError, match="notice_s must be shorter than the load"):
        estimate_availability(setup, ask(spot))
    for values in ({"mtbf_s": 0.0}, {"cold_start_s": -1.0}, {"notice_s": math.nan}):
        with pytest.raises(UsageError, match="must be"):
            FailureRates(**values)
