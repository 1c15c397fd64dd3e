"""Charts of the report, as SVG: bars of ratios beside their goals, and lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.measure.plots import new_figure, save

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio and its goal."""

    label: str
    ratio: float
    goal: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Named points (x, y); a prediction is dashed, in the colour of the curve before it."""

    name: str
    points: Sequence[tuple[float, float]]
    is_predicted: bool = False


def draw_bars(path: Path, title: str, rows: Sequence[Bar]) -> None:
    """Write a chart with a bar for each row from 1 to its ratio, and a mark at each goal."""
    figure = new_figure(9, 0.6 + 0.28 * len(rows))
    axes = figure.subplots()
    axes.set(title=title, xscale="log")
    ratios = [row.ratio for row in rows]
    colours = ["#2a9d5c" if row.ratio >= row.goal else "#d08030" for row in rows]
    labels = [row.label for row in rows]
    bars = axes.barh(labels, [ratio - 1 for ratio in ratios], left=1, color=colours)
    axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=4)
    axes.plot([row.goal for row in rows], labels, "|", color="#cc0033", markersize=14)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    save(figure, path)


def draw_curves(path: Path, title: str, x_name: str, y_name: str, lines: Sequence[Curve]) -> None:
    """Write a chart of all curves, whose x values are spaced evenly; a grey line marks 1."""
    places = sorted({x for line in lines for x, _ in line.points})
    figure = new_figure(8, 4)
    axes = figure.subplots()
    axes.set(title=title, xlabel=x_name, ylabel=y_name)
    axes.set_xticks(range(len(places)), [f"{x:g}" for x in places])
    axes.axhline(1, color="#777777", alpha=0.5)
    colour = -1
    for line in lines:
        colour += not line.is_predicted
        axes.plot(
            [places.index(x) for x, _ in line.points],
            [y for _, y in line.points],
            "--" if line.is_predicted else "-",
            color=f"C{colour % 10}",
            label=line.name,
        )
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", fontsize=9)
    save(figure, path)
