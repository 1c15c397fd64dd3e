"""Figures and intervals of measured runs, records, and comparisons."""

from __future__ import annotations

import csv
import random

import numpy as np
import pytest
from msgspec.structs import replace

from support.bench_answers import make_answer
from twostroke.core.errors import UsageError
from twostroke.lab.bench.audit import AuditFinding
from twostroke.lab.bench.bootstrap import PooledValues, difference_interval, interval
from twostroke.lab.bench.comparison import compare_runs, different_loads
from twostroke.lab.bench.energy import EnergyUse
from twostroke.lab.bench.record import RunRecord, RunSetup, read_record, write_csv, write_record
from twostroke.lab.bench.report import latency_table, make_bench_report
from twostroke.lab.bench.resources import RunResources
from twostroke.lab.measure.requests import OBJECTIVE_NAMES, Objectives, named_objectives
from twostroke.lab.simulator.traces import read_trace

SETUP = RunSetup(
    url="http://host:8000",
    model="m",
    api="chat",
    load="poisson arrivals",
    num_clients=None,
    rate=2.0,
    date="2026-11-30T08:00:00+00:00",
    verdict="This run can be trusted: the audit has no findings.",
)


def random_run(seed, count=600, ttft_s=0.1, gap_s=0.01):
    rng = random.Random(seed)
    return tuple(
        make_answer(
            n, n / 10, ttft_s=rng.uniform(0.5, 1.5) * ttft_s, gap_s=rng.uniform(0.5, 1.5) * gap_s
        )
        for n in range(count)
    )


def test_latencies_follow_their_definitions():
    answer = make_answer(
        0, 10.0, ttft_s=0.5, gap_s=0.2, num_output=9, num_chunks=5, late_s=0.1,
        first_reasoning_s=10.5, first_content_s=10.9,
    )  # fmt: skip
    report = make_bench_report([answer], Objectives())
    means = {name: latency.mean for name, latency in report.run.latencies.items()}
    assert means == pytest.approx(
        {
            "ttft": 0.5,
            "server_ttft": 0.4,
            "content_ttft": 0.9,
            "tpot": 0.8 / 8,
            "itl": 0.2,
            "itl_per_token": 0.2 / 1.8,
            "e2e": 1.3,
            "e2e_per_token": 1.3 / 9,
        }
    )
    assert report.tokens_per_chunk == pytest.approx(1.8)
    assert report.run.lateness_p99_s == pytest.approx(0.1)
    titles = [row[0] for row in latency_table(report)]
    assert titles[:4] == ["MS", "TTFT", "TTFT from sent", "Time to publish"]


def test_output_tokens_are_counted_by_the_times_of_chunks():
    # One request a second; its first chunk has 90 of 100 tokens, and the second comes 50 s later.
    answers = [
        make_answer(n, float(n), gap_s=50.0, num_output=100, num_chunks=2, chunk_tokens=(90, 10))
        for n in range(41)
    ]
    report = make_bench_report(answers, Objectives())
    assert report.run.output_per_s == pytest.approx(90, rel=0.03)


def test_p99_needs_500_samples():
    for count, has_p99 in ((400, False), (600, True)):
        report = make_bench_report(random_run(0, count), Objectives())
        assert ("p99" in report.run.latencies["ttft"].percentiles) is has_p99
        assert latency_table(report)[1][-1].startswith("–") is not has_p99


def test_an_interval_has_the_true_value_as_often_as_it_says():
    rng = np.random.default_rng(0)
    num_hits = 0
    for _ in range(60):
        low, high = interval(PooledValues(rng.exponential(size=200)).resampled((0.5,))[:, 0], 0.95)
        num_hits += low <= np.log(2) <= high
    assert 50 <= num_hits <= 60


def test_values_of_one_request_are_drawn_together():
    # 20 requests of 50 equal gaps each: the interval must be as wide as for 20 values.
    values = np.random.default_rng(0).exponential(size=20)
    low, high = interval(PooledValues(values).resampled((0.5,))[:, 0], 0.95)
    pooled = PooledValues(np.repeat(values, 50), np.repeat(np.arange(20), 50))
    pooled_low, pooled_high = interval(pooled.resampled((0.5,))[:, 0], 0.95)
    assert pooled_high - pooled_low == pytest.approx(high - low, rel=0.5)
    apart_low, apart_high = interval(PooledValues(np.repeat(values, 50)).resampled((0.5,)), 0.95)
    assert apart_high - apart_low < 0.5 * (pooled_high - pooled_low)


def test_the_difference_of_equal_runs_contains_zero():
    rng = np.random.default_rng(1)
    num_hits = 0
    for _ in range(40):
        first, second = (PooledValues(rng.exponential(size=150)) for _ in range(2))
        low, high = difference_interval(first, second, 0.5, 0.99)
        num_hits += low <= 0 <= high
    assert num_hits >= 36


