"""Plots by matplotlib (extra `plots`) as SVG or PNG, in HTML reports, and the roofline."""

from __future__ import annotations

import re
from importlib import resources
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment
from markupsafe import Markup

from twostroke.core.env import install_command
from twostroke.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from twostroke.lab.measure.profile import StepProfile

    Point = tuple[str, float, float, float]

# Colours of plots. Blue, vermilion and green can be distinguished with any colour vision (Okabe
# and Ito, 2008).
BLUE: Final = "#0072b2"
VERMILION: Final = "#d55e00"
GREEN: Final = "#009e73"
INK: Final = "#1a1c1f"
SOFT: Final = "#555b63"
GRID: Final = "#dfdfdb"
LABEL_POINTS: Final = 8.5  # font size
# The style sheet's variables for these colours, in light and dark mode.
_HTML_COLOURS: Final = {
    INK: "var(--ink)",
    SOFT: "var(--soft)",
    GRID: "var(--line)",
    BLUE: "var(--prefill)",
    VERMILION: "var(--decode)",
    GREEN: "var(--cache)",
    "#ffffff": "var(--ground)",
}
# Text is not converted to outlines, and ids are the same in every run.
_SVG_SETTINGS: Final[dict[Any, Any]] = {"svg.fonttype": "none", "svg.hashsalt": "twostroke"}
_MAX_LABEL_ROWS: Final = 44  # labels that fit in a column
_MIN_FLOPS_SHARE: Final = 1e-4  # of the step's FLOPs: operations below it are not drawn


def new_figure(width: float, height: float) -> Figure:
    """Return an empty matplotlib figure of this size in inches.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("matplotlib"):
            raise
        raise UsageError(f"Plots need matplotlib: {install_command('plots')}.") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG or PNG, by the path's suffix; equal figures give equal files."""
    import matplotlib as mpl

    file_format = path.suffix[1:].lower()
    metadata = {"Date": None} if file_format == "svg" else None
    with mpl.rc_context(_SVG_SETTINGS):
        figure.savefig(path, format=file_format, metadata=metadata, dpi=150)


def svg_element(figure: Figure, name: str) -> str:
    """Return a figure as an SVG element for an HTML page; its ids begin with `name`."""
    import matplotlib as mpl

    with mpl.rc_context(_SVG_SETTINGS | {"svg.hashsalt": name}), StringIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None})
        text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r'(\bid="|="#|url\(#)', rf"\1{name}-", text)


def render_html(package: str, template: str, **values: Any) -> str:
    """Return the text of an HTML report from a template, which is a file of a package.

    Besides `values`, the template has `style`, the style sheet of all reports.
    """
    style = resources.files("twostroke.lab.measure").joinpath("html_reports.css").read_text("utf-8")
    text = resources.files(package).joinpath(template).read_text("utf-8")
    report = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
    return report.render(style=Markup(style), **values)  # noqa: S704 - a file of this package


def html_figure(figure: Figure, name: str) -> Markup:
    """Return a plot as an SVG element for an HTML report, in its colours; `name` begins its ids."""
    svg = svg_element(figure, name)
    for colour, variable in _HTML_COLOURS.items():
        svg = svg.replace(colour, variable)
    return Markup(svg)  # noqa: S704 - matplotlib escapes texts


def style_axes(axes: Axes) -> None:
    """Give a plot the style of all plots: a thin grid, two sides of the frame, a legend below."""
    from matplotlib.ticker import LogLocator

    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() != "log":
            continue
        low, high = sorted(axis.get_view_interval())
        steps = (1.0,) if high > 200 * low else (1.0, 2.0, 5.0)
        axis.set_major_locator(LogLocator(subs=steps, numticks=12))
        axis.set_minor_formatter("")
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(which="both", colors=SOFT, labelsize=LABEL_POINTS)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(INK)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize=LABEL_POINTS, frameon=False,
        labelcolor=INK, markerscale=0.7,
    )  # fmt: skip


def roofline(title: str, profiles: Sequence[StepProfile]) -> Figure:
    """Return a roofline plot of the machine with the operations of each step.

    Both axes are logarithmic: FLOPs per byte, and FLOPs per second (Williams et al., 2009). Each
    step has a colour; the area of a circle is the operation's share of its step.

    Raises:
        UsageError: matplotlib is not installed.
    """
    figure = new_figure(10, 6.4)
    axes = figure.subplots()
    axes.set(
        title=title,
        xscale="log",
        yscale="log",
        xlabel="FLOP per byte of memory traffic (the area of a circle is its share of the step)",
        ylabel="FLOP/s",
    )
    hardware = profiles[0].hardware
    points_by_step = [_points(profile) for profile in profiles]
    points = [point for step_points in points_by_step for point in step_points]
    ridge = hardware.peak / hardware.bandwidth
    low = min([ridge / 30, *(intensity for _, intensity, *_ in points)]) / 1.5
    high = max([ridge * 10, *(intensity for _, intensity, *_ in points)]) * 4
    bandwidth = f"{hardware.bandwidth / 1e9:.1f} GB/s, measured"
    peak = f"{hardware.peak / 1e12:.2f} T operations/s, measured: {hardware.peak_kind}"
    roof = [low * hardware.bandwidth, hardware.peak, hardware.peak]
    axes.plot([low, ridge, high], roof, color="#333333", label=f"{bandwidth}; {peak}")
    for profile, step_points in zip(profiles, points_by_step, strict=True):
        columns = zip(*step_points, strict=True) if step_points else ((),) * 4
        _, intensities, rates, shares = columns
        sizes = [20 + 600 * share for share in shares]
        name = f"{profile.shape.name}: {profile.step_s * 1e3:,.2f} ms"
        axes.scatter(intensities, rates, sizes, alpha=0.75, label=name)
    bottom, top = axes.get_ylim()
    row = (top / bottom) ** (1 / _MAX_LABEL_ROWS)
    height = 0.0
    for label, intensity, flops_per_s, _ in sorted(points, key=lambda point: point[2]):
        height = max(flops_per_s, height * row)
        axes.annotate(
            label,
            (intensity, flops_per_s),
            (intensity * 1.15, height),
            fontsize=8,
            va="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.5, "relpos": (0, 0.5)},
        )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8, ncols=2)
    return figure


def _points(profile: StepProfile) -> list[Point]:
    """Return a roofline plot's points: label, FLOPs per byte, FLOPs per second, share of step.

    Only operations that compute have a point.
    """
    points = []
    for operation in profile.operations:
        figures = profile.figures(operation)
        intensity, flops_per_s = figures["flops_per_byte"], figures["flops_per_s"]
        is_large = operation.cost.flops > _MIN_FLOPS_SHARE * profile.cost.flops
        if is_large and intensity and flops_per_s:
            share = figures["share"] or 0.0
            points.append((str(operation.label), intensity, flops_per_s, share))
    return points
