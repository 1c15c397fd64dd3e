"""Writes a run, or the loads of a sweep, as one self-contained HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.lab.bench import plots
from twostroke.lab.bench.charts import fit_ttft, knee_of
from twostroke.lab.bench.record import RunRecord  # noqa: TC001 - msgspec reads it
from twostroke.lab.bench.report import BenchReport, latency_table, make_bench_report
from twostroke.lab.bench.resource_text import resource_sentences
from twostroke.lab.measure.plots import html_figure, render_html
from twostroke.lab.measure.report_text import format_ms, format_number
from twostroke.lab.measure.requests import describe_rates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from markupsafe import Markup

_TRUSTED, _CAREFUL, _INVALID = "valid", "careful", "invalid"  # classes of the style sheet
_SWEEP_HEADINGS: Final = (
    "LOAD",
    "TTFT P50",
    "TTFT P90",
    "TPOT P50",
    "TPOT P90",
    "REQUESTS/MIN",
    "OUTPUT TOKENS/S",
    "GOOD",
    "AUDIT",
)


class MeasuredRun(Frozen):
    """A recorded run with its computed figures."""

    record: RunRecord
    report: BenchReport

    @classmethod
    def of(cls, record: RunRecord) -> MeasuredRun:
        """Compute the figures of a recorded run."""
        return cls(record, make_bench_report(record.answers, record.setup.objectives))

    @property
    def trust(self) -> str:
        """The CSS class that shows whether the run can be trusted."""
        verdict = self.record.setup.verdict
        if "NOT VALID" in verdict:
            return _INVALID
        return _TRUSTED if "can be trusted" in verdict else _CAREFUL


def html_report(runs: Sequence[MeasuredRun], summary: str = "") -> str:
    """Return the HTML report of a run, or of several as the loads of a sweep.

    `summary` is the result of the sweep in a sentence.

    Raises:
        UsageError: matplotlib is not installed.
    """
    runs = sorted_by_load(runs)
    first = runs[0].record
    is_sweep = len(runs) > 1
    model = first.setup.model or "a model"
    return render_html(
        "twostroke.lab.bench",
        "html_report.html",
        title=f"Benchmark of {model} at {first.setup.url}",
        verdict=_sweep_verdict(runs) if is_sweep else first.setup.verdict,
        trust=_worst(runs),
        summary=summary,
        findings=[] if is_sweep else first.findings,
        setup=list(_setup(first)),
        sweep=_sweep(runs) if is_sweep else None,
        runs=[_run(run, number, is_sweep=is_sweep) for number, run in enumerate(runs)],
    )


def sorted_by_load(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Return runs from the lowest to the highest load; closed loops come first."""

    def order(run: MeasuredRun) -> tuple[float, float]:
        setup = run.record.setup
        return (setup.rate or 0.0, setup.num_clients or 0)

    return sorted(runs, key=order)


def _sweep_verdict(runs: Sequence[MeasuredRun]) -> str:
    counts = {trust: sum(run.trust == trust for run in runs) for trust in (_INVALID, _CAREFUL)}
    loads = counted_noun(len(runs), "load")
    if counts[_INVALID]:
        return f"{counts[_INVALID]} of {loads} NOT VALID: see the column AUDIT."
    if counts[_CAREFUL]:
        return f"Read {counts[_CAREFUL]} of {loads} with care: see the column AUDIT."
    return f"All {loads} can be trusted: the audit has no findings."


def _worst(runs: Sequence[MeasuredRun]) -> str:
    classes = {run.trust for run in runs}
    return next(trust for trust in (_INVALID, _CAREFUL, _TRUSTED) if trust in classes)


def _setup(record: RunRecord) -> Iterator[tuple[str, str]]:
    setup = record.setup
    yield "Command", record.command or "called from Python"
    yield "Date", setup.date
    yield "Endpoint", f"{setup.url}, API {setup.api}"
    yield "Server", record.resources.server_version or "its version is not known"
    yield "Client", f"Twostroke {record.client_version}" if record.client_version else "not known"
    limits = {"TTFT": setup.objectives.ttft_s, "TPOT": setup.objectives.tpot_s}
    texts = [f"{name} {format_ms(s)} ms" for name, s in limits.items() if s is not None]
    yield "Objectives", ", ".join(texts) or "none"


