"""Logs of the requests of a measured or simulated run, objectives, and the run's report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen, check_choice, check_range
from twostroke.engine.output import Timings  # noqa: TC001 - msgspec reads it
from twostroke.lab.measure.report_text import format_ms

if TYPE_CHECKING:
    from collections.abc import Sequence

COMPLETED, REFUSED, FAILED = "completed", "refused", "failed"
LATENCIES: Final = ("queue", "ttft", "tpot", "e2e")
PERCENTILES: Final = (50, 90, 95, 99)
_WARM_UP_SHARE: Final = 0.1  # of the time in which requests arrive; rates leave it out
# A load is too high if requests in progress grow by this ratio from the first to the last third of
# the window, and if less than this share of arriving requests ends.
_MIN_GROWTH_RATIO: Final = 2.0
_MIN_ENDED_SHARE: Final = 0.9
# Requests arrive at once if they arrive in less than this time and this share of the run: the first
# requests of the clients of a closed loop, for example, are some microseconds apart.
_MAX_BURST_S: Final = 0.01
_MAX_BURST_SHARE: Final = 0.01
_MIN_ARRIVALS: Final = 20  # fewer arrivals are not enough to detect growth
MIN_P99_SAMPLES: Final = 500

# Limits in ms of TTFT and TPOT, from MLPerf Inference (MLCommons). `reading` is the
# speed at which a very fast reader follows a stream.
_PUBLISHED_LIMITS_MS: Final = {
    "llama-2-70b-server": (2000, 200),
    "llama-2-70b-interactive": (450, 40),
    "llama-3.1-8b-server": (2000, 100),
    "llama-3.1-8b-interactive": (500, 30),
    "llama-3.1-405b-server": (6000, 175),
    "llama-3.1-405b-interactive": (4500, 80),
    "mixtral-8x7b-server": (2000, 200),
    "deepseek-r1-server": (2000, 80),
    "deepseek-r1-interactive": (1500, 15),
    "gpt-oss-120b-server": (3000, 80),
    "gpt-oss-120b-interactive": (2000, 20),
    "reading": (200, 120),
}
OBJECTIVE_NAMES: Final = tuple(_PUBLISHED_LIMITS_MS)


class RequestLog(Frozen):
    """One request of a benchmark or simulation; times are in seconds since the start of the run.

    Attributes:
        timings: its `arrival_s` is the scheduled time, so that delays of the client count in
            latencies. `started_s` is 0 if only the client was measured.
        sent_s: time at which the client sent the request.
        num_prompt, num_output, num_cached: numbers of tokens.
        outcome: `COMPLETED`, `REFUSED` or `FAILED`; only completed requests have latencies.
    """

    timings: Timings
    sent_s: float
    num_prompt: int
    num_output: int
    num_cached: int = 0
    outcome: str = COMPLETED

    @property
    def latencies(self) -> dict[str, float | None]:
        """The request's latencies by name (`LATENCIES`); None if unknown or not applicable."""
        timings = self.timings
        return {
            "queue": timings.queue_s if timings.started_s else None,
            "ttft": timings.ttft_s,
            "tpot": timings.tpot_s(self.num_output),
            "e2e": timings.e2e_s,
        }


