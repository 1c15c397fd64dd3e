"""The native sampler's rows: the fields of a request, and the fields that a step changes."""

from __future__ import annotations

import ctypes

import numpy as np

from support.sampling import make_request, random_logits, random_request
from twostroke.backends.gpu.sampling import CONVERTED_COLUMNS
from twostroke.backends.sampling.reference import draw
from twostroke.backends.sampling.rows import (
    NEUTRAL_VALUES,
    RESULT,
    ROW,
    RowTable,
    only_best,
    read_results,
)
from twostroke.core.draft_tree import ROOT, DraftBranch
from twostroke.core.sampling import BOUNDS, SamplingParams
from twostroke.core.step import Slice, TokenLogprobs

# Columns without effect on a greedy row, and the lists of columns in `NEUTRAL_VALUES`.
COLUMNS_WITHOUT_EFFECT = {
    *("tokens", "num_tokens", "num_prompt", "seed", "counter", "top_k", "top_p", "min_p"),
    *("bias_ids", "bias_values", "barred_ids"),
}
# Each field of `SamplingParams` that changes a greedy row, with a value that does so.
FIELDS_WITH_EFFECT = {
    "temperature": 1.0,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {1: 2.0},
    "min_tokens": 2,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "constraint": None,  # the request's matcher applies it
}
# The other fields: of greedy rows they change nothing, or only when the answer ends.
FIELDS_WITHOUT_EFFECT = {
    *("top_k", "top_p", "min_p", "seed", "n", "max_tokens", "stop", "stop_token_ids"),
    *("include_stop", "ignore_eos", "preface", "shown_ids", "end_ids", "drops_space"),
    "reasoning_budget",  # a matcher of the request
}


def ints(row: np.void, pointer: str, length: str) -> list[int]:
    if not row[length]:
        return []
    address = ctypes.cast(int(row[pointer]), ctypes.POINTER(ctypes.c_int32))
    return address[: int(row[length])]


def test_the_gpu_sampler_converts_every_column():
    """A sampling option that the GPU's sampler does not know would be ignored without an error."""
    assert set(ROW.names or ()) == CONVERTED_COLUMNS


def test_every_sampling_option_that_changes_a_greedy_row_is_checked_by_only_best():
    """Ranks would ignore a missing option: they send only the largest logit of greedy rows."""
    assert {*ROW.names} == NEUTRAL_VALUES.keys() | COLUMNS_WITHOUT_EFFECT
    assert {*SamplingParams.__struct_fields__} == FIELDS_WITH_EFFECT.keys() | FIELDS_WITHOUT_EFFECT
    greedy = {"temperature": 0.0}
    for name, value in FIELDS_WITH_EFFECT.items():
        params = SamplingParams(**greedy | {name: value})
        allowed = np.ones(50, np.bool_) if name == "constraint" else None
        request = make_request(params, [1, 2, 3], end_ids=[9], allowed=allowed)
        num_scored = 1 if name == "prompt_logprobs" else 0
        rows = RowTable().rows([request], [Slice(request, 1, 2, True, num_scored=num_scored)])
        assert only_best(rows)[0] == 0, name
    others = SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5, seed=3)
    assert only_best(RowTable().rows([make_request(others, end_ids=[9])])) == 1


def test_the_definition_draws_the_largest_logit_of_rows_that_need_no_other():
    rng = np.random.default_rng(5)
    for name in sorted({*BOUNDS, "logit_bias"} - {"temperature", "max_tokens"}):
        for _ in range(200):
            request = random_request(rng, 50)
            value = getattr(request.params, name)
            request.params = SamplingParams(temperature=0.0, **{name: value})
            request.matcher = None
            if only_best(RowTable().rows([request])):
                logits = random_logits(rng, 50, "ties")
                assert draw(request, logits) == (int(logits.argmax()), None), request.params


def test_a_row_holds_the_requests_parameters():
    params = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.5,
        frequency_penalty=0.25, presence_penalty=-0.5, logprobs=2,
    )  # fmt: skip
    row = RowTable().rows([make_request(params, [1, 2], [3], seed=-2)])[0]
    expected = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5,
        "frequency_penalty": 0.25, "presence_penalty": -0.5, "num_logprobs": 2,
        "seed": 2**64 - 2, "counter": 1, "num_prompt": 2, "num_tokens": 3, "num_bias": 0,
        "num_barred": 0,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert RowTable().rows([make_request(SamplingParams())])[0]["num_logprobs"] == -1


def test_the_history_follows_the_request_as_it_grows():
    request = make_request(SamplingParams(frequency_penalty=1.0), prompt=[5, 6])
    table = RowTable()
    for token in range(100):
        row = table.rows([request])[0]
        assert ints(row, "tokens", "num_tokens") == request.tokens
        assert row["counter"] == token
        request.tokens.append(token)
    request.tokens.extend(range(500))
    assert ints(table.rows([request])[0], "tokens", "num_tokens") == request.tokens


