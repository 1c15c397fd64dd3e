"""Writes a plan as one HTML page that loads nothing else; plots are inline SVG."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from twostroke.core.message_text import counted_noun
from twostroke.lab.measure.plots import render_html
from twostroke.lab.measure.report_text import format_ms
from twostroke.lab.planner import plots, words
from twostroke.lab.planner.question import MEMORY_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.lab.planner.plan import Plan
    from twostroke.lab.planner.roofline import PlannedStepTime

_MIN_TIME_SHARE: Final = 0.005  # of a step's time: operations below it are not listed


def report(plan: Plan) -> str:
    """Return a plan as the text of an HTML page.

    Raises:
        UsageError: matplotlib is not installed.
    """
    return render_html(
        "twostroke.lab.planner",
        "report.html",
        plan=plan,
        title=words.title(plan),
        shown=words.num_streams(plan.shown_streams),
        facts=list(words.plan_facts(plan)),
        answer=list(words.answer_sentences(plan)),
        question=list(_question(plan)),
        memory=list(_memory(plan)),
        figures=plots.drawings(plan),
        rows=[(row.streams == plan.shown_streams, words.row_cells(row)) for row in plan.rows],
        headings=words.HEADINGS,
        load_headings=words.LOAD_HEADINGS,
        loads=list(words.load_rows(plan)),
        about_loads=words.ABOUT_LOADS,
        what_if_headings=words.WHAT_IF_HEADINGS,
        what_ifs=list(words.what_if_rows(plan)),
        steps=[
            ("Prefill of one prompt", list(_operations(plan.prefill))),
            (words.decode_name(plan.shown_streams).capitalize(), list(_operations(plan.decode))),
        ],
        formulas=[_split_formula(line) for line in plan.steps],
        today=datetime.now(UTC).strftime("%Y-%m-%d"),
    )


def _question(plan: Plan) -> Iterator[tuple[str, str]]:
    question = plan.question
    prompt = counted_noun(question.prompt, "token", form=",")
    yield (
        "Prompt",
        f"{prompt}, {question.num_cached:,} of them cached",
    )
    yield "Answer", counted_noun(question.output, "token", form=",")
    yield (
        "Streams",
        "as many as fit within the objectives, at most 256 without a TPOT objective"
        if question.streams is None
        else f"{question.streams:,}",
    )
    for name, limit_s in (("TTFT", question.ttft_s), ("TPOT", question.tpot_s)):
        yield f"Objective of {name}", "none" if limit_s is None else f"{limit_s * 1e3:,.4g} ms"
    yield "Weights, keys and values", f"{plan.stored}; {question.kv_format}"
    yield "Efficiency of the engine", f"MFU {question.mfu:g}, MBU {question.mbu:g}"


def _memory(plan: Plan) -> Iterator[tuple[str, str, float]]:
    """Yield the parts of a plan's memory: name, size, and width in the bar.

    Nothing is yielded if the device's memory is unknown.
    """
    memory = plan.memory
    if memory.usable is None:
        return
    total = memory.usable / MEMORY_SHARE
    cache = memory.kv_per_request * plan.shown_streams
    requests = counted_noun(plan.shown_streams, "request", form=",")
    parts = {"weights": memory.weights, f"keys and values of {requests}": cache}
    free = memory.usable - memory.weights - cache
    if free >= 0:
        parts |= {"free": free, "for activations and the runtime": total - memory.usable}
    bar_bytes = max(total, memory.weights + cache)  # exceeds the memory if it does not fit
    for name, num_bytes in parts.items():
        yield name, f"{num_bytes / 1e9:,.4g} GB ({num_bytes / total:.0%})", num_bytes / bar_bytes


def _operations(step: PlannedStepTime) -> Iterator[tuple[str, ...]]:
    """Yield the table rows of a planned step's operations, the slowest operation first."""
    for name, op in sorted(step.ops.items(), key=lambda item: -item[1].seconds):
        if op.seconds < _MIN_TIME_SHARE * step.seconds:
            break
        time, share = _time(op.seconds, step)
        intensity = f"{op.flops / op.bytes:,.1f}" if op.bytes else "–"
        yield (
            name,
            time,
            share,
            f"{op.flops / 1e9:,.3f}",
            f"{op.bytes / 1e6:,.1f}",
            intensity,
            op.bound,
        )
    for name, seconds in (("links", step.moving_s), ("around operations", step.rest_s)):
        if seconds:
            time, share = _time(seconds, step)
            yield name, time, share, "–", "–", "–", "–"


def _time(seconds: float, step: PlannedStepTime) -> tuple[str, str]:
    return format_ms(seconds), f"{seconds / step.seconds:.0%}"


def _split_formula(line: str) -> tuple[str, str]:
    """Return the name and the text of a formula in a plan's explanation."""
    mark = " = " if " = " in line.partition(": ")[0] else ": "
    name, _, text = line.partition(mark)
    return name, text
