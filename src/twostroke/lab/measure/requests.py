"""What happened to the requests of a run, measured or simulated, and the figures that follow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen, check_range
from twostroke.engine.output import Timings  # noqa: TC001 - msgspec reads it
from twostroke.lab.measure.report_text import format_ms

if TYPE_CHECKING:
    from collections.abc import Sequence

COMPLETED, REFUSED, FAILED = "completed", "refused", "failed"
LATENCIES: Final = ("queue", "ttft", "tpot", "e2e")
PERCENTILES: Final = (50, 90, 95, 99)
_RAMP: Final = 0.1  # of the time in which requests arrive; figures a second leave it out
_GROWTH: Final = 2.0  # of the requests at work, from the first to the last third of the window
_KEPT_UP: Final = 0.9  # of the arrivals that must end for a load to be carried
_FOR_GROWTH: Final = 20  # arrivals, of which fewer say nothing
_FOR_P99: Final = 500  # samples


class RequestLog(Frozen):
    """One request of a run, in seconds since its start.

    In `timings`, `arrival_s` is when the request was scheduled: a client that is late is not
    hidden. `sent_s` is when it was sent. `started_s` is 0 where only the client was watched.
    `outcome` is one of `COMPLETED`, `REFUSED` and `FAILED`; others than the first have no times.
    """

    timings: Timings
    sent_s: float
    num_prompt: int
    num_output: int
    num_cached: int = 0
    outcome: str = COMPLETED

    @property
    def latencies(self) -> dict[str, float | None]:
        """The times of `LATENCIES`; None for what does not apply or was not seen."""
        one = self.timings
        return {
            "queue": one.queue_s if one.started_s else None,
            "ttft": one.ttft_s,
            "tpot": one.tpot_s(self.num_output),
            "e2e": one.e2e_s,
        }


class Objectives(Frozen):
    """Most seconds that a request may take; None for no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        check_range(self, "ttft_s", "tpot_s", high=1e9)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self.ttft_s is not None or self.tpot_s is not None

    def are_met(self, log: RequestLog) -> bool:
        """Whether a request met them; one that did not complete never does."""
        if log.outcome != COMPLETED:
            return False
        taken, limits = log.latencies, {"ttft": self.ttft_s, "tpot": self.tpot_s}
        return all((taken[name] or 0.0) <= (limit or math.inf) for name, limit in limits.items())


class Percentile(Frozen):
    """A percentile of a sample, with the 95% interval that its order statistics give."""

    value: float
    low: float
    high: float


class Latency(Frozen):
    """Seconds of one latency; percentiles by name, p99 only from 500 samples on."""

    count: int
    mean: float
    percentiles: dict[str, Percentile]


