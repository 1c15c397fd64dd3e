"""The native sampler of every level against its NumPy definition: the same token, always."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.native import NEEDS, load_level
from support.sampling import KINDS, make_request, random_logits, random_request, sample_native

from twostroke.core.sampling import SamplingParams
from twostroke.sample.reference import NO_TOKEN, draw, weights
from twostroke.sample.rows import RESULT, ROW

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import TokenLogprobs

SIZES = {1: 60, 2: 60, 7: 200, 63: 200, 64: 200, 65: 200, 300: 500, 1000: 500, 8191: 60, 49152: 40}


@pytest.fixture(params=NEEDS)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return load_level(request.param)


@cache
def cases(
    vocab_size: int,
) -> tuple[list[Request], NDArray[np.float32], list[tuple[int, TokenLogprobs | None]]]:
    """Random requests, their logits, and what the definition draws."""
    rng = np.random.default_rng(vocab_size)
    count = SIZES[vocab_size]
    requests = [random_request(rng, vocab_size) for _ in range(count)]
    logits = np.stack([random_logits(rng, vocab_size) for _ in range(count)])
    return requests, logits, [draw(r, x) for r, x in zip(requests, logits, strict=True)]


@pytest.mark.parametrize("vocab_size", SIZES)
def test_every_level_draws_what_the_definition_draws(library, vocab_size):
    requests, logits, expected = cases(vocab_size)
    tokens, logprobs = sample_native(library, requests, logits)
    for request, token, reported, (right, right_logprobs) in zip(
        requests, tokens, logprobs, expected, strict=True
    ):
        assert token == right, request.params
        assert (reported is None) == (right_logprobs is None)
        if reported is None or right_logprobs is None:
            continue
        assert reported.top_ids == right_logprobs.top_ids, request.params
        found = [reported.logprob, *reported.top_logprobs]
        known = [right_logprobs.logprob, *right_logprobs.top_logprobs]
        np.testing.assert_allclose(found, known, rtol=1e-6, atol=1e-6)