class Objectives(Frozen):
    """Latency objectives, in seconds, that each request of a run should meet; None for no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        """Raise UsageError, with the field, if an objective is out of range."""
        check_range(self, "ttft_s", "tpot_s", high=1e9)

    def __bool__(self) -> bool:
        """Whether there is any latency objective."""
        return self.ttft_s is not None or self.tpot_s is not None

    def are_met(self, log: RequestLog) -> bool:
        """Whether a request meets all latency objectives; only completed requests can."""
        if log.outcome != COMPLETED:
            return False
        latencies, limits = log.latencies, {"ttft": self.ttft_s, "tpot": self.tpot_s}
        return all(
            (latencies[name] or 0.0) <= (limit or math.inf) for name, limit in limits.items()
        )


def named_objectives(name: str) -> Objectives:
    """Return published latency objectives; raise UsageError if the name is unknown."""
    check_choice("slo", name, OBJECTIVE_NAMES)
    ttft_ms, tpot_ms = _PUBLISHED_LIMITS_MS[name]
    return Objectives(ttft_ms / 1e3, tpot_ms / 1e3)


class Percentile(Frozen):
    """A percentile of measured values, with its 95% confidence interval by order statistics."""

    value: float
    low: float
    high: float


class LatencyStatistics(Frozen):
    """Statistics of one latency, such as the TTFT, over all requests of a run, in seconds.

    Percentiles are by name; p99 is included only with at least 500 samples.
    """

    count: int
    mean: float
    percentiles: dict[str, Percentile]


class RunReport(Frozen):
    """Latencies and rates of a benchmark or simulation of many requests.

    Rates are counted in a window from one tenth of the arrivals' duration to the last arrival.

    Attributes:
        num_requests, num_completed, num_refused, num_failed: numbers of requests.
        duration_s: time from the first arrival to the last token.
        offered_per_s: requests per second that arrive.
        requests_per_s: requests per second that end.
        input_per_s, output_per_s: prompt and output tokens per second.
        concurrency: mean number of requests in progress.
        is_growing: whether the load is too high: the number of requests in progress grows, and
            fewer requests end than arrive.
        hit_rate: share of prompt tokens from the prefix cache.
        lateness_p99_s: 99th percentile of the client's delay in sending requests.
        latencies: statistics by name.
        good_share, good_per_s: requests that meet the objectives, as a share and per second;
            None without objectives.
    """

    num_requests: int
    num_completed: int
    num_refused: int
    num_failed: int
    duration_s: float
    offered_per_s: float
    requests_per_s: float
    input_per_s: float
    output_per_s: float
    concurrency: float
    is_growing: bool
    hit_rate: float
    lateness_p99_s: float
    latencies: dict[str, LatencyStatistics]
    good_share: float | None = None
    good_per_s: float | None = None

    @property
    def output_per_user(self) -> float:
        """Output tokens per second of each request in progress, on average."""
        return self.output_per_s / self.concurrency if self.concurrency else 0.0


def make_report(logs: Sequence[RequestLog], objectives: Objectives) -> RunReport:
    """Return the latencies and rates of a run of at least one request."""
    completed = [log for log in logs if log.outcome == COMPLETED]
    scheduled = np.array([log.timings.arrival_s for log in logs])
    first_s = float(scheduled.min())
    ended_s = max([float(scheduled.max()), *(log.timings.last_token_s for log in completed)])
    begin_s, end_s = steady_window(logs)
    window = _Window(completed, begin_s, end_s)
    arrivals = scheduled[(scheduled > begin_s) & (scheduled <= window.end_s)]
    offered_per_s = len(arrivals) / window.seconds
    good = [log for log in logs if objectives.are_met(log)] if objectives else None
    num_prompt = sum(log.num_prompt for log in completed)
    lateness_s = [log.sent_s - log.timings.arrival_s for log in logs]
    return RunReport(
        num_requests=len(logs),
        num_completed=len(completed),
        num_refused=sum(log.outcome == REFUSED for log in logs),
        num_failed=sum(log.outcome == FAILED for log in logs),
        duration_s=ended_s - first_s,
        offered_per_s=offered_per_s,
        requests_per_s=window.num_ended / window.seconds,
        input_per_s=window.prompt_tokens / window.seconds,
        output_per_s=window.output_tokens / window.seconds,
        concurrency=window.concurrency(),
        is_growing=len(arrivals) >= _MIN_ARRIVALS
        and window.is_growing
        and window.num_ended < _MIN_ENDED_SHARE * len(arrivals),
        hit_rate=sum(log.num_cached for log in completed) / num_prompt if num_prompt else 0.0,
        lateness_p99_s=float(np.quantile(lateness_s, 0.99)),
        latencies=_latencies(completed),
        good_share=None if good is None else len(good) / len(logs),
        good_per_s=None if good is None else window.count_ended(good) / window.seconds,
    )


def steady_window(logs: Sequence[RequestLog]) -> tuple[float, float]:
    """Return the begin and the end of the time in which rates are counted.

    The ramp, one tenth of the time in which requests arrive, and the drain after the last arrival
    are left out. If all requests arrive at once, the window ends with the last answer.
    """
    first_s = min(log.timings.arrival_s for log in logs)
    last_s = max(log.timings.arrival_s for log in logs)
    ends_s = [log.timings.last_token_s for log in logs if log.outcome == COMPLETED]
    ended_s = max([last_s, *ends_s])
    if last_s - first_s <= min(_MAX_BURST_S, _MAX_BURST_SHARE * (ended_s - first_s)):
        return last_s, ended_s
    return first_s + _WARM_UP_SHARE * (last_s - first_s), last_s


def latency_rows(report: RunReport) -> list[tuple[str, ...]]:
    """Return the rows of a table of a run's latencies in milliseconds, with its headings."""
    rows = [("", "MEAN MS", *(f"P{number}" for number in PERCENTILES))]
    for name, latency in report.latencies.items():
        percentiles = [latency.percentiles.get(f"p{number}") for number in PERCENTILES]
        cells = ["–" if p is None else format_ms(p.value) for p in percentiles]
        rows.append((name.upper(), format_ms(latency.mean), *cells))
    return rows


