"""The report of a run: latencies with intervals, rates, goodput, failures."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.lab.bench.bootstrap import PooledValues, interval
from twostroke.lab.measure.report_text import format_ms
from twostroke.lab.measure.requests import (
    MIN_P99_SAMPLES,
    PERCENTILES,
    LatencyStatistics,
    Percentile,
    RunReport,
    make_report,
    steady_window,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.lab.bench.answers import MeasuredAnswer
    from twostroke.lab.measure.requests import Objectives

INTERVAL_LEVEL: Final = 0.95  # of the intervals
# The rows of the table, by the name of a latency. Times are from the scheduled time, unless the
# name says otherwise.
TITLES: Final = {
    "ttft": "TTFT",
    "server_ttft": "TTFT from sent",
    "content_ttft": "Time to publish",
    "tpot": "TPOT",
    "itl": "ITL",
    "itl_per_token": "ITL per token",
    "e2e": "E2E",
    "e2e_per_token": "E2E per token",
}


class BenchReport(Frozen):
    """The figures of a run.

    Attributes:
        run: rates, counts and latencies; latencies have the names in `TITLES`.
        tokens_per_chunk: the mean number of tokens in a chunk; 0 without chunks.
        failures: numbers of requests that failed, by the reason.
    """

    run: RunReport
    tokens_per_chunk: float
    failures: dict[str, int]


def make_bench_report(answers: Sequence[MeasuredAnswer], objectives: Objectives) -> BenchReport:
    """Return the figures of a run of at least one request."""
    logs = [answer.log for answer in answers]
    completed = [answer for answer in answers if answer.is_completed]
    latencies = {name: _statistics(values) for name, values in pooled_latencies(completed).items()}
    num_chunks = sum(len(answer.chunk_times_s) for answer in completed)
    num_output = sum(answer.log.num_output for answer in completed)
    return BenchReport(
        run=replace(
            make_report(logs, objectives),
            output_per_s=_output_per_s(answers),
            latencies=latencies,
        ),
        tokens_per_chunk=num_output / num_chunks if num_chunks else 0.0,
        failures=dict(Counter(answer.failure for answer in answers if answer.failure)),
    )


def pooled_latencies(completed: Sequence[MeasuredAnswer]) -> dict[str, PooledValues]:
    """Return the latencies of completed requests in seconds, by the names in `TITLES`.

    A latency that no request has is left out. If some answers begin with reasoning, `content_ttft`
    is the time to the first token after the reasoning.
    """
    columns: dict[str, tuple[list[float], list[int]]] = {name: ([], []) for name in TITLES}
    has_reasoning = any(answer.first_reasoning_s is not None for answer in completed)
    for owner, answer in enumerate(completed):
        for name, value in _latencies(answer, has_reasoning=has_reasoning).items():
            if value is not None:
                columns[name][0].append(value)
                columns[name][1].append(owner)
        gaps_s = np.diff(answer.chunk_times_s)
        tokens = answer.tokens_by_chunk[1:]
        columns["itl"][0].extend(gaps_s.tolist())
        columns["itl"][1].extend([owner] * len(gaps_s))
        for gap_s, count in zip(gaps_s.tolist(), tokens, strict=True):
            columns["itl_per_token"][0].append(gap_s / count if count else gap_s)
            columns["itl_per_token"][1].append(owner)
    return {name: PooledValues(*column) for name, column in columns.items() if column[0]}


def latency_table(report: BenchReport) -> list[tuple[str, ...]]:
    """Return the rows of the table of latencies in milliseconds, with its headings."""
    headings = ("MS", "MEAN", *(f"P{number}" for number in PERCENTILES))
    rows: list[tuple[str, ...]] = [headings]
    latencies = report.run.latencies
    for name, title in TITLES.items():
        if name not in latencies or (name == "itl_per_token" and report.tokens_per_chunk <= 1):
            continue
        statistics = latencies[name]
        percentiles = [statistics.percentiles.get(f"p{number}") for number in PERCENTILES]
        rows.append((title, format_ms(statistics.mean), *map(_cell, percentiles)))
    return rows


def _cell(percentile: Percentile | None) -> str:
    if percentile is None:
        return "–"
    value, low, high = map(format_ms, (percentile.value, percentile.low, percentile.high))
    if percentile.low == percentile.high:  # such as of a single request
        return value
    return f"{value} [{low}, {high}]"


def _latencies(answer: MeasuredAnswer, *, has_reasoning: bool) -> dict[str, float | None]:
    log, timings = answer.log, answer.log.timings
    content_ttft_s = None
    if has_reasoning and answer.first_content_s is not None:
        content_ttft_s = answer.first_content_s - timings.arrival_s
    return {
        "ttft": timings.ttft_s,
        "server_ttft": timings.first_token_s - log.sent_s,
        "content_ttft": content_ttft_s,
        "tpot": timings.tpot_s(log.num_output),
        "e2e": timings.e2e_s,
        "e2e_per_token": timings.e2e_s / log.num_output if log.num_output else None,
    }


def _statistics(values: PooledValues) -> LatencyStatistics:
    numbers = [number for number in PERCENTILES if number < 99 or len(values) >= MIN_P99_SAMPLES]
    shares = [number / 100 for number in numbers]
    resampled = values.resampled(shares)
    percentiles = {}
    for index, (number, value) in enumerate(zip(numbers, values.quantiles(shares), strict=True)):
        low, high = float(value), float(value)  # one request cannot be drawn in other ways
        if values.num_requests > 1:
            low, high = interval(resampled[:, index], INTERVAL_LEVEL)
        percentiles[f"p{number}"] = Percentile(
            value=float(value), low=min(low, float(value)), high=max(high, float(value))
        )
    return LatencyStatistics(len(values), values.mean, percentiles)


def _output_per_s(answers: Sequence[MeasuredAnswer]) -> float:
    """Return the output tokens per second in the steady window, by the time stamps of chunks.

    Only completed answers count, as in the number of requests in progress.
    """
    begin_s, end_s = steady_window([answer.log for answer in answers])
    num_tokens = sum(
        count
        for answer in answers
        if answer.is_completed
        for at_s, count in zip(answer.chunk_times_s, answer.tokens_by_chunk, strict=True)
        if begin_s < at_s <= end_s
    )
    return num_tokens / max(end_s - begin_s, 1e-9)
