"""The benchmark of advice: which options are measured, and when a gain is the expected one."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.lab.advice import AdviceResult, measured_gain, measured_options
from twostroke.engine.output import Timings
from twostroke.lab.measure.requests import FAILED, Objectives, RequestLog
from twostroke.lab.simulator.gain import Gain, Interval

OBJECTIVES = Objectives(ttft_s=0.5)


def log(ttft_s: float, outcome: str = "completed") -> RequestLog:
    return RequestLog(Timings(0.0, 0.0, ttft_s, ttft_s + 1), 0.0, 100, 10, outcome=outcome)


def printed(changes: dict[str, Any], best: dict[str, Any]) -> dict[str, Any]:
    """Return a part of the JSON of `twostroke advise`."""
    command = "twostroke serve 'my model' --token-budget 64 --max-running 8"
    return {"advice": {"changes": changes, "best": best}, "commands": [command]}


def test_the_advised_command_is_measured():
    options, is_advised = measured_options(printed({"token_budget": 64}, {"token_budget": 64}))
    assert options == ["--token-budget", "64", "--max-running", "8"]
    assert is_advised


def test_the_best_other_setting_is_measured_if_the_defaults_are_advised():
    assert measured_options(printed({}, {"max_running": 4})) == (["--max-running", "4"], False)
    assert measured_options(printed({}, {})) == ([], False)


def test_a_gain_counts_failed_requests_as_bad():
    rounds = [([log(0.6)] * 50 + [log(0.4)] * 50, [log(0.4)] * 75 + [log(0.1, FAILED)] * 25)] * 2
    gain = measured_gain(rounds, OBJECTIVES)
    assert gain.share.expected == pytest.approx(0.25, abs=0.05)
    assert gain.share.low < gain.share.expected < gain.share.high


@pytest.mark.parametrize(
    ("share", "ratio", "text"),
    [
        (Interval(0.2, 0.12, 0.28), "1.00", "The intervals overlap."),
        (Interval(0.3, 0.25, 0.35), "0.67", "The intervals do not overlap."),
    ],
)
def test_the_report_has_the_measured_gain_beside_the_expected_one(share, ratio, text):
    result = AdviceResult(
        model="smollm2",
        load="2.00 requests/s (poisson), 100 in each run",
        objectives=OBJECTIVES,
        options="--token-budget 64",
        is_advised=True,
        expected=Gain(share, None, None),
        slowness=(0.9, 1.0, 1.1),
        rounds=[(0.5, 0.7), (0.6, 0.8)],
        measured=Gain(Interval(0.2, 0.17, 0.23), None, None),
        num_disturbed=1,
    )
    report = "\n".join(result.parts())
    assert f"The measured gain is {ratio} of the expected one. {text}" in report
    assert "| 2 | 60.0% | 80.0% | +20.0 |" in report
    assert "| all, 95% interval |  |  | +20.0 (+17.0 to +23.0) |" in report
    assert "disturbed 1 of 4 runs" in report
