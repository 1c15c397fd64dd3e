"""Terminal output of `twostroke bench`: progress, the report of a run, the table of a sweep."""

from __future__ import annotations

import statistics
import sys
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.cli.terminal import printable, show_table
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.lab.bench.benchmark import BenchLoad, BenchResult
    from twostroke.lab.bench.definitions import DefinedFigure
    from twostroke.lab.bench.runner import LoadRunner
    from twostroke.lab.bench.sweep import BenchSweep, SweepRun
    from twostroke.lab.measure.requests import Objectives

_SHOWN_ANSWERS: Final = 100  # newest answers whose median TTFT the progress line shows


class ProgressLine:
    """A progress line that is redrawn in place; prints nothing if there is no terminal."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()

    def show(self, load: BenchLoad, runner: LoadRunner, now_s: float) -> None:
        """Show how far the run of a load is."""
        if not self._is_shown:
            return
        answers, duration_s = runner.answers, load.limits.duration_s
        num_failed = sum(not answer.is_completed for answer in answers)
        total = (
            f"{duration_s:.0f} s"
            if duration_s
            else counted_noun(load.num_planned, "request", form=",")
        )
        done = f"{now_s:.0f}" if duration_s else f"{len(answers):,}"
        words = [
            f"{describe_load(load)}: {done} of {total}",
            f"{runner.num_sent - len(answers):,} in progress",
            f"{num_failed:,} failed",
        ]
        times_s = [a.log.timings.ttft_s for a in answers[-_SHOWN_ANSWERS:] if a.is_completed]
        if times_s and now_s > 0:
            words.append(f"{len(answers) / now_s:.3g} requests/s")
            words.append(f"TTFT {statistics.median(times_s) * 1e3:.3g} ms")
        text = ", ".join(words)[: get_terminal_size().columns - 1]
        click.echo(f"\r{text}\x1b[K", nl=False, err=True)

    def clear(self) -> None:
        """Remove the progress line from the terminal."""
        if self._is_shown:
            click.echo("\r\x1b[K", nl=False, err=True)


def describe_load(load: BenchLoad) -> str:
    """Return a short name for a load, such as "2 clients"."""
    if load.limits.num_clients is not None:
        return counted_noun(load.limits.num_clients, "client")
    return f"{load.workload.rate:.3g} requests/s"


def result_fields(result: BenchResult) -> dict[str, Any]:
    """Return the fields of a run for --json."""
    from twostroke.lab.bench.conversations import turn_figures

    return {
        "verdict": result.audit.verdict,
        "is_valid": result.audit.is_valid,
        "findings": result.audit.findings,
        "setup": result.record.setup,
        "report": result.report,
        "resources": result.record.resources,
        "turns": turn_figures(result.record.answers),
    }


def definition_fields(result: BenchResult) -> dict[str, dict[str, float | None]]:
    """Return a run's latency figures by the definitions of several benchmark tools, for --json."""
    return {figure.name: figure.values for figure in _defined_figures(result)}


def show_definitions(result: BenchResult) -> None:
    """Print a run's latency figures by the definitions of several benchmark tools, side by side."""
    from twostroke.lab.bench.definitions import TOOLS
    from twostroke.lab.measure.report_text import format_ms, format_number

    figures = _defined_figures(result)
    if not figures:
        return
    rows = [("MS", *(tool.upper() for tool in TOOLS))]
    for figure in figures:
        values = [figure.values[tool] for tool in TOOLS]
        form = format_number if figure.is_rate else format_ms
        rows.append((figure.title, *("–" if value is None else form(value) for value in values)))
    click.echo("\nThe same run by the definitions of other tools:")
    show_table(rows)


def _defined_figures(result: BenchResult) -> list[DefinedFigure]:
    from twostroke.lab.bench.definitions import defined_figures

    if not result.report.run.num_completed:
        return []
    return defined_figures(result.record.answers, result.report, result.facts.tokenized)


def sweep_fields(sweep: BenchSweep) -> dict[str, Any]:
    """Return the fields of a sweep for --json."""
    return {
        "is_interrupted": sweep.is_interrupted,
        "capacity": sweep.capacity,
        "points": [{"load": run.point, **result_fields(run.result)} for run in sweep.runs],
    }


def show_sweep(sweep: BenchSweep, objectives: Objectives) -> None:
    """Print the result of a search, the loads that are not valid, and a table of all loads."""
    from twostroke.lab.bench.sweep import describe_capacity

    runs = sweep.runs_by_load
    if sweep.is_interrupted and sweep.capacity is None:
        click.echo("The sweep was interrupted: the last load has only its first answers.")
    if sweep.capacity is not None:
        click.echo(printable(describe_capacity(sweep.capacity, runs, objectives)))
    invalid = [run for run in runs if not run.result.audit.is_valid]
    careful = [run for run in runs if run.result.audit.findings]
    if not invalid and careful:
        remarks = dict.fromkeys(f.name for run in careful for f in run.result.audit.findings)
        loads = counted_noun(len(runs), "load")
        click.echo(f"Read {len(careful)} of {loads} with care: {', '.join(remarks)}.")
    elif not invalid:
        click.echo("The figures of all loads are valid.")
    for run in invalid:
        names = [finding.name for finding in run.result.audit.findings if finding.is_fatal]
        click.echo(printable(f"- {_load_of(run)}: NOT VALID: {', '.join(names)}"))
    click.echo()
    for line in _facts(runs[0].result, with_load=False):
        click.echo(printable(line))
    click.echo()
    headings = ("LOAD", "REQUESTS", "DONE/S", "TOKENS/S", "IN PROGRESS", *_LATENCY_HEADINGS)
    has_good = any(run.point.good for run in runs)
    rows = [(*headings, "GOOD", "95% INTERVAL") if has_good else headings]
    show_table(rows + [_sweep_row(run, has_good=has_good) for run in runs])
    if any(run.result.facts.is_hopeless for run in runs):
        click.echo("* ended early, when too few requests could still meet the objectives")


