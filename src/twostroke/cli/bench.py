"""`twostroke bench`: loads an OpenAI-compatible endpoint, measures it, and audits the run."""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.cli.help import Command, JsonObjectParam, TextFileParam, WordParam, option
from twostroke.cli.options import check_effect, check_folder, is_given_by_user
from twostroke.cli.planning import BoundedNumberParam, objective_options
from twostroke.cli.terminal import on_interrupt, printable, show_table
from twostroke.core import env
from twostroke.core.errors import Field, UsageError
from twostroke.core.json_io import encode_json
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.lab.bench.benchmark import BenchLoad, BenchResult
    from twostroke.lab.bench.request_form import RequestForm
    from twostroke.lab.bench.runner import LoadRunner
    from twostroke.lab.measure.requests import Objectives
    from twostroke.lab.simulator.load import Workload

_LENGTHS: Final = ("prompt", "output", "spread", "shared")
_ARRIVALS: Final = ("arrivals", "burstiness")
_MAX_CLIENTS: Final = 10_000
_MAX_SECONDS: Final = 1e6
_SHOWN_ANSWERS: Final = 100  # newest answers whose median TTFT the progress line shows
_INTERRUPTED_CODE: Final = 130


@click.command("bench", cls=Command)
@click.argument("url")
@option("--model", help="Model to request [default: the endpoint's only model].")
@option(
    "--api-key-file",
    "key_text",
    type=TextFileParam(),
    help="File with the API key [default: TWOSTROKE_API_KEY].",
)
@option("--api", type=WordParam(("chat", "completions")), default="chat", help="API to load.")
@option(
    "--clients",
    type=click.IntRange(1, _MAX_CLIENTS),
    help="Load: N clients, each of which sends a request after its last answer (closed loop).",
)
@option("--rate", type=float, help="Load: requests per second, at scheduled times (open loop).")
@option(
    "--arrivals",
    type=WordParam(("poisson", "constant", "gamma")),
    help="Distribution of arrivals of --rate [default: poisson].",
)
@option("--burstiness", type=float, help="Coefficient of variation of gamma arrivals [default: 3].")
@option(
    "--trace",
    help="Load: arrivals and lengths of a trace or file, as for `simulate`; with --clients only "
    "lengths.",
)
@option("--speed", default=1.0, help="Make requests arrive X times as fast.")
@option("--scale", default=1.0, help="Multiply the lengths of prompts and answers by X.")
@option(
    "--dataset",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of prompts: JSON Lines with prompt or messages, and optionally max_tokens.",
)
@option("--prompt", type=int, help="Mean tokens of a prompt [default: 1024].")
@option("--output", type=int, help="Mean tokens of an answer [default: 256].")
@option("--spread", type=float, help="Coefficient of variation of both lengths [default: 0].")
@option("--shared", type=int, help="Tokens at the start that all prompts share [default: 0].")
@option(
    "--requests",
    type=click.IntRange(1),
    help="Send the first N requests [default: all of a trace or dataset; else 1000, or enough for "
    "--duration].",
)
@option(
    "--duration",
    "duration_s",
    type=BoundedNumberParam(high=_MAX_SECONDS),
    help="Send no request after this time, in seconds.",
)
@option(
    "--timeout",
    "timeout_s",
    type=BoundedNumberParam(high=_MAX_SECONDS),
    default=600.0,
    help="Longest time of a request, in seconds; later it has failed.",
)
@option("--seed", type=click.IntRange(0), default=0, help="Seed of arrivals and lengths.")
@option(
    "--extra-body",
    "extra_fields",
    type=JsonObjectParam(),
    help='Further fields of each request, such as {"temperature": 0.6}.',
)
@objective_options()
@option("--slo", help="Objectives of MLPerf, such as llama-3.1-8b-server, or reading.")
@option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write every request and chunk to this file, for `bench compare` and `simulate --trace`.",
)
@option(
    "--csv",
    "csv_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a line for each request to this file.",
)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    url: str, *, as_json: bool, record: Path | None, csv_path: Path | None, **values: Any
) -> int:
    """Send requests to the OpenAI-compatible endpoint at URL, and report latencies and rates.

    The first line says whether the figures can be trusted. The exit code is 1 if they are not
    valid. Ctrl-C ends the run early and reports the answers so far.
    """
    from twostroke.core.process_tuning import request_short_time_slices
    from twostroke.lab.bench.benchmark import Benchmark
    from twostroke.lab.bench.record import write_csv, write_record

    objectives = _objectives(values)
    for path, field in ((record, "record"), (csv_path, "csv_path")):
        if path is not None:
            check_folder(path, field)
    key, timeout_s, form = _api_key(values), values.pop("timeout_s"), _wanted_form(values)
    load = _load(values)
    benchmark = Benchmark(url, form, key=key, timeout_s=timeout_s)
    request_short_time_slices()
    line = _ProgressLine(load)
    try:
        with on_interrupt(benchmark.stop):
            result = asyncio.run(benchmark.run(load, objectives, line.show))
    finally:
        line.clear()
    if record is not None:
        write_record(record, result.record)
    if csv_path is not None:
        write_csv(csv_path, result.record.answers)
    if as_json:
        fields = {
            "verdict": result.audit.verdict,
            "is_valid": result.audit.is_valid,
            "findings": result.audit.findings,
            "setup": result.record.setup,
            "report": result.report,
        }
        click.echo(encode_json(fields).decode())
    else:
        _show(result, objectives)
    if result.facts.is_interrupted:
        return _INTERRUPTED_CODE
    return 0 if result.audit.is_valid else 1


