"""Comparisons of runs and sweeps: which loads are matched, what is refused, and HTML reports."""

from __future__ import annotations

import random
import re

import pytest
from msgspec.structs import replace

from support.bench_answers import make_answer
from twostroke.core.errors import UsageError
from twostroke.lab.bench.comparison import check_comparable, compare_loads
from twostroke.lab.bench.html_comparison import html_comparison
from twostroke.lab.bench.html_report import MeasuredRun
from twostroke.lab.bench.record import RunRecord, RunSetup

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


def run_of(seed=0, count=100, gap_s=0.01, num_prompt=100, num_output=11, **setup):
    rng = random.Random(seed)
    answers = tuple(
        make_answer(
            n, n / 2, ttft_s=0.1 * rng.uniform(0.5, 1.5), gap_s=gap_s * rng.uniform(0.5, 1.5),
            num_prompt=round(num_prompt * rng.uniform(0.5, 1.5)), num_output=num_output,
        )
        for n in range(count)
    )  # fmt: skip
    return RunRecord(replace(SETUP, **setup), answers)


def sweep_of(clients, **fields):
    return [run_of(num_clients=number, rate=None, **fields) for number in clients]


def test_the_loads_of_two_sweeps_are_matched():
    before, after = sweep_of((1, 2, 4)), sweep_of((4, 2, 8), gap_s=0.02)
    comparisons = compare_loads(before, after)
    assert [comparison.load for comparison in comparisons] == ["2 clients", "4 clients"]
    for comparison in comparisons:
        assert comparison.different_loads == ()
        words = {change.title: change.word for change in comparison.changes}
        assert words["TPOT P50"] == "worse"
        assert 0 < comparison.num_changed < len(comparison.changes)


def test_rates_are_matched_to_the_nearest():
    before = [run_of(rate=2.0), run_of(rate=4.0)]
    after = [run_of(rate=3.9), run_of(rate=2.05), run_of(rate=2.1), run_of(rate=9.0)]
    pairs = [comparison.different_loads for comparison in compare_loads(before, after)]
    assert pairs == [("rate 2 and 2.05",), ("rate 4 and 3.9",)]


def test_single_runs_of_other_loads_are_compared():
    [comparison] = compare_loads([run_of(rate=1.0)], [run_of(num_clients=2, rate=None)])
    assert comparison.different_loads


def test_sweeps_without_a_common_load_are_refused():
    with pytest.raises(UsageError, match="No load is in both: 1 client, 2 clients, and 3 clients"):
        compare_loads(sweep_of((1, 2)), sweep_of((3, 4)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "n"}, "The runs have different models, 'm' and 'n'. Compare them anyway"),
        ({"num_prompt": 150}, r"Prompts have 1\d\d and 1\d\d tokens on average"),
        ({"num_output": 20}, "Answers have 11 and 20 tokens on average"),
    ],
)
def test_runs_that_do_not_compare_are_refused(fields, words):
    with pytest.raises(UsageError, match=words):
        check_comparable([run_of()], [run_of(seed=1, **fields)])


def test_lengths_that_differ_by_chance_compare():
    for seed in range(10):
        check_comparable([run_of(seed)], [run_of(seed + 100, count=20)])
    check_comparable([run_of(count=2)], [run_of(num_prompt=900)])  # the comparison refuses it


def test_the_report_of_a_comparison_has_both_sides_and_loads_nothing():
    for before, after in (
        ([run_of()], [run_of(1, gap_s=0.02)]),
        (sweep_of((1, 2)), sweep_of((1, 2), gap_s=0.02)),
    ):
        sides = [[MeasuredRun.of(record) for record in records] for records in (before, after)]
        comparisons = compare_loads(before, after)
        page = html_comparison(sides[0], sides[1], comparisons, ("a<.json", "b.json"))
        body = page[page.index("<body>") :]
        assert body.index("figures changed by more than chance") < body.index("<h1>")
        assert "Before: a&lt;.json" in body
        assert "After: b.json" in body
        assert body.count('<tr class="worse">') > 0
        assert body.count("<svg") == 1
        assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)|url\((?!#)|@import""", page)
