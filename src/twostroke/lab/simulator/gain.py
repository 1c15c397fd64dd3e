"""How much better one setting is than another for a load, with a 95% interval."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.lab.measure.requests import COMPLETED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.lab.measure.requests import Objectives, RequestLog

MIN_SHARE_GAIN: Final = 0.005  # of the share of good requests; less is noise
MIN_TAIL_GAIN: Final = 0.03  # of the 99th percentiles, if the shares are equal
_INTERVAL_LEVEL: Final = 0.95
_NUM_RESAMPLES: Final = 400
_NUM_RUNS: Final = 20  # requests that follow each other wait in the same queue, so runs are drawn
# For measured requests, whose bursts may be longer: the widest of these intervals is taken.
_MEASURED_NUM_RUNS: Final = (20, 10, 5)
_SEED: Final = 0


class Interval(Frozen):
    """The expected value of an estimated figure, and the 95% interval around it."""

    expected: float
    low: float
    high: float


class Gain(Frozen):
    """How much better one setting of a server is than another for the same load.

    Attributes:
        share: the share of requests that meet the latency objectives with this setting, minus the
            share with the other one; above 0 is better.
        goodput: the ratio of these shares, minus 1; above 0 is better. None if no request meets the
            objectives with the other setting.
        tail: the 99th percentile of (time / objective) with this setting, divided by the percentile
            with the other one, minus 1; below 0 is better. The time of a request is its TTFT or
            TPOT, by the larger ratio. None if failed requests make the percentile infinite.
    """

    share: Interval
    goodput: Interval | None
    tail: Interval | None

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the setting is better by more than chance.

        The low end of `share` must not be worse than no change. Then either more requests are
        expected to be good, or the tail latencies are lower even at the high end of `tail`.
        """
        if self.share.low < -MIN_SHARE_GAIN:
            return False
        if self.share.expected > MIN_SHARE_GAIN:
            return True
        return self.tail is not None and self.tail.high < -MIN_TAIL_GAIN

    @property
    def rank(self) -> tuple[float, float, float]:
        """A sort key: better settings have a larger rank, by the low end of `share` first."""
        tail = 0.0 if self.tail is None else self.tail.high
        low, expected = self.share.low, self.share.expected
        return round(low / MIN_SHARE_GAIN), round(expected / MIN_SHARE_GAIN), -tail


def objective_ratios(logs: Sequence[RequestLog], objectives: Objectives) -> np.ndarray:
    """Return the largest ratio of each request's latencies to their objectives: (requests,).

    A request is good up to a ratio of 1. Requests that were not completed have infinity.
    """
    limits = {"ttft": objectives.ttft_s, "tpot": objectives.tpot_s}
    ratios = np.full(len(logs), np.inf)
    for index, log in enumerate(logs):
        if log.outcome == COMPLETED:
            latencies = log.latencies
            ratios[index] = max(
                (latencies[name] or 0.0) / limit
                for name, limit in limits.items()
                if limit is not None
            )
    return ratios


def expected_gain(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> Gain:
    """Return the gain of a setting over another, from a load's requests with either of them.

    `after` is of the setting, and `before` of the other one. Each array has the `objective_ratios`
    of the load on a machine of another speed; all speeds are equally likely. Runs of consecutive
    requests are resampled, the same for both settings.
    """
    rng = np.random.default_rng(_SEED)
    num_requests = len(before[0])
    shares = np.empty((_NUM_RESAMPLES, 2))
    tails = np.empty((_NUM_RESAMPLES, 2))
    for number in range(_NUM_RESAMPLES):
        speed = number % len(before)
        drawn_requests = _drawn_runs(rng, num_requests, _NUM_RUNS)
        for column, ratios in enumerate(
            (before[speed][drawn_requests], after[speed][drawn_requests])
        ):
            shares[number, column] = np.mean(ratios <= 1)
            tails[number, column] = np.quantile(ratios, 0.99, method="higher")
    goodput = tail = None
    if shares[:, 0].min() > 0:
        goodput = _interval(shares[:, 1] / shares[:, 0] - 1)
    if np.isfinite(tails).all():
        tail = _interval(tails[:, 1] / np.maximum(tails[:, 0], 1e-12) - 1)
    return Gain(_interval(shares[:, 1] - shares[:, 0]), goodput, tail)


def measured_gain(estimated: Sequence[np.ndarray], measured: np.ndarray) -> Interval:
    """Return the share of measured requests that are good, minus the estimated share.

    Each array of `estimated` has, for a machine of another speed, whether each request is estimated
    to be good; `measured` has whether it was: (requests,), in the order of arrival. All speeds are
    equally likely.

    Requests of a burst are good or bad together, so runs of consecutive requests are resampled.
    This is done with several lengths of runs, and the widest interval is returned. In simulated
    traffic whose bursts have up to a tenth of the requests, 95% intervals then miss the truth at
    one end in 2% to 5% of cases; intervals of independent requests miss it in 15% to 39%.

    A result below 0 means that the machine was worse than estimated.
    """
    rng = np.random.default_rng(_SEED)
    differences = [measured.astype(float) - are_good for are_good in estimated]
    intervals = []
    for num_runs in _MEASURED_NUM_RUNS:
        resampled = np.empty(_NUM_RESAMPLES)
        for number in range(_NUM_RESAMPLES):
            drawn_requests = _drawn_runs(rng, len(measured), num_runs)
            resampled[number] = differences[number % len(differences)][drawn_requests].mean()
        intervals.append(_interval(resampled))
    expected = float(np.mean([difference.mean() for difference in differences]))
    return Interval(
        expected,
        low=min(interval.low for interval in intervals),
        high=max(interval.high for interval in intervals),
    )


def _drawn_runs(rng: np.random.Generator, num_requests: int, num_runs: int) -> np.ndarray:
    """Return the indices of about `num_requests` requests, drawn as about `num_runs` random runs.

    A run is a sequence of consecutive requests; after the last request follows the first. Used to
    resample requests that depend on their neighbours (block bootstrap).
    """
    run_length = math.ceil(num_requests / num_runs)
    starts = rng.integers(0, num_requests, math.ceil(num_requests / run_length))
    requests: np.ndarray = (starts[:, None] + np.arange(run_length)).ravel() % num_requests
    return requests


def _interval(resampled: np.ndarray) -> Interval:
    low, high = np.quantile(resampled, ((1 - _INTERVAL_LEVEL) / 2, (1 + _INTERVAL_LEVEL) / 2))
    return Interval(float(resampled.mean()), float(low), float(high))
