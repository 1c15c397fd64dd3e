"""`twostroke bench compare`: shows what changed between two measured runs or sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from twostroke.cli.bench_report import check_html
from twostroke.cli.help import Command, option
from twostroke.cli.options import file_option
from twostroke.cli.terminal import printable, show_table
from twostroke.core.files import atomic_output
from twostroke.core.json_io import encode_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.lab.bench.comparison import LoadComparison
    from twostroke.lab.bench.record import RunRecord


@click.command("bench compare", cls=Command)
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@option(
    "--html",
    **file_option((".html",)),
    help="Write the comparison as one page with charts (needs the extra [plots]).",
)
@option(
    "--force",
    "is_forced",
    is_flag=True,
    help="Compare the runs even if their models, or the lengths of prompts or answers, differ.",
)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    before: Path, after: Path, *, html: Path | None, is_forced: bool, as_json: bool
) -> None:
    """Compare two runs or sweeps, BEFORE and AFTER, which `bench --record` wrote.

    Each figure has the 99% bootstrap interval of its difference. A change is called better or worse
    only if the interval does not contain 0. Of two sweeps, the loads that both have are compared.
    """
    from twostroke.lab.bench.comparison import check_comparable, compare_loads

    check_html(html)
    records = _read(before), _read(after)
    if not is_forced:
        check_comparable(records[0], records[1])
    comparisons = compare_loads(records[0], records[1])
    if html is not None:
        _write_html(html, records, comparisons, (before.name, after.name))
    if as_json:
        loads = list(map(_fields, comparisons))
        is_sweep = max(map(len, records)) > 1
        click.echo(encode_json({"loads": loads} if is_sweep else loads[0]).decode())
    else:
        _show(comparisons, (before.name, after.name))


def _read(path: Path) -> tuple[RunRecord, ...]:
    from twostroke.lab.bench.record import read_sweep

    return read_sweep(path).points


def _fields(comparison: LoadComparison) -> dict[str, object]:
    """Return the fields of a load's comparison for --json."""
    return {
        "load": comparison.load,
        "different_loads": comparison.different_loads,
        "figures": [
            {**msgspec.structs.asdict(change), "change": change.word}
            for change in comparison.changes
        ],
    }


def _show(comparisons: Sequence[LoadComparison], names: tuple[str, str]) -> None:
    from twostroke.lab.bench.html_comparison import (
        CHANGE_HEADINGS,
        change_cells,
        comparison_verdict,
    )

    click.echo(comparison_verdict(comparisons))
    for comparison in comparisons:
        if len(comparisons) > 1:
            click.echo(printable(f"\n{comparison.load}:"))
        if comparison.different_loads:
            differences = "; ".join(comparison.different_loads)
            click.echo(printable(f"The loads differ: {differences}."))
        for name, verdict in zip(names, comparison.verdicts, strict=True):
            click.echo(printable(f"{name}: {verdict}"))
        click.echo()
        show_table([CHANGE_HEADINGS, *map(change_cells, comparison.changes)])


def _write_html(
    path: Path,
    records: tuple[Sequence[RunRecord], Sequence[RunRecord]],
    comparisons: Sequence[LoadComparison],
    names: tuple[str, str],
) -> None:
    from twostroke.lab.bench.html_comparison import html_comparison
    from twostroke.lab.bench.html_report import MeasuredRun

    before, after = ([MeasuredRun.of(record) for record in side] for side in records)
    with atomic_output(path) as part:
        part.write_text(html_comparison(before, after, comparisons, names), encoding="utf-8")
