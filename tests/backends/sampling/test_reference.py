"""The definition of sampling: the effect of each parameter, and their order."""

from __future__ import annotations

import math

import numpy as np
import pytest

from support.sampling import make_request, random_logits
from twostroke.backends.sampling.reference import (
    MIN_LOGPROB,
    UNIT,
    adjust,
    distribution,
    draw,
    weights,
)
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import NO_TOKEN

INF = math.inf


def row(*logits: float):
    return np.array(logits, np.float32)


def candidate_ids(params: SamplingParams, logits) -> list[int]:
    return distribution(params, logits)[0].tolist()


# Weights


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 3.0, 100.0])
def test_weights_are_the_exponential_to_a_few_parts_in_a_million(temperature):
    logits = np.linspace(-27 * temperature, 0, 5001).astype(np.float32)
    exact = np.exp(logits.astype(float) / temperature) * UNIT
    result = weights(logits, np.float32(0), temperature).astype(float)
    assert np.max(np.abs(result - exact) / np.maximum(exact, 2**22)) < 5e-6


def test_weights_are_integers_and_the_likeliest_weighs_one_unit():
    result = weights(random_logits(np.random.default_rng(0), 999, "normal"), np.float32(20), 1.0)
    assert (result == np.floor(result)).all()
    assert weights(row(3.25), np.float32(3.25), 0.6)[0] == UNIT


def test_a_token_less_likely_by_more_than_two_to_the_41_weighs_nothing():
    result = weights(row(0, -40 * math.log(2), -41.1 * math.log(2), -INF), np.float32(0), 1.0)
    assert result.tolist() == [UNIT, 1, 0, 0]


# Greedy


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals():
    request = make_request(SamplingParams(temperature=0))
    assert draw(request, row(1, 3, 2, 3)) == (1, None)


def test_greedy_comes_after_bias_penalties_and_bars():
    logits = row(5, 4, 3, 2)
    assert draw(make_request(SamplingParams(temperature=0, logit_bias={2: 2.5})), logits)[0] == 2
    barred = make_request(SamplingParams(temperature=0, min_tokens=1), end_ids=[0])
    assert draw(barred, logits)[0] == 1
    punished = make_request(SamplingParams(temperature=0, presence_penalty=1.5), output=[0])
    assert draw(punished, logits)[0] == 1


# Adjustments


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_output():
    request = make_request(SamplingParams(repetition_penalty=2.0), prompt=[0, 1, 0], output=[2])
    assert adjust(request, row(4, -4, 3, 3)).tolist() == [2, -8, 1.5, 3]


def test_frequency_counts_and_presence_marks_tokens_of_the_output_alone():
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    request = make_request(params, prompt=[0, 3], output=[1, 1, 1, 2])
    assert adjust(request, row(1, 1, 1, 1)).tolist() == [1, -0.75, 0.25, 1]


def test_bias_comes_before_the_repetition_penalty():
    params = SamplingParams(logit_bias={0: 3.0}, repetition_penalty=2.0)
    assert adjust(make_request(params, prompt=[0]), row(-1)).tolist() == [1]


def test_end_tokens_are_barred_until_min_tokens_are_out():
    params = SamplingParams(min_tokens=2)
    for output, expected in ([], -INF), ([5], -INF), ([5, 5], 1), ([5, 5, 5], 1):
        request = make_request(params, prompt=[1, 1, 1], output=output, end_ids=[0])
        assert adjust(request, row(1, 1))[0] == expected


def test_ids_outside_the_vocabulary_are_passed_over():
    params = SamplingParams(
        logit_bias={9: 1.0}, repetition_penalty=2.0, frequency_penalty=1.0, min_tokens=9
    )
    request = make_request(params, prompt=[7], output=[8], end_ids=[9])
    assert adjust(request, row(1, 2)).tolist() == [1, 2]


def test_draw_leaves_the_logits_alone():
    logits = row(1, math.nan, 2)
    request = make_request(SamplingParams(logit_bias={0: 5.0}, repetition_penalty=2), [0, 2])
    draw(request, logits)
    assert logits[0] == 1
    assert np.isnan(logits[1])
    assert logits[2] == 2


# Truncation


def test_top_k_keeps_exactly_k_the_lower_ids_among_equals():
    assert candidate_ids(SamplingParams(top_k=3), row(1, 2, 1, 1, 2)) == [0, 1, 4]


def test_top_p_keeps_the_token_that_crosses_and_no_more():
    logits = np.log(row(0.1, 0.4, 0.2, 0.3))
    assert candidate_ids(SamplingParams(top_p=0.39), logits) == [1]
    assert candidate_ids(SamplingParams(top_p=0.41), logits) == [1, 3]
    assert candidate_ids(SamplingParams(top_p=0.71), logits) == [1, 2, 3]
    assert candidate_ids(SamplingParams(top_p=0.91), logits) == [0, 1, 2, 3]