class _ProgressLine:
    """A line on the terminal that is written anew; without a terminal there is none."""

    def __init__(self, load: BenchLoad) -> None:
        self._is_shown = sys.stderr.isatty()
        self._duration_s = load.limits.duration_s
        self._count = len(load.prompts) or len(load.workload.arrivals)

    def show(self, runner: LoadRunner, now_s: float) -> None:
        """Show how far the run is."""
        if not self._is_shown:
            return
        answers = runner.answers
        num_failed = sum(not answer.is_completed for answer in answers)
        total = f"{self._duration_s:.0f} s" if self._duration_s else f"{self._count:,} requests"
        done = f"{now_s:.0f}" if self._duration_s else f"{len(answers):,}"
        words = [
            f"{done} of {total}",
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
        """Remove the line."""
        if self._is_shown:
            click.echo("\r\x1b[K", nl=False, err=True)


def _objectives(values: dict[str, Any]) -> Objectives:
    """Return the objectives of a command's `values`, and remove them from `values`."""
    from twostroke.lab.measure.requests import Objectives, named_objectives

    objectives, name = Objectives(values.pop("ttft_s"), values.pop("tpot_s")), values.pop("slo")
    if name is None:
        return objectives
    if objectives:
        other = "ttft_s" if objectives.ttft_s is not None else "tpot_s"
        reason = "cannot be combined with {other}: leave one of them out."
        raise UsageError(reason, field="slo", other=Field(other))
    return named_objectives(name)


def _api_key(values: dict[str, Any]) -> str | None:
    text = values.pop("key_text")
    key = env.client_api_key() if text is None else text.strip()
    if key is not None and not (key.isascii() and key.isprintable()):
        raise UsageError("The API key must be one line of ASCII characters.")
    return key


def _wanted_form(values: dict[str, Any]) -> RequestForm:
    from twostroke.lab.bench.request_form import RequestForm

    return RequestForm(
        api=values.pop("api"),
        model=values.pop("model") or "",
        ignores_end=values["dataset"] is None,
        extra_fields=values.pop("extra_fields") or {},
    )


def _load(values: dict[str, Any]) -> BenchLoad:
    """Return the load that a command's `values` describe."""
    from twostroke.lab.bench.benchmark import BenchLoad
    from twostroke.lab.bench.requests_to_send import read_dataset
    from twostroke.lab.bench.runner import RunLimits

    clients, rate, trace, path = (values[n] for n in ("clients", "rate", "trace", "dataset"))
    if clients is None and rate is None and trace is None:
        raise UsageError("Which load? Give --clients, --rate or --trace.")
    for first, second in (("clients", "rate"), ("rate", "trace"), ("dataset", "trace")):
        if values[first] is not None and values[second] is not None:
            reason = "cannot be combined with {other}: leave one of them out."
            raise UsageError(reason, field=first, other=Field(second))
    for name in _ARRIVALS:
        check_effect(name, "rate", has_effect=rate is not None)
    check_effect("burstiness", "arrivals", has_effect=values["arrivals"] == "gamma", value="gamma")
    source = "trace" if trace is not None else "dataset"
    for name in _LENGTHS:
        is_limit = name == "output" and trace is None
        if values[source] is not None and values[name] is not None and not is_limit:
            raise UsageError(f"has no effect with --{source}, which has its own.", field=name)
    if path is not None and is_given_by_user("scale"):
        reason = "has no effect with --dataset, whose prompts are sent as they are."
        raise UsageError(reason, field="scale")
    prompts = read_dataset(path, values["requests"]) if path is not None else ()
    workload = _workload(values, len(prompts) or values["requests"])
    if prompts:
        workload = workload.named(f"{path.name}, {workload.name}")
    return BenchLoad(
        workload=workload,
        limits=RunLimits(num_clients=clients, duration_s=values["duration_s"]),
        prompts=prompts,
        max_output=(values["output"] or 0) if prompts else 0,
    )


def _workload(values: dict[str, Any], count: int | None) -> Workload:
    """Return the arrivals and lengths of a load of `count` requests; None for the default."""
    from twostroke.lab.simulator.load import MAX_REQUESTS, SyntheticWorkload
    from twostroke.lab.simulator.traces import read_trace

    rate, clients, speed = values["rate"], values["clients"], values["speed"]
    duration_s = values["duration_s"]
    changes = {"speed": speed, "scale": values["scale"]}
    if values["trace"] is not None:
        workload = read_trace(values["trace"]).first(count).changed(**changes)
        if clients is None:
            return workload
        if is_given_by_user("speed"):
            reason = "has no effect with --clients: a closed loop has no arrival times."
            raise UsageError(reason, field="speed")
        return workload.named(f"lengths of {workload.name}, {counted_noun(clients, 'client')}")
    if count is None and duration_s is not None:
        # More requests than a random schedule has in this time; a client may need more.
        per_s = 1000.0 if rate is None else 1.5 * rate * speed
        count = min(MAX_REQUESTS, 100 + math.ceil(per_s * duration_s))
    shape = {name: values[name] for name in (*_ARRIVALS, *_LENGTHS) if values[name] is not None}
    if values["dataset"] is not None:
        shape.pop("output", None)
    shape |= {} if count is None else {"count": count}
    check_effect("speed", "rate", has_effect=rate is not None)
    if rate is not None:
        return SyntheticWorkload(rate, **shape).load(values["seed"]).changed(**changes)
    synthetic = SyntheticWorkload(1.0, "constant", **shape)
    workload = synthetic.load(values["seed"]).changed(scale=values["scale"])
    return workload.named(counted_noun(clients, "client"))


def _show(result: BenchResult, objectives: Objectives) -> None:
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
    for line in _rates(result, objectives):
        click.echo(printable(line))


def _facts(result: BenchResult) -> Iterator[str]:
    setup, run = result.record.setup, result.report.run
    kind = "open loop" if setup.num_clients is None else "closed loop"
    model = f"{setup.model} at " if setup.model else ""
    yield f"{model}{setup.url}, {setup.api}"
    logs = [answer.log for answer in result.record.answers if answer.is_completed]
    if logs:
        mean_prompt = sum(log.num_prompt for log in logs) / len(logs)
        mean_output = sum(log.num_output for log in logs) / len(logs)
        rate = "" if setup.rate is None else f", {setup.rate:.3g} per second"
        yield (
            f"{setup.load} ({kind}): {counted_noun(run.num_requests, 'request', form=',')}{rate}, "
            f"with {mean_prompt:,.0f} prompt tokens and {mean_output:,.0f} output tokens on average"
        )


def _rates(result: BenchResult, objectives: Objectives) -> Iterator[str]:
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
    if result.facts.has_usage:
        yield f"Prefix cache: {run.hit_rate:.1%} of prompt tokens, as the server reports."
    yield (
        f"A chunk has {result.report.tokens_per_chunk:.2f} tokens on average. The client was up to "
        f"{format_ms(run.lateness_p99_s)} ms late (p99), and used "
        f"{result.facts.client_share:.0%} of a core."
    )
