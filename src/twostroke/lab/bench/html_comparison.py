"""Writes the comparison of two runs or sweeps as one self-contained HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from twostroke.core.message_text import counted_noun
from twostroke.lab.bench import plots
from twostroke.lab.bench.html_report import sorted_by_load
from twostroke.lab.measure.plots import html_figure, render_html
from twostroke.lab.measure.report_text import format_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.lab.bench.comparison import FigureChange, LoadComparison
    from twostroke.lab.bench.html_report import MeasuredRun
    from twostroke.lab.bench.record import RunRecord

CHANGE_HEADINGS: Final = ("", "BEFORE", "AFTER", "CHANGE", "99% INTERVAL", "")


def html_comparison(
    before: Sequence[MeasuredRun],
    after: Sequence[MeasuredRun],
    comparisons: Sequence[LoadComparison],
    names: tuple[str, str],
) -> str:
    """Return the HTML report of a comparison; `names` are the names of the files.

    Raises:
        UsageError: matplotlib is not installed.
    """
    before, after = sorted_by_load(before), sorted_by_load(after)
    if len(before) == len(after) == 1:
        figure = plots.draw_both_runs(before[0].record, after[0].record)
        about = "The share of requests whose TTFT, and whose TPOT, is below each time."
    else:
        reports = [[run.report for run in runs] for runs in (before, after)]
        figure = plots.draw_both_frontiers(reports[0], reports[1])
        about = "Median latency against throughput, a point for each load."
    return render_html(
        "twostroke.lab.bench",
        "html_comparison.html",
        title=f"{names[0]} and {names[1]}",
        verdict=comparison_verdict(comparisons),
        sides=[
            _side(name, runs[0].record) for name, runs in zip(names, (before, after), strict=True)
        ],
        figure=html_figure(figure, "both"),
        about=about,
        headings=CHANGE_HEADINGS,
        loads=[_load(comparison, names) for comparison in comparisons],
    )


def comparison_verdict(comparisons: Sequence[LoadComparison]) -> str:
    """Return the first line of a comparison: how many figures changed."""
    num_figures = sum(len(comparison.changes) for comparison in comparisons)
    num_changed = sum(comparison.num_changed for comparison in comparisons)
    loads = f" at {counted_noun(len(comparisons), 'load')}" if len(comparisons) > 1 else ""
    if not num_changed:
        return f"No figure changed by more than chance{loads}."
    return f"{num_changed} of {num_figures} figures changed by more than chance{loads}."


def change_cells(change: FigureChange) -> tuple[str, ...]:
    """Return the cells of a figure's row in the table of a comparison."""
    unit, scale = ("", 1.0) if change.is_rate else (" ms", 1e3)
    low, high = (_signed(value * scale) for value in (change.low, change.high))
    ratio = f"{change.after / change.before - 1:+.1%}" if change.before else "–"
    return (
        change.title,
        f"{format_number(change.before * scale)}{unit}",
        f"{format_number(change.after * scale)}{unit}",
        ratio,
        f"[{low}, {high}]{unit}",
        change.word,
    )


def _signed(value: float) -> str:
    return f"+{format_number(value)}" if value > 0 else format_number(value)


def _side(name: str, record: RunRecord) -> tuple[str, list[tuple[str, str]]]:
    """Return the facts about one side of a comparison, after the name of its file."""
    setup = record.setup
    return (
        name,
        [
            ("Command", record.command or "called from Python"),
            ("Date", setup.date),
            ("Endpoint", f"{setup.model or 'a model'} at {setup.url}, API {setup.api}"),
            ("Server", record.resources.server_version or "its version is not known"),
            ("Client", f"Twostroke {record.client_version}" if record.client_version else "–"),
        ],
    )


def _load(comparison: LoadComparison, names: tuple[str, str]) -> dict[str, Any]:
    return {
        "name": comparison.load,
        "differences": "; ".join(comparison.different_loads),
        "verdicts": list(zip(names, comparison.verdicts, strict=True)),
        "rows": [(change.word, change_cells(change)) for change in comparison.changes],
    }
