"""Counts of an engine: histograms, inter-token latencies, and sums over recent seconds."""

from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING

import pytest

from support.engines import tiny_client
from support.waiting import wait_for
from twostroke.core.request import FinishReason
from twostroke.core.sampling import SamplingParams
from twostroke.engine.client import Caller
from twostroke.engine.counters import (
    MAX_SECONDS,
    TIME_BOUNDS_S,
    Histogram,
    ServiceCounter,
    SumHistory,
)

if TYPE_CHECKING:
    from pathlib import Path

_PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


def test_percentiles_are_close_to_those_of_the_values() -> None:
    rng = random.Random(3)
    values = [rng.lognormvariate(-3, 1.5) for _ in range(5000)]
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    result = histogram.read()
    exact = statistics.quantiles(values, n=100)
    assert result.count == 5000
    assert result.mean == pytest.approx(statistics.fmean(values))
    for percent in (10, 50, 90, 99):
        assert result.percentile(percent / 100) == pytest.approx(exact[percent - 1], rel=0.07)


def test_counts_that_stay_are_kept_once() -> None:
    """Histograms that have not changed are shared by the snapshots of all seconds."""
    histogram = Histogram()
    histogram.observe(1.0)
    first = histogram.read()
    assert histogram.read() is first
    histogram.observe(1.0)
    assert (first.count, histogram.read().count) == (1, 2)


def test_values_beyond_the_bounds_are_counted_too() -> None:
    histogram = Histogram()
    histogram.observe(0.0)
    histogram.observe(1e9)
    result = histogram.read()
    assert result.count == 2
    assert result.percentile(1) == TIME_BOUNDS_S[-1]
    assert Histogram().read().percentile(0.5) is None
    assert Histogram().read().mean is None


def test_coarser_buckets_have_the_sums_of_finer_ones() -> None:
    histogram = Histogram()
    for value in (0.001, 0.002, 0.0025, 0.3, 0.25):
        histogram.observe(value)
    coarse = dict(histogram.read().cumulative((0.001, 0.0025, 0.25, 1.0)))
    assert coarse == {0.001: 1, 0.0025: 3, 0.25: 4, 1.0: 5}


def test_the_difference_of_two_distributions_counts_between_them() -> None:
    histogram = Histogram()
    histogram.observe(0.5)
    early = histogram.read()
    histogram.observe(0.1, 3)
    difference = histogram.read() - early
    assert (difference.count, difference.sum) == (3, pytest.approx(0.3))


def test_gaps_of_a_step_are_counted_together() -> None:
    counter = ServiceCounter()
    counter.gaps += [1.0, 1.0, 1.0]
    counter.count_gaps(1.5)
    counter.gaps += [1.5, 1.0, 1.5]
    counter.count_gaps(2.0)
    result = counter.read().latencies["itl"]
    assert result.count == 6
    assert result.sum == pytest.approx(3 * 0.5 + 2 * 0.5 + 1.0)
    assert not counter.gaps


def test_each_class_of_service_is_counted_separately(tmp_path: Path) -> None:
    with tiny_client(tmp_path) as (client, _):
        client.generate([5] * 20, _PARAMS, Caller(service_tier="flex")).wait()
        client.generate([7] * 20, _PARAMS).wait()
        wait_for(lambda: client.loop.snapshot().services["default"].answers == 1)
        services = client.loop.snapshot().services
    for service_tier, count in (("default", 1), ("flex", 1), ("priority", 0)):
        totals = services[service_tier]
        assert totals.prompt_tokens == 20 * count
        assert totals.completion_tokens == 5 * count
        assert totals.ends == ({FinishReason.LENGTH: 1} if count else {})
        counts = {name: latency.count for name, latency in totals.latencies.items()}
        assert counts == dict.fromkeys(("queue", "ttft", "tpot", "e2e"), count) | {"itl": 4 * count}


def test_answers_of_one_token_have_no_time_per_token(tmp_path: Path) -> None:
    with tiny_client(tmp_path) as (client, _):
        client.generate([5], SamplingParams(max_tokens=1)).wait()
        wait_for(lambda: client.loop.snapshot().services["default"].answers == 1)
        latencies = client.loop.snapshot().services["default"].latencies
    assert latencies["tpot"].count == latencies["itl"].count == 0
    assert latencies["e2e"].count == latencies["ttft"].count == 1


def test_cancelled_answers_are_counted_as_cancelled(tmp_path: Path) -> None:
    with tiny_client(tmp_path) as (client, backend):
        backend.gate.clear()
        generation = client.generate([5], _PARAMS)
        generation.cancel()
        backend.gate.set()
        wait_for(
            lambda: (
                client.loop.snapshot().scheduler.num_running
                + client.loop.snapshot().scheduler.num_waiting
                == 0
            )
        )
        totals = client.loop.snapshot().services["default"]
    assert totals.ends == {FinishReason.CANCEL: 1}
    assert totals.answers == 0
    assert totals.latencies["e2e"].count == 0


def test_the_last_seconds_are_those_before_this_one() -> None:
    now, sums = [10.0], [0]
    seconds = SumHistory(lambda: sums[0], clock=lambda: now[0])

    def count(at_s: float, much: int) -> None:
        now[0] = at_s
        seconds.advance(at_s)
        sums[0] += much

    count(10.5, 1)
    count(11.2, 10)
    count(11.9, 100)
    count(14.0, 1000)
    for at_s, max_seconds, first, last, length in (
        (11.9, 10, 0, 1, 1),
        (14.5, 10, 0, 111, 4),
        (14.5, 2, 111, 111, 2),
        (15.0, 1, 111, 1111, 1),
        (15.5, 4, 1, 1111, 4),
        (16.0, 1, 1111, 1111, 1),
        (90.0, 60, 1111, 1111, 60),
    ):
        now[0] = at_s
        span = seconds.span(max_seconds)
        assert (span.first, span.last, span.seconds) == (first, last, length), (at_s, max_seconds)


def test_only_the_last_seconds_are_remembered() -> None:
    now, sums = [0.0], [0]
    seconds = SumHistory(lambda: sums[0], clock=lambda: now[0])
    for second in range(500):
        now[0] = float(second)
        seconds.advance(now[0])
        sums[0] += 1
    span = seconds.span(60)
    assert (span.last - span.first, span.seconds) == (60, 60)
    assert len(seconds._marks) < MAX_SECONDS + 10
