"""Differences between two sets of logits for the same tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float32]

_CHUNK_VALUES = 1 << 22  # logits that are converted to float64 at a time
_HIGH_QUANTILE = 0.999


class LogitsComparison(Frozen):
    """How much a model's logits differ from the expected ("right") logits of the same text.

    Attributes:
        num_rows: number of rows.
        mean_kl, max_kl: Kullback-Leibler divergence KL(right || other) of the next-token
            distributions, in nats.
        top1_agreement: share of rows with the same most likely token.
        perplexity, right_perplexity: perplexity of the text by the model's logits, and by the
            expected logits.
        high_kl: the divergence that one row in a thousand exceeds.
        mean_logprob_change, max_logprob_change: absolute difference of the log-probabilities of the
            text's tokens, in nats.
    """

    num_rows: int
    mean_kl: float
    max_kl: float
    top1_agreement: float
    perplexity: float
    right_perplexity: float
    high_kl: float = math.nan  # the oldest reports do not have this field and the next ones
    mean_logprob_change: float = math.nan
    max_logprob_change: float = math.nan

    @property
    def perplexity_change(self) -> float:
        """The model's perplexity divided by the expected perplexity, minus 1."""
        return abs(self.perplexity / self.right_perplexity - 1)

    def cells(self) -> tuple[str, ...]:
        """Return the comparison's figures as the cells of a table row.

        They are mean and largest KL divergence, agreement, perplexity, and the perplexity's change.
        """
        return (
            f"{self.mean_kl:.1e}",
            f"{self.max_kl:.1e}",
            f"{self.top1_agreement:.2%}",
            f"{self.perplexity:.3f}",
            f"{self.perplexity / self.right_perplexity - 1:+.3%}",
        )


def compare(pieces: Iterable[tuple[Array, Array, Sequence[int]]]) -> LogitsComparison:
    """Compare logits with the expected logits of several token sequences.

    At least one sequence must have two tokens. Each item is (expected logits, other logits,
    tokens); logits are (len(tokens), vocab_size). Row i predicts token i + 1, so the last row of a
    sequence counts for KL and agreement, but not for the perplexity.
    """
    num_rows = num_predicted = agreeing = 0
    right_nats = other_nats = 0.0
    divergences: list[NDArray[np.float64]] = []
    logprob_changes: list[NDArray[np.float64]] = []
    for right, other, tokens in pieces:
        width = min(right.shape[1], other.shape[1])  # tables may be padded differently
        step = max(1, _CHUNK_VALUES // width)
        for start in range(0, len(tokens), step):
            chunk = slice(start, start + step)
            ours, theirs = (log_softmax(part[chunk, :width]) for part in (right, other))
            divergences.append(np.einsum("rv,rv->r", np.exp(ours), ours - theirs))
            agreeing += int(np.sum(ours.argmax(axis=1) == theirs.argmax(axis=1)))
            num_rows += len(ours)
            following = np.array(tokens[start + 1 : start + 1 + step], np.int64)
            rows = np.arange(len(following))
            right_logprobs, other_logprobs = ours[rows, following], theirs[rows, following]
            right_nats -= float(right_logprobs.sum())
            other_nats -= float(other_logprobs.sum())
            logprob_changes.append(np.abs(other_logprobs - right_logprobs))
            num_predicted += len(following)
    all_divergences, changes = np.concatenate(divergences), np.concatenate(logprob_changes)
    return LogitsComparison(
        num_rows=num_rows,
        mean_kl=float(all_divergences.mean()),
        max_kl=float(all_divergences.max()),
        top1_agreement=agreeing / num_rows,
        perplexity=float(np.exp(other_nats / num_predicted)),
        right_perplexity=float(np.exp(right_nats / num_predicted)),
        high_kl=float(np.quantile(all_divergences, _HIGH_QUANTILE)),
        mean_logprob_change=float(changes.mean()),
        max_logprob_change=float(changes.max()),
    )


def log_softmax(logits: Array) -> NDArray[np.float64]:
    """Return the natural log-probabilities of logits along the last axis, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return result
