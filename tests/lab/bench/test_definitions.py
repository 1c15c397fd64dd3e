"""The figures of one run by several tools' definitions, computed by hand."""

from __future__ import annotations

import pytest

from support.bench_answers import make_answer
from twostroke.lab.bench.definitions import TOOLS, defined_figures
from twostroke.lab.bench.report import make_bench_report
from twostroke.lab.measure.requests import Objectives


def figures_of(answers, own_counts=None):
    report = make_bench_report(answers, Objectives())
    figures = defined_figures(answers, report, own_counts or {})
    assert all(set(figure.values) == set(TOOLS) for figure in figures)
    return {figure.name: figure.values for figure in figures}


def one_answer(**fields):
    """A request due at 0 and sent at 0.1 s; its role comes at 0.3 s, its 3 chunks of 2 tokens at
    0.5, 0.6 and 0.7 s, its reason at 0.8 s, and its end at 1.0 s."""
    return make_answer(
        0,
        0.0,
        ttft_s=0.5,
        gap_s=0.1,
        num_output=6,
        num_chunks=3,
        late_s=0.1,
        empty_chunk_times_s=(0.3, 0.8),
        ended_s=1.0,
        **fields,
    )


@pytest.mark.parametrize(
    ("figure", "values"),
    [
        # twostroke counts from the scheduled time; vLLM begins with the role.
        ("ttft_mean", (0.5, 0.2, 0.4, 0.4, 0.4)),
        ("tpot_mean", (0.2 / 5, 0.5 / 5, 0.2 / 5, 0.6 / 6, 0.2 / 5)),
        ("itl_mean", (0.1, 0.5 / 4, 0.1, 0.2 / 5, 0.2 / 5)),
        ("itl_p50", (0.1, 0.1, 0.1, 0.04, 0.0)),
        ("e2e_mean", (0.7, 0.7, 0.6, 0.9, 0.9)),
        ("requests_per_s", (None, 1 / 0.9, 1 / 0.6, 1 / 0.9, 1 / 0.9)),
    ],
)
def test_each_tool_has_its_definition(figure, values):
    figures = figures_of([one_answer()])
    for tool, value in zip(TOOLS, values, strict=True):
        if value is not None:
            assert figures[figure][tool] == pytest.approx(value), tool


def test_tools_that_count_by_themselves_take_the_counts_of_the_tokenizer():
    figures = figures_of([one_answer()], {0: 11})
    assert figures["tpot_mean"]["aiperf"] == pytest.approx(0.02)
    assert figures["tpot_mean"]["inference-perf"] == pytest.approx(0.02)
    assert figures["tpot_mean"]["vllm"] == pytest.approx(0.1)
    rates = figures["output_per_s"]
    assert rates["aiperf"] / rates["vllm"] == pytest.approx(11 / 0.6 / (6 / 0.9))


def test_tokens_weigh_in_the_means_of_guidellm():
    slow = make_answer(0, 0.0, gap_s=0.1, num_output=11)
    fast = make_answer(1, 0.0, gap_s=0.02, num_output=91)
    figures = figures_of([slow, fast])
    assert figures["itl_mean"]["guidellm"] == pytest.approx((0.1 * 10 + 0.02 * 90) / 100)
    assert figures["tpot_mean"]["twostroke"] == pytest.approx(0.06)


def test_failed_requests_count_for_no_tool():
    answers = [one_answer(), make_answer(1, 0.0, ttft_s=9.0, failure="timeout")]
    figures = figures_of(answers)
    assert max(figures["ttft_p90"].values()) == pytest.approx(0.5)


def test_answers_of_one_token_have_no_gaps():
    figures = figures_of([make_answer(0, 0.0, num_output=1)])
    assert figures["itl_mean"] == dict.fromkeys(TOOLS)
    assert figures["ttft_mean"]["inference-perf"] is None
