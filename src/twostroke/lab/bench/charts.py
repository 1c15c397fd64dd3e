"""The numbers behind the charts of a run: TTFT by input length, gaps and requests over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.lab.bench.answers import MeasuredAnswer
    from twostroke.lab.bench.report import BenchReport

_MAX_FITTED: Final = 600  # requests; the fit takes the slopes of all pairs of them
_MIN_LENGTH_RATIO: Final = 1.2  # of the longest to the shortest input; less has no slope
_MIN_FITTED: Final = 10
_MAX_CACHED_SHARE: Final = 0.1  # of an input that counts as computed
_MAX_BINS: Final = 60
_MIN_BIN_VALUES: Final = 5
_MEAN_BIN_VALUES: Final = 20
_SEED: Final = 0


class LengthFit(Frozen):
    """A line fitted to the time to the first token as a function of the input's length.

    Attributes:
        seconds_per_token: the slope.
        fixed_s: the time at length 0.
    """

    seconds_per_token: float
    fixed_s: float


class TimeBins(Frozen):
    """Values over the time of a run, in bins of equal width.

    Attributes:
        edges_s: where bins begin and end: (bins + 1,).
        columns: values by name: (bins,); NaN where a bin has too few.
    """

    edges_s: NDArray[np.float64]
    columns: dict[str, NDArray[np.float64]]

    @property
    def middles_s(self) -> NDArray[np.float64]:
        """The middle of each bin: (bins,)."""
        return (self.edges_s[1:] + self.edges_s[:-1]) / 2


def fit_ttft(completed: Sequence[MeasuredAnswer]) -> LengthFit | None:
    """Return the line of TTFT by input length; None if lengths are equal or requests are few.

    The slope is the median of the slopes between pairs of requests (Theil and Sen), so that a few
    requests that waited in a queue do not change it. Requests are left out if more than a tenth of
    their input was cached.
    """
    logs = [answer.log for answer in completed]
    logs = [log for log in logs if log.num_cached <= _MAX_CACHED_SHARE * log.num_prompt]
    lengths = np.array([log.num_prompt for log in logs], np.float64)
    times_s = np.array([log.timings.ttft_s for log in logs])
    if len(logs) < _MIN_FITTED or lengths.max() < _MIN_LENGTH_RATIO * lengths.min():
        return None
    if len(logs) > _MAX_FITTED:
        indices = np.random.default_rng(_SEED).choice(len(logs), _MAX_FITTED, replace=False)
        lengths, times_s = lengths[indices], times_s[indices]
    first, second = np.triu_indices(len(lengths), 1)
    runs = lengths[second] - lengths[first]
    is_apart = np.abs(runs) > (_MIN_LENGTH_RATIO - 1) * lengths.min()
    rises = (times_s[second] - times_s[first])[is_apart]
    if not len(rises):
        return None
    slope = float(np.median(rises / runs[is_apart]))
    return LengthFit(slope, float(np.median(times_s - slope * lengths)))


def itl_over_time(completed: Sequence[MeasuredAnswer]) -> TimeBins | None:
    """Return the median and the p90 of the gaps between chunks over time; None without gaps."""
    times = [np.asarray(answer.chunk_times_s) for answer in completed]
    gaps_s = np.concatenate([np.diff(at_s) for at_s in times]) if times else np.empty(0)
    ends_s = np.concatenate([at_s[1:] for at_s in times]) if times else np.empty(0)
    if len(gaps_s) < _MIN_BIN_VALUES:
        return None
    edges = np.linspace(
        0.0, float(ends_s.max()), max(1, min(_MAX_BINS, len(gaps_s) // _MEAN_BIN_VALUES)) + 1
    )
    bins = np.clip(np.digitize(ends_s, edges) - 1, 0, len(edges) - 2)
    columns = {name: np.full(len(edges) - 1, np.nan) for name in ("p50", "p90")}
    for index in range(len(edges) - 1):
        in_bin = gaps_s[bins == index]
        if len(in_bin) >= _MIN_BIN_VALUES:
            columns["p50"][index], columns["p90"][index] = np.quantile(in_bin, (0.5, 0.9))
    return TimeBins(edges, columns)


def requests_over_time(answers: Sequence[MeasuredAnswer]) -> TimeBins:
    """Return, over time, the requests per minute that arrive, complete and fail.

    The number of requests in progress is also returned. `answers` has at least one request.
    """
    arrivals_s = np.array([answer.log.timings.arrival_s for answer in answers])
    ends_s = np.array([max(a.ended_s, a.log.timings.arrival_s) for a in answers])
    is_completed = np.array([answer.is_completed for answer in answers])
    end_s = max(float(ends_s.max()), 1e-6)
    num_bins = int(np.clip(len(answers) // 3, 1, _MAX_BINS))
    edges = np.linspace(0.0, end_s, num_bins + 1)
    per_minute = 60.0 / float(edges[1])
    columns = {
        name: np.histogram(times_s, edges)[0] * per_minute
        for name, times_s in (
            ("arrived", arrivals_s),
            ("completed", ends_s[is_completed]),
            ("failed", ends_s[~is_completed]),
        )
    }
    bins = TimeBins(edges, columns)
    num_begun = np.searchsorted(np.sort(arrivals_s), bins.middles_s, side="right")
    num_ended = np.searchsorted(np.sort(ends_s), bins.middles_s, side="right")
    columns["in_progress"] = (num_begun - num_ended).astype(np.float64)
    return bins


def knee_of(reports: Sequence[BenchReport]) -> int | None:
    """Return the index of the knee of a sweep: the load with the most throughput per latency.

    It is the load of the greatest *power* (Kleinrock, 1979): output tokens per second divided by
    the mean E2E. A higher load adds more latency than throughput. None with fewer than three loads.
    """
    powers = [
        report.run.output_per_s / report.run.latencies["e2e"].mean
        if "e2e" in report.run.latencies
        else 0.0
        for report in reports
    ]
    return int(np.argmax(powers)) if len(powers) >= 3 and max(powers) > 0 else None