def _run(run: MeasuredRun, number: int, *, is_sweep: bool) -> dict[str, Any]:
    """Return the values of the template for one run."""
    record, report = run.record, run.report
    return {
        "name": run.record.setup.load_name,
        "verdict": record.setup.verdict,
        "trust": run.trust,
        "findings": record.findings,
        "load": _load_sentence(run),
        "tiles": list(_tiles(run)),
        "table": latency_table(report) if report.run.latencies else [],
        "facts": list(_facts(run)),
        "figures": list(_figures(run, f"run{number}")),
        "is_sweep": is_sweep,
    }


def _load_sentence(run: MeasuredRun) -> str:
    setup, report = run.record.setup, run.report.run
    kind = "closed loop" if setup.rate is None else "open loop"
    logs = [answer.log for answer in run.record.answers if answer.is_completed]
    requests = counted_noun(report.num_requests, "request", form=",")
    text = f"{setup.load} ({kind}): {requests} in {format_number(report.duration_s)} s"
    if not logs:
        return f"{text}, none of which completed."
    mean_prompt = sum(log.num_prompt for log in logs) / len(logs)
    mean_output = sum(log.num_output for log in logs) / len(logs)
    return (
        f"{text}, {report.num_completed:,} of which completed, with {mean_prompt:,.0f} prompt "
        f"tokens and {mean_output:,.0f} output tokens on average."
    )


