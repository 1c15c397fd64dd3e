"""Truncation follows its definition, on random logits and parameters from Hypothesis."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support.chi_square import brute_force
from support.sampling import make_request
from twostroke.backends.sampling.reference import distribution, draw
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import NO_TOKEN

finite = st.floats(-30, 30, width=32) | st.sampled_from([0.0, -0.0, 1.0, 1.5])
logits_of = st.lists(finite, min_size=1, max_size=40).map(lambda x: np.array(x, np.float32))
anything = st.lists(st.floats(width=32), min_size=1, max_size=40)
shares = st.floats(1e-6, 1.0)
TOLERANCE = 2e-5  # of a probability; weights are float32


def order_of(logits) -> list[int]:
    return sorted(range(logits.size), key=lambda i: (-float(logits[i]), i))


@given(logits_of, st.integers(1, 50))
def test_top_k_keeps_the_first_k_of_the_order(logits, top_k):
    ids, _ = distribution(SamplingParams(top_k=top_k, temperature=100.0), logits)
    assert ids.tolist() == sorted(order_of(logits)[:top_k])


@given(logits_of, shares, st.floats(0.05, 5.0))
def test_top_p_keeps_the_shortest_prefix_that_holds_its_share(logits, top_p, temperature):
    ids, _ = distribution(SamplingParams(top_p=top_p, temperature=temperature), logits)
    p = brute_force(SamplingParams(temperature=temperature), logits)
    order = order_of(logits)
    assert ids.tolist() == sorted(order[: ids.size])
    assert p[order[: ids.size]].sum() >= top_p - TOLERANCE
    assert p[order[: ids.size - 1]].sum() < top_p + TOLERANCE


@given(logits_of, st.floats(0.0, 1.0), st.floats(0.05, 5.0))
def test_min_p_keeps_what_reaches_its_share_of_the_likeliest(logits, min_p, temperature):
    ids, _ = distribution(SamplingParams(min_p=min_p, temperature=temperature), logits)
    p = brute_force(SamplingParams(temperature=temperature), logits)
    is_candidate = np.isin(np.arange(logits.size), ids)
    assert (p[is_candidate] >= (min_p - TOLERANCE) * p.max()).all()
    assert (p[~is_candidate] <= (min_p + TOLERANCE) * p.max()).all()


@given(logits_of, st.integers(0, 50), shares, st.floats(0.0, 1.0), st.floats(0.05, 5.0))
def test_weights_are_in_proportion_to_the_probabilities(logits, top_k, top_p, min_p, temperature):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, weight = distribution(params, logits)
    p = brute_force(SamplingParams(temperature=temperature), logits)[ids]
    np.testing.assert_allclose(weight / weight.sum(), p / p.sum(), atol=TOLERANCE)


@given(anything, st.floats(0.0, 100.0), st.integers(0, 50), shares, st.integers(0, 2**64 - 1))
def test_a_token_is_above_minus_infinity_or_there_is_none(values, temperature, top_k, top_p, seed):
    logits = np.array(values, np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, logprobs=3)
    token, logprobs = draw(make_request(params, seed=seed), logits)
    if token == NO_TOKEN:
        assert not (logits > -np.inf).any()
        assert logprobs is None
        return
    assert logits[token] > -np.inf
    assert logprobs is not None
    assert np.isfinite([logprobs.logprob, *logprobs.top_logprobs]).all()
