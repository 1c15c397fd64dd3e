"""What is said of guesses where the machine was slow for a while."""

from __future__ import annotations

import pytest

from speculation import Run, Usual
from twostroke.spec import TimedStep


def _run(*steps: TimedStep) -> Run:
    return Run([], 0, 0, 0.0, list(steps))


def _step(step_s: float, guesses: int = 0, right: int = 0, asking_s: float = 0.0) -> TimedStep:
    return TimedStep(2 + guesses, guesses, 2, 2 + right, step_s, asking_s)


def test_a_slow_spell_does_not_show():
    plain = _run(*[_step(0.010)] * 20, *[_step(0.050)] * 9)
    guessed = _run(*[_step(0.015, guesses=2, right=1)] * 10)
    usual = Usual([*plain.steps, *guessed.steps])
    assert usual.token_s([plain]) == pytest.approx(0.005)
    assert usual.token_s([guessed]) == pytest.approx(0.005)


def test_looking_for_guesses_counts():
    run = _run(*[_step(0.020, asking_s=0.002)] * 10)
    assert Usual(run.steps).token_s([run]) == pytest.approx(0.011)
    assert run.tokens_per_s == pytest.approx(1 / 0.011)


def test_rare_sizes_lie_between_their_neighbours():
    often = [*[_step(0.010)] * 10, *[_step(0.030, guesses=4)] * 10]
    rare = _run(_step(0.900, guesses=2))
    assert Usual([*often, *rare.steps]).token_s([rare]) == pytest.approx(0.010)