def test_end_tokens_are_barred_until_min_tokens_are_out():
    request = make_request(SamplingParams(min_tokens=2), prompt=[1], end_ids=[9, 4])
    table = RowTable()
    barred = []
    for _ in range(4):
        barred.append(ints(table.rows([request])[0], "barred_ids", "num_barred"))
        request.tokens.append(1)
    assert barred == [[4, 9], [4, 9], [], []]


def test_bias_is_two_arrays_of_one_length():
    request = make_request(SamplingParams(logit_bias={7: 1.5, 3: -2.0}))
    table = RowTable()
    row = table.rows([request])[0]
    values = ctypes.cast(int(row["bias_values"]), ctypes.POINTER(ctypes.c_float))
    assert ints(row, "bias_ids", "num_bias") == [7, 3]
    assert values[:2] == [1.5, -2.0]


def test_rows_come_in_the_order_of_the_requests():
    requests = [make_request(SamplingParams(), seed=i) for i in range(200)]
    table = RowTable()
    table.rows(requests[::2])
    assert table.rows(requests)["seed"].tolist() == list(range(200))
    assert table.rows(requests[::-3])["seed"].tolist() == list(range(200))[::-3]


def test_a_forgotten_requests_row_is_reused():
    table = RowTable()
    full = make_request(
        SamplingParams(min_tokens=5, repetition_penalty=2.0, logit_bias={1: 1.0}, logprobs=3),
        prompt=[1],
        end_ids=[1],
    )
    plain = make_request(SamplingParams(), prompt=[1])
    fresh = RowTable().rows([plain])[0]
    for _ in range(1000):
        table.rows([full])
        table.forget(full)
        row = table.rows([plain])[0]
        table.forget(plain)
    assert len(table) == 0
    for name in ("num_barred", "num_bias", "repetition_penalty", "num_logprobs", "num_tokens"):
        assert row[name] == fresh[name]


def test_a_forgotten_request_that_returns_gets_a_new_row():
    request = make_request(SamplingParams(repetition_penalty=2.0), prompt=[1, 2, 3])
    table = RowTable()
    table.rows([request])
    table.forget(request)
    request.tokens[2] = 9
    row = table.rows([request])[0]
    assert len(table) == 1
    assert ints(row, "tokens", "num_tokens") == [1, 2, 9]


def test_forgetting_an_unknown_request_does_nothing():
    RowTable().forget(make_request(SamplingParams()))


def test_no_requests_give_no_rows():
    assert RowTable().rows([]).shape == (0,)


def test_results_become_tokens_and_logprobs():
    results = np.zeros(3, RESULT)
    results["token"] = [4, 5, -1]
    results[1]["logprob"], results[1]["count"] = -0.5, 2
    results[1]["top_ids"][:2], results[1]["top_logprobs"][:2] = [5, 8], [-0.5, -2.0]
    requests = [make_request(SamplingParams(logprobs=n)) for n in (None, 2, 2)]
    tokens, logprobs = read_results(results, RowTable().rows(requests))
    assert tokens == [4, 5, -1]
    assert logprobs == [None, TokenLogprobs(-0.5, (5, 8), (-0.5, -2.0)), None]


def test_rows_follow_requests_that_come_go_and_grow():
    rng, table = np.random.default_rng(7), RowTable()
    alive = []
    for step in range(200):
        if rng.random() < 0.2:
            alive.append(make_request(SamplingParams(min_tokens=3), seed=step, end_ids=[9]))
        if alive and rng.random() < 0.1:
            table.forget(alive.pop(int(rng.integers(len(alive)))))
        rows = table.rows(list(alive))
        fresh = RowTable().rows(list(alive))
        for name in ("seed", "counter", "num_tokens", "num_barred", "num_prompt"):
            assert rows[name].tolist() == fresh[name].tolist()
        for request in alive:
            request.tokens.append(step)


def test_rows_of_branches_see_their_own_path():
    params = SamplingParams(presence_penalty=1.0, min_tokens=3)
    request = make_request(params, prompt=[1, 2], output=[3], end_ids=[9])
    other = make_request(SamplingParams(), prompt=[7])
    # One path is 10, 11; another begins with 20 and goes on with 21 or 22.
    branches = (branch(2, ROOT), branch(4, 2))
    tree = Slice(request, 2, 1, True, (10, 11, 20, 21, 22), branches)
    table = RowTable()  # it owns what the rows point to
    rows = table.rows([other, request], [Slice(other, 0, 1, True), tree])
    assert rows["counter"].tolist() == [0, 1, 2, 3, 2, 3, 3]
    assert [ints(row, "tokens", "num_tokens") for row in rows[1:]] == [
        [1, 2, 3],
        [1, 2, 3, 10],
        [1, 2, 3, 10, 11],
        [1, 2, 3, 20],
        [1, 2, 3, 20, 21],
        [1, 2, 3, 20, 22],
    ]
    assert [len(ints(row, "barred_ids", "num_barred")) for row in rows[1:]] == [1, 1, 0, 1, 0, 0]


def branch(first, parent):
    """Return a draft branch whose pages do not matter."""
    return DraftBranch(first, parent, 0, 0, ((0,),), 1, (), is_copied=False)
