"""Differences between two sets of logits, compared with the definitions of their figures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from twostroke.lab.measure import divergence as module
from twostroke.lab.measure.divergence import compare


def random_pieces(seed: int) -> list[tuple[np.ndarray, np.ndarray, list[int]]]:
    rng = np.random.default_rng(seed)
    samples = []
    for length in (2, 9, 30):
        right = rng.standard_normal((length, 17)).astype(np.float32) * 3
        other = right + rng.standard_normal(right.shape).astype(np.float32)
        samples.append((right, other, rng.integers(17, size=length).tolist()))
    return samples


def softmax(row: np.ndarray) -> list[float]:
    powers = [math.exp(value) for value in row.astype(np.float64)]
    return [power / sum(powers) for power in powers]


def test_every_figure_is_as_its_definition_says() -> None:
    samples = random_pieces(1)
    divergences, agreeing, right_nats, other_nats = [], [], [], []
    for right, other, tokens in samples:
        for i in range(len(tokens)):
            p, q = softmax(right[i]), softmax(other[i])
            divergences.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
            agreeing.append(p.index(max(p)) == q.index(max(q)))
            if i + 1 < len(tokens):
                right_nats.append(-math.log(p[tokens[i + 1]]))
                other_nats.append(-math.log(q[tokens[i + 1]]))
    result = compare(samples)
    assert result.num_rows == 41
    assert result.mean_kl == pytest.approx(np.mean(divergences))
    assert result.max_kl == pytest.approx(max(divergences))
    second, last = sorted(divergences)[-2:]  # 41 rows: 0.999 lies between the last two
    assert result.high_kl == pytest.approx(last + 0.04 * (second - last))
    assert result.top1_agreement == np.mean(agreeing)
    assert result.right_perplexity == pytest.approx(math.exp(np.mean(right_nats)))
    assert result.perplexity == pytest.approx(math.exp(np.mean(other_nats)))
    change = abs(result.perplexity - result.right_perplexity) / result.right_perplexity
    assert result.perplexity_change == pytest.approx(change)
    differences = np.abs(np.array(other_nats) - np.array(right_nats))
    assert result.mean_logprob_change == pytest.approx(differences.mean())
    assert result.max_logprob_change == pytest.approx(differences.max())


def test_few_rows_at_a_time_count_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = random_pieces(2)
    expected = compare(samples)
    for rows in (1, 4, 29, 30):
        monkeypatch.setattr(module, "_CHUNK_VALUES", 17 * rows)
        parts = compare(samples)
        assert parts.num_rows == expected.num_rows
        assert parts.mean_kl == pytest.approx(expected.mean_kl)
        assert parts.perplexity == pytest.approx(expected.perplexity)
        assert parts.mean_logprob_change == pytest.approx(expected.mean_logprob_change)
        assert parts.max_logprob_change == pytest.approx(expected.max_logprob_change)
        assert parts.right_perplexity == pytest.approx(expected.right_perplexity)
        assert parts.top1_agreement == expected.top1_agreement
