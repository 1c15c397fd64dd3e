"""Drawn tokens follow the requested distribution, and planted faults are noticed."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from support.chi_square import AGREES, DIFFERS, brute_force, deviate
from twostroke.backends.sampling import reference
from twostroke.backends.sampling.reference import distribution, pick
from twostroke.core.sampling import SamplingParams

random_bits = cache(reference.random_bits)
NUM_DRAWS = 10_000
LOGITS = (np.random.default_rng(5).normal(size=48) * 1.5).astype(np.float32)

COMBINATIONS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.4, top_k=20, top_p=0.9),
    SamplingParams(temperature=0.7, top_p=0.95, min_p=0.02),
    SamplingParams(temperature=1.2, top_k=12, top_p=0.85, min_p=0.05),
]


def draws(params: SamplingParams, bits=random_bits):
    ids, weight = distribution(params, LOGITS)
    return np.array([pick(ids, weight, bits(3, i)) for i in range(NUM_DRAWS)])


@pytest.mark.parametrize("params", COMBINATIONS)
def test_draws_follow_the_distribution(params):
    assert deviate(draws(params), brute_force(params, LOGITS)) < AGREES


def test_draws_of_many_seeds_at_one_index_follow_the_distribution():
    tokens = draws(SamplingParams(), bits=lambda _, i: random_bits(i, 0))
    assert deviate(tokens, brute_force(SamplingParams(), LOGITS)) < AGREES


def pairs_deviate(tokens) -> float:
    """Return how far consecutive tokens are from independent, by a coarse table of pairs."""
    p = brute_force(SamplingParams(), LOGITS)
    first, second = tokens[0::2], tokens[1::2]
    return deviate(first * LOGITS.size + second, np.outer(p, p).ravel())


def test_consecutive_draws_are_independent():
    assert pairs_deviate(draws(SamplingParams())) < AGREES


@pytest.mark.parametrize(
    ("tested_params", "done"),
    [
        (SamplingParams(temperature=0.85), SamplingParams()),
        (SamplingParams(temperature=0.5), SamplingParams(temperature=2.0)),
        (SamplingParams(top_k=7), SamplingParams(top_k=8)),
        (SamplingParams(top_k=7), SamplingParams(top_k=6)),
        (SamplingParams(top_p=0.8), SamplingParams(top_p=0.74)),
        (SamplingParams(top_p=0.8), SamplingParams(top_p=0.84)),
        (SamplingParams(min_p=0.1), SamplingParams(min_p=0.07)),
        (SamplingParams(top_k=12, top_p=0.85), SamplingParams(top_p=0.85)),
        (SamplingParams(top_k=12, top_p=0.85), SamplingParams(top_k=12)),
    ],
)
def test_a_planted_fault_in_the_parameters_is_caught(tested_params, done):
    assert deviate(draws(done), brute_force(tested_params, LOGITS)) > DIFFERS


@pytest.mark.parametrize(
    "bits",
    [
        lambda seed, i: random_bits(seed, i) >> 1,
        lambda seed, i: random_bits(seed, i) | 1 << 63,
        lambda seed, i: random_bits(seed, i) & 0xFFFFFFFF,
        lambda seed, i: random_bits(seed, i) // 2**60 * 2**60,
        lambda seed, i: max(random_bits(seed, 2 * i), random_bits(seed, 2 * i + 1)),
        lambda seed, i: random_bits(seed, i % 100),
    ],
    ids=["halved", "upper half", "low word", "four bits", "larger of two", "period of 100"],
)
def test_a_planted_fault_in_the_random_bits_is_caught(bits):
    assert deviate(draws(SamplingParams(), bits), brute_force(SamplingParams(), LOGITS)) > DIFFERS


def test_a_random_number_that_is_used_twice_is_caught():
    tokens = draws(SamplingParams(), lambda seed, i: random_bits(seed, i // 2))
    assert pairs_deviate(tokens) > DIFFERS


def test_a_planted_fault_in_the_draw_is_caught():
    ids, weight = distribution(SamplingParams(), LOGITS)
    shifted = np.array([pick(ids, np.roll(weight, 1), random_bits(3, i)) for i in range(NUM_DRAWS)])
    assert deviate(shifted, brute_force(SamplingParams(), LOGITS)) > DIFFERS


def test_a_planted_fault_in_the_weights_is_caught():
    ids, weight = distribution(SamplingParams(), LOGITS)
    weight[np.argmax(weight)] = weight.max() * 2 // 3
    tokens = np.array([pick(ids, weight, random_bits(3, i)) for i in range(NUM_DRAWS)])
    assert deviate(tokens, brute_force(SamplingParams(), LOGITS)) > DIFFERS
