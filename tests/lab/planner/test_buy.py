"""Costs of hosting compared with prices of APIs, checked with sums made by hand."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from support.configs import write_config
from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.lab.planner import Question, find_device, load_planned_model
from twostroke.lab.planner.buy import (
    DAYS_PER_MONTH,
    HOUR_WEIGHTS,
    CostInputs,
    Hosting,
    Traffic,
    compare_costs,
)
from twostroke.lab.planner.prices import ApiPrice, find_price, load_prices

PRICE = ApiPrice(
    model="one", input_usd_per_1m=2.0, output_usd_per_1m=8.0, source_date="2026-01",
    cached_input_usd_per_1m=0.5, batch_share=0.5,
)  # fmt: skip


@pytest.fixture
def case(tmp_path):
    path = write_config(tmp_path / "8b.json", "8B")
    question = Question(prompt=1000, output=100, mfu=0.5, mbu=0.7)
    device = find_device("H100-SXM")
    return CostInputs(load_planned_model(path), device, question, Traffic(1e5), Hosting())


def test_a_request_costs_what_its_tokens_do():
    assert PRICE.hour_usd(0, 1000, prompt=1000, cached=0, output=100) == pytest.approx(
        1000 * (2000 + 800) / 1e6
    )
    # A fifth is written once and read 999 times.
    cached = 1000 * (800 * 2 + 800) / 1e6 + 200 * (2 + 999 * 0.5) / 1e6
    assert PRICE.hour_usd(0, 1000, prompt=1000, cached=200, output=100) == pytest.approx(cached)
    long = replace(PRICE, tier_tokens=500, tier_input_usd_per_1m=4.0, tier_output_usd_per_1m=16.0)
    assert long.hour_usd(0, 1, prompt=1000, cached=0, output=100) == pytest.approx(5600e-6)
    assert long.hour_usd(0, 1, prompt=500, cached=0, output=100) == pytest.approx(1800e-6)
    peak = replace(PRICE, peak_hours_utc="1-4 6-10", peak_factor=2.0)
    usd = [
        peak.hour_usd(hour, 1, prompt=1000, cached=0, output=100) / 2800e-6 for hour in range(24)
    ]
    assert usd == pytest.approx([1, 2, 2, 2, 1, 1, 2, 2, 2, 2, *[1] * 14])


def test_a_prefix_is_written_and_read_as_in_the_worked_example():
    """2,000 tokens, 100 calls an hour, 3 $ for 1M: 0.0669 $ with a cache, 0.60 $ without."""
    price = replace(PRICE, input_usd_per_1m=3.0, cached_input_usd_per_1m=0.3,
                    cache_write_usd_per_1m=3.75)  # fmt: skip
    assert price.hour_usd(0, 100, prompt=2000, cached=2000, output=0) == pytest.approx(
        0.0669, abs=5e-5
    )
    assert price.hour_usd(0, 100, prompt=2000, cached=0, output=0) == pytest.approx(0.60)


def test_costs_of_a_month_are_those_of_a_count_by_hand(case):
    comparison = compare_costs(case, [PRICE], "2026-02")
    (api,) = comparison.comparisons
    assert api.usd == pytest.approx(1e5 * 2800e-6 * DAYS_PER_MONTH)
    assert not api.is_stale
    assert comparison.costs.replicas == (2,) * 24  # one, and one to spare
    assert comparison.costs.usd == pytest.approx(2 * 24 * 2.69 * DAYS_PER_MONTH)
    assert api.saving_usd == pytest.approx(api.usd - comparison.costs.usd)
    assert api.break_even == pytest.approx(2 * 24 * 2.69 / 2800e-6, rel=1e-6)
    assert comparison.peak_availability == pytest.approx(1 - 0.01**2)
    waiting = replace(case, traffic=replace(case.traffic, batch=0.5))
    half = compare_costs(waiting, [PRICE], "2027-02")
    assert half.comparisons[0].usd == pytest.approx(0.75 * api.usd)
    assert half.comparisons[0].is_stale


def test_own_devices_and_power_are_counted_by_hand(case):
    hosting = Hosting(
        purchase_usd=30_000.0, lifetime_years=5.0, usd_per_kwh=0.15, pue=1.3, grams_per_kwh=380.0
    )
    costs = compare_costs(replace(case, hosting=hosting), [PRICE], "2026-02").costs
    # Two devices of 700 W, all hours of the month.
    assert costs.devices_usd == pytest.approx(2 * 30_000 / 60)
    assert costs.energy_kwh == pytest.approx(2 * 0.7 * 1.3 * 730.5)
    assert costs.energy_usd == pytest.approx(0.15 * costs.energy_kwh)
    assert costs.carbon_kg == pytest.approx(0.38 * costs.energy_kwh)
    assert costs.usd == pytest.approx(costs.devices_usd + costs.energy_usd)
    other = replace(case, hosting=replace(hosting, watts=1000.0, usd_per_kwh=0.0))
    other_costs = compare_costs(other, [PRICE], "2026-02").costs
    assert other_costs.energy_kwh == pytest.approx(costs.energy_kwh / 0.7)
    assert other_costs.energy_usd == 0
    rented = compare_costs(case, [PRICE], "2026-02")
    assert (rented.costs.energy_kwh, rented.costs.carbon_kg) == (None, None)
    swings = {
        name: {swing.name: swing for swing in compare_costs(c, [PRICE], "2026-02").swings}
        for name, c in (("own", replace(case, hosting=hosting)), ("rented", case))
    }
    assert swings["own"]["price of power"].spread == pytest.approx(0.4 * costs.energy_usd)
    assert swings["own"]["price of devices"].spread == pytest.approx(0.4 * costs.devices_usd)
    assert "price of power" not in swings["rented"]


def test_power_that_is_not_known_is_asked_for(case):
    device = replace(case.device, tdp_w=None)
    unknown = replace(case, device=device, hosting=Hosting(usd_per_kwh=0.1))
    with pytest.raises(UsageError, match="the power of H100-SXM is not known") as caught:
        compare_costs(unknown, [PRICE], "2026-02")
    assert caught.value.field == "watts"
    known = replace(unknown, hosting=Hosting(usd_per_kwh=0.1, watts=900.0))
    assert compare_costs(known, [PRICE], "2026-02").costs.energy_usd > 0


def test_hours_decide_the_replicas_and_waiting_requests_fill_them(case):
    busy = replace(case, traffic=Traffic(2e7, HOUR_WEIGHTS["office"]), hosting=Hosting(spare=0))
    fixed = compare_costs(busy, [PRICE], "2026-02").costs
    each = compare_costs(busy, [PRICE], "2026-02").replica.requests_per_s * 3600
    peak = max(busy.traffic.per_hour)
    assert fixed.replicas == (-int(-peak // each),) * 24
    scaled = compare_costs(
        replace(busy, hosting=Hosting(spare=0, scaled=True)), [PRICE], "2026-02"
    ).costs
    assert sum(scaled.replicas) < 0.7 * sum(fixed.replicas)
    assert max(scaled.replicas) == max(fixed.replicas)
    patient = replace(busy, traffic=replace(busy.traffic, batch=0.4))
    filled = compare_costs(patient, [PRICE], "2026-02").costs
    assert max(filled.replicas) == pytest.approx(0.6 * max(fixed.replicas), abs=1)
    assert sum(filled.replicas) * each >= busy.traffic.requests_per_day


def test_break_even_moves_with_growth_setup_and_every_input(case):
    hosting = Hosting(setup_usd=1000.0)
    soon = compare_costs(replace(case, hosting=hosting), [PRICE], "2026-02")
    saving = soon.comparisons[0].saving_usd
    assert soon.comparisons[0].months == -int(-1000 // saving)
    small = replace(case, traffic=Traffic(2e4, growth=0.1), hosting=hosting)
    later = compare_costs(small, [PRICE], "2026-02").comparisons[0]
    assert later.saving_usd < 0
    assert 8 < later.months < 20  # 2e4 x 1.1^9 is the break-even of 46,114
    cheap = compare_costs(
        case, [replace(PRICE, input_usd_per_1m=1e-4, output_usd_per_1m=1e-4)], "2026-02"
    )
    assert cheap.comparisons[0].break_even is None
    swings = {swing.name: swing for swing in soon.swings}
    assert swings["price of the API"].high_usd - saving == pytest.approx(
        0.2 * soon.comparisons[0].usd
    )
    assert swings["price of devices"].low_usd - saving == pytest.approx(
        0.2 * soon.costs.devices_usd
    )
    spreads = [swing.spread for swing in soon.swings]
    assert spreads == sorted(spreads, reverse=True)


def test_the_table_is_whole_and_wrong_prices_name_their_line(tmp_path):
    prices = load_prices()
    assert len(prices) >= 16
    assert all(1 <= int(price.source_date.split("-")[1]) <= 12 for price in prices.values())
    with pytest.raises(UsageError, match=r"Did you mean 'GPT-4\.1'"):
        find_price("GPT-4.2", prices)
    path, head = tmp_path / "mine.csv", "model,input_usd_per_1m,output_usd_per_1m,source_date\n"
    longer_head = head.replace("\n", ",batch_share,peak_hours_utc\n")
    path.write_text(head + "mine,1,2e1,2026-03\n")
    assert load_prices(path)["mine"].output_usd_per_1m == 20
    for text, words in (
        (head + "mine,1,2,2026-03\nother,x,2,2026-03\n", "line 3: .*input_usd_per_1m"),
        (head + "mine,1,2,lately\n", "line 2: "),
        (head.replace("model", "modell") + "mine,1,2,2026-03\n", "Did you mean 'model'"),
        (head + "mine,0,2,2026-03\n", "line 2: .*greater than 0"),
        (head + "mine,nan,2,2026-03\n", "line 2: input_usd_per_1m must be greater than 0"),
        (head + "mine,1,inf,2026-03\n", "line 2: output_usd_per_1m must be from 0 to 1,000,000"),
        (head + "mine,1,2,2026-99\n", "line 2: source_date must be a month such as 2026-07"),
        (head + "mine,1,2,2026-03,9\n", "line 2: there are more values than columns"),
        (head + "mine,1,2,2026-03\nmine,1,3,2026-03\n", "line 3: there is another line for"),
        (
            longer_head + "mine,1,2,2026-03,-0.5,\n",
            "line 2: batch_share must be from 0 to 1, got -0.5",
        ),
        (longer_head + "mine,1,2,2026-03,,22-2\n", "line 2: peak_hours_utc must be hours such as"),
        (longer_head + "mine,1,2,2026-03,,late\n", "line 2: peak_hours_utc must be hours such as"),
        (head, "has no prices"),
        (head + f"{'x' * 200_000},1,2,2026-03\n", "mine.csv, line 2: field larger than"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            load_prices(path)


def test_impossible_objectives_and_loads_are_refused(case):
    for other, words in (
        (replace(case, question=replace(case.question, tpot_s=1e-4)), "times the objective"),
        (replace(case, device=find_device("T4")), "does not fit"),
        (replace(case, device=find_device("MI325X")), "no price"),
    ):
        with pytest.raises(TwostrokeError, match=words):
            compare_costs(other, [PRICE], "2026-02")
    for fields in ({"requests_per_day": 0.0}, {"requests_per_day": 1.0, "batch": 2.0}):
        with pytest.raises(UsageError, match="must be"):
            Traffic(**fields)
