"""The native sampler of every level against its NumPy definition: the same token, always."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from support.chi_square import AGREES, DIFFERS, brute_force, deviate
from support.sampling import (
    KINDS,
    OneMask,
    make_request,
    random_logits,
    random_request,
    run_rows,
    sample_native,
)
from twostroke.backends.sampling.reference import draw, score, weights
from twostroke.backends.sampling.rows import RESULT, ROW, RowTable, columns_hash, read_scores
from twostroke.core.sampling import BOUNDS, SamplingParams
from twostroke.core.step import NO_TOKEN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import TokenLogprobs

NUM_DRAWS = 100_000
LOGITS = (np.random.default_rng(6).normal(size=70) * 1.5).astype(np.float32)
COMBINATIONS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.85, min_p=0.05),
]
SIZES = {1: 60, 2: 60, 7: 200, 63: 200, 64: 200, 65: 200, 300: 500, 1000: 500, 8191: 60, 49152: 40}


@cache
def cases(
    vocab_size: int,
) -> tuple[list[Request], NDArray[np.float32], list[tuple[int, TokenLogprobs | None]]]:
    """Random requests, their logits, and what the definition draws."""
    rng = np.random.default_rng(vocab_size)
    count = SIZES[vocab_size]
    requests = [random_request(rng, vocab_size) for _ in range(count)]
    logits = np.stack([random_logits(rng, vocab_size) for _ in range(count)])
    return (
        requests,
        logits,
        [draw(r, x, (), mask(r)) for r, x in zip(requests, logits, strict=True)],
    )


def mask(request: Request) -> NDArray[np.uint32] | None:
    matcher = request.matcher
    return matcher.mask if isinstance(matcher, OneMask) else None


def test_every_level_draws_what_the_definition_draws(library):
    for vocab_size in SIZES:
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
            reported_logprobs = [reported.logprob, *reported.top_logprobs]
            expected_logprobs = [right_logprobs.logprob, *right_logprobs.top_logprobs]
            np.testing.assert_allclose(reported_logprobs, expected_logprobs, rtol=1e-6, atol=1e-6)


def test_random_requests_vary_every_option_of_a_draw():
    rng = np.random.default_rng(0)
    params = [random_request(rng, 100).params for _ in range(100)]
    drawing = BOUNDS.keys() - {"max_tokens", "seed", "n", "prompt_logprobs", "reasoning_budget"}
    assert not [name for name in drawing if len({getattr(param, name) for param in params}) < 2]


def test_rows_and_results_have_the_layout_that_python_writes(library):
    library.ts_sample_columns_hash.restype = ctypes.c_uint64
    assert library.ts_sample_columns_hash() == columns_hash(ROW)
    for name, layout in (("row", ROW), ("result", RESULT)):
        size = getattr(library, f"ts_sample_{name}_size")
        size.restype = ctypes.c_int64
        assert size() == layout.itemsize


def test_weights_equal_the_definition_bit_for_bit(library):
    for temperature in [0.01, 0.7, 1.0, 3.3]:
        gaps = np.concatenate(
            [np.linspace(0, 45 * temperature, 20_001), np.geomspace(1e-30, 1e38, 999)]
        )
        logits = (5 - gaps).astype(np.float32)
        results = np.zeros(logits.size + 63, np.float32)
        library.ts_sample_weights_test(
            ctypes.c_void_p(logits.ctypes.data),
            ctypes.c_int64(logits.size),
            ctypes.c_float(5),
            ctypes.c_double(temperature),
            ctypes.c_void_p(results.ctypes.data),
        )
        np.testing.assert_array_equal(
            results[: logits.size], weights(logits, np.float32(5), temperature)
        )


def test_a_damaged_row_does_not_change_its_neighbours(library):
    for kind in KINDS:
        rng = np.random.default_rng(1)
        logits = np.stack([random_logits(rng, 500, "normal") for _ in range(3)])
        requests = [make_request(SamplingParams(), seed=s) for s in range(3)]
        alone, _ = sample_native(library, requests, logits)
        logits[1] = random_logits(rng, 500, kind)
        among, _ = sample_native(library, requests, logits)
        assert among[0::2] == alone[0::2]
        assert among[1] == draw(requests[1], logits[1])[0]


def test_a_row_of_nan_gives_no_token_and_no_logprobs(library):
    logits = np.full((2, 100), np.nan, np.float32)
    requests = [make_request(SamplingParams(temperature=t, logprobs=3)) for t in (0.0, 1.0)]
    assert sample_native(library, requests, logits) == ([NO_TOKEN] * 2, [None] * 2)


def test_every_level_reports_on_a_given_token_as_the_definition_does(library):
    for vocab_size in SIZES:
        rng = np.random.default_rng(vocab_size)
        count = 40
        logits = np.stack([random_logits(rng, vocab_size) for _ in range(count)])
        given_tokens = rng.integers(vocab_size, size=count)
        num_top_logprobs = rng.integers(0, 21, size=count)
        requests = [random_request(rng, vocab_size) for _ in range(count)]
        for request, num_top in zip(requests, num_top_logprobs, strict=True):
            request.params = replace(request.params, prompt_logprobs=int(num_top))
        rows = RowTable().rows(requests)
        rows["given"], rows["num_logprobs"] = given_tokens, num_top_logprobs
        results, before = np.zeros(count, RESULT), logits.copy()
        run_rows(library, rows, logits, results)
        np.testing.assert_array_equal(before.view(np.uint32), logits.view(np.uint32))
        scored_rows = zip(
            requests, logits, given_tokens.tolist(), read_scores(results), strict=True
        )
        for request, row, token, scores in scored_rows:
            right = score(request, row, token)
            assert (scores is None) == (right is None)
            if scores is None or right is None:
                continue
            assert scores.top_ids == right.top_ids
            values = [scores.logprob, *scores.top_logprobs]
            expected_logprobs = [right.logprob, *right.top_logprobs]
            np.testing.assert_allclose(values, expected_logprobs, rtol=1e-6, atol=1e-6)


def test_rows_that_no_request_can_have_are_harmless(library):
    rng = np.random.default_rng(2)
    logits = np.ascontiguousarray(np.tile(random_logits(rng, 300, "normal"), (8, 1)))
    rows, results = np.zeros(8, ROW), np.zeros(8, RESULT)
    rows["given"] = NO_TOKEN
    rows["temperature"] = [1, 1, 1, 1, np.nan, np.inf, -1, 5e-324]
    rows["top_p"] = [np.nan, -1, 0, 7, 1, 0.5, 1, 0.5]
    rows["min_p"] = [np.nan, -1, 2, 0, 1, 0.5, np.inf, 0]
    rows["top_k"] = [-5, 0, 1, 2, 3, 4, 5, 6]
    rows["num_logprobs"] = [-7, 21, 2**31 - 1, 0, 1, 2, 3, 4]
    run_rows(library, rows, logits, results)
    assert ((results["token"] >= 0) & (results["token"] < 300)).all()
    assert results["count"].max() == 20


def test_draws_follow_the_distribution(library):
    for params in COMBINATIONS:
        assert deviate(many_draws(library, params), brute_force(params, LOGITS)) < AGREES


def test_a_planted_fault_is_caught(library):
    tokens = many_draws(library, SamplingParams(top_k=8, temperature=1.1))
    assert deviate(tokens, brute_force(SamplingParams(top_k=8), LOGITS)) > DIFFERS


def many_draws(library: ctypes.CDLL, params: SamplingParams) -> NDArray[np.int64]:
    """Tokens drawn from one row of logits at consecutive counters."""
    rows = np.repeat(RowTable().rows([make_request(params, seed=3)]), NUM_DRAWS)
    rows["counter"] = np.arange(NUM_DRAWS)
    results = np.zeros(NUM_DRAWS, RESULT)
    run_rows(library, rows, np.ascontiguousarray(np.tile(LOGITS, (NUM_DRAWS, 1))), results)
    return results["token"].astype(np.int64)
