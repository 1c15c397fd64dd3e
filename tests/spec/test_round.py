"""What guesses bring while they are made: how likely another one must be to pay."""

from __future__ import annotations

import pytest

from twostroke.spec.proposal import Price
from twostroke.spec.round import Round

PLAIN_S, ROW_S = 0.030, 0.002
PRICE = Price(0.0, 2 / PLAIN_S, 24, lambda num_guesses: PLAIN_S + ROW_S * num_guesses)


def test_a_guess_competes_with_what_those_before_it_bring() -> None:
    this_round = Round(2, PRICE, taken_s=0.001)
    least = this_round.least_next(2, 1.8, 2, step_s=0.001)
    rate = (2 + 1.8) / (PLAIN_S + 2 * ROW_S + 0.001)
    assert least == pytest.approx(rate * (ROW_S + 0.001 / 2))


def test_what_was_taken_for_guesses_counts_against_their_rate() -> None:
    this_round = Round(1, PRICE, taken_s=0.0)
    first, second = (this_round.least_next(3, 2.7, 1, step_s=0.02) for _ in range(2))
    assert this_round.taken_s == pytest.approx(0.04)
    assert second < first, "a slower round is less of a rival"


def test_guesses_that_bring_little_are_measured_by_none_at_all() -> None:
    this_round = Round(1, PRICE, taken_s=1.0)
    assert this_round.least_next(1, 0.0, 1, step_s=0.0) == pytest.approx(PRICE.rate * ROW_S)


def test_nobody_left_is_no_division_by_nothing() -> None:
    assert Round(1, PRICE, 0.0).least_next(0, 0.0, 0, step_s=0.01) > 0