def test_failed_answers_do_not_raise_the_speed_of_the_others():
    answers = [make_answer(n, n / 10, failure="timeout" if n % 3 else "") for n in range(300)]
    completed = [answer for answer in answers if answer.is_completed]
    run, alone = (make_bench_report(part, Objectives()).run for part in (answers, completed))
    assert run.output_per_user == pytest.approx(alone.output_per_user, rel=0.02)
    assert run.output_per_user < 11 / 0.2


def test_a_record_is_read_again_by_bench_and_by_simulate(tmp_path):
    path = tmp_path / "run.json"
    answers = random_run(0, 30)
    finding = AuditFinding("few samples", "30 requests completed.")
    resources = RunResources(energy=EnergyUse({"package-0": 5.0}, 2.0), server_version="vLLM 1")
    write_record(path, RunRecord(SETUP, answers, (finding,), resources, "twostroke bench", "0.1.0"))
    again = read_record(path)
    assert (again.setup, again.findings, again.resources) == (SETUP, (finding,), resources)
    assert (again.command, again.client_version) == ("twostroke bench", "0.1.0")
    assert again.answers[3].log == answers[3].log
    assert again.answers[3].chunk_times_s == pytest.approx(answers[3].chunk_times_s, abs=1e-6)
    workload = read_trace(str(path))
    assert [a.num_output for a in workload.arrivals] == [11] * 30
    assert workload.arrivals[10].at_s == pytest.approx(1.0)


def test_a_file_that_is_no_record_is_refused(tmp_path):
    path = tmp_path / "run.json"
    write_record(path, RunRecord(SETUP, random_run(0, 3)))
    whole = path.read_text()
    for text, words in (
        ("{}", "is not a run of bench"),
        ("[]", "is not a run of bench"),
        ('{"setup": 1, "requests": [], "answers": []}', "is not a run of bench"),
        (whole.replace('"arrival_s":', '"arrived":'), "is not a run of bench"),
        ("nothing", "is not a run of bench, or it is cut off: it is not JSON"),
        (whole[: len(whole) // 2], "is not a run of bench, or it is cut off: it is not JSON"),
        ("", "is not a run of bench, or it is cut off: it is not JSON"),
        (whole.replace('"version":1', '"version":2'), "record has version 2, and this version"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            read_record(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_record(tmp_path / "none.json")


def test_csv_has_a_line_for_each_request(tmp_path):
    path = tmp_path / "run.csv"
    failed = make_answer(1, 2.0, failure="timeout")
    no_tokens = replace(failed.log.timings, first_token_s=0.0, last_token_s=0.0)
    failed = replace(failed, log=replace(failed.log, timings=no_tokens))
    write_csv(path, [[make_answer(0, 1.0), failed]])
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["first_token_s"] for row in rows] == ["1.1", ""]
    assert [row["ttft_ms"] for row in rows] == ["100.0", ""]
    assert [row["failure"] for row in rows] == ["", "timeout"]


def test_a_comparison_tells_changes_from_chance():
    before = RunRecord(SETUP, random_run(0))
    words = {change.title: change.word for change in compare_runs(before, before)}
    assert set(words.values()) == {"same"}
    slower = RunRecord(SETUP, random_run(1, gap_s=0.013))
    words = {change.title: change.word for change in compare_runs(before, slower)}
    assert words["TPOT P50"] == words["ITL P90"] == "worse"
    assert words["TTFT P50"] == "same"
    back = {change.title: change.word for change in compare_runs(slower, before)}
    assert back["TPOT P50"] == "better"
    assert different_loads(before, slower) == []


def test_a_comparison_of_rates_knows_that_more_is_better():
    slow = RunRecord(SETUP, tuple(make_answer(n, n / 10) for n in range(200)))
    fast = RunRecord(SETUP, tuple(make_answer(n, n / 20) for n in range(200)))
    changes = {change.title: change for change in compare_runs(slow, fast)}
    assert changes["output tokens/s"].word == "better"
    assert changes["output tokens/s"].after == pytest.approx(220, rel=0.05)
    assert {c.title: c.word for c in compare_runs(fast, slow)}["requests/s"] == "worse"


def test_a_comparison_of_few_requests_is_refused():
    with pytest.raises(UsageError, match="needs 10 completed requests"):
        compare_runs(RunRecord(SETUP, random_run(0, 9)), RunRecord(SETUP, random_run(0)))


def test_named_objectives_are_known():
    assert len(OBJECTIVE_NAMES) == 12
    assert named_objectives("llama-3.1-8b-interactive") == Objectives(0.5, 0.03)
    with pytest.raises(UsageError, match="Did you mean 'reading'"):
        named_objectives("readng")
