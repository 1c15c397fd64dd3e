"""Speed-ups by speculation, measured on a machine that was slow for a while."""

from __future__ import annotations

import pytest

from benchmarks.engine.speculation import Run, Usual
from twostroke.engine.speculation import TimedStep


def _run(*steps: TimedStep) -> Run:
    return Run([], 0, 0, 0.0, list(steps))


def _step(step_s: float, num_drafts: int = 0, right: int = 0, asking_s: float = 0.0) -> TimedStep:
    return TimedStep(2 + num_drafts, num_drafts, 2, 2 + right, step_s, asking_s)


def test_slow_moments_do_not_show():
    plain = _run(*[_step(0.010)] * 20, *[_step(0.050)] * 9)
    speculative = _run(*[_step(0.010)] * 20, *[_step(0.015, num_drafts=2, right=1)] * 10)
    usual = Usual([plain, speculative])
    assert _ratio(usual, plain, speculative) == pytest.approx((40 + 30) / (20 + 15) / 2)


def test_time_spent_looking_for_drafts_counts():
    plain = _run(*[_step(0.020)] * 10)
    asking = _run(*[_step(0.020, asking_s=0.002)] * 10)
    assert _ratio(Usual([plain, asking]), plain, asking) == pytest.approx(1 / 1.1)
    assert asking.tokens_per_s == pytest.approx(1 / 0.011)


def test_rare_sizes_have_their_own_time_in_their_runs_measure():
    often = _run(*[_step(0.010)] * 10)
    rare = _run(*[_step(0.020)] * 10, _step(0.900, num_drafts=70))
    usual = Usual([often, rare])
    assert _ratio(usual, often, rare) == pytest.approx(11 * 10 / (10 * 10 + 450))


def test_slow_minutes_do_not_show():
    plain = [_run(*[_step(0.010)] * 40) for _ in range(3)]
    speculative = [
        _run(*[_step(0.010 * slow)] * 9, *[_step(0.015 * slow, 2, 1)] * 31) for slow in (1, 3)
    ]
    usual = Usual([*plain, *speculative])
    expected = (9 * 2 + 31 * 3) / (9 * 0.010 + 31 * 0.015) / (2 / 0.010)
    assert usual.token_s(plain) / usual.token_s(speculative) == pytest.approx(expected)


def _ratio(usual: Usual, plain: Run, speculative: Run) -> float:
    return usual.token_s([plain]) / usual.token_s([speculative])
