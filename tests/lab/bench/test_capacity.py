"""The search for the goodput capacity, on made-up servers, and on a small one."""

from __future__ import annotations

import asyncio
import random

import pytest

from support.fake_endpoint import EndpointBehavior, FakeEndpoint
from twostroke.lab.bench.benchmark import BenchLoad, Benchmark
from twostroke.lab.bench.capacity import (
    CAPACITY_FOUND,
    CLIENT_LIMITED,
    INTERRUPTED,
    MAX_RATE_RATIO,
    OBJECTIVES_MISSED,
    TOO_FEW_REQUESTS,
    CapacitySearch,
    LoadPoint,
    SearchInterruptedError,
    estimate_share,
)
from twostroke.lab.bench.request_form import RequestForm
from twostroke.lab.bench.runner import RunLimits
from twostroke.lab.bench.sweep import BenchSweep, describe_capacity
from twostroke.lab.measure.requests import Objectives
from twostroke.lab.simulator.load import SyntheticWorkload


def search(
    capacity, *, start=None, noise=0.0, count=1000, client_rate=1e9, stop_after=99, e2e_s=1.0
):
    """Search on a server whose requests are good below a rate; return the result and the rates."""
    rng, rates = random.Random(3), []

    async def measure(rate):
        rates.append(rate)
        if len(rates) > stop_after:
            raise SearchInterruptedError
        good = 1.0 if (rate or 0.0) <= capacity else 0.5
        good = min(1.0, max(0.0, good + rng.gauss(0, noise)))
        return LoadPoint(
            rate=rate,
            num_clients=None if rate else 1,
            num_requests=count,
            mean_e2e_s=e2e_s,
            good=estimate_share([index < good * count for index in range(count)]),
            is_client_limited=(rate or 0.0) > client_rate,
        )

    return asyncio.run(CapacitySearch(measure, 0.9).run(start)), rates


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.3, 60.0])
@pytest.mark.parametrize("start", [None, 5.0])
def test_the_capacity_is_found_between_two_measured_rates(capacity, start):
    result, rates = search(capacity, start=start)
    assert result.end == CAPACITY_FOUND
    assert result.rate <= capacity <= result.rate * MAX_RATE_RATIO
    assert result.low <= capacity <= result.high
    assert rates[0] is None, "one request at a time is first"
    assert rates[1] == (start or 1.0)
    assert len(rates) < 20


def test_noise_widens_the_interval_and_keeps_the_capacity_in_it():
    for capacity in (2.2, 3.7):
        result, _ = search(capacity, noise=0.03, count=200)
        assert result.low <= capacity <= (result.high or 1e9)


def test_objectives_that_one_request_misses_end_the_search_at_once():
    result, rates = search(-1.0)
    assert (result.end, result.rate, rates) == (OBJECTIVES_MISSED, None, [None])


def test_objectives_that_any_rate_misses_end_the_search():
    result, rates = search(0.001)
    assert (result.end, result.rate) == (OBJECTIVES_MISSED, None)
    assert len(rates) < 12


def test_a_client_that_is_the_limit_gives_a_lower_bound():
    result, _ = search(50.0, client_rate=20.0)
    assert (result.end, result.rate) == (CLIENT_LIMITED, 32.0)
    result, _ = search(1e6, client_rate=20.0)
    assert result.end == TOO_FEW_REQUESTS, "a late client does not end a search that goes well"


def test_a_late_client_that_makes_requests_bad_is_named():
    async def measure(rate):
        is_late = (rate or 0.0) > 20
        good = estimate_share([not is_late] * 100)
        return LoadPoint(rate, None, 100_000, 1.0, good, is_client_limited=is_late)

    result = asyncio.run(CapacitySearch(measure, 0.9).run())
    assert (result.end, result.rate, result.high) == (CLIENT_LIMITED, 16.0, None)


def test_an_interrupted_search_keeps_what_it_knows():
    result, _ = search(6.0, stop_after=4)
    assert (result.end, result.rate) == (INTERRUPTED, 4.0)


def test_shares_of_requests_that_fail_together_have_wider_intervals():
    rng = random.Random(1)
    apart = [rng.random() < 0.9 for _ in range(400)]
    together = [(index // 40) % 10 != 3 for index in range(400)]
    widths = []
    for values in (apart, together):
        estimate = estimate_share(values)
        assert estimate.low < estimate.value < estimate.high
        widths.append(estimate.high - estimate.low)
    assert widths[1] > 2 * widths[0]
    assert estimate_share([True] * 100).low == pytest.approx(0.963, abs=0.001)


class LimitedEndpoint(FakeEndpoint):
    """A server that answers one request after the other."""

    async def _stream(self, writer, body):
        if not hasattr(self, "lock"):
            self.lock = asyncio.Lock()
        async with self.lock:
            return await super()._stream(writer, body)


def run_sweep(server, objectives, rates=None, count=60, **fields):
    def load_at(rate):
        workload = SyntheticWorkload(rate or 1.0, count=count, prompt=20, output=4).load(0)
        workload = workload.changed(speed=(rate or 1.0) / workload.rate)
        limits = RunLimits(num_clients=None if rate else 1)
        return BenchLoad(workload=workload, limits=limits)

    benchmark = Benchmark(server.url, RequestForm(), key=None)
    watch = fields.get("watch", lambda *_: None)
    sweep = BenchSweep(benchmark, objectives, 0.9, watch)
    if rates:
        asyncio.run(sweep.measure_loads([load_at(rate) for rate in rates]))
    else:
        asyncio.run(sweep.search(load_at, None))
    return sweep


def test_a_server_with_a_known_capacity_is_measured():
    server = LimitedEndpoint(EndpointBehavior(step_s=0.004))
    try:  # a request takes 16 ms or more, so 60 a second are the most
        sweep = run_sweep(server, Objectives(ttft_s=0.15), count=80)
        assert sweep.capacity.end == CAPACITY_FOUND
        assert 15 < sweep.capacity.rate < 70
        rates = [run.point.rate for run in sweep.runs if run.point.rate]
        assert max(rates) > sweep.capacity.rate
        assert any(run.result.facts.is_hopeless for run in sweep.runs)
        assert "Goodput capacity: " in describe_capacity(
            sweep.capacity, sweep.runs, Objectives(ttft_s=0.15)
        )
        sweep = run_sweep(server, Objectives(ttft_s=1e-6))
        assert len(sweep.runs) == 1
        text = describe_capacity(sweep.capacity, sweep.runs, Objectives(ttft_s=1e-6))
        assert "even with one request at a time, only 0% of the requests meet" in text
        assert "P50 of TTFT is" in text
    finally:
        server.close()


def test_a_list_of_rates_is_measured_in_its_order():
    server = FakeEndpoint(EndpointBehavior(step_s=0.001))
    try:
        sweep = run_sweep(server, Objectives(), rates=(100.0, 200.0), count=30)
    finally:
        server.close()
    assert sweep.runs[0].point.rate < sweep.runs[1].point.rate
    assert sweep.capacity is None
    assert not sweep.is_interrupted
    assert all(run.result.report.run.num_completed == 30 for run in sweep.runs)