class RunReport(Frozen):
    """The figures of a run.

    Rates are counted by time stamp in the window from a tenth of the arrivals' time to the last
    arrival. `concurrency` is the mean number of requests at work in it; `is_growing` says that
    this number grew and fewer requests ended than arrived: the load is more than was carried.
    `good_share` and `good_per_s` are None without objectives; requests that did not complete are
    bad. `lateness_p99_s` is how late the client sent requests.
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
    latencies: dict[str, Latency]
    good_share: float | None = None
    good_per_s: float | None = None

    @property
    def output_per_user(self) -> float:
        """Output tokens a second of each request at work."""
        return self.output_per_s / self.concurrency if self.concurrency else 0.0


def make_report(logs: Sequence[RequestLog], objectives: Objectives) -> RunReport:
    """Return the figures of at least one request."""
    done = [log for log in logs if log.outcome == COMPLETED]
    scheduled = np.array([log.timings.arrival_s for log in logs])
    first_s, last_s = float(scheduled.min()), float(scheduled.max())
    ended_s = max([last_s, *(log.timings.last_token_s for log in done)])
    begin_s = first_s + _RAMP * (last_s - first_s)
    window = _Window(done, begin_s, last_s if last_s > begin_s else ended_s)
    arrived = scheduled[(scheduled > begin_s) & (scheduled <= window.end_s)]
    offered_per_s = len(arrived) / window.seconds
    good = [log for log in logs if objectives.are_met(log)] if objectives else None
    num_prompt = sum(log.num_prompt for log in done)
    late = [log.sent_s - log.timings.arrival_s for log in logs]
    return RunReport(
        num_requests=len(logs),
        num_completed=len(done),
        num_refused=sum(log.outcome == REFUSED for log in logs),
        num_failed=sum(log.outcome == FAILED for log in logs),
        duration_s=ended_s - first_s,
        offered_per_s=offered_per_s,
        requests_per_s=window.ended / window.seconds,
        input_per_s=window.prompt_tokens / window.seconds,
        output_per_s=window.output_tokens / window.seconds,
        concurrency=window.at_work(),
        is_growing=len(arrived) >= _FOR_GROWTH
        and window.is_growing
        and window.ended < _KEPT_UP * len(arrived),
        hit_rate=sum(log.num_cached for log in done) / num_prompt if num_prompt else 0.0,
        lateness_p99_s=float(np.quantile(late, 0.99)),
        latencies=_latencies(done),
        good_share=None if good is None else len(good) / len(logs),
        good_per_s=None if good is None else window.num_ended(good) / window.seconds,
    )


def latency_rows(report: RunReport) -> list[tuple[str, ...]]:
    """Return a table of the latencies in milliseconds, its headings first."""
    rows = [("", "MEAN MS", *(f"P{one}" for one in PERCENTILES))]
    for name, one in report.latencies.items():
        found = [one.percentiles.get(f"p{number}") for number in PERCENTILES]
        cells = ["–" if value is None else format_ms(value.value) for value in found]
        rows.append((name.upper(), format_ms(one.mean), *cells))
    return rows


class _Window:
    """Counts what falls between two times. Tokens after the first are spread evenly."""

    def __init__(self, done: Sequence[RequestLog], begin_s: float, end_s: float) -> None:
        self.begin_s, self.end_s = begin_s, end_s
        self.seconds = max(end_s - begin_s, 1e-9)
        self._sent = np.array([log.sent_s for log in done])
        self._first = np.array([log.timings.first_token_s for log in done])
        self._last = np.array([log.timings.last_token_s for log in done])
        more = np.array([log.num_output for log in done]) - 1
        has_begun = self._holds(self._first)
        self.ended = self.num_ended(done)
        self.prompt_tokens = float(np.array([log.num_prompt for log in done])[has_begun].sum())
        inside = _overlap(self._first, self._last, begin_s, end_s)
        spread = more * inside / np.maximum(self._last - self._first, 1e-12)
        self.output_tokens = float(has_begun.sum() + spread.sum())

    def num_ended(self, logs: Sequence[RequestLog]) -> int:
        """Return how many of these ended in the window."""
        return int(self._holds(np.array([log.timings.last_token_s for log in logs])).sum())

    @property
    def is_growing(self) -> bool:
        """Whether many more requests were at work in its last third than in its first."""
        return self.at_work(2 / 3, 1.0) > _GROWTH * self.at_work(0.0, 1 / 3)

    def at_work(self, first: float = 0.0, last: float = 1.0) -> float:
        """Return the mean number of requests at work between two shares of the window."""
        begin_s = self.begin_s + first * self.seconds
        end_s = self.begin_s + last * self.seconds
        busy_s = _overlap(self._sent, self._last, begin_s, end_s).sum()
        return float(busy_s) / (end_s - begin_s)

    def _holds(self, times: np.ndarray) -> np.ndarray:
        return (times > self.begin_s) & (times <= self.end_s)


def _overlap(first: np.ndarray, last: np.ndarray, begin_s: float, end_s: float) -> np.ndarray:
    inside: np.ndarray = np.minimum(last, end_s) - np.maximum(first, begin_s)
    return inside.clip(0.0)


def _latencies(done: Sequence[RequestLog]) -> dict[str, Latency]:
    columns: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for log in done:
        for name, value in log.latencies.items():
            if value is not None:
                columns[name].append(value)
    return {name: _latency(np.sort(values)) for name, values in columns.items() if values}


def _latency(ordered: np.ndarray) -> Latency:
    percentiles = {}
    for number in PERCENTILES:
        if number < 99 or len(ordered) >= _FOR_P99:
            percentiles[f"p{number}"] = _percentile(ordered, number / 100)
    return Latency(len(ordered), float(ordered.mean()), percentiles)


def _percentile(ordered: np.ndarray, share: float) -> Percentile:
    count = len(ordered)
    spread = 1.96 * math.sqrt(count * share * (1 - share))  # of the rank, nearly normal
    low, high = math.floor(count * share - spread), math.ceil(count * share + spread)
    ends = (float(ordered[min(max(one, 0), count - 1)]) for one in (low, high))
    return Percentile(float(np.quantile(ordered, share)), *ends)
