"""Plots of a plan by matplotlib (extra `plots`): roofline, and latency by throughput."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.lab.measure.plots import (
    BLUE,
    INK,
    LABEL_POINTS,
    VERMILION,
    html_figure,
    new_figure,
    style_axes,
)
from twostroke.lab.planner import words

if TYPE_CHECKING:
    from collections.abc import Callable

    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from twostroke.lab.planner.plan import Plan
    from twostroke.lab.planner.planner import PlanRow
    from twostroke.lab.planner.roofline import PlannedStepTime

PREFILL: Final = BLUE
DECODE: Final = VERMILION
_MIN_TIME_SHARE: Final = 0.01  # of a step's time: operations below it are not drawn
_MAX_MERGED_RATIO: Final = 1.15  # operations whose coordinates differ by less share a mark


class _Mark(Frozen):
    """A mark in the roofline plot, for operations of one step that lie close together."""

    names: tuple[str, ...]
    intensity: float
    flops_per_s: float
    share: float

    @property
    def label(self) -> str:
        """The names of the mark's first two operations, and the number of further ones."""
        num_further = len(self.names) - 2
        return ", ".join(self.names[:2]) + (f" and {num_further} more" if num_further > 0 else "")


def draw(plan: Plan) -> Figure:
    """Return a figure with a plan's roofline and its latency plot, one beside the other.

    Raises:
        UsageError: matplotlib is not installed.
    """
    figure = new_figure(13, 6.2)
    left, right = figure.subplots(1, 2)
    _roofline(left, plan)
    _latency(right, plan)
    left.set_title("Prefill and decode under the roofline", color=INK)
    right.set_title("Latency and throughput by number of streams", color=INK)
    figure.suptitle(words.title(plan), color=INK, parse_math=False)
    return figure


def drawings(plan: Plan) -> tuple[Markup, Markup]:
    """Return a plan's roofline and its latency plot, each as an SVG element of an HTML report.

    Raises:
        UsageError: matplotlib is not installed.
    """
    return _svg(plan, _roofline, "roofline"), _svg(plan, _latency, "latency")


def _roofline(axes: Axes, plan: Plan) -> None:
    """Draw the roofline of a plan's devices, and below it both steps and their operations.

    The steps are the prefill of a prompt and a decode step.
    """
    peak, bandwidth = plan.roof.peak, plan.roof.bandwidth
    tokens = counted_noun(plan.question.prompt - plan.question.num_cached, "token", form=",")
    steps = (
        (words.decode_name(plan.shown_streams), plan.decode, DECODE, "s"),
        (f"prefill, {tokens}", plan.prefill, PREFILL, "o"),
    )
    marks = [_marks(step) for _, step, *_ in steps]
    intensities = [mark.intensity for step in marks for mark in step]
    rates = [mark.flops_per_s for step in marks for mark in step]
    ridge = peak / bandwidth
    low = min([ridge / 30, *intensities]) / 3
    high = max([ridge * 10, *intensities]) * 4
    axes.set(
        xscale="log", yscale="log", xlim=(low, high),
        ylim=(min([peak / 300, *rates]) / 4, peak * 8),
        xlabel="Arithmetic intensity (FLOP/byte)", ylabel="Arithmetic (FLOP/s)",
    )  # fmt: skip
    bandwidth_text, peak_text = _format_quantity(bandwidth, "B/s"), _format_quantity(peak, "FLOP/s")
    label = f"roof: {bandwidth_text}, {plan.arithmetic} {peak_text}"
    roof = [low * bandwidth, peak, peak]
    axes.plot([low, ridge, high], roof, color=INK, linewidth=1.6, zorder=1, label=label)
    for (name, step, colour, shape), ops in zip(steps, marks, strict=True):
        _draw_step(axes, name, step, ops, colour=colour, shape=shape)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_formatter(lambda value, _: _format_quantity(value, ""))
    style_axes(axes)


