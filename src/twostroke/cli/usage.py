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
from twostroke.cli.key_storage import open_key_storage, storage_options
from twostroke.cli.terminal import show_table
from twostroke.core.errors import UsageError
from twostroke.server.auth import costs
from twostroke.server.auth.prices import read_prices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twostroke.server.auth.prices import Prices
    from twostroke.server.auth.usage import Amount

_UPSTREAM: Final = "upstream"
_BY: Final = ("key", "tenant", "day", "model", _UPSTREAM)
_FIRST: Final = "0000-01-01"
_LAST: Final = "9999-12-31"
_COST_DECIMALS: Final = 12  # of costs in JSON and CSV; further decimals are rounding noise
_COUNTS: Final = ("requests", "input", "cached", "output")
_COST_NAMES: Final = ("cost", "cost_per_million", "estimated_cost")  # of --by upstream


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
@storage_options
@option(
    "--by",
    type=WordParam(_BY),
    default="key",
    help="Show a row for each key, tenant, day or model; upstream: what a router's replicas and "
    "each upstream have cost.",
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
    records: Path | None,
    store: str | None,
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
    if by == _UPSTREAM:
        if prices is not None:
            raise UsageError("--prices has no effect on --by upstream: a router counts its costs.")
        first_day, last_day = since or _FIRST, until or _LAST
        with open_key_storage(records, store) as storage:
            all_costs = storage.costs(first_day, last_day)
            damaged_costs = storage.damaged_costs(first_day, last_day)
        where = "the store" if records is None else str(records / "records.db")
        return _show_upstreams(all_costs, damaged_costs, where, as_csv=as_csv, as_json=as_json)
    table = read_prices(prices) if prices is not None else None
    with open_key_storage(records, store) as storage:
        first_day, last_day = since or _FIRST, until or _LAST
        all_amounts = storage.amounts(first_day, last_day)
        damaged = storage.damaged_owners(first_day, last_day)
        names = {key.id: key.name for key, _ in storage.all_keys()}
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
    where = "the store" if records is None else str(records / "records.db")
    for owner in damaged:
        whose = f"key {owner.key!r}, tenant {owner.tenant!r}, model {owner.model!r}"
        _report_damage(where, owner.day, whose)
    return int(bool(damaged))


def _show_upstreams(
    all_costs: Iterable[costs.CostAmount],
    damaged: list[costs.CostOwner],
    where: str,
    *,
    as_csv: bool,
    as_json: bool,
) -> int:
    """Print the tokens and the costs of a router's replicas and upstreams; return the exit code.

    `where` names the database or store, for messages about damaged rows.
    """
    rows = list(_cost_rows(all_costs))
    if as_json:
        click.echo(json.dumps(rows))
    elif as_csv:
        head = (_UPSTREAM, "currency", *_COUNTS, *_COST_NAMES)
        writer = csv.DictWriter(sys.stdout, head, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            texts = {
                name: "" if row[name] is None else _format_cost(row[name]) for name in _COST_NAMES
            }
            writer.writerow(row | texts)
    elif rows:
        titles = ("COST", "PER 1M TOKENS", "ESTIMATED", "CURRENCY")
        lines = [("UPSTREAM", *map(str.upper, _COUNTS), *titles)]
        for row in rows:
            counts = [f"{row[name]:,}" for name in _COUNTS]
            per_million = row["cost_per_million"]
            per_million_text = "-" if per_million is None else f"{per_million:,.4f}"
            cost, estimated = f"{row['cost']:,.4f}", f"{row['estimated_cost']:,.4f}"
            figures = (cost, per_million_text, estimated)
            lines.append((row[_UPSTREAM], *counts, *figures, row["currency"]))
        show_table(lines, right=range(1, 1 + len(_COUNTS) + len(_COST_NAMES)))
    else:
        click.echo("Nothing was used, or no router with --overflow has used this place.")
    for owner in damaged:
        whose = f"upstream {owner.upstream!r}, model {owner.model!r}"
        _report_damage(where, owner.day, whose)
    return int(bool(damaged))


def _cost_rows(all_costs: Iterable[costs.CostAmount]) -> Iterable[dict[str, Any]]:
    """Return a row with the requests, tokens and costs for each upstream and currency.

    The row of the replicas is the first.
    """
    rows: dict[tuple[bool, str, str], dict[str, Any]] = {}
    for amount in all_costs:
        owner = amount.owner
        group = {_UPSTREAM: owner.upstream, "currency": owner.currency}
        position = (owner.upstream != costs.REPLICAS_SIDE, owner.upstream, owner.currency)
        names = (*_COUNTS, "nanos", "estimated_nanos")
        row = rows.setdefault(position, group | dict.fromkeys(names, 0))
        for name in names:
            row[name] += getattr(amount, name)
    for position in sorted(rows):
        row = rows[position]
        num_tokens = row["input"] + row["output"]
        row["cost"] = row.pop("nanos") / costs.NANOS
        per_million = row["cost"] * 1e6 / num_tokens if num_tokens else None
        row["cost_per_million"] = None if per_million is None else _rounded(per_million)
        row["estimated_cost"] = row.pop("estimated_nanos") / costs.NANOS
        yield row


def _report_damage(where: str, day: str, whose: str) -> None:
    click.echo(
        f"The record of {day}, {whose} in {where} is damaged and left out: restore a backup.",
        err=True,
    )


def _columns(by: str) -> tuple[str, ...]:
    return ("key", "name", "tenant") if by == "key" else (by,)


def _usage_rows(
    all_amounts: Iterable[Amount], by: str, names: dict[str, str], prices: Prices | None
) -> Iterable[dict[str, Any]]:
    """Return a row with the requests, tokens and costs for each key, tenant, day or model.

    `by` says for which of them. The rows have the form that --json prints.
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
