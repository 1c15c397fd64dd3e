"""`twostroke bench compare`: shows what changed between two measured runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from twostroke.cli.help import Command, option
from twostroke.cli.terminal import printable, show_table
from twostroke.core.json_io import encode_json

if TYPE_CHECKING:
    from twostroke.lab.bench.comparison import FigureChange


@click.command("bench compare", cls=Command)
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(before: Path, after: Path, as_json: bool) -> None:
    """Compare two runs, BEFORE and AFTER, which `bench --record` wrote.

    Each figure has the 99% bootstrap interval of its difference. A change is called better or worse
    only if the interval does not contain 0.
    """
    from twostroke.lab.bench.comparison import compare_runs, different_loads
    from twostroke.lab.bench.record import read_record

    records = read_record(before), read_record(after)
    changes = compare_runs(records[0], records[1])
    differences = different_loads(records[0], records[1])
    if as_json:
        rows = [{**msgspec.structs.asdict(change), "change": change.word} for change in changes]
        click.echo(encode_json({"different_loads": differences, "figures": rows}).decode())
        return
    num_changed = sum(change.is_significant for change in changes)
    click.echo(
        f"{num_changed} of {len(changes)} figures changed by more than chance."
        if num_changed
        else "No figure changed by more than chance."
    )
    if differences:
        click.echo(printable(f"The loads differ: {'; '.join(differences)}."))
    for path, record in zip((before, after), records, strict=True):
        click.echo(printable(f"{path.name}: {record.setup.verdict}"))
    click.echo()
    show_table([("", "BEFORE", "AFTER", "CHANGE", "99% INTERVAL", ""), *map(_row, changes)])


def _row(change: FigureChange) -> tuple[str, ...]:
    from twostroke.lab.measure.report_text import format_number

    unit, scale = ("", 1.0) if change.is_rate else (" ms", 1e3)
    low, high = (f"{value * scale:+.3g}" for value in (change.low, change.high))
    ratio = f"{change.after / change.before - 1:+.1%}" if change.before else "–"
    return (
        change.title,
        f"{format_number(change.before * scale)}{unit}",
        f"{format_number(change.after * scale)}{unit}",
        ratio,
        f"[{low}, {high}]{unit}",
        change.word,
    )
