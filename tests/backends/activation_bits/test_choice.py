"""A choice of activation bits stays within its error budget, after few measurements."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest

from support.cpu import tiny_model
from twostroke.backends.activation_bits import (
    QUICK_SEARCH,
    ExpectedLogits,
    checking_text,
    choose,
    choosing_text,
    is_certain,
    products_of,
)
from twostroke.backends.activation_bits.resolve import _CheckingText
from twostroke.lab.measure.compare import held_out_text

_BUDGET = 7e-4
_ROWS, _WIDTH = 8, 400


def _products():
    program, tensors = tiny_model(num_layers=6, fmt="Q4_1", embedding_fmt="Q8_0")
    return products_of(program, tensors)


def _scorer(errors):
    """Return a function whose logits have about the summed error of matrices with fewer bits."""
    noise = np.random.default_rng(0).choice((-1.0, 1.0), (_ROWS, _WIDTH))

    def score(bits, num_tokens):
        total = sum(errors[name] / (5 if few == 9 else 1) for name, few in bits.items())
        return (noise[:num_tokens] * np.sqrt(2 * total)).astype(np.float32)

    return score


def _all_is_well(_):
    return 0.0


def test_products_that_err_little_get_8_bits_and_the_others_keep_more():
    products = _products()
    names = [name for product in products for name in product.matrices]
    errors = {name: 1e-2 if name.startswith("blk.5.ffn_down") else 1e-7 for name in names}
    choice = choose(products, _scorer(errors), _all_is_well, "model")
    assert 0 < choice.divergence <= _BUDGET
    assert "blk.5.ffn_down.weight" not in choice.bits
    assert choice.bits["blk.0.ffn_down.weight"] == choice.bits["blk.5.attn_q.weight"] == 8


def test_all_products_get_8_bits_where_that_is_enough_and_15_where_nothing_is():
    products = _products()
    names = [name for product in products for name in product.matrices]
    few, none = (dict.fromkeys(names, error) for error in (1e-6, float("nan")))
    assert set(choose(products, _scorer(few), _all_is_well, "").bits) == set(names)
    assert choose(products, _scorer(none), _all_is_well, "").bits == {}


def test_a_choice_that_fails_on_other_text_is_made_again_with_less_room():
    products = _products()
    names = [name for product in products for name in product.matrices]
    errors = dict(zip(names, np.geomspace(1e-6, 1e-4, len(names)), strict=True))

    def check(bits):  # on this text products err three times as much
        return 3 * sum(errors[name] / (5 if few == 9 else 1) for name, few in bits.items())

    first = choose(products, _scorer(errors), _all_is_well, "")
    second = choose(products, _scorer(errors), check, "")
    assert check(first.bits) > _BUDGET >= second.divergence >= check(second.bits) > 0
    assert choose(products, _scorer(errors), lambda bits: float("nan"), "").bits == {}


def test_a_quick_search_measures_each_kind_once_and_little_text():
    products = _products()
    names = [name for product in products for name in product.matrices]
    errors = {name: 1e-2 if "ffn_down" in name else 1e-7 for name in names}
    score, scored = _scorer(errors), []

    def count_and_score(bits, num_tokens):
        scored.append(num_tokens)
        return score(bits, num_tokens)

    choice = choose(products, count_and_score, _all_is_well, "model", QUICK_SEARCH)
    assert 0 < choice.divergence <= _BUDGET
    assert not any("ffn_down" in name for name in choice.bits)
    assert choice.bits["blk.0.attn_q.weight"] == 8
    num_kinds = len({product.kind for product in products})
    assert scored.count(QUICK_SEARCH.num_kind_tokens) <= 1 + 2 * num_kinds
    assert scored.count(None) <= 2 + QUICK_SEARCH.num_trials


def test_nothing_but_8_bits_is_measured_where_they_are_enough():
    products, scored = _products(), []
    names = [name for product in products for name in product.matrices]
    score = _scorer(dict.fromkeys(names, 1e-6))

    def count_and_score(bits, num_tokens):
        scored.append(num_tokens)
        return score(bits, num_tokens)

    assert set(choose(products, count_and_score, _all_is_well, "", QUICK_SEARCH).bits) == set(names)
    assert scored == [None, None]


def test_errors_of_rows_are_the_divergences_of_their_distributions():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((70, 300), np.float32)
    others = logits + 1e-2 * rng.standard_normal((70, 300), np.float32)
    shares, other_shares = (
        np.exp(values.astype(float)) / np.exp(values.astype(float)).sum(axis=1, keepdims=True)
        for values in (logits, others)
    )
    exact = (shares * np.log(shares / other_shares)).sum(axis=1)
    expected = ExpectedLogits(logits)
    np.testing.assert_allclose(expected.divergences(others), exact, rtol=1e-3)
    assert expected.divergence(others) == pytest.approx(exact.mean(), rel=1e-3)
    assert expected.first(9).divergence(others[:9]) == pytest.approx(exact[:9].mean(), rel=1e-3)
    others[3] = np.nan
    assert expected.divergence(others) == np.inf


def test_a_check_ends_once_more_text_would_not_change_its_result():
    rng = np.random.default_rng(0)
    near, far = rng.exponential(_BUDGET, 400), rng.exponential(_BUDGET / 3, 400)
    assert not is_certain(far[:100])  # too few to know
    assert is_certain(far)
    assert is_certain(far * 12)
    assert not is_certain(near)
    rare = np.where(np.arange(400) == 0, 0.1, far)
    assert not is_certain(rare)
    assert not is_certain(np.full(400, np.nan))


class _CountingBackend:
    """A backend whose logits have a given mean error for each chunk; it counts its passes."""

    def __init__(self, errors: list[float]) -> None:
        self._errors = errors
        self.passes: list[tuple[int, bool]] = []

    def score_with(self, bits, tokens):
        chunk = tokens[0]
        self.passes.append((chunk, bool(bits)))
        noise = np.random.default_rng(chunk).standard_normal((len(tokens), _WIDTH))
        return (noise * np.sqrt(2 * self._errors[chunk]) * bool(bits)).astype(np.float32)


def test_large_models_are_checked_on_as_little_text_as_is_needed():
    chunks = [[number] * 256 for number in range(3)]
    for errors, num_chunks in (([1e-4] * 3, 1), ([7e-4, 1e-4, 1e-4], 2), ([5e-3] * 3, 1)):
        backend = _CountingBackend(errors)
        check = _CheckingText(backend, chunks, stops_early=True)
        mean = check.mean_error({"matrix": 8})
        assert mean == pytest.approx(np.mean(errors[:num_chunks]), rel=0.2)
        assert len(backend.passes) == 2 * num_chunks
        check.mean_error({"matrix": 8})  # the expected logits are there already
        assert len(backend.passes) == 3 * num_chunks


def test_small_models_are_checked_on_the_whole_text():
    backend = _CountingBackend([1e-4] * 3)
    chunks = [[number] * 256 for number in range(3)]
    _CheckingText(backend, chunks, stops_early=False).mean_error({"matrix": 8})
    assert [chunk for chunk, has_bits in backend.passes if has_bits] == [0, 1, 2]


def test_products_of_one_value_have_the_same_bits():
    for product in _products():
        if product.matrices[0].endswith("attn_q.weight"):
            assert [name.split(".")[2] for name in product.matrices] == [
                "attn_q",
                "attn_k",
                "attn_v",
            ]


def test_choosing_checking_and_held_out_text_differ():
    def runs(text):
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}

    assert len(runs(choosing_text())) > 150
    assert len(runs(checking_text())) > 600
    for one_text, other in combinations((choosing_text(), checking_text(), held_out_text()), 2):
        assert not runs(one_text) & runs(other)
