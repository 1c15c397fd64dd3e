"""Draws a plan with matplotlib (extra `plots`): the roofline, and latency against throughput."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.lab.measure.plots import new_figure, svg_element
from twostroke.lab.planner import words

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from twostroke.lab.planner.plan import Plan
    from twostroke.lab.planner.planner import Row
    from twostroke.lab.planner.roofline import PlannedStepTime

# Blue and vermilion are told apart with any colour vision (Okabe and Ito, 2008).
PREFILL: Final = "#0072b2"
DECODE: Final = "#d55e00"
INK: Final = "#1a1c1f"
SOFT: Final = "#555b63"
GRID: Final = "#dfdfdb"
_SMALL: Final = 8.5  # points, of labels
_LEAST_SHARE: Final = 0.01  # of a step's time: operations below it are not drawn
_NEAR: Final = 1.15  # operations whose places differ less share a label


class _Mark(Frozen):
    """Operations of one step that lie at one place of the roofline."""

    names: tuple[str, ...]
    intensity: float
    flops_per_s: float
    share: float

    @property
    def label(self) -> str:
        """The names, the first of them where there are many."""
        more = len(self.names) - 2
        return ", ".join(self.names[:2]) + (f" and {more} more" if more > 0 else "")


def draw(plan: Plan) -> Figure:
    """Return a figure with both plots beside each other.

    Raises:
        UsageError: matplotlib is not installed.
    """
    figure = new_figure(13, 6.2)
    left, right = figure.subplots(1, 2)
    _roofline(left, plan)
    _latency(right, plan)
    left.set_title("Both strokes under the roofline", color=INK)
    right.set_title("Latency and throughput by number of streams", color=INK)
    figure.suptitle(words.title(plan), color=INK, parse_math=False)
    return figure


def drawings(plan: Plan) -> tuple[str, str]:
    """Return each plot as the text of an SVG element.

    Raises:
        UsageError: matplotlib is not installed.
    """
    return _svg(plan, _roofline, "roofline"), _svg(plan, _latency, "latency")


def _roofline(axes: Axes, plan: Plan) -> None:
    """Draw the roof of the devices, and under it both strokes and their operations."""
    peak, bandwidth = plan.roof.peak, plan.roof.bandwidth
    steps = (
        (words.decode_name(plan.shown), plan.decode, DECODE, "s"),
        (f"prefill, {plan.question.prompt - plan.question.num_cached:,} tokens", plan.prefill,
         PREFILL, "o"),
    )  # fmt: skip
    marks = [_marks(step) for _, step, *_ in steps]
    places = [one.intensity for step in marks for one in step]
    rates = [one.flops_per_s for step in marks for one in step]
    ridge = peak / bandwidth
    low, high = min([ridge / 30, *places]) / 3, max([ridge * 10, *places]) * 4
    axes.set(
        xscale="log", yscale="log", xlim=(low, high),
        ylim=(min([peak / 300, *rates]) / 4, peak * 8),
        xlabel="Arithmetic intensity (FLOP/byte)", ylabel="Arithmetic (FLOP/s)",
    )  # fmt: skip
    label = f"roof: {_quantity(bandwidth, 'B/s')}, {plan.arithmetic} {_quantity(peak, 'FLOP/s')}"
    roof = [low * bandwidth, peak, peak]
    axes.plot([low, ridge, high], roof, color=INK, linewidth=1.6, zorder=1, label=label)
    for (name, step, colour, shape), ops in zip(steps, marks, strict=True):
        _step(axes, name, step, ops, (colour, shape))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_formatter(lambda value, _: _quantity(value, ""))
    _finish(axes)


def _step(
    axes: Axes, name: str, step: PlannedStepTime, marks: list[_Mark], look: tuple[str, str]
) -> None:
    colour, shape = look
    axes.scatter(
        [one.intensity for one in marks],
        [one.flops_per_s for one in marks],
        [25 + 250 * one.share for one in marks],
        color=colour, marker=shape, alpha=0.55, linewidths=0, zorder=2,
        label=f"{name}: operations, with their shares of the time",
    )  # fmt: skip
    axes.plot(
        step.flops / step.bytes, step.flops / step.seconds, marker="*", markersize=15,
        color=colour, markeredgecolor="white", linestyle="none", zorder=3,
        label=f"{name}: the whole step, {step.seconds * 1e3:,.4g} ms",
    )  # fmt: skip
    is_above = colour == PREFILL  # labels of the other step are below, as both may lie together
    side, up = ("right", 1) if is_above else ("left", -1)
    before: list[tuple[float, float]] = []  # places of labels in points; each is long and low
    for one in sorted(marks, key=lambda mark: -mark.intensity):
        place = axes.transData.transform((one.intensity, one.flops_per_s)) * 72 / axes.figure.dpi
        x, y = float(place[0]), float(place[1]) + 13 * up
        while any(abs(x - left) < 150 and abs(y - base) < 12 for left, base in before):
            y += 12 * up
        before.append((x, y))
        axes.annotate(
            f"{one.label} {one.share:.0%}", (one.intensity, one.flops_per_s),
            (-11 * up, y - place[1]), textcoords="offset points", va="center",
            ha=side, fontsize=_SMALL, color=colour,
        )  # fmt: skip


def _marks(step: PlannedStepTime) -> list[_Mark]:
    """Return where the operations of a step are that compute; near ones are one mark."""
    found: list[_Mark] = []
    ops = sorted(step.ops.items(), key=lambda item: -item[1].seconds)
    for name, op in ops:
        share = op.seconds / step.seconds
        if not (op.flops and op.bytes) or share < _LEAST_SHARE:
            continue
        intensity, rate = op.flops / op.bytes, op.flops / op.seconds
        for place, one in enumerate(found):
            ratios = one.intensity / intensity, one.flops_per_s / rate
            if all(1 / _NEAR < ratio < _NEAR for ratio in ratios):
                names = (*one.names, name)
                found[place] = _Mark(names, one.intensity, one.flops_per_s, one.share + share)
                break
        else:
            found.append(_Mark((name,), intensity, rate, share))
    return found


def _latency(axes: Axes, plan: Plan) -> None:
    """Draw TTFT and TPOT over the throughput that each number of streams gives."""
    rates = [row.tokens_per_s for row in plan.rows]
    axes.set(
        xscale="log", yscale="log",
        xlabel="Throughput with prefill (tokens/s, all streams)", ylabel="Latency (ms)",
    )  # fmt: skip
    for name, times_s, colour, marker in (
        ("TTFT", [row.ttft_s for row in plan.rows], PREFILL, "o"),
        ("TPOT", [row.tpot_s for row in plan.rows], DECODE, "s"),
    ):
        axes.plot(
            rates, [one * 1e3 for one in times_s], color=colour, marker=marker, markersize=4.5,
            label=f"{name}, by number of streams",
        )  # fmt: skip
    for row in _spread(plan):
        axes.annotate(
            f"{row.streams:,}", (row.tokens_per_s, row.tpot_s * 1e3), (-4, 5),
            textcoords="offset points", ha="right", fontsize=_SMALL, color=DECODE,
        )  # fmt: skip
    if (chosen := plan.chosen) is not None:
        axes.plot(
            chosen.tokens_per_s, chosen.tpot_s * 1e3, marker="*", markersize=15, color=DECODE,
            markeredgecolor="white", linestyle="none",
            label=f"{chosen.streams:,} streams: {chosen.tokens_per_s:,.0f} tokens/s",
        )  # fmt: skip
    asked = plan.question
    for name, limit_s, colour in (
        ("TTFT", asked.ttft_s, PREFILL),
        ("TPOT", asked.tpot_s, DECODE),
    ):
        if limit_s is not None:
            axes.axhline(
                limit_s * 1e3, color=colour, linestyle=(0, (2, 2)), linewidth=1.3,
                label=f"objective of {name}: {limit_s * 1e3:,.4g} ms",
            )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
    _finish(axes)


def _spread(plan: Plan) -> list[Row]:
    """Return every other row, from the last one on, without those next to the chosen one."""
    chosen = plan.chosen.streams if plan.chosen is not None else 0
    return [row for row in plan.rows if not chosen / 1.4 < row.streams < chosen * 1.4][::-2]


def _finish(axes: Axes) -> None:
    """Leave a thin grid and two sides of the frame; put the legend below."""
    from matplotlib.ticker import LogLocator

    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        steps = (1.0,) if high > 200 * low else (1.0, 2.0, 5.0)
        axis.set_major_locator(LogLocator(subs=steps, numticks=12))
        axis.set_minor_formatter("")
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(which="both", colors=SOFT, labelsize=_SMALL)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(INK)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize=_SMALL, frameon=False,
        labelcolor=INK, markerscale=0.7,
    )  # fmt: skip


def _quantity(value: float, unit: str) -> str:
    """Return a value with a prefix: 3.35 TB/s."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if value >= 0.9995 * 10**power:
            return f"{value / 10**power:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def _svg(plan: Plan, draw_on: Callable[[Axes, Plan], None], name: str) -> str:
    figure = new_figure(8, 5.6)
    draw_on(figure.subplots(), plan)
    return svg_element(figure, name)