def _draw_step(
    axes: Axes,
    name: str,
    step: PlannedStepTime,
    marks: list[_Mark],
    *,
    colour: str,
    shape: str,
) -> None:
    """Draw a step in the roofline plot: a star for the step, and labelled marks for operations."""
    axes.scatter(
        [mark.intensity for mark in marks],
        [mark.flops_per_s for mark in marks],
        [25 + 250 * mark.share for mark in marks],
        color=colour, marker=shape, alpha=0.55, linewidths=0, zorder=2,
        label=f"{name}: operations, with their shares of the time",
    )  # fmt: skip
    axes.plot(
        step.flops / step.bytes, step.flops / step.seconds, marker="*", markersize=15,
        color=colour, markeredgecolor="white", linestyle="none", zorder=3,
        label=f"{name}: the whole step, {step.seconds * 1e3:,.4g} ms",
    )  # fmt: skip
    is_above = colour == PREFILL  # labels of decode are below, since both steps may be close
    side, up = ("right", 1) if is_above else ("left", -1)
    labels: list[tuple[float, float]] = []  # positions in points
    for mark in sorted(marks, key=lambda mark: -mark.intensity):
        position = axes.transData.transform((mark.intensity, mark.flops_per_s))
        position = position * 72 / axes.figure.dpi
        x, y = float(position[0]), float(position[1]) + 13 * up
        while any(abs(x - left) < 150 and abs(y - base) < 12 for left, base in labels):
            y += 12 * up
        labels.append((x, y))
        axes.annotate(
            f"{mark.label} {mark.share:.0%}", (mark.intensity, mark.flops_per_s),
            (-11 * up, y - position[1]), textcoords="offset points", va="center",
            ha=side, fontsize=LABEL_POINTS, color=colour,
        )  # fmt: skip


def _marks(step: PlannedStepTime) -> list[_Mark]:
    """Return the roofline marks of a step's operations; nearby operations share a mark."""
    marks: list[_Mark] = []
    ops = sorted(step.ops.items(), key=lambda item: -item[1].seconds)
    for name, op in ops:
        share = op.seconds / step.seconds
        if not (op.flops and op.bytes) or share < _MIN_TIME_SHARE:
            continue
        intensity, rate = op.flops / op.bytes, op.flops / op.seconds
        for index, mark in enumerate(marks):
            ratios = mark.intensity / intensity, mark.flops_per_s / rate
            if all(1 / _MAX_MERGED_RATIO < ratio < _MAX_MERGED_RATIO for ratio in ratios):
                names = (*mark.names, name)
                marks[index] = replace(mark, names=names, share=mark.share + share)
                break
        else:
            marks.append(_Mark((name,), intensity, rate, share))
    return marks


def _latency(axes: Axes, plan: Plan) -> None:
    """Draw a plan's TTFT and TPOT by throughput, one point for each number of streams."""
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
            rates, [seconds * 1e3 for seconds in times_s], color=colour, marker=marker,
            markersize=4.5,
            label=f"{name}, by number of streams",
        )  # fmt: skip
    for row in _labelled_rows(plan):
        axes.annotate(
            f"{row.streams:,}", (row.tokens_per_s, row.tpot_s * 1e3), (-4, 5),
            textcoords="offset points", ha="right", fontsize=LABEL_POINTS, color=DECODE,
        )  # fmt: skip
    if (chosen_row := plan.chosen_row) is not None:
        streams = words.num_streams(chosen_row.streams)
        label = f"{streams}: {chosen_row.tokens_per_s:,.0f} tokens/s"
        axes.plot(
            chosen_row.tokens_per_s, chosen_row.tpot_s * 1e3, marker="*", markersize=15,
            color=DECODE, markeredgecolor="white", linestyle="none",
            label=label,
        )  # fmt: skip
    for name, limit_s, colour in (
        ("TTFT", plan.question.ttft_s, PREFILL),
        ("TPOT", plan.question.tpot_s, DECODE),
    ):
        if limit_s is not None:
            axes.axhline(
                limit_s * 1e3, color=colour, linestyle=(0, (2, 2)), linewidth=1.3,
                label=f"objective of {name}: {limit_s * 1e3:,.4g} ms",
            )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
    style_axes(axes)


def _labelled_rows(plan: Plan) -> list[PlanRow]:
    """Return the plan's rows whose points get a label in the latency plot.

    It is every other row, from the last one, without rows close to the chosen row.
    """
    streams = plan.chosen_row.streams if plan.chosen_row is not None else 0
    return [row for row in plan.rows if not streams / 1.4 < row.streams < streams * 1.4][::-2]


def _format_quantity(value: float, unit: str) -> str:
    """Return a value with a decimal prefix, such as "3.35 TB/s"."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if value >= 0.9995 * 10**power:
            return f"{value / 10**power:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def _svg(plan: Plan, draw_on: Callable[[Axes, Plan], None], name: str) -> Markup:
    figure = new_figure(8, 5.6)
    draw_on(figure.subplots(), plan)
    return html_figure(figure, name)