def describe_rates(report: RunReport, *, is_open: bool = True) -> str:
    """Return a sentence with a run's rates of requests and tokens.

    A closed loop (not `is_open`) has no rate of arrivals.
    """
    rate = f"{report.requests_per_s:.3g} requests/s"
    if report.offered_per_s and is_open:  # not all at once
        rate += f" of {report.offered_per_s:.3g} that arrive"
    if report.requests_per_s:
        rate += f" ({60 * report.requests_per_s:,.3g} per minute)"
    else:
        completed, duration_s = report.num_completed, report.duration_s
        arrivals = f" ({report.offered_per_s:.3g} per second)" if is_open else ""
        rate = (
            f"No request ends while others arrive{arrivals}; all of them take {duration_s:.3g} s, "
            f"{completed / duration_s:.3g} requests/s. While they arrive"
        )
    return (
        f"{rate}, {report.output_per_s:,.0f} output and {report.input_per_s:,.0f} input tokens/s; "
        f"{report.concurrency:,.1f} requests in progress, "
        f"{report.output_per_user:,.1f} tokens/s each."
    )


class _Window:
    """Counts the tokens and the ended requests of a run between two times.

    A request's tokens after its first are assumed to be evenly spaced in time.
    """

    def __init__(self, logs: Sequence[RequestLog], begin_s: float, end_s: float) -> None:
        self.begin_s = begin_s
        self.end_s = end_s
        self.seconds = max(end_s - begin_s, 1e-9)
        self._sent = np.array([log.sent_s for log in logs])
        self._first = np.array([log.timings.first_token_s for log in logs])
        self._last = np.array([log.timings.last_token_s for log in logs])
        num_further = np.array([log.num_output for log in logs]) - 1
        has_first_token = self._contains(self._first)
        self.num_ended = self.count_ended(logs)
        num_prompt = np.array([log.num_prompt for log in logs])
        self.prompt_tokens = float(num_prompt[has_first_token].sum())
        decoding_s = _overlap_s(self._first, self._last, begin_s, end_s)
        further_tokens = num_further * decoding_s / np.maximum(self._last - self._first, 1e-12)
        self.output_tokens = float(has_first_token.sum() + further_tokens.sum())

    def count_ended(self, logs: Sequence[RequestLog]) -> int:
        """Return the number of requests that ended in this window of the run."""
        return int(self._contains(np.array([log.timings.last_token_s for log in logs])).sum())

    @property
    def is_growing(self) -> bool:
        """Whether the window's last third has many more requests in progress than its first."""
        return self.concurrency(2 / 3, 1.0) > _MIN_GROWTH_RATIO * self.concurrency(0.0, 1 / 3)

    def concurrency(self, first: float = 0.0, last: float = 1.0) -> float:
        """Return the mean number of requests in progress in a part of the window.

        The part lasts from `first` to `last`, which are shares of the window.
        """
        begin_s = self.begin_s + first * self.seconds
        end_s = self.begin_s + last * self.seconds
        busy_s = _overlap_s(self._sent, self._last, begin_s, end_s).sum()
        return float(busy_s) / (end_s - begin_s)

    def _contains(self, times: np.ndarray) -> np.ndarray:
        return (times > self.begin_s) & (times <= self.end_s)


def _overlap_s(first: np.ndarray, last: np.ndarray, begin_s: float, end_s: float) -> np.ndarray:
    """Return, for each interval from `first` to `last`, its seconds within `begin_s` to `end_s`."""
    seconds: np.ndarray = np.minimum(last, end_s) - np.maximum(first, begin_s)
    return seconds.clip(0.0)


def _latencies(logs: Sequence[RequestLog]) -> dict[str, LatencyStatistics]:
    columns: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for log in logs:
        for name, value in log.latencies.items():
            if value is not None:
                columns[name].append(value)
    return {name: _latency(np.sort(values)) for name, values in columns.items() if values}


def _latency(ordered: np.ndarray) -> LatencyStatistics:
    percentiles = {}
    for number in PERCENTILES:
        if number < 99 or len(ordered) >= MIN_P99_SAMPLES:
            percentiles[f"p{number}"] = _percentile(ordered, number / 100)
    return LatencyStatistics(len(ordered), float(ordered.mean()), percentiles)


def _percentile(ordered: np.ndarray, share: float) -> Percentile:
    count = len(ordered)
    spread = 1.96 * math.sqrt(count * share * (1 - share))  # of the rank, by a normal distribution
    low, high = math.floor(count * share - spread), math.ceil(count * share + spread)
    low_value, high_value = (float(ordered[min(max(rank, 0), count - 1)]) for rank in (low, high))
    return Percentile(float(np.quantile(ordered, share)), low_value, high_value)
