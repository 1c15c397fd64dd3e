"""`twostroke usage`: sums, periods, and costs from a table of prices."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING

import pytest

from twostroke.server.auth import costs
from twostroke.server.auth import stored_keys as kept
from twostroke.server.auth.costs import CostOwner
from twostroke.server.auth.usage import Owner, add
from twostroke.server.storage import open_database

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Ran

    Cli = Callable[..., Ran]

PRICES = """
currency = "EUR"
[models.tiny]
input = 2.0
cached = 0.5
output = 10
batch_discount = 0.5
[models."org/other"]
input = 1
output = 1
"""


@pytest.fixture
def usage(cli: Cli, tmp_path: Path) -> Callable[..., Ran]:
    """Return a function that runs `twostroke usage` on the records of one key, and of no key."""
    folder = tmp_path / "records"
    with open_database(folder, writes=True, creates=True) as db:
        key, _ = kept.add(db, "app", "anna")
        for day in ("2026-11-24", "2026-11-25"):
            add(db, {Owner(day, key.id, "anna", "tiny", is_batch=False): [1, 1000, 400, 100]})
        add(db, {Owner("2026-11-25", key.id, "anna", "tiny", is_batch=True): [2, 1000, 400, 100]})
        add(db, {Owner("2026-11-25", "", "", "org/other", is_batch=False): [5, 10, 0, 20]})
    (tmp_path / "prices.toml").write_text(PRICES)
    return lambda *words: cli("usage", "--records", str(folder), *words)


def test_batches_are_apart_and_totals_add_up(usage: Callable[..., Ran]) -> None:
    lines = [line.split() for line in usage().out.splitlines()]
    assert lines[0][:4] == ["KEY", "NAME", "TENANT", "CLASS"]
    assert lines[1][:3] == ["-", "-", "-"]
    assert lines[2][1:] == ["app", "anna", "interactive", "2", "2,000", "800", "200"]
    assert lines[3][1:] == ["app", "anna", "batch", "2", "1,000", "400", "100"]
    assert lines[4] == ["total", "9", "3,010", "1,200", "320"]


def test_cost_is_by_model_cache_and_class(usage: Callable[..., Ran], tmp_path: Path) -> None:
    prices = str(tmp_path / "prices.toml")
    rows = json.loads(usage("--by", "tenant", "--prices", prices, "--json").out)
    each = (600 * 2.0 + 400 * 0.5 + 100 * 10) / 1e6
    costs = {(row["tenant"], row["batch"]): row["cost"] for row in rows}
    assert costs == {
        ("", False): 0.00003,
        ("anna", False): round(2 * each, 12),
        ("anna", True): round(each / 2, 12),
    }
    assert {row["currency"] for row in rows} == {"EUR"}
    assert "COST IN EUR" in usage("--prices", prices).out


def test_costs_are_added_before_they_are_rounded(usage: Callable[..., Ran], tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("[models.m]\ninput = 0.4\noutput = 1")
    owners = [Owner("2025-01-01", "", f"{i:04}", "m", is_batch=False) for i in range(1000)]
    with open_database(tmp_path / "records", writes=True) as db:
        add(db, {owner: [1, 1, 0, 0] for owner in owners})
    words = ("--until", "2025-01-01", "--prices", str(prices))
    for by in ("tenant", "day"):
        assert usage(*words, "--by", by).out.splitlines()[-1].split()[-1] == "0.0004"
    row = next(csv.DictReader(usage(*words, "--by", "tenant", "--csv").out.splitlines()))
    assert (row["cost"], row["currency"]) == ("0.0000004", "USD")


def test_days_are_a_span_with_both_ends(usage: Callable[..., Ran]) -> None:
    rows = list(csv.DictReader(usage("--by", "day", "--csv").out.splitlines()))
    assert [(row["day"], row["batch"], row["requests"]) for row in rows] == [
        ("2026-11-24", "0", "1"),
        ("2026-11-25", "0", "6"),
        ("2026-11-25", "1", "2"),
    ]
    ran = usage("--by", "model", "--since", "2026-11-25", "--until", "2026-11-25", "--csv")
    assert ran.out.splitlines() == [
        "model,batch,requests,input,cached,output",
        "org/other,0,5,10,0,20",
        "tiny,0,1,1000,400,100",
        "tiny,1,2,1000,400,100",
    ]
    assert usage("--since", "2026-11-26").out == "Nothing was used.\n"


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("[models.tiny]\ninput = 1\noutput = 1", "has no model 'org/other', which was used: add"),
        (
            "[models.tiny]\ninput = 1",
            "table at model 'tiny': Object missing required field `output`",
        ),
        ("[models.tiny]\ninput = 1\noutput = 1\ncache = 1", "unknown field `cache`"),
        ("[models.tiny]\ninput = -1\noutput = 1", "input must be from 0 to"),
        ("[models.tiny]\ninput = nan\noutput = 1", "input must be from 0 to"),
        ("[models.tiny\n", "is not a price table"),
        (f"a = {'[' * 5000}{']' * 5000}\n", "is not a price table"),
        ("\xff", "prices.toml is not a price table: it is not UTF-8."),
        (None, "'prices.toml' cannot be read: No such file"),
    ],
)
def test_wrong_price_table_is_one_sentence(
    usage: Callable[..., Ran], tmp_path: Path, table: str | None, sentence: str
) -> None:
    path = tmp_path / "prices.toml"
    path.unlink()
    if table is not None:
        path.write_text(table, "latin-1")
    ran = usage("--prices", str(path), "--csv")
    assert (ran.code in {2, 4}, ran.out) == (True, "")
    assert sentence in ran.err


def test_wrong_options_are_refused(usage: Callable[..., Ran], cli: Cli, tmp_path: Path) -> None:
    assert "'today' is not a day" in usage("--since", "today").err
    assert "either --csv or --json" in usage("--csv", "--json").err
    assert "'keys' is not one of" in usage("--by", "keys").err
    refused_run = usage("--since", "2026-11-30", "--until", "2026-11-01")
    assert "--since 2026-11-30 is later than --until 2026-11-01" in refused_run.err
    ran = cli("usage", "--records", str(tmp_path))
    assert (ran.code, ran.out) == (1, "")
    assert "There is no database" in ran.err


@pytest.fixture
def spending(cli: Cli, tmp_path: Path) -> Callable[..., Ran]:
    """Return a function that runs `twostroke usage` on the records of a router with upstreams."""
    folder = tmp_path / "records"
    with open_database(folder, writes=True, creates=True) as db:
        for day in ("2026-11-24", "2026-11-25"):
            hours = CostOwner(day, "here", "", "USD")
            replicas = CostOwner(day, "here", "tiny", "USD")
            vendor = CostOwner(day, "vendor", "big-1", "USD")
            costs.add(db, {hours: [0, 0, 0, 0, 3_000_000_000, 0, 0]})
            costs.add(db, {replicas: [4, 800_000, 5, 200_000, 0, 0, 0]})
            costs.add(db, {vendor: [1, 400, 300, 100, 1_500_000, 1, 500_000]})
        costs.add(db, {CostOwner("2026-11-25", "vendor", "big-1", "EUR"): [1, 0, 0, 0, 0, 0, 0]})
    return lambda *words: cli("usage", "--records", str(folder), "--by", "upstream", *words)


def test_costs_of_each_side_are_added_up_by_currency(spending: Callable[..., Ran]) -> None:
    here, euros, vendor = json.loads(spending("--json").out)
    assert here == {
        "upstream": "here",
        "currency": "USD",
        "requests": 8,
        "input": 1_600_000,
        "cached": 10,
        "output": 400_000,
        "cost": 6.0,
        "cost_per_million": 3.0,
        "estimated_cost": 0.0,
    }
    assert vendor["estimated_cost"] == 0.001
    assert (vendor["requests"], vendor["cost"], vendor["cost_per_million"]) == (2, 0.003, 3.0)
    assert (euros["currency"], euros["cost"], euros["cost_per_million"]) == ("EUR", 0, None)
    [line] = [line.split() for line in spending("--since", "2026-11-25").out.splitlines()][1:2]
    assert line == ["here", "4", "800,000", "5", "200,000", "3.0000", "3.0000", "0.0000", "USD"]
    rows = list(csv.DictReader(spending("--csv").out.splitlines()))
    assert [(row["upstream"], row["cost"]) for row in rows] == [
        ("here", "6"),
        ("vendor", "0"),
        ("vendor", "0.003"),
    ]


def test_costs_have_their_own_prices_and_damage_is_named(
    spending: Callable[..., Ran], tmp_path: Path
) -> None:
    assert spending("--prices", "prices.toml").code == 2
    with open_database(tmp_path / "records", writes=True) as db:
        db.execute("UPDATE costs SET nanos = nanos + 1 WHERE upstream = 'vendor'")
    ran = spending()
    assert ran.code == 1
    assert ran.err.count("is damaged and left out") == 3
    assert "vendor" not in ran.out


def test_folders_of_servers_have_no_costs(usage: Callable[..., Ran]) -> None:
    assert "no router with --overflow" in usage("--by", "upstream").out
