"""Plots as SVG files, drawn with matplotlib (extra `plots`), and the roofline of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from twostroke.core.hardware import Hardware

_LABEL_ROWS: Final = 44  # labels that fit above each other


@dataclass(frozen=True, slots=True)
class Point:
    """An operation: FLOPs a byte, FLOPs a second, and its share of its step's time."""

    label: str
    intensity: float
    flops_per_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Series:
    """The operations of one step, drawn in one colour."""

    name: str
    points: Sequence[Point]


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("matplotlib"):
            raise
        raise UsageError("Plots need matplotlib: pip install 'twostroke[plots]'.") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, with its text as text; the same figure gives the same file."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "twostroke"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def roofline(title: str, hardware: Hardware, series: Sequence[Series]) -> Figure:
    """Return the machine's roofline with operations under it (Williams et al., 2009).

    Both axes are logarithmic: FLOPs a byte, and FLOPs a second. The area of a circle is the
    operation's share of its step.

    Raises:
        UsageError: matplotlib is not installed.
    """
    figure = new_figure(10, 6.4)
    axes = figure.subplots()
    axes.set(
        title=title,
        xscale="log",
        yscale="log",
        xlabel="FLOP a byte of memory traffic (the area of a circle is its share of the step)",
        ylabel="FLOP/s",
    )
    points = [point for one in series for point in one.points]
    ridge = hardware.peak / hardware.bandwidth
    low = min([ridge / 30, *(point.intensity for point in points)]) / 1.5
    high = max([ridge * 10, *(point.intensity for point in points)]) * 4
    bandwidth = f"{hardware.bandwidth / 1e9:.1f} GB/s, measured"
    peak = f"{hardware.peak / 1e12:.2f} T operations/s, measured: {hardware.peak_kind}"
    roof = [low * hardware.bandwidth, hardware.peak, hardware.peak]
    axes.plot([low, ridge, high], roof, color="#333333", label=f"{bandwidth}; {peak}")
    for one in series:
        axes.scatter(
            [point.intensity for point in one.points],
            [point.flops_per_s for point in one.points],
            [20 + 600 * point.share for point in one.points],
            alpha=0.75,
            label=one.name,
        )
    bottom, top = axes.get_ylim()
    row = (top / bottom) ** (1 / _LABEL_ROWS)
    height = 0.0
    for point in sorted(points, key=lambda each: each.flops_per_s):
        height = max(point.flops_per_s, height * row)
        axes.annotate(
            point.label,
            (point.intensity, point.flops_per_s),
            (point.intensity * 1.15, height),
            fontsize=8,
            va="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.5, "relpos": (0, 0.5)},
        )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8, ncols=2)
    return figure
