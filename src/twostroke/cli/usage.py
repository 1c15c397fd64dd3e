"""`twostroke usage`: shows the requests, tokens and costs of a server's keys and tenants."""

from __future__ import annotations

import csv
import json
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.cli.help import Command, WordParam, option
from twostroke.cli.terminal import show_table
from twostroke.core.errors import UsageError
from twostroke.server.auth.prices import read_prices
from twostroke.server.auth.stored_keys import all_keys
from twostroke.server.auth.usage import amounts, damaged_owners
from twostroke.server.storage import open_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twostroke.server.auth.prices import Prices
    from twostroke.server.auth.usage import Amount

_BY: Final = ("key", "tenant", "day", "model")
_FIRST: Final = "0000-01-01"
_LAST: Final = "9999-12-31"
_COST_DECIMALS: Final = 12  # of costs in JSON and CSV; further decimals are rounding noise
_COUNTS: Final = ("requests", "input", "cached", "output")


class DayParam(click.ParamType):  # type: ignore[type-arg]
    """An option type: a day such as 2026-11-30."""

    name = "day"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the option's day in ISO 8601."""
        try:
            return date.fromisoformat(str(value)).isoformat()
        except ValueError:
            self.fail(f"'{value}' is not a day: write it as 2026-11-30.", param, ctx)


@click.command("usage", cls=Command)
@option(
    "--records",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="The server's folder of records.",
)
@option(
    "--by",
    type=WordParam(_BY),
    default="key",
    help="Show a row for each key, tenant, day or model.",
)
@option("--since", type=DayParam(), help="First day, in UTC [default: all].")
@option("--until", type=DayParam(), help="Last day, in UTC, included [default: today].")
@option(
    "--prices",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file with prices: also show costs.",
)
@option("--csv", "as_csv", is_flag=True, help="Print CSV, for spreadsheets.")
@option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def command(
    records: Path,
    by: str,
    since: str | None,
    until: str | None,
    prices: Path | None,
    as_csv: bool,
    as_json: bool,
) -> int:
    """Show the requests and tokens of keys, tenants, days or models.

    Batch requests have separate rows. Cached tokens are a part of the input.
    """
    if as_csv and as_json:
        raise UsageError("Give either --csv or --json.")
    if since and until and since > until:
        raise UsageError(f"--since {since} is later than --until {until}.")
    table = read_prices(prices) if prices is not None else None
    with open_database(records) as db:
        first_day, last_day = since or _FIRST, until or _LAST
        all_amounts = amounts(db, first_day, last_day)
        damaged = damaged_owners(db, first_day, last_day)
        names = {key.id: key.name for key, _ in all_keys(db)}
    rows = list(_usage_rows(all_amounts, by, names, table))
    if as_json:
        click.echo(json.dumps([row | _costs(row, _rounded) for row in rows]))
    elif as_csv:
        head = [*_columns(by), "batch", *_COUNTS, *(["cost", "currency"] if table else [])]
        writer = csv.DictWriter(sys.stdout, head, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            row | {"batch": int(row["batch"])} | _costs(row, _format_cost) for row in rows
        )
    elif rows:
        _show(rows, by, table)
    else:
        click.echo("Nothing was used.")
    for owner in damaged:
        whose = f"key {owner.key!r}, tenant {owner.tenant!r}, model {owner.model!r}"
        click.echo(
            f"The record of {owner.day}, {whose} in {records / 'records.db'} is damaged and left "
            "out: restore a backup.",
            err=True,
        )
    return int(bool(damaged))


def _columns(by: str) -> tuple[str, ...]:
    return ("key", "name", "tenant") if by == "key" else (by,)


def _usage_rows(
    all_amounts: Iterable[Amount], by: str, names: dict[str, str], prices: Prices | None
) -> Iterable[dict[str, Any]]:
    """Return the requests, tokens and costs of each key, tenant, day or model.

    The rows are as --json prints them.
    """
    rows: dict[tuple[object, ...], dict[str, Any]] = {}
    for amount in all_amounts:
        owner = amount.owner
        facts = {**owner._asdict(), "name": names.get(owner.key, "")}
        group = {name: facts[name] for name in _columns(by)} | {"batch": owner.is_batch}
        row = rows.setdefault(tuple(group.values()), group | dict.fromkeys(_COUNTS, 0))
        for name in _COUNTS:
            row[name] += getattr(amount, name)
        if prices is not None:
            row["cost"] = row.get("cost", 0.0) + prices.cost(amount)
            row["currency"] = prices.currency
    return [rows[group] for group in sorted(rows)]


def _costs(row: dict[str, Any], write: Callable[[float], object]) -> dict[str, object]:
    return {"cost": write(row["cost"])} if "cost" in row else {}


def _rounded(cost: float) -> float:
    return round(cost, _COST_DECIMALS)


def _format_cost(cost: float) -> str:
    """Return a cost as a decimal number without an exponent, for spreadsheets."""
    return f"{cost:.{_COST_DECIMALS}f}".rstrip("0").rstrip(".")


def _show(rows: list[dict[str, Any]], by: str, prices: Prices | None) -> None:
    columns, costs = _columns(by), ["cost"] if prices else []
    total: dict[str, Any] = dict.fromkeys(columns, "") | {columns[0]: "total", "batch": ""}
    total |= {name: sum(row[name] for row in rows) for name in (*_COUNTS, *costs)}
    head = [*columns, "class", *_COUNTS, *(f"cost in {prices.currency}" for _ in costs if prices)]
    lines = [tuple(word.upper() for word in head)]
    for row in [*rows, total]:
        kind = {True: "batch", False: "interactive"}.get(row["batch"], "")
        words = [str(row[name]) or ("-" if row is not total else "") for name in columns]
        counts = [f"{row[name]:,}" for name in _COUNTS]
        lines.append((*words, kind, *counts, *(f"{row[name]:,.4f}" for name in costs)))
    first = len(columns) + 1
    show_table(lines, right=range(first, first + len(_COUNTS) + len(costs)))