def _tiles(run: MeasuredRun) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each of the most important figures of a run."""
    report, resources = run.report.run, run.record.resources
    for name, title in (("ttft", "TTFT"), ("tpot", "TPOT")):
        if name in report.latencies:
            yield (
                f"{title}, median",
                f"{format_ms(report.latencies[name].percentiles['p50'].value)} ms",
            )
    if not report.num_completed:
        return
    yield "Output", f"{format_number(report.output_per_s)} tok/s"
    yield "Requests", f"{format_number(report.requests_per_s * 60)}/min"
    if report.good_per_s is not None and report.good_share is not None:
        good = format_number(report.good_per_s * 60)
        yield "Goodput", f"{good}/min ({report.good_share:.0%})"
    yield "Prefix cache", f"{report.hit_rate:.1%}"
    if resources.use is not None and resources.use.mfu is not None:
        yield "MFU", f"{resources.use.mfu:.1%}"
    if resources.use is not None and resources.use.mbu is not None:
        yield "MBU", f"{resources.use.mbu:.1%}"
    if resources.joules_per_output_token is not None:
        yield "Energy", f"{format_number(resources.joules_per_output_token)} J/token"
    if resources.cost is not None and resources.cost.per_million_output is not None:
        yield "1M output tokens", f"${resources.cost.per_million_output:,.3g}"


def _facts(run: MeasuredRun) -> Iterator[tuple[str, str]]:
    """Yield the remaining figures of a run as pairs: (name, sentence)."""
    report, resources = run.report.run, run.record.resources
    if report.num_completed:
        yield "Rates", describe_rates(report, is_open=run.record.setup.rate is not None)
    if run.report.failures:
        failures = sorted(run.report.failures.items())
        yield "Failures", f"{', '.join(f'{kind} {count:,}' for kind, count in failures)}."
    if report.num_completed:
        yield (
            "Prefix cache",
            f"{report.hit_rate:.1%} of prompt tokens, as the server reports with its answers.",
        )
    sentences = dict(resource_sentences(resources))
    yield from sentences.items()
    if "Speculation" not in sentences:
        yield "Speculation", "The server counted no drafted tokens, or does not say."
    if "Machine" not in sentences:
        yield "MFU and MBU", "Not known: name the model by --model-config and the device by --on."
    if "Energy" not in sentences:
        yield "Energy", "Not counted: it needs counters of this machine (see --energy)."
    if "Costs" not in sentences:
        yield "Costs", "Not known: give the price by --price, or the device by --on."
    yield "Client", f"Up to {format_ms(report.lateness_p99_s)} ms late (p99)."


def _figures(run: MeasuredRun, prefix: str) -> Iterator[tuple[str, str, Markup]]:
    """Yield the charts of a run: (heading, explanation, SVG).

    A run without completed answers has fewer charts.
    """
    answers, objectives = run.record.answers, run.record.setup.objectives
    completed = [answer for answer in answers if answer.is_completed]
    if completed:
        fit = fit_ttft(completed)
        about = (
            "Inputs have nearly the same length, or there are few: no line is fitted."
            if fit is None
            else "The line has the median slope between pairs of requests, without requests whose "
            "input was cached."
        )
        figure = plots.draw_ttft_by_length(completed, objectives)
        yield "TTFT by input length", about, html_figure(figure, f"{prefix}-length")
        about = (
            "The time to publish is the time to the first token that a reader sees: the first "
            "of the content."
            if any(answer.first_reasoning_s is not None for answer in completed)
            else "No answer begins with reasoning, so the time to publish is TTFT."
        )
        figure = plots.draw_first_tokens(completed, objectives)
        yield "Time to the first token", about, html_figure(figure, f"{prefix}-first")
        gaps = plots.draw_itl_over_time(completed, objectives)
        if gaps is not None:
            about = "Gaps between the chunks of all answers, in intervals of equal time."
            yield "Gaps between chunks (ITL) over time", about, html_figure(gaps, f"{prefix}-itl")
    figure = plots.draw_requests_over_time(answers)
    about = "Requests that arrive and end in intervals of equal time, and those in progress."
    yield "Requests over time", about, html_figure(figure, f"{prefix}-requests")


def _sweep(runs: Sequence[MeasuredRun]) -> dict[str, Any]:
    """Return the values of the template for the loads of a sweep together."""
    reports = [run.report for run in runs]
    names = [run.record.setup.load_name for run in runs]
    knee = knee_of(reports)
    setups = [run.record.setup for run in runs]
    is_closed = all(setup.num_clients is not None for setup in setups)
    loads = [_load_position(run, is_closed=is_closed) for run in runs]
    axis_label = "Clients" if is_closed else "Requests per second that arrive"
    objectives = setups[0].objectives
    frontier = plots.draw_frontier(names, reports, knee, objectives)
    goodput = plots.draw_goodput(names, loads, reports, axis_label)
    return {
        "headings": _SWEEP_HEADINGS,
        "rows": [(index == knee, run.trust, _sweep_row(run)) for index, run in enumerate(runs)],
        "knee": None if knee is None else names[knee],
        "frontier": html_figure(frontier, "frontier"),
        "goodput": html_figure(goodput, "goodput"),
        "has_objectives": bool(objectives),
    }


def _load_position(run: MeasuredRun, *, is_closed: bool) -> float:
    """Return the position of a load on the axis: clients (`is_closed`), or requests per second.

    A closed loop that is shown beside open loops has the position of the rate that it reached.
    """
    setup = run.record.setup
    if is_closed:
        return float(setup.num_clients or 0)
    return run.report.run.requests_per_s if setup.rate is None else setup.rate


def _sweep_row(run: MeasuredRun) -> tuple[str, ...]:
    report = run.report.run
    percentiles = [
        format_ms(report.latencies[name].percentiles[percentile].value)
        if name in report.latencies
        else "–"
        for name in ("ttft", "tpot")
        for percentile in ("p50", "p90")
    ]
    fatal = [finding.name for finding in run.record.findings if finding.is_fatal]
    names = fatal or [finding.name for finding in run.record.findings]
    word = {_TRUSTED: "trusted", _CAREFUL: "with care", _INVALID: "NOT VALID"}[run.trust]
    return (
        run.record.setup.load_name,
        *percentiles,
        format_number(report.requests_per_s * 60),
        format_number(report.output_per_s),
        "–" if report.good_share is None else f"{report.good_share:.0%}",
        f"{word}: {', '.join(names)}" if names else word,
    )
