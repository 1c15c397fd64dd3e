"""Plots of measured runs by matplotlib (extra `plots`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.lab.bench.charts import fit_ttft, itl_over_time, requests_over_time
from twostroke.lab.measure.plots import (
    BLUE,
    GREEN,
    INK,
    LABEL_POINTS,
    SOFT,
    VERMILION,
    new_figure,
    style_axes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from twostroke.lab.bench.answers import MeasuredAnswer
    from twostroke.lab.bench.record import RunRecord
    from twostroke.lab.bench.report import BenchReport
    from twostroke.lab.measure.requests import Objectives

_MAX_POINTS: Final = 2000  # of a scatter plot; more make a report of several megabytes
_LOG_RATIO: Final = 30.0  # axes whose values differ by more are logarithmic
_PERCENTILE_STYLES: Final = (("p50", "-"), ("p90", (0, (4, 2))))


def draw_ttft_by_length(
    completed: Sequence[MeasuredAnswer], objectives: Objectives, width: float = 8.0
) -> Figure:
    """Draw TTFT by input length, with the fitted line.

    The time to publish is drawn, too, if it differs.
    """
    figure = new_figure(width, 4.6)
    axes = figure.subplots()
    drawn_answers = completed[:: max(1, -(-len(completed) // _MAX_POINTS))]
    lengths = [answer.log.num_prompt for answer in drawn_answers]
    ttft_s = [answer.log.timings.ttft_s for answer in drawn_answers]
    published = [
        (answer.log.num_prompt, answer.first_content_s - answer.log.timings.arrival_s)
        for answer in drawn_answers
        if answer.first_reasoning_s is not None and answer.first_content_s is not None
    ]
    _scatter(axes, lengths, ttft_s, colour=BLUE, label="TTFT")
    if published:
        _scatter(
            axes, *zip(*published, strict=True), colour=VERMILION,
            label="time to publish (first token of the content)",
        )  # fmt: skip
    fit = fit_ttft(completed)
    if fit is not None:
        ends = np.array([min(lengths), max(lengths)], np.float64)
        axes.plot(
            ends, (fit.fixed_s + fit.seconds_per_token * ends) * 1e3, color=INK, linewidth=1.4,
            label=f"{fit.fixed_s * 1e3:,.4g} ms + {fit.seconds_per_token * 1e6:,.4g} ms for 1,000 "
            "input tokens",
        )  # fmt: skip
    _draw_limit(axes, objectives.ttft_s, "TTFT")
    times_s = [*ttft_s, *(time_s for _, time_s in published)]
    _set_latency_scale(axes, times_s)
    axes.set(xlabel="Input tokens", ylabel="ms")
    axes.xaxis.set_major_formatter("{x:,g}")
    style_axes(axes)
    return figure


def draw_first_tokens(completed: Sequence[MeasuredAnswer], objectives: Objectives) -> Figure:
    """Draw the share of requests whose TTFT, time to publish and E2E are below each time."""
    figure = new_figure(8, 4.2)
    axes = figure.subplots()
    columns = {
        "TTFT": ([answer.log.timings.ttft_s for answer in completed], BLUE),
        "time to publish": (
            [
                answer.first_content_s - answer.log.timings.arrival_s
                for answer in completed
                if answer.first_reasoning_s is not None and answer.first_content_s is not None
            ],
            VERMILION,
        ),
        "E2E": ([answer.log.timings.e2e_s for answer in completed], SOFT),
    }
    all_s: list[float] = []
    for name, (times_s, colour) in columns.items():
        if not times_s:
            continue
        all_s += times_s
        shares = np.linspace(0.0, 1.0, min(len(times_s), _MAX_POINTS))
        axes.plot(
            np.quantile(times_s, shares) * 1e3, shares * 100, color=colour, linewidth=1.6,
            label=name,
        )  # fmt: skip
    if objectives.ttft_s is not None:
        axes.axvline(
            objectives.ttft_s * 1e3, color=INK, linestyle=(0, (2, 2)), linewidth=1.2,
            label=f"objective of TTFT: {objectives.ttft_s * 1e3:,.4g} ms",
        )  # fmt: skip
    if min(all_s) > 0 and max(all_s) > _LOG_RATIO * min(all_s):
        axes.set_xscale("log")
    axes.set(xlabel="ms", ylabel="% of requests")
    axes.xaxis.set_major_formatter("{x:,g}")
    style_axes(axes)
    return figure


def draw_itl_over_time(
    completed: Sequence[MeasuredAnswer], objectives: Objectives
) -> Figure | None:
    """Draw the gaps between chunks over the time of the run; None without gaps."""
    bins = itl_over_time(completed)
    if bins is None:
        return None
    figure = new_figure(8, 4.2)
    axes = figure.subplots()
    for (name, style), colour in zip(_PERCENTILE_STYLES, (BLUE, VERMILION), strict=True):
        axes.plot(
            bins.middles_s, bins.columns[name] * 1e3, color=colour, linestyle=style, marker=".",
            markersize=4, linewidth=1.3, label=f"ITL {name}",
        )  # fmt: skip
    _draw_limit(axes, objectives.tpot_s, "TPOT")
    values_s = np.concatenate([column[np.isfinite(column)] for column in bins.columns.values()])
    _set_latency_scale(axes, values_s.tolist())
    axes.set(xlabel="Seconds since the start", ylabel="ms")
    style_axes(axes)
    return figure


def draw_requests_over_time(answers: Sequence[MeasuredAnswer]) -> Figure:
    """Draw requests per minute over the time of the run, and below them those in progress."""
    bins = requests_over_time(answers)
    figure = new_figure(8, 5.6)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name, colour, style in (
        ("arrived", SOFT, (0, (4, 2))),
        ("completed", BLUE, "-"),
        ("failed", VERMILION, "-"),
    ):
        if name != "failed" or bins.columns[name].any():
            top.stairs(
                bins.columns[name], bins.edges_s, color=colour, linestyle=style, linewidth=1.4,
                baseline=None, label=name,
            )  # fmt: skip
    bottom.stairs(
        bins.columns["in_progress"], bins.edges_s, color=GREEN, linewidth=1.4, baseline=None,
        label="in progress",
    )  # fmt: skip
    top.set(ylabel="Requests per minute", ylim=(0, None))
    bottom.set(ylabel="Requests", xlabel="Seconds since the start", ylim=(0, None))
    for axes in (top, bottom):
        axes.yaxis.set_major_formatter("{x:,g}")
        style_axes(axes)
    top.legend_.set_bbox_to_anchor((0.5, -0.02))
    bottom.legend_.set_bbox_to_anchor((0.5, -0.22))
    return figure


def draw_frontier(
    names: Sequence[str], reports: Sequence[BenchReport], knee: int | None, objectives: Objectives
) -> Figure:
    """Draw latency against throughput of the loads of a sweep, with the knee marked."""
    figure = new_figure(8, 7.6)
    for axes, latency, title, limit_s in zip(
        figure.subplots(2, 1, sharex=True),
        ("ttft", "tpot"),
        ("TTFT", "TPOT"),
        (objectives.ttft_s, objectives.tpot_s),
        strict=True,
    ):
        rates, values_s = _draw_percentiles(axes, latency, title, reports)
        for index, (rate, value_s) in enumerate(zip(rates["p50"], values_s["p50"], strict=True)):
            if not np.isfinite(value_s):
                continue
            axes.annotate(
                names[index], (rate, value_s * 1e3), (5, -11), textcoords="offset points",
                fontsize=LABEL_POINTS, color=SOFT,
            )  # fmt: skip
            if index == knee:
                axes.plot(
                    rate, value_s * 1e3, marker="*", markersize=15, color=GREEN, linestyle="none",
                    markeredgecolor="white", label=f"knee: {names[index]}", zorder=3,
                )  # fmt: skip
        _draw_limit(axes, limit_s, title)
        finite_s = [value for values in values_s.values() for value in values if np.isfinite(value)]
        _set_latency_scale(axes, finite_s)
        axes.set(ylabel=f"{title} (ms)", xlim=(0, None))
        axes.xaxis.set_major_formatter("{x:,g}")
        style_axes(axes)
        axes.legend_.set_bbox_to_anchor((0.5, -0.14))
    axes.set(xlabel="Output tokens per second, all requests")
    return figure


def draw_goodput(
    names: Sequence[str], loads: Sequence[float], reports: Sequence[BenchReport], axis_label: str
) -> Figure:
    """Draw requests and good requests per minute, by the loads of a sweep."""
    figure = new_figure(8, 4.2)
    axes = figure.subplots()
    completed_per_min = [report.run.requests_per_s * 60 for report in reports]
    axes.plot(
        loads, completed_per_min, color=SOFT, marker="o", markersize=4, label="completed requests"
    )
    if all(report.run.good_per_s is not None for report in reports):
        good = [(report.run.good_per_s or 0.0) * 60 for report in reports]
        axes.plot(
            loads, good, color=GREEN, marker="s", markersize=5,
            label="goodput: requests that met every objective",
        )  # fmt: skip
    axes.set(
        xlabel=axis_label, ylabel="Requests per minute", xlim=(0, None), ylim=(0, None)
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
    if len(set(loads)) != len(loads) or not any(loads):  # loads without a number
        axes.set_xticks(loads, names)
    style_axes(axes)
    return figure


def draw_both_runs(before: RunRecord, after: RunRecord) -> Figure:
    """Draw the shares of requests whose TTFT and TPOT are below each time, of two runs."""
    figure = new_figure(8, 7.0)
    for axes, name, title in zip(
        figure.subplots(2, 1), ("ttft", "tpot"), ("TTFT", "TPOT"), strict=True
    ):
        all_s: list[float] = []
        for side, record, colour in (("before", before, SOFT), ("after", after, BLUE)):
            latencies = (a.log.latencies[name] for a in record.answers if a.is_completed)
            times_s = [time_s for time_s in latencies if time_s is not None]
            if not times_s:
                continue
            all_s += times_s
            shares = np.linspace(0.0, 1.0, min(len(times_s), _MAX_POINTS))
            axes.plot(
                np.quantile(times_s, shares) * 1e3, shares * 100, color=colour, linewidth=1.6,
                label=f"{title} {side}",
            )  # fmt: skip
        if all_s and min(all_s) > 0 and max(all_s) > _LOG_RATIO * min(all_s):
            axes.set_xscale("log")
        axes.set(xlabel=f"{title} (ms)", ylabel="% of requests")
        axes.xaxis.set_major_formatter("{x:,g}")
        style_axes(axes)
    return figure


def draw_both_frontiers(before: Sequence[BenchReport], after: Sequence[BenchReport]) -> Figure:
    """Draw the median latency against the throughput of two sweeps, in the order of loads."""
    figure = new_figure(8, 7.0)
    for axes, name, title in zip(
        figure.subplots(2, 1, sharex=True), ("ttft", "tpot"), ("TTFT", "TPOT"), strict=True
    ):
        all_ms: list[float] = []
        for side, reports, colour in (("before", before, SOFT), ("after", after, BLUE)):
            points = [
                (report.run.output_per_s, report.run.latencies[name].percentiles["p50"].value * 1e3)
                for report in reports
                if name in report.run.latencies
            ]
            if points:
                rates, medians_ms = zip(*points, strict=True)
                all_ms += medians_ms
                axes.plot(rates, medians_ms, color=colour, marker="o", markersize=4.5, label=side)
        _set_latency_scale(axes, all_ms)
        axes.set(ylabel=f"{title} p50 (ms)", xlim=(0, None))
        axes.xaxis.set_major_formatter("{x:,g}")
        style_axes(axes)
    axes.set(xlabel="Output tokens per second, all requests")
    return figure


def _draw_percentiles(
    axes: Axes, latency: str, title: str, reports: Sequence[BenchReport]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Draw a latency's percentiles by throughput.

    Returns (the rates, the latencies) of the drawn points, each by percentile.
    """
    rates: dict[str, list[float]] = {}
    values_s: dict[str, list[float]] = {}
    for (percentile, style), colour in zip(_PERCENTILE_STYLES, (BLUE, VERMILION), strict=True):
        rates[percentile] = [report.run.output_per_s for report in reports]
        values_s[percentile] = [
            report.run.latencies[latency].percentiles[percentile].value
            if latency in report.run.latencies
            else np.nan
            for report in reports
        ]
        axes.plot(
            rates[percentile], np.array(values_s[percentile]) * 1e3, color=colour, linestyle=style,
            marker="o", markersize=4.5, label=f"{title} {percentile}",
        )  # fmt: skip
    return rates, values_s


def _scatter(
    axes: Axes, lengths: Sequence[float], times_s: Sequence[float], *, colour: str, label: str
) -> None:
    axes.scatter(
        lengths, np.asarray(times_s) * 1e3, 22, color=colour, alpha=0.5, linewidths=0, label=label
    )


def _draw_limit(axes: Axes, limit_s: float | None, title: str) -> None:
    if limit_s is not None:
        axes.axhline(
            limit_s * 1e3, color=INK, linestyle=(0, (2, 2)), linewidth=1.2,
            label=f"objective of {title}: {limit_s * 1e3:,.4g} ms",
        )  # fmt: skip


def _set_latency_scale(axes: Axes, times_s: Sequence[float]) -> None:
    """Make the axis of latencies logarithmic if they differ much; else let it begin at 0."""
    if times_s and min(times_s) > 0 and max(times_s) > _LOG_RATIO * min(times_s):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter("{x:,g}")
