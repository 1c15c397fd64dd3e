"""Reports of measured runs, compared with figures computed by hand."""

from __future__ import annotations

import pytest

from twostroke.core.errors import UsageError
from twostroke.engine.output import Timings
from twostroke.lab.measure.requests import (
    REFUSED,
    Objectives,
    RequestLog,
    latency_rows,
    make_report,
)


def log(at_s, first_s, last_s, num_output=11, num_prompt=100, **fields):
    return RequestLog(Timings(at_s, at_s, first_s, last_s), at_s, num_prompt, num_output, **fields)


def test_times_to_first_token():
    times_ms = (100, 102, 100, 100, 99, 104, 110, 90, 3000, 95)
    logs = [log(10.0 + n, 10 + n + ms / 1e3, 20 + n) for n, ms in enumerate(times_ms)]
    ttft = make_report(logs, Objectives()).latencies["ttft"]
    assert ttft.mean == pytest.approx(0.390)
    assert ttft.percentiles["p50"].value == pytest.approx(0.100)
    assert ttft.percentiles["p50"].low <= 0.100 <= ttft.percentiles["p50"].high
    assert "p99" not in ttft.percentiles, "ten samples have no 99th percentile"


def test_goodput_counts_requests_that_meet_all_objectives():
    # 100 requests in a minute; 30 meet both.
    fast, slow = (0.15, 0.05), ((0.25, 0.05), (0.15, 0.15))
    logs = []
    for number in range(100):
        ttft_s, tpot_s = fast if number % 10 < 3 else slow[number % 2]
        at_s = 1 + number * 60 / 99
        logs.append(log(at_s, at_s + ttft_s, at_s + ttft_s + 10 * tpot_s))
    report = make_report(logs, Objectives(ttft_s=0.2, tpot_s=0.1))
    assert report.good_share == pytest.approx(0.3)
    assert report.good_per_s * 60 == pytest.approx(30, rel=0.02)
    refused = log(30.0, 0.0, 0.0, 0, outcome=REFUSED)
    with_refused = make_report([*logs, *[refused] * 20], Objectives(ttft_s=0.2, tpot_s=0.1))
    assert with_refused.good_share == pytest.approx(0.25), "a refused request is bad"
    assert with_refused.num_refused == 20


def test_a_load_that_is_not_carried_has_no_more_good_requests_than_ended_ones():
    # Ten requests a second arrive, one a second ends; each meets the objective once it has begun.
    logs = [log(1.0 + n / 10, 1.0 + n, 2.0 + n) for n in range(200)]
    report = make_report(logs, Objectives(tpot_s=0.2))
    assert report.good_share == 1.0
    assert report.offered_per_s == pytest.approx(10, rel=0.05)
    assert report.good_per_s == report.requests_per_s == pytest.approx(1.0, rel=0.1)


def test_rates_leave_out_the_ramp_and_the_drain():
    # One request a second, each at work for 10 s and writing 2 tokens a second.
    logs = [log(1.0 + n, 2.0 + n, 11.0 + n, num_output=19, num_cached=50) for n in range(101)]
    report = make_report(logs, Objectives())
    assert report.requests_per_s == pytest.approx(1.0, rel=0.02)
    assert report.output_per_s == pytest.approx(19.0, rel=0.02)
    assert report.input_per_s == pytest.approx(100, rel=0.02)
    assert report.concurrency == pytest.approx(10, rel=0.02)
    assert report.output_per_user == pytest.approx(1.9, rel=0.02)
    assert report.hit_rate == pytest.approx(0.5)
    assert not report.is_growing


def test_rates_of_requests_that_arrive_at_once_are_of_the_whole_run():
    for gap_s in (0.0, 20e-6):  # clients of a closed loop begin some microseconds apart
        logs = [log(1.0 + n * gap_s, 1.5, 3.0, num_output=19) for n in range(4)]
        report = make_report(logs, Objectives())
        assert report.requests_per_s == pytest.approx(2.0, rel=0.01)
        assert report.output_per_s == pytest.approx(38.0, rel=0.01)
        assert report.concurrency == pytest.approx(4.0, rel=0.01)


def test_a_load_that_is_too_much_is_seen():
    # Ten a second arrive, one a second ends.
    logs = [log(1 + n / 10, 1 + n, 2.0 + n, num_output=1) for n in range(1000)]
    report = make_report(logs, Objectives())
    assert report.is_growing
    assert report.offered_per_s == pytest.approx(10, rel=0.02)
    assert report.requests_per_s == pytest.approx(1, rel=0.02)
    assert "tpot" not in report.latencies, "single tokens have no time per token"
    assert [row[0] for row in latency_rows(report)] == ["", "QUEUE", "TTFT", "E2E"]


def test_objectives_have_a_range():
    for value in (0, -1, float("nan")):
        with pytest.raises(UsageError, match="ttft_s must be greater than 0"):
            Objectives(ttft_s=value)
    assert not Objectives()
