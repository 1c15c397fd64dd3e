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
    from collections.abc import Iterator, Sequence

    from twostroke.lab.bench.answers import MeasuredAnswer
    from twostroke.lab.bench.bootstrap import PooledValues
    from twostroke.lab.bench.record import RunRecord

# Some 20 figures are compared: at this level one in five comparisons of equal runs shows a change
# that is chance.
COMPARISON_LEVEL: Final = 0.99
_PERCENTILES: Final = (50, 90, 99)
_NUM_SLICES: Final = 30  # of the steady window, for the interval of a rate
_NUM_RESAMPLES: Final = 1000
_MIN_REQUESTS: Final = 10


_MAX_LENGTH_RATIO: Final = 1.1  # of mean lengths; runs whose lengths differ by more do not compare
_MAX_LENGTH_Z: Final = 4.0  # differences of mean lengths below these standard errors are chance
_MAX_RATE_RATIO: Final = 1.1  # of the rates of two loads that count as the same


class FigureChange(Frozen):
    """A figure of two runs, and its difference.

    Attributes:
        title: the figure's name.
        before, after: its values; latencies are in seconds.
        low, high: the interval of the difference `after` minus `before`.
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


class LoadComparison(Frozen):
    """The figures of a load that two runs, or two sweeps, have in common.

    Attributes:
        load: the load in a few words.
        different_loads: differences between the loads, as `different_loads` returns them.
        changes: the figures of both runs.
        verdicts: the first line of each run's audit, before and after.
    """

    load: str
    different_loads: tuple[str, ...]
    changes: tuple[FigureChange, ...]
    verdicts: tuple[str, str]

    @property
    def num_changed(self) -> int:
        """The number of figures that changed by more than chance."""
        return sum(change.is_significant for change in self.changes)


def compare_loads(
    before: Sequence[RunRecord], after: Sequence[RunRecord]
) -> tuple[LoadComparison, ...]:
    """Return the comparison of each load that two runs or sweeps have in common.

    Two single runs are compared even if their rates or numbers of clients differ.

    Raises:
        UsageError: no load is in both, or a run has fewer than 10 completed requests.
    """
    pairs = list(_matched_loads(before, after))
    if len(before) == len(after) == 1:
        pairs = [(before[0], after[0])]
    if not pairs:
        first, second = (
            ", ".join(record.setup.load_name for record in records) for records in (before, after)
        )
        raise UsageError(f"No load is in both: {first}, and {second}.")
    return tuple(
        LoadComparison(
            load=first_run.setup.load_name,
            different_loads=tuple(different_loads(first_run, second_run)),
            changes=tuple(compare_runs(first_run, second_run)),
            verdicts=(first_run.setup.verdict, second_run.setup.verdict),
        )
        for first_run, second_run in pairs
    )


def check_comparable(before: Sequence[RunRecord], after: Sequence[RunRecord]) -> None:
    """Check that differences between runs can come from the server, and not from the requests.

    Raises:
        UsageError: the models, or the lengths of prompts or answers, differ.
    """
    models = before[0].setup.model, after[0].setup.model
    remedy = "Compare them anyway with --force."
    if models[0] != models[1]:
        raise UsageError(
            f"The runs have different models, '{models[0]}' and '{models[1]}'. {remedy}"
        )
    for noun, count in (("Prompts", "num_prompt"), ("Answers", "num_output")):
        first, second = (
            np.array([getattr(answer.log, count) for answer in _completed(records)], np.float64)
            for records in (before, after)
        )
        if min(len(first), len(second)) < _MIN_REQUESTS:
            continue  # `compare_runs` names it
        means = first.mean(), second.mean()
        error = np.sqrt(first.var() / len(first) + second.var() / len(second))
        is_far = max(means) > _MAX_LENGTH_RATIO * min(means)
        if is_far and abs(means[1] - means[0]) > _MAX_LENGTH_Z * error:
            raise UsageError(
                f"{noun} have {means[0]:,.0f} and {means[1]:,.0f} tokens on average, so latencies "
                f"do not compare. {remedy}"
            )


def compare_runs(before: RunRecord, after: RunRecord) -> list[FigureChange]:
    """Return the figures that both runs have, with the interval of each difference.

    Raises:
        UsageError: a run has fewer than 10 completed requests.
    """
    completed = [_completed([record]) for record in (before, after)]
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


def _matched_loads(
    before: Sequence[RunRecord], after: Sequence[RunRecord]
) -> Iterator[tuple[RunRecord, RunRecord]]:
    """Yield the runs of two sweeps that have the same load, in the order of the first sweep."""
    remaining = list(after)
    for record in before:
        candidates = [other for other in remaining if _have_same_load(record, other)]
        if candidates:
            match = min(candidates, key=lambda other: _rate_ratio(record, other))
            remaining.remove(match)
            yield record, match


def _have_same_load(first: RunRecord, second: RunRecord) -> bool:
    if first.setup.num_clients != second.setup.num_clients:
        return False
    return first.setup.num_clients is not None or _rate_ratio(first, second) <= _MAX_RATE_RATIO


def _rate_ratio(first: RunRecord, second: RunRecord) -> float:
    rates = first.setup.rate or 0.0, second.setup.rate or 0.0
    return max(rates) / min(rates) if min(rates) else 1.0 + (rates[0] != rates[1])


def _completed(records: Sequence[RunRecord]) -> list[MeasuredAnswer]:
    return [answer for record in records for answer in record.answers if answer.is_completed]


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
    """Return the rate in each slice of the steady window, per second: (slices,).

    These are output tokens with `counts_tokens`, otherwise completed requests.
    """
    begin_s, end_s = steady_window([answer.log for answer in record.answers])
    times_s: list[float] = []
    counts: list[float] = []
    for answer in record.answers:
        if not answer.is_completed:
            continue
        if counts_tokens:
            times_s += answer.chunk_times_s
            counts += answer.tokens_by_chunk
        else:
            times_s.append(answer.log.timings.last_token_s)
            counts.append(1.0)
    sums, _ = np.histogram(times_s, _NUM_SLICES, (begin_s, end_s), weights=counts)
    rates: np.ndarray = sums * _NUM_SLICES / max(end_s - begin_s, 1e-9)
    return rates
