"""How far the logits of a backend are from those of the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Logits = NDArray[np.float32]


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Return the natural log-probabilities of rows of logits."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    normalized: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return normalized


def divergence(reference: Logits, actual: Logits) -> tuple[float, float]:
    """Return the mean Kullback-Leibler divergence of a row, and the ratio of equal top tokens."""
    p, q = log_softmax(reference), log_softmax(actual)
    same = reference.argmax(axis=-1) == actual.argmax(axis=-1)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean()), float(same.mean())