_LATENCY_HEADINGS: Final = ("TTFT P50", "P90", "TPOT P50", "P90")


def _load_of(run: SweepRun) -> str:
    if run.point.num_clients is not None:
        return counted_noun(run.point.num_clients, "client")
    return f"{run.point.rate:.3g} requests/s"


def _sweep_row(run: SweepRun, *, has_good: bool) -> tuple[str, ...]:
    from twostroke.lab.measure.report_text import format_ms

    report, mark = run.result.report.run, "*" if run.result.facts.is_hopeless else ""
    cells = [f"{_load_of(run)}{mark}", f"{report.num_requests:,}", f"{report.requests_per_s:.3g}"]
    cells += [f"{report.output_per_s:,.0f}", f"{report.concurrency:,.1f}"]
    for name in ("ttft", "tpot"):
        latency = report.latencies.get(name)
        for percentile in ("p50", "p90"):
            cells.append(format_ms(latency.percentiles[percentile].value) if latency else "–")
    if has_good:
        good = run.point.good
        cells += [f"{good.value:.1%}", f"{good.low:.1%} to {good.high:.1%}"] if good else ["–", ""]
    return tuple(cells)


def show_result(result: BenchResult, objectives: Objectives) -> None:
    """Print the report of a run, the audit's verdict first."""
    from twostroke.lab.bench.report import latency_table

    click.echo(result.audit.verdict)
    for finding in result.audit.findings:
        click.echo(printable(f"- {finding.name}: {finding.text}"))
    click.echo()
    for line in _facts(result):
        click.echo(printable(line))
    click.echo()
    if result.report.run.latencies:
        show_table(latency_table(result.report))
        click.echo("In brackets: 95% bootstrap intervals. P99 needs 500 samples.\n")
    _show_turns(result)
    for line in _rates(result, objectives):
        click.echo(printable(line))


def _show_turns(result: BenchResult) -> None:
    """Print a line for each turn of conversations; nothing for other loads."""
    from twostroke.lab.bench.conversations import turn_figures
    from twostroke.lab.measure.report_text import format_ms

    turns = turn_figures(result.record.answers)
    if not turns:
        return
    headings = ("TURN", "REQUESTS", "PROMPT", "CACHED", "HISTORY", "TTFT P50", "P90", "TPOT P50")
    rows = [
        (
            str(turn.turn),
            f"{turn.num_requests:,}",
            f"{turn.mean_prompt:,.0f}",
            f"{turn.cached_share:.0%}",
            f"{turn.reusable_share:.0%}",
            format_ms(turn.ttft_p50_s),
            format_ms(turn.ttft_p90_s),
            "–" if turn.tpot_p50_s is None else format_ms(turn.tpot_p50_s),
        )
        for turn in turns
    ]
    show_table([headings, *rows])
    click.echo(
        "HISTORY: tokens that the request before had computed, so the cache can have them.\n"
    )


def _facts(result: BenchResult, *, with_load: bool = True) -> Iterator[str]:
    setup, run = result.record.setup, result.report.run
    kind = "open loop" if setup.num_clients is None else "closed loop"
    model = f"{setup.model} at " if setup.model else ""
    yield f"{model}{setup.url}, {setup.api}"
    logs = [answer.log for answer in result.record.answers if answer.is_completed]
    if not with_load:
        return
    rate = "" if setup.rate is None else f", {setup.rate:.3g} per second"
    text = f"{setup.load} ({kind}): {counted_noun(run.num_requests, 'request', form=',')}{rate}"
    if logs:
        mean_prompt = sum(log.num_prompt for log in logs) / len(logs)
        mean_output = sum(log.num_output for log in logs) / len(logs)
        text += f", with {mean_prompt:,.0f} prompt tokens and {mean_output:,.0f} output tokens"
        text += " on average"
    yield text


def _rates(result: BenchResult, objectives: Objectives) -> Iterator[str]:
    from twostroke.lab.bench.resource_text import resource_sentences
    from twostroke.lab.measure.report_text import format_ms
    from twostroke.lab.measure.requests import describe_rates

    run = result.report.run
    if run.num_completed:
        yield describe_rates(run, is_open=result.facts.is_open)
    if result.report.failures:
        kinds = (f"{kind} {count:,}" for kind, count in sorted(result.report.failures.items()))
        yield f"Failed requests: {', '.join(kinds)}."
    if objectives:
        limits = {"TTFT": objectives.ttft_s, "TPOT": objectives.tpot_s}
        texts = [f"{name} {format_ms(s)} ms" for name, s in limits.items() if s is not None]
        yield (
            f"Goodput: {run.good_per_s:.3g} requests/s; {run.good_share:.1%} of the scheduled "
            f"requests meet the objectives ({', '.join(texts)})."
        )
    for name, sentence in resource_sentences(result.record.resources):
        yield f"{name}: {sentence}"
    if result.facts.has_usage and run.num_completed:
        yield f"Prefix cache: {run.hit_rate:.1%} of prompt tokens, as the server reports."
    chunks = f"A chunk has {result.report.tokens_per_chunk:.2f} tokens on average. "
    yield (
        f"{chunks if run.num_completed else ''}The client was up to "
        f"{format_ms(run.lateness_p99_s)} ms late (p99), and used "
        f"{result.facts.client_share:.0%} of a core."
    )
