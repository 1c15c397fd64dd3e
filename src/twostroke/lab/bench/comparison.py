"""Compares two measured runs: which figures changed, and which changes are more than chance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.lab.bench.bootstrap import difference_interval, interval
from twostroke.lab.bench.report import TITLES, pooled_latencies
from twostroke.lab.measure.requests import MIN_P99_SAMPLES, steady_window

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.lab.bench.bootstrap import PooledValues
    from twostroke.lab.bench.record import RunRecord

# Some 20 figures are compared: at this level one in five comparisons of equal runs shows a change
# that is chance.
COMPARISON_LEVEL: Final = 0.99
_PERCENTILES: Final = (50, 90, 99)
_NUM_SLICES: Final = 30  # of the steady window, for the interval of a rate
_NUM_RESAMPLES: Final = 1000
_MIN_REQUESTS: Final = 10


class FigureChange(Frozen):
    """A figure of two runs.

    Attributes:
        title: the figure's name.
        before, after: its values; latencies are in seconds.
        low, high: the interval of the difference.
        is_rate: whether the figure is a rate: more is better.
    """

    title: str
    before: float
    after: float
    low: float
    high: float
    is_rate: bool = False

    @property
    def is_significant(self) -> bool:
        """Whether the change is more than chance."""
        return self.low > 0 or self.high < 0

    @property
    def word(self) -> str:
        """The change in one word: better, worse, or same."""
        if not self.is_significant:
            return "same"
        return "better" if (self.low > 0) is self.is_rate else "worse"


def compare_runs(before: RunRecord, after: RunRecord) -> list[FigureChange]:
    """Return the figures that both runs have, with the interval of each difference.

    Raises:
        UsageError: a run has fewer than 10 completed requests.
    """
    completed = [
        [answer for answer in record.answers if answer.is_completed] for record in (before, after)
    ]
    if min(map(len, completed)) < _MIN_REQUESTS:
        raise UsageError(f"A comparison needs {_MIN_REQUESTS} completed requests in each run.")
    first, second = map(pooled_latencies, completed)
    changes = [
        change
        for name, title in TITLES.items()
        if name in first and name in second
        for change in _latency_changes(title, first[name], second[name])
    ]
    return [*changes, *_rate_changes(before, after)]


def different_loads(before: RunRecord, after: RunRecord) -> list[str]:
    """Return the differences between the loads of two runs, such as "rate 2 and 4"."""
    words = []
    for field, noun in (
        ("model", "model"),
        ("api", "API"),
        ("load", "load"),
        ("num_clients", "clients"),
        ("rate", "rate"),
    ):
        values = [getattr(record.setup, field) for record in (before, after)]
        if values[0] != values[1]:
            texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
            words.append(f"{noun} {texts[0]} and {texts[1]}")
    return words


def _latency_changes(
    title: str, before: PooledValues, after: PooledValues
) -> Iterator[FigureChange]:
    for number in _PERCENTILES:
        if number == 99 and min(len(before), len(after)) < MIN_P99_SAMPLES:
            continue
        share = number / 100
        low, high = difference_interval(before, after, share, COMPARISON_LEVEL)
        yield FigureChange(
            title=f"{title} P{number}",
            before=float(before.quantiles((share,))[0]),
            after=float(after.quantiles((share,))[0]),
            low=low,
            high=high,
        )


def _rate_changes(before: RunRecord, after: RunRecord) -> Iterator[FigureChange]:
    rng = np.random.default_rng(0)
    for title in ("output tokens/s", "requests/s"):
        means = []
        for record in (before, after):
            rates = _sliced_rates(record, counts_tokens=title.startswith("output"))
            draws = rng.integers(0, len(rates), (_NUM_RESAMPLES, len(rates)))
            means.append((float(rates.mean()), rates[draws].mean(axis=1)))
        (first, first_drawn), (second, second_drawn) = means
        low, high = interval(second_drawn - first_drawn, COMPARISON_LEVEL)
        yield FigureChange(
            title=title, before=first, after=second, low=low, high=high, is_rate=True
        )


def _sliced_rates(record: RunRecord, *, counts_tokens: bool) -> np.ndarray:
    """Return the rate in each slice of the steady window: (slices,)."""
    begin_s, end_s = steady_window([answer.log for answer in record.answers])
    times_s: list[float] = []
    counts: list[float] = []
    for answer in record.answers:
        if counts_tokens:
            times_s += answer.chunk_times_s
            counts += answer.tokens_by_chunk
        elif answer.is_completed:
            times_s.append(answer.log.timings.last_token_s)
            counts.append(1.0)
    sums, _ = np.histogram(times_s, _NUM_SLICES, (begin_s, end_s), weights=counts)
    rates: np.ndarray = sums * _NUM_SLICES / max(end_s - begin_s, 1e-9)
    return rates
