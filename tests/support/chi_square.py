"""Pearson's chi-square test of samples, whose result is a standard normal deviate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from twostroke.core.sampling import SamplingParams

AGREES = 4.5  # deviates of right samplers stay below: 3 in a million are above
DIFFERS = 8.0  # planted faults must exceed it


def deviate(tokens: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """Return how far the counts of `tokens` are from `probabilities`, as a normal deviate.

    It has a standard normal distribution if they agree. Cells that expect fewer than 5 are pooled;
    a token that must not occur gives infinity. Wilson and Hilferty, "The distribution of chi-
    square" (1931), turn the statistic into a deviate.
    """
    counts = np.bincount(tokens, minlength=probabilities.size).astype(float)
    if counts[probabilities == 0].any():
        return math.inf
    expected = probabilities * tokens.size
    large = expected >= 5
    if expected[~large].sum() >= 5:
        counts = np.append(counts[large], counts[~large].sum())
        expected = np.append(expected[large], expected[~large].sum())
    else:
        counts, expected = counts[large], expected[large]
    freedom = counts.size - 1
    if freedom == 0:
        return 0.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def brute_force(params: SamplingParams, logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the probability of each token (vocab_size,), computed slowly in float64.

    For temperatures above 0 and finite logits, without bias, penalties or forbidden tokens.
    """
    values = params.values
    scaled = logits.astype(float) / values.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = sorted(range(logits.size), key=lambda i: (-float(logits[i]), i))
    if values.top_k:
        order = order[: values.top_k]
    order = [i for i in order if p[i] >= values.min_p * p.max()]
    kept_ids, mass = [], 0.0
    for i in order:
        if mass >= values.top_p * p[order].sum():
            break
        kept_ids.append(i)
        mass += p[i]
    result = np.zeros(p.size)
    result[kept_ids] = p[kept_ids] / p[kept_ids].sum()
    return result
