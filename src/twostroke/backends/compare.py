"""How far two sets of logits for the same tokens lie apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One reader's logits against those of another that is held to be right.

    `mean_kl` is the mean Kullback-Leibler divergence KL(right || other) of the next-token
    distributions in nats; `top1_agreement` the share of rows with the same likeliest token;
    perplexities are of the text itself.
    """

    num_rows: int
    mean_kl: float
    max_kl: float
    top1_agreement: float
    perplexity: float
    right_perplexity: float

    @property
    def perplexity_change(self) -> float:
        """How much the perplexity differs, as a share of the right one."""
        return abs(self.perplexity / self.right_perplexity - 1)


def compare(pieces: Sequence[tuple[Array, Array, Sequence[int]]]) -> Comparison:
    """Compare (right, other, tokens) of several sequences.

    Logits are (len(tokens), vocab_size); row i predicts token i + 1, so the last row's prediction
    counts for KL and agreement but not for the perplexity.
    """
    divergences: list[Array] = []
    agreeing = num_rows = num_predicted = 0
    right_nats = other_nats = 0.0
    for right_logits, other_logits, tokens in pieces:
        right, other = log_softmax(right_logits), log_softmax(other_logits)
        divergences.append(np.einsum("rv,rv->r", np.exp(right), right - other))
        agreeing += int(np.sum(right.argmax(axis=1) == other.argmax(axis=1)))
        num_rows += len(tokens)
        rows, following = np.arange(len(tokens) - 1), np.array(tokens[1:])
        right_nats -= float(right[rows, following].sum())
        other_nats -= float(other[rows, following].sum())
        num_predicted += len(rows)
    every = np.concatenate(divergences)
    return Comparison(
        num_rows=num_rows,
        mean_kl=float(every.mean()),
        max_kl=float(every.max()),
        top1_agreement=agreeing / num_rows,
        perplexity=float(np.exp(other_nats / num_predicted)),
        right_perplexity=float(np.exp(right_nats / num_predicted)),
    )


def log_softmax(logits: Array) -> NDArray[np.float64]:
    """Return natural log-probabilities along the last axis, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return result
