"""A plan as one HTML page: nothing is fetched, all text is escaped, plots are inline SVG."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING, Final

from jinja2 import Environment
from markupsafe import Markup

from twostroke.lab.measure.report_text import format_ms
from twostroke.lab.planner import plots, words
from twostroke.lab.planner.question import MEMORY_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.lab.planner.plan import Plan
    from twostroke.lab.planner.roofline import PlannedStepTime

# The plots' colours, which the style sheet has for light and for dark.
_COLOURS: Final = {
    plots.INK: "var(--ink)",
    plots.SOFT: "var(--soft)",
    plots.GRID: "var(--line)",
    plots.PREFILL: "var(--prefill)",
    plots.DECODE: "var(--decode)",
    "#ffffff": "var(--ground)",
}
_LEAST_SHARE: Final = 0.005  # of a step's time: operations below it are not listed


def report(plan: Plan) -> str:
    """Return the page.

    Raises:
        UsageError: matplotlib is not installed.
    """
    template = resources.files("twostroke.lab.planner").joinpath("report.html").read_text("utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    return page.render(
        plan=plan,
        title=words.title(plan),
        shown=words.num_streams(plan.shown),
        facts=list(words.facts(plan)),
        answer=list(words.answer(plan)),
        question=list(_question(plan)),
        memory=list(_memory(plan)),
        figures=[Markup(_recoloured(one)) for one in plots.drawings(plan)],  # noqa: S704
        rows=[(row.streams == plan.shown, words.cells(row)) for row in plan.rows],
        headings=words.HEADINGS,
        load_headings=words.LOAD_HEADINGS,
        loads=list(words.loads(plan)),
        about_loads=words.ABOUT_LOADS,
        what_if_headings=words.WHAT_IF_HEADINGS,
        what_ifs=list(words.what_ifs(plan)),
        strokes=[
            ("Prefill of one prompt", list(_operations(plan.prefill))),
            (words.decode_name(plan.shown).capitalize(), list(_operations(plan.decode))),
        ],
        formulas=[_halves(line) for line in plan.steps],
        today=datetime.now(UTC).strftime("%Y-%m-%d"),
    )


def _question(plan: Plan) -> Iterator[tuple[str, str]]:
    asked = plan.question
    yield "Prompt", f"{asked.prompt:,} tokens, {asked.num_cached:,} of them cached"
    yield "Answer", f"{asked.output:,} tokens"
    yield (
        "Streams",
        "as many as fit within the objectives, up to 256 without one of TPOT"
        if asked.streams is None
        else f"{asked.streams:,}",
    )
    for name, limit_s in (("TTFT", asked.ttft_s), ("TPOT", asked.tpot_s)):
        yield f"Objective of {name}", "none" if limit_s is None else f"{limit_s * 1e3:,.4g} ms"
    yield "Weights, keys and values", f"{plan.stored}; {asked.kv_format}"
    yield "Shares that an engine reaches", f"MFU {asked.mfu:g}, MBU {asked.mbu:g}"


def _memory(plan: Plan) -> Iterator[tuple[str, str, float]]:
    """Yield name, size and width of the parts of the memory; nothing where it is not known."""
    memory = plan.memory
    if memory.usable is None:
        return
    whole, cache = memory.usable / MEMORY_SHARE, memory.kv_per_request * plan.shown
    requests = f"{plan.shown:,} {'request' if plan.shown == 1 else 'requests'}"
    parts = {"weights": memory.weights, f"keys and values of {requests}": cache}
    free = memory.usable - memory.weights - cache
    if free >= 0:
        parts |= {"free": free, "for the values of a step and the runtime": whole - memory.usable}
    drawn = max(whole, memory.weights + cache)  # more than there is, if it does not fit
    for name, num_bytes in parts.items():
        yield name, f"{num_bytes / 1e9:,.4g} GB ({num_bytes / whole:.0%})", num_bytes / drawn


def _operations(step: PlannedStepTime) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a step's table, the longest operation first."""
    for name, op in sorted(step.ops.items(), key=lambda item: -item[1].seconds):
        if op.seconds < _LEAST_SHARE * step.seconds:
            break
        sizes = f"{op.flops / 1e9:,.3f}", f"{op.bytes / 1e6:,.1f}"
        intensity = f"{op.flops / op.bytes:,.1f}" if op.bytes else "–"
        yield name, *_time(op.seconds, step), *sizes, intensity, op.bound
    for name, seconds in (("links", step.moving_s), ("around operations", step.rest_s)):
        if seconds:
            yield name, *_time(seconds, step), "–", "–", "–", "–"


def _time(seconds: float, step: PlannedStepTime) -> tuple[str, str]:
    return format_ms(seconds), f"{seconds / step.seconds:.0%}"


def _halves(line: str) -> tuple[str, str]:
    """Return the name of a formula, and what it says."""
    mark = " = " if " = " in line.partition(": ")[0] else ": "
    name, _, rest = line.partition(mark)
    return name, rest


def _recoloured(figure: str) -> str:
    for colour, name in _COLOURS.items():
        figure = figure.replace(colour, name)
    return figure