def test_top_p_of_equals_that_is_reached_exactly_keeps_no_more():
    assert candidate_ids(SamplingParams(top_p=0.5), row(1, 1, 1, 1)) == [0, 1]


def test_the_smallest_top_p_keeps_the_likeliest():
    assert candidate_ids(SamplingParams(top_p=1e-300), row(1, 2, 2)) == [1]


def test_min_p_is_relative_to_the_likeliest():
    logits = np.log(row(0.05, 0.5, 0.2, 0.25))
    assert candidate_ids(SamplingParams(min_p=0.45), logits) == [1, 3]
    assert candidate_ids(SamplingParams(min_p=1.0), row(1, 1, 0.9)) == [0, 1]


def test_top_p_counts_what_top_k_and_min_p_left():
    logits = np.log(row(0.4, 0.3, 0.2, 0.1))
    assert candidate_ids(SamplingParams(top_p=0.55), logits) == [0, 1]
    assert candidate_ids(SamplingParams(top_p=0.55, top_k=2), logits) == [0]
    assert candidate_ids(SamplingParams(top_p=0.55, min_p=0.7), logits) == [0]


def test_temperature_comes_before_truncation():
    logits = np.log(row(0.6, 0.3, 0.1))
    assert candidate_ids(SamplingParams(temperature=0.25, top_p=0.9), logits) == [0]
    assert candidate_ids(SamplingParams(temperature=4.0, top_p=0.9), logits) == [0, 1, 2]


# The draw


def test_a_draw_depends_on_seed_and_output_index_and_on_nothing_else():
    logits = random_logits(np.random.default_rng(1), 500, "normal")
    params = SamplingParams()
    short = make_request(params, prompt=[1], output=[4, 4], seed=7)
    other = make_request(params, prompt=[9] * 50, output=[8, 3], seed=7)
    assert draw(short, logits) == draw(short, logits) == draw(other, logits)
    by_seed = {draw(make_request(params, seed=s), logits)[0] for s in range(50)}
    by_index = {draw(make_request(params, output=[0] * i), logits)[0] for i in range(50)}
    assert len(by_seed) > 10
    assert len(by_index) > 10


def test_a_tiny_temperature_draws_among_the_likeliest_alone():
    logits = row(1, 2, 2, math.nextafter(2, 1) - 1e-6)
    drawn_tokens = {
        draw(make_request(SamplingParams(temperature=1e-40), seed=s), logits)[0] for s in range(40)
    }
    assert drawn_tokens == {1, 2}


# Damaged and extreme logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_never_drawn(temperature):
    request = make_request(SamplingParams(temperature=temperature, logprobs=5))
    token, logprobs = draw(request, row(math.nan, 1, math.nan))
    assert token == 1
    assert logprobs is not None
    assert logprobs.top_ids == (1,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, -INF])
def test_a_row_with_nothing_to_draw_gives_no_token(temperature, value):
    request = make_request(SamplingParams(temperature=temperature, logprobs=5, top_p=0.5))
    assert draw(request, row(value, value)) == (NO_TOKEN, None)


def test_a_row_that_is_barred_throughout_gives_no_token():
    request = make_request(SamplingParams(min_tokens=1), end_ids=[0, 1])
    assert draw(request, row(1, 2)) == (NO_TOKEN, None)


def test_plus_infinity_is_shared_evenly_and_leaves_others_no_chance():
    ids, weight = distribution(SamplingParams(), row(INF, 5, INF))
    assert ids.tolist() == [0, 2]
    assert weight[0] == weight[1]


# Log-probabilities


def test_logprobs_are_those_of_the_unmodified_distribution():
    logits = random_logits(np.random.default_rng(2), 400, "normal")
    params = SamplingParams(
        temperature=0.3, top_k=1, logit_bias={17: 100.0}, repetition_penalty=3.0, logprobs=4
    )
    token, logprobs = draw(make_request(params, prompt=range(100)), logits)
    exact = logits.astype(float) - np.log(np.exp(logits.astype(float)).sum())
    assert token == 17
    assert logprobs is not None
    assert logprobs.logprob == pytest.approx(exact[17], abs=2e-6)
    assert list(logprobs.top_ids) == np.argsort(-exact)[:4].tolist()
    np.testing.assert_allclose(logprobs.top_logprobs, exact[list(logprobs.top_ids)], atol=2e-6)


def test_logprobs_0_reports_the_token_alone():
    _, logprobs = draw(make_request(SamplingParams(temperature=0, logprobs=0)), row(0, 0))
    assert logprobs is not None
    assert logprobs.logprob == pytest.approx(math.log(0.5))
    assert logprobs.top_ids == logprobs.top_logprobs == ()


def test_no_logprob_is_below_what_json_can_carry():
    params = SamplingParams(temperature=0, min_tokens=1, logprobs=2)
    token, logprobs = draw(make_request(params, end_ids=[0]), row(INF, 3))
    assert token == 1
    assert logprobs is not None
    assert logprobs.logprob == MIN_LOGPROB
    assert logprobs.top_logprobs == (0.0, MIN_LOGPROB)
