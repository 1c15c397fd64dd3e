"""Chooses the bits of a model's activations: the cheapest that keep the divergence in bounds."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.backends.activation_bits.tree import bits_of, cheapest, measure_kinds, split_groups
from twostroke.core.frozen import Frozen
from twostroke.core.options import ActivationBits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from twostroke.backends.activation_bits.products import Product
    from twostroke.backends.activation_bits.tree import ProductGroup

    Array = NDArray[np.float32]
    Score = Callable[[Mapping[str, int], int | None], Array]
    Check = Callable[[Mapping[str, int]], float]

METHOD: Final = 3  # raise it when a change of texts, constants or kernels changes the choices
MIN_WEIGHTS: Final = 1 << 24  # in products; smaller models are fast enough with 15 bits
# In nats, on the choosing text and on the longer checking text. The promised limit is 1e-3: other
# texts may differ more.
_MAX_MEAN_KL: Final = 7e-4
_CHUNK_ROWS: Final = 32
_MIN_CERTAIN_ROWS: Final = 128
_CERTAIN_DEVIATIONS: Final = 3.0  # standard deviations of the mean


class SearchEffort(Frozen):
    """How thoroughly activation bits are searched, if 8 bits for all products have too much error.

    Attributes:
        num_kind_tokens: tokens of the choosing text on which the errors of product groups are
            measured.
        num_splits: how often the group with the largest error is split by layers.
        num_trials: how many choices are measured before the model keeps 15 bits.
    """

    num_kind_tokens: int
    num_splits: int
    num_trials: int


FULL_SEARCH: Final = SearchEffort(num_kind_tokens=256, num_splits=10, num_trials=4)
# Of models with billions of weights: a measurement of each kind of product, and two choices.
QUICK_SEARCH: Final = SearchEffort(num_kind_tokens=64, num_splits=0, num_trials=2)


def choosing_text() -> str:
    """Return the packaged text on which the errors of fewer activation bits are measured.

    It differs from the held-out text of evaluations.
    """
    return (
        resources.files("twostroke.backends.activation_bits")
        .joinpath("choosing.txt")
        .read_text("utf-8")
    )


def checking_text() -> str:
    """Return the packaged text on which a choice of activation bits is checked.

    It is longer than the choosing text, because few rows cause most of the error.
    """
    return (
        resources.files("twostroke.backends.activation_bits")
        .joinpath("checking.txt")
        .read_text("utf-8")
    )


def choose(
    products: Sequence[Product],
    score: Score,
    check: Check,
    model_id: str,
    effort: SearchEffort = FULL_SEARCH,
) -> ActivationBits:
    """Choose the cheapest activation bits of products whose error is at most `_MAX_MEAN_KL`.

    8 bits for all products are tried first; only if their error is too large, the errors of groups
    of products are measured.

    The error is the mean KL divergence from the logits with 15 bits.

    Args:
        products: the products whose bits may be chosen.
        score: `score(bits, num_tokens)` returns the logits (rows, vocab_size) of the first tokens
            of the choosing text; of all its tokens if `num_tokens` is None. `bits` maps names of
            matrices to bits; a missing name means 15.
        check: `check(bits)` returns the mean KL divergence on the checking text.
        model_id: identifies the model in the result.
        effort: how thoroughly to search.
    """
    expected = ExpectedLogits(score({}, None))

    def max_error(bits: Mapping[str, int]) -> float:
        error = expected.divergence(score(bits, None))
        if error <= _MAX_MEAN_KL and not (other := check(bits)) <= error:
            return other
        return error

    bits = bits_of(products, 8)
    error = max_error(bits)
    if not error <= _MAX_MEAN_KL:
        groups = _measure_groups(products, score, expected, effort)
        budget = _MAX_MEAN_KL
        for _ in range(effort.num_trials):
            bits = cheapest(groups, budget)
            error = max_error(bits) if bits else 0.0
            if error <= _MAX_MEAN_KL:
                break
            budget *= 0.9 * _MAX_MEAN_KL / error if error < np.inf else 0.5
        else:
            bits, error = {}, 0.0
    num_products = sum(len(product.matrices) for product in products)
    return ActivationBits(model_id, METHOD, bits, error, num_products)


def _measure_groups(
    products: Sequence[Product], score: Score, expected: ExpectedLogits, effort: SearchEffort
) -> list[ProductGroup]:
    """Measure the errors of groups of products on the beginning of the choosing text."""
    expected = expected.first(effort.num_kind_tokens)

    def measure(bits: Mapping[str, int]) -> float:
        return expected.divergence(score(bits, effort.num_kind_tokens))

    return split_groups(measure_kinds(products, measure), measure, effort.num_splits)


class ExpectedLogits:
    """The logits of the model with full precision, against which other logits are compared."""

    def __init__(self, logits: Array) -> None:
        """Set the logits (rows, vocab_size) of the model with full precision."""
        self._logits = logits

    @property
    def num_bytes(self) -> int:
        """The memory that the logits take."""
        return self._logits.nbytes

    def first(self, num_rows: int) -> ExpectedLogits:
        """Return the expected logits of the first rows."""
        return ExpectedLogits(self._logits[:num_rows])

    def divergence(self, logits: Array) -> float:
        """Return the mean KL divergence of `logits` from the expected logits over rows.

        Infinite if the mean is NaN.
        """
        return mean_of(self.divergences(logits))

    def divergences(self, logits: Array) -> NDArray[np.float64]:
        """Return the KL divergence of each row of `logits` from the expected logits.

        With d = logits - expected logits and p = softmax(expected logits), this is log(sum p e^d) -
        sum p d. In this form, few digits of float32 are lost where d is small.
        """
        divergences = np.empty(len(logits))
        for chunk in _chunks(logits):
            expected = self._logits[chunk]
            shares = np.exp(expected - expected.max(axis=1, keepdims=True))
            shares /= shares.sum(axis=1, keepdims=True)
            difference = logits[chunk] - expected
            difference -= np.einsum("rv,rv->r", shares, difference)[:, None]
            mean = np.einsum("rv,rv->r", shares, difference, dtype=np.float64)
            grown = np.einsum("rv,rv->r", shares, np.expm1(difference), dtype=np.float64)
            divergences[chunk] = np.log1p(grown) - mean
        return divergences


def mean_of(divergences: NDArray[np.float64]) -> float:
    """Return the mean of the KL divergences of rows; infinite if it is NaN."""
    mean = max(float(divergences.mean()), 0.0)
    return mean if np.isfinite(mean) else np.inf


def is_certain(divergences: NDArray[np.float64]) -> bool:
    """Whether more rows would hardly change if the mean error is above or below the limit.

    The limit must be three standard deviations of the mean away, and there must be enough rows to
    know this deviation. The result depends on the errors only, so that it is the same on each
    machine.
    """
    if len(divergences) < _MIN_CERTAIN_ROWS:
        return False
    margin = _CERTAIN_DEVIATIONS * float(divergences.std()) / float(np.sqrt(len(divergences)))
    distance = abs(float(divergences.mean()) - _MAX_MEAN_KL)
    return distance > margin


def _chunks(logits: Array) -> list[slice]:
    return [slice(i, i + _CHUNK_ROWS) for i in range(0, len(logits), _CHUNK_ROWS)]
