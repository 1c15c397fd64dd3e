"""Plots of the GPU benchmark: the steps of optimization, and the roofline (extra `plots`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from twostroke.lab.measure.plots import new_figure, save

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_STEPS: Final = {
    "ladder-eager": "BF16, launched\nfrom Python",
    "ladder-graph": "as a graph",
    "ladder-int8": "Q8_0",
    "ladder-int4": "Q4_0",
    "ladder-drafts": "Q4_0 and 5 drafts,\nright with 70%",
}
# The first and the last step of PyTorch's ladder on an A100, Llama 7B
# (https://pytorch.org/blog/accelerating-generative-ai-2/, 2023-11-30).
_PUBLISHED: Final = (25.5, 244.7)
_ROOFLINE: Final = (
    *("decode-8b-bf16", "decode-8b-q4_k", "streams-256-8b-bf16", "prefill-8b-bf16"),
    *("prefill-8b-fp8", "decode-30b-a3b-q4_k", "decode-1.5b-bf16"),
)
_COLOURS: Final = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")


def draw(result: dict[str, Any], folder: Path) -> Iterator[Path]:
    """Draw what the results have, measured or predicted; yield the files.

    Raises:
        UsageError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(name in result["rows"] for name in _STEPS):
        yield _ladder(result, folder / "gpu-ladder.svg")
    if any(name in result["rows"] for name in _ROOFLINE):
        yield _roofline(result, folder / "gpu-roofline.svg")


def _kind(result: dict[str, Any]) -> str:
    """Return how the figures were made, for titles."""
    if result["predicted_only"]:
        return "predicted for one H200, not measured"
    return f"{result['device']['name']}, measured"


def _ladder(result: dict[str, Any], path: Path) -> Path:
    figure = new_figure(8, 4.6)
    axes = figure.subplots()
    rows = {name: result["rows"][name] for name in _STEPS if name in result["rows"]}
    for index, row in enumerate(rows.values()):
        predicted, measured = row["predicted_tokens_s"], row.get("tokens_s")
        if measured is not None:
            axes.bar(index, measured, 0.6, color="#4477aa")
        axes.bar(index, predicted, 0.7, facecolor="none", edgecolor="#777777", linestyle="--")
        tokens_s = measured or predicted
        axes.annotate(f"{tokens_s:,.0f}", (index, tokens_s), ha="center", va="bottom")
    for speed, which_step in zip(_PUBLISHED, ("first", "last"), strict=True):
        axes.axhline(speed, color="#ee6677", linewidth=0.8, zorder=0)
        text = f"published for an A100, {which_step} step: {speed:g}"
        style: Any = {"fontsize": 8, "color": "#cc3311", "ha": "right", "va": "bottom"}
        axes.annotate(text, (len(rows) + 1.3, speed), **style)
    axes.set_xlim(-0.6, len(rows) + 1.4)
    axes.set_xticks(range(len(rows)), [_STEPS[name] for name in rows], fontsize=8)
    axes.set(ylabel="tokens/s of one stream; dashed: predicted")
    axes.set_title(f"The ladder, 7B shape ({_kind(result)})")
    axes.margins(y=0.12)
    save(figure, path)
    return path


def _roofline(result: dict[str, Any], path: Path) -> Path:
    figure = new_figure(10, 6.4)
    axes = figure.subplots()
    bandwidth, peak = result["limits"]
    every = {name: result["rows"].get(name, {}) for name in _ROOFLINE}
    rows = {name: row for name, row in every.items() if "kernels" in row}
    ridge, seen = peak / bandwidth, [peak / bandwidth]
    for (name, row), colour in zip(rows.items(), _COLOURS, strict=False):
        points = {
            kernel_name: k for kernel_name, k in row["kernels"].items() if k["bytes"] and k["flops"]
        }
        times = {kernel_name: _seconds(kernel) for kernel_name, kernel in points.items()}
        intensities = {
            kernel_name: kernel["flops"] / kernel["bytes"] for kernel_name, kernel in points.items()
        }
        rates = {
            kernel_name: kernel["flops"] / times[kernel_name]
            for kernel_name, kernel in points.items()
        }
        sizes = [20 + 500 * time_s / sum(times.values()) for time_s in times.values()]
        at = [*intensities.values()], [*rates.values()]
        axes.scatter(*at, sizes, alpha=0.7, color=colour, label=name)
        seen += intensities.values()
        slowest = max(
            points,
            key=lambda kernel_name: times[kernel_name] - 1e-6 * points[kernel_name]["floor_us"],
        )
        style: Any = {"textcoords": "offset points", "fontsize": 8, "color": colour}
        axes.annotate(slowest, (intensities[slowest], rates[slowest]), (6, -9), **style)
    low, high = min(seen) / 2, max(seen) * 3
    axes.plot([low, ridge, high], [low * bandwidth, peak, peak], color="#333333")
    axes.set(
        xscale="log",
        yscale="log",
        title=f"Kernels under the roofline ({_kind(result)})",
        xlabel="FLOP a byte (the area of a circle is its share of the step)",
        ylabel="FLOP/s",
    )
    axes.grid(alpha=0.3)
    roof = f"roof: {bandwidth / 1e12:.2f} TB/s, {peak / 1e12:.0f} TFLOPS of BF16"
    title = f"{roof}; named is the kernel with the most time above its floor"
    figure.legend(loc="outside lower center", fontsize=8, ncols=4, title=title)
    save(figure, path)
    return path


def _seconds(kernel: dict[str, float]) -> float:
    """Return what was measured, else what is predicted."""
    return 1e-6 * kernel.get("us", kernel["predicted_us"])
