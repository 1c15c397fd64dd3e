"""Bootstrap intervals: how much a figure would differ if the same run were repeated.

Complete requests are resampled, not single values, because the gaps between the chunks of one
answer are not independent of each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_RESAMPLES: Final = 400
_MIN_RESAMPLES: Final = 100
_MAX_DRAWN_VALUES: Final = 40_000_000  # limits the time to some seconds
_SEED: Final = 0


class PooledValues:
    """Values of all requests of a run, such as latencies; a request may have several values.

    Used for confidence intervals by the bootstrap, which resamples whole requests.
    """

    def __init__(self, values: Sequence[float], owners: Sequence[int] | None = None) -> None:
        """Pool values.

        `owners` has the number of each value's request; None: each value is of another request.
        """
        pooled = np.asarray(values, np.float64)
        requests = np.arange(len(pooled)) if owners is None else np.asarray(owners)
        _, requests = np.unique(requests, return_inverse=True)
        order = np.argsort(pooled, kind="stable")
        self.ordered = pooled[order]  # (values,)
        self._owners = requests[order]  # (values,): numbers from 0 on
        self._num_owners = int(requests.max()) + 1 if len(pooled) else 0

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self.ordered)

    @property
    def num_requests(self) -> int:
        """The number of requests that have values."""
        return self._num_owners

    @property
    def mean(self) -> float:
        """The mean of all values."""
        return float(self.ordered.mean())

    def quantiles(self, shares: Sequence[float]) -> np.ndarray:
        """Return the quantiles of the values at each of `shares`: (shares,)."""
        quantiles: np.ndarray = np.quantile(self.ordered, shares)
        return quantiles

    def resampled(self, shares: Sequence[float]) -> np.ndarray:
        """Return quantiles of resampled runs: (resamples, shares).

        The requests of each resampled run are drawn with replacement; every call uses the same
        seed.
        """
        rng = np.random.default_rng(_SEED)
        count = self._num_owners
        num_resamples = _MAX_DRAWN_VALUES // max(len(self.ordered), 1)
        num_resamples = min(max(num_resamples, _MIN_RESAMPLES), _MAX_RESAMPLES)
        rows = np.empty((num_resamples, len(shares)))
        for row in rows:
            draws = np.bincount(rng.integers(0, count, count), minlength=count)
            weights = np.cumsum(draws[self._owners])
            ranks = np.searchsorted(weights, np.asarray(shares) * weights[-1])
            row[:] = self.ordered[np.minimum(ranks, len(self.ordered) - 1)]
        return rows


def interval(resampled: np.ndarray, level: float) -> tuple[float, float]:
    """Return the interval of the middle resampled figures: a share `level` of them is inside."""
    low, high = np.quantile(resampled, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)


def difference_interval(
    before: PooledValues, after: PooledValues, share: float, level: float
) -> tuple[float, float]:
    """Return the confidence interval of a quantile's difference between two independent runs.

    The difference is `after` minus `before`, of the quantile at `share`. `level` is the confidence,
    such as 0.95.
    """
    first, second = before.resampled((share,))[:, 0], after.resampled((share,))[:, 0]
    rng = np.random.default_rng(_SEED + 1)
    shuffled = rng.permutation(np.resize(second, len(first)))
    return interval(shuffled - first, level)
