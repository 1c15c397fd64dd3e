"""How much two sets of logits for the same tokens differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float32]

_CHUNK_VALUES = 1 << 22  # logits that are widened to float64 at once
_HIGH = 0.999


class LogitsComparison(Frozen):
    """One reader's logits against those of another that counts as right.

    `mean_kl` is the mean Kullback-Leibler divergence KL(right || other) of the next-token
    distributions in nats, `high_kl` is exceeded by one row in a thousand; `top1_agreement` is the
    share of rows with the same likeliest token; perplexities are of the text itself.
    `mean_logprob_change` and `max_logprob_change` are the mean and the largest absolute difference
    of the log-probabilities of the text's tokens in nats.
    """

    num_rows: int
    mean_kl: float
    max_kl: float
    top1_agreement: float
    perplexity: float
    right_perplexity: float
    high_kl: float = math.nan  # not in the oldest results, nor are the following
    mean_logprob_change: float = math.nan
    max_logprob_change: float = math.nan

    @property
    def perplexity_change(self) -> float:
        """How much the perplexity differs, as a share of the right one."""
        return abs(self.perplexity / self.right_perplexity - 1)

    def cells(self) -> tuple[str, ...]:
        """Return KL (mean, largest), agreement, and perplexity with its change, for tables."""
        return (
            f"{self.mean_kl:.1e}",
            f"{self.max_kl:.1e}",
            f"{self.top1_agreement:.2%}",
            f"{self.perplexity:.3f}",
            f"{self.perplexity / self.right_perplexity - 1:+.3%}",
        )


def compare(pieces: Iterable[tuple[Array, Array, Sequence[int]]]) -> LogitsComparison:
    """Compare (right, other, tokens) of several sequences, at least one of them of two tokens.

    Logits are (len(tokens), vocab_size). Row i predicts token i + 1, so a sequence's last row
    counts for KL and agreement but not for the perplexity.
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
    every, changes = np.concatenate(divergences), np.concatenate(logprob_changes)
    return LogitsComparison(
        num_rows=num_rows,
        mean_kl=float(every.mean()),
        max_kl=float(every.max()),
        top1_agreement=agreeing / num_rows,
        perplexity=float(np.exp(other_nats / num_predicted)),
        right_perplexity=float(np.exp(right_nats / num_predicted)),
        high_kl=float(np.quantile(every, _HIGH)),
        mean_logprob_change=float(changes.mean()),
        max_logprob_change=float(changes.max()),
    )


def log_softmax(logits: Array) -> NDArray[np.float64]:
    """Return natural log-probabilities along the last axis, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return result
