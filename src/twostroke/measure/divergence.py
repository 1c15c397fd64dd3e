"""How far two sets of logits for the same tokens lie apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float32]

_CHUNK_VALUES = 1 << 22  # logits that are widened to float64 at once


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


class Divergence:
    """Adds up piece by piece what a `Comparison` says, so that texts may be long."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._kl_sum = 0.0
        self._kl_max = -np.inf
        self._agreeing = self._num_rows = self._num_predicted = 0
        self._right_nats = self._other_nats = 0.0

    def add(self, right: Array, other: Array, tokens: Sequence[int]) -> None:
        """Count a sequence; logits are (len(tokens), vocab_size).

        Row i predicts token i + 1, so the last row's prediction counts for KL and agreement but
        not for the perplexity.
        """
        step = max(1, _CHUNK_VALUES // right.shape[1])
        following = np.array(tokens[1:], np.int64)
        for start in range(0, len(tokens), step):
            rows = slice(start, start + step)
            self._add_rows(right[rows], other[rows], following[rows])

    def _add_rows(self, right: Array, other: Array, following: NDArray[np.int64]) -> None:
        """Count rows, of which the first `len(following)` are followed by these tokens."""
        ours, theirs = log_softmax(right), log_softmax(other)
        divergences = np.einsum("rv,rv->r", np.exp(ours), ours - theirs)
        self._kl_sum += float(divergences.sum())
        self._kl_max = max(self._kl_max, float(divergences.max()))
        self._agreeing += int(np.sum(ours.argmax(axis=1) == theirs.argmax(axis=1)))
        self._num_rows += len(right)
        rows = np.arange(len(following))
        self._right_nats -= float(ours[rows, following].sum())
        self._other_nats -= float(theirs[rows, following].sum())
        self._num_predicted += len(following)

    def result(self) -> Comparison:
        """Return what was counted; at least one sequence of two tokens must have been."""
        return Comparison(
            num_rows=self._num_rows,
            mean_kl=self._kl_sum / self._num_rows,
            max_kl=self._kl_max,
            top1_agreement=self._agreeing / self._num_rows,
            perplexity=float(np.exp(self._other_nats / self._num_predicted)),
            right_perplexity=float(np.exp(self._right_nats / self._num_predicted)),
        )


def compare(pieces: Sequence[tuple[Array, Array, Sequence[int]]]) -> Comparison:
    """Compare (right, other, tokens) of several sequences, as `Divergence.add` takes them."""
    divergence = Divergence()
    for right, other, tokens in pieces:
        divergence.add(right, other, tokens)
    return divergence.result()


def log_softmax(logits: Array) -> NDArray[np.float64]:
    """Return natural log-probabilities along the last axis, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return result
