"""`twostroke plan fleet`: chooses devices to buy, or places many models on a stock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from twostroke.cli.help import Command, option
from twostroke.cli.terminal import printable, show_table
from twostroke.core.json_io import encode_json
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.lab.planner.fleet import FleetPlan

_HEADINGS = (
    "DEVICES", "MODEL", "WEIGHTS", "REPLICAS", "TIME", "GB", "STREAMS", "TTFT MS", "MS/TOKEN",
    "REQUESTS/S", "BOUND BY",
)  # fmt: skip


@click.command("plan fleet", cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(file: Path, as_json: bool) -> None:
    """Choose devices to buy for the models of a YAML FILE, or place the models on a stock.

    Without a stock in the file, devices are bought from the table; with a stock, models are placed
    on its devices. The objective is cost or performance. See docs/guide/planning.md for the file.
    """
    from twostroke.core.errors import TwostrokeError, UnreachableError
    from twostroke.lab.planner.fleet import make_fleet
    from twostroke.lab.planner.fleet_file import at_line, read_fleet_with_lines
    from twostroke.lab.planner.words import describe_missing_fields

    question, source = read_fleet_with_lines(file)
    try:
        fleet = make_fleet(question)
    except TwostrokeError as error:
        raise at_line(source, error) from None
    if as_json:
        click.echo(encode_json(fleet).decode())
    if fleet.verdict:
        raise UnreachableError(fleet.verdict)
    if as_json:
        return
    click.echo(printable(_price(fleet)))
    for name, keys in fleet.assumed.items():
        click.echo(printable(describe_missing_fields(keys, name)))
    click.echo()
    show_table([_HEADINGS, *_groups(fleet)], {3, 4, 5, 6, 7, 8, 9})
    click.echo()
    show_table([("MODEL", "LOAD/S", "CARRIED", "ONE MORE/S"), *_model_rows(fleet)])
    click.echo()
    for line in fleet.binding:
        click.echo(printable(line))
    click.echo()
    show_table([("WITHOUT", "$/HOUR", "MORE", "LOAD MISSING"), *_alternatives(fleet)])


def _price(fleet: FleetPlan) -> str:
    text = f"{fleet.usd_per_hour:,.2f} $ an hour" if fleet.usd_per_hour else "No prices are known"
    if fleet.least_usd is not None:
        text += f"; no fleet of these replicas costs less than {fleet.least_usd:,.2f}"
    if (fleet.mfu, fleet.mbu) == (1.0, 1.0):
        return f"{text}. Times are limits, which no engine passes: set mfu and mbu."
    return f"{text}. Engines reach {fleet.mfu:.0%} of arithmetic and {fleet.mbu:.0%} of bandwidth."


def _groups(fleet: FleetPlan) -> Iterator[tuple[str, ...]]:
    from twostroke.lab.measure.report_text import format_ms, format_number

    for group in fleet.groups:
        each = f"{group.count} x {group.device}" if group.count > 1 else group.device
        name = f"{counted_noun(group.times, 'group')} of {each}" if group.times > 1 else each
        for replica in group.replicas:
            yield (
                name,
                replica.model,
                replica.weights,
                f"{replica.count * group.times:,}",
                f"{replica.time_share:.0%}",
                format_number(replica.memory_bytes / 1e9),
                f"{replica.streams:,}",
                format_ms(replica.ttft_s),
                format_ms(replica.tpot_s),
                f"{replica.requests_per_s * replica.count * group.times:.3g}",
                replica.bound,
            )
            name = ""


def _model_rows(fleet: FleetPlan) -> Iterator[tuple[str, ...]]:
    unit = "" if fleet.least_usd is None else " $/h"
    for model in fleet.models:
        share = model.carried / model.load
        yield model.model, f"{model.load:.3g}", f"{share:.0%}", f"{model.next_usd:,.3g}{unit}"


def _alternatives(fleet: FleetPlan) -> Iterator[tuple[str, ...]]:
    for alternative in fleet.alternatives:
        extra_cost = alternative.usd_per_hour / fleet.usd_per_hour - 1 if fleet.usd_per_hour else 0
        price = f"{alternative.usd_per_hour:,.2f}"
        yield alternative.without, price, f"{extra_cost:+.1%}", f"{alternative.missing_share:.0%}"
