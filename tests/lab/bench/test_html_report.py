"""HTML reports of runs and sweeps, and the numbers behind their charts."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from msgspec.structs import replace

from support.bench_answers import make_answer
from twostroke.lab.bench.audit import AuditFinding
from twostroke.lab.bench.charts import fit_ttft, itl_over_time, knee_of, requests_over_time
from twostroke.lab.bench.html_report import MeasuredRun, html_report
from twostroke.lab.bench.record import RunRecord, RunSetup
from twostroke.lab.bench.report import make_bench_report
from twostroke.lab.bench.resources import RunResources
from twostroke.lab.measure.requests import Objectives

SETUP = RunSetup(
    url="http://host:8000",
    model="m<1>",
    api="chat",
    load="poisson arrivals",
    num_clients=None,
    rate=2.0,
    date="2026-11-30T08:00:00+00:00",
    verdict="Read this run with care: few samples.",
    objectives=Objectives(0.2, 0.05),
)


def some_answers(count=60, gap_s=0.01, **fields):
    rng = random.Random(0)
    return tuple(
        make_answer(n, n / 2, num_prompt=rng.randrange(50, 900), gap_s=gap_s, **fields)
        for n in range(count)
    )


def run_of(answers, **setup):
    findings = (AuditFinding("few samples", "Some <text>."),)
    record = RunRecord(
        replace(SETUP, **setup),
        answers,
        findings=findings,
        resources=RunResources(server_version="Other 1.2"),
        command="twostroke bench http://host:8000 --rate 2",
        client_version="0.1.0",
    )
    return MeasuredRun.of(record)


def test_the_report_of_a_run_begins_with_the_audit_and_loads_nothing():
    page = html_report([run_of(some_answers())])
    body = page[page.index("<body>") :]
    order = [
        body.index(text)
        for text in (
            SETUP.verdict, "Some &lt;text&gt;.", "<h1>", "--rate 2", "Other 1.2", "Twostroke 0.1.0",
            "TTFT by input length", "(ITL) over time", "Requests over time",
        )
    ]  # fmt: skip
    assert order == sorted(order)
    assert "m&lt;1&gt;" in body
    assert "m<1>" not in page
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)|url\((?!#)|@import""", page)
    assert "<script" not in page
    assert page.count("<svg") == 4


def test_the_time_to_publish_is_shown_beside_ttft():
    answers = tuple(
        replace(answer, first_reasoning_s=n / 2 + 0.1, first_content_s=n / 2 + 1.1)
        for n, answer in enumerate(some_answers())
    )
    page = html_report([run_of(answers)])
    assert "time to publish (first token of the content)" in page
    assert "Time to publish</td><td>1,100.0" in page


def test_a_run_without_answers_has_a_report():
    failed = some_answers(3, failure="timeout")
    page = html_report([run_of(failed, verdict="This run is NOT VALID: failed requests.")])
    assert "none of which completed" in page
    assert "timeout 3." in page
    assert page.count("<svg") == 1


def test_one_answer_has_a_report():
    assert "Rates and resources" in html_report([run_of(some_answers(1))])


def test_the_report_of_a_sweep_marks_the_knee_and_each_load():
    runs = [
        run_of(some_answers(gap_s=gap_s), num_clients=clients, rate=None)
        for clients, gap_s in ((1, 0.01), (2, 0.01), (4, 0.3))
    ]
    invalid = replace(runs[2].record.setup, verdict="This run is NOT VALID: late client.")
    runs[2] = replace(runs[2], record=replace(runs[2].record, setup=invalid))
    page = html_report(runs)
    body = page[page.index("<body>") :]
    assert body.index("1 of 3 loads NOT VALID") < body.index("<h1>")
    assert page.count("<details>") == 3
    assert "knee: " in page
    assert "Goodput by load" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_search_is_shown_in_the_order_of_loads_below_its_result():
    alone = run_of(some_answers(), num_clients=1, rate=None)
    rates = [run_of(some_answers(gap_s=0.01 * rate), rate=rate) for rate in (4.0, 2.0)]
    page = html_report([rates[0], alone, rates[1]], "Goodput capacity: 2 requests/s.")
    body = page[page.index("<body>") :]
    assert body.index("Goodput capacity: 2 requests/s.") < body.index("<h1>")
    summaries = re.findall(r"<summary>(.*)</summary>", body)
    assert summaries == ["1 client", "2/s", "4/s"]
    assert "Requests per second that arrive" in body


def test_the_fit_finds_the_line_despite_requests_that_waited():
    rng = random.Random(0)
    answers = []
    for number in range(300):
        length = rng.randrange(100, 4000)
        waited_s = rng.expovariate(0.5) if number % 4 == 0 else 0.0
        ttft_s = 0.05 + 0.0002 * length + waited_s
        answers.append(make_answer(number, number / 5, ttft_s=ttft_s, num_prompt=length))
    fit = fit_ttft(answers)
    assert fit is not None
    assert fit.seconds_per_token == pytest.approx(0.0002, rel=0.1)
    assert fit.fixed_s == pytest.approx(0.05, abs=0.02)


def test_equal_lengths_and_cached_inputs_have_no_line():
    assert fit_ttft([make_answer(n, n) for n in range(50)]) is None
    cached = [make_answer(n, n, num_prompt=50 + n, num_cached=40) for n in range(50)]
    assert fit_ttft(cached) is None
    assert fit_ttft([]) is None


def test_gaps_over_time_show_a_server_that_slows_down():
    answers = [make_answer(n, n / 2, gap_s=0.01 if n < 50 else 0.05) for n in range(100)]
    bins = itl_over_time(answers)
    assert bins is not None
    p50 = bins.columns["p50"]
    assert np.nanmedian(p50[: len(p50) // 3]) == pytest.approx(0.01)
    assert np.nanmedian(p50[-len(p50) // 3 :]) == pytest.approx(0.05)
    assert itl_over_time([make_answer(0, 0.0, num_output=1)]) is None


def test_requests_over_time_count_each_request_once():
    answers = some_answers(90)
    failed = tuple(replace(answer, failure="x") for answer in some_answers(9, failure="x"))
    bins = requests_over_time([*answers, *failed])
    minutes = bins.edges_s[1] / 60
    assert (bins.columns["arrived"] * minutes).sum() == pytest.approx(99)
    assert (bins.columns["completed"] * minutes).sum() == pytest.approx(90)
    assert (bins.columns["failed"] * minutes).sum() == pytest.approx(9)


def test_the_knee_is_where_throughput_stops_to_pay_for_latency():
    reports = []
    for clients in (1, 2, 4, 8, 16, 32):
        e2e_s = max(1.0, clients / 8)  # the server has 8 slots
        report = make_bench_report(
            [make_answer(0, 0.0, gap_s=e2e_s / 10, ttft_s=1e-6)], Objectives()
        )
        run = replace(report.run, output_per_s=10.0 * clients / e2e_s)
        reports.append(replace(report, run=run))
    assert knee_of(reports) == 3
    assert knee_of(reports[:2]) is None
