"""Packings of replicas cost as little as the cheapest one, which is found by trying all."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from twostroke.lab.planner import find_device
from twostroke.lab.planner.packing import Demand, Packer
from twostroke.lab.planner.replicas import TIME_UNITS, DeviceGroup, PlannedReplica

pytest.importorskip("highspy", reason="the extra [plan] is not installed")

LOADS = (1.0, 1.0)
PRICES = (2.0, 3.0)
HIGH_PRICE = 1e4


def group(usd):
    return DeviceGroup(find_device("L4"), 1, 100.0, usd, f"{usd} $")


def replica(model, share, memory, rate):
    return PlannedReplica(
        model=model,
        weights="int8",
        streams=1,
        time_units=share,
        memory_bytes=memory,
        requests_per_s=rate,
        ttft_s=0.1,
        tpot_s=0.1,
        bound="load",
    )


def random_options(rng):
    """Return device groups with two replicas of each model, which serve all or part of its load."""
    options = []
    for usd in PRICES:
        replicas = []
        for model in range(len(LOADS)):
            for share in sorted(rng.integers(6, TIME_UNITS + 1, 2).tolist()):
                rate = min(1.0, share / TIME_UNITS * usd * float(rng.uniform(0.3, 0.7)))
                replicas.append(replica(model, share, 20.0 + share, rate))
        options.append((group(usd), replicas))
    return options


def cheapest(options):
    """Return the lowest price of device groups that serve all loads, by trying all."""
    patterns = []
    for group, replicas in options:
        each = [
            [None, *(candidate for candidate in replicas if candidate.model == model)]
            for model in range(2)
        ]
        for pair in product(*each):
            members = [candidate for candidate in pair if candidate is not None]
            fits = sum(candidate.memory_bytes for candidate in members) <= group.memory_bytes
            if (
                members
                and fits
                and sum(candidate.time_units for candidate in members) <= TIME_UNITS
            ):
                rates = [sum(o.requests_per_s for o in members if o.model == m) for m in range(2)]
                patterns.append((group.usd_per_hour, *rates))
    usd, *rates = np.array(patterns).T
    carried = [(0.0, 0.0, 0.0)]
    best = np.inf
    while carried:  # one more group at a time
        carried = sorted({
            (cost + usd[n], min(1, a + rates[0][n]), min(1, b + rates[1][n]))
            for cost, a, b in carried
            for n in range(len(usd))
        })  # fmt: skip
        best = min([best, *(cost for cost, a, b in carried if min(a, b) > 1 - 1e-9)])
        carried = [candidate for candidate in carried if candidate[0] < best]
    return best


def test_the_packing_is_the_cheapest_and_no_packing_costs_less_than_the_bound():
    rng = np.random.default_rng(5)
    for _ in range(12):
        options = random_options(rng)
        packed = Packer(options).pack(Demand(LOADS, (HIGH_PRICE, HIGH_PRICE), {}))
        min_usd = cheapest(options)
        assert packed.bound <= min_usd + 1e-6
        assert packed.usd_per_hour == pytest.approx(min_usd, rel=0.005)


def test_the_bound_counts_whole_replicas():
    options = [(group(2.0), [replica(0, TIME_UNITS, 50.0, 5 / 6)])]
    demand = Demand((1.0,), (HIGH_PRICE,), {})
    packed = Packer(options).pack(demand)
    assert packed.usd_per_hour == pytest.approx(4)
    assert packed.bound == pytest.approx(4)
    assert packed.load_prices == pytest.approx([2.4])  # of what carries much more load
    short = Packer(options).pack(Demand((1.0,), (HIGH_PRICE,), {"2.0 $": 1}))
    assert not short.carries(demand)
    assert short.missing == pytest.approx([1 / 6])
