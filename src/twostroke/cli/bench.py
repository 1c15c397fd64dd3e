"""`twostroke bench`: loads an OpenAI-compatible endpoint, measures it, and audits the run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from twostroke.cli.bench_load import LoadBuilder
from twostroke.cli.bench_output import (
    ProgressLine,
    definition_fields,
    result_fields,
    show_definitions,
    show_result,
    show_sweep,
    sweep_fields,
)
from twostroke.cli.bench_report import (
    check_html,
    measured_run,
    report_options,
    take_machine,
    write_html,
)
from twostroke.cli.help import (
    Command,
    CountListParam,
    JsonObjectParam,
    NumberListParam,
    TextFileParam,
    WordParam,
    command_line,
    option,
)
from twostroke.cli.options import check_effect, check_folder, click_params, is_given_by_user
from twostroke.cli.planning import BoundedNumberParam, objective_options, take_objectives
from twostroke.cli.terminal import on_interrupt, run_in_event_loop
from twostroke.core import env
from twostroke.core.errors import Field, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.json_io import encode_json
from twostroke.core.load_options import ConversationOptions, LoadOptions

if TYPE_CHECKING:
    from twostroke.lab.bench.benchmark import BenchLoad, Benchmark, BenchResult
    from twostroke.lab.bench.endpoint import TlsTrust
    from twostroke.lab.bench.request_form import RequestForm
    from twostroke.lab.bench.sweep import BenchSweep
    from twostroke.lab.measure.requests import Objectives

_MAX_RATE: Final = 1e6
_MAX_CLIENTS: Final = 10_000
_MAX_SECONDS: Final = 1e6
_INTERRUPTED_CODE: Final = 130


@click.command(
    "bench", cls=Command, params=[*click_params(LoadOptions), *click_params(ConversationOptions)]
)
@click.argument("url")
@option("--model", help="Model to request [default: the endpoint's only model].")
@option(
    "--api-key-file",
    "key_text",
    type=TextFileParam(),
    help="File with the API key [default: TWOSTROKE_API_KEY].",
)
@option(
    "--ca-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the certificates that an https endpoint's must be signed by [default: the "
    "system's].",
)
@option("--insecure", is_flag=True, help="Accept any certificate of an https endpoint.")
@option("--api", type=WordParam(("chat", "completions")), default="chat", help="API to load.")
@option(
    "--clients",
    type=CountListParam(high=_MAX_CLIENTS),
    help="Load: N clients, each of which sends a request after its last answer (closed loop). "
    "1,2,4 measures three loads.",
)
@option(
    "--rate",
    type=NumberListParam(high=_MAX_RATE),
    help="Load: requests per second, at scheduled times (open loop). 1,2,4 measures three loads.",
)
@option(
    "--trace",
    help="Load: arrivals and lengths of a trace or file, as for `simulate`; with --clients only "
    "lengths.",
)
@option(
    "--dataset",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of prompts: JSON Lines with prompt or messages, and optionally max_tokens.",
)
@option(
    "--requests",
    "num_requests",
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
@option(
    "--slo",
    help="Objectives by name: MLPerf's, such as llama-3.1-8b-server, or reading (a fast reader).",
)
@option(
    "--sweep",
    "is_search",
    is_flag=True,
    help="Find the highest rate at which --good of the requests meet the objectives.",
)
@option(
    "--good",
    "share",
    type=BoundedNumberParam(high=1.0),
    default=0.9,
    help="Share of requests, 0 to 1, that must meet the objectives.",
)
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
@option(
    "--definitions",
    "shows_definitions",
    is_flag=True,
    help="Also show the figures by the definitions of vLLM, aiperf, guidellm and inference-perf.",
)
@report_options
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    url: str,
    *,
    as_json: bool,
    record: Path | None,
    csv_path: Path | None,
    html: Path | None,
    shows_definitions: bool,
    **values: Any,
) -> int:
    """Send requests to the OpenAI-compatible endpoint at URL, and report latencies and rates.

    The first line says whether the figures can be trusted. The exit code is 1 if they are not
    valid. Ctrl-C ends the run early and reports the answers so far.
    """
    from twostroke.core.process_tuning import request_short_time_slices
    from twostroke.lab.bench.benchmark import Benchmark
    from twostroke.lab.bench.sweep import BenchSweep

    objectives = take_objectives(values)
    for path, field in ((record, "record"), (csv_path, "csv_path")):
        if path is not None:
            check_folder(path, field)
    check_html(html)
    is_search, share = values["is_search"], values.pop("share")
    _check_search(objectives, is_search=is_search)
    key, timeout_s, form = _api_key(values), values.pop("timeout_s"), _wanted_form(values)
    builder = LoadBuilder(values)
    benchmark = Benchmark(
        url,
        form,
        key=key,
        timeout_s=timeout_s,
        machine=take_machine(url, values),
        command=command_line(),
        trust=_trust(url, values),
    )
    request_short_time_slices()
    files = RunFiles(record=record, csv=csv_path, html=html)
    if not is_search and len(loads := builder.loads()) == 1:
        output = OutputForm(as_json=as_json, shows_definitions=shows_definitions)
        load = msgspec.structs.replace(loads[0], keeps_texts=shows_definitions)
        return _bench_one(benchmark, load, objectives, files, output)
    if shows_definitions:
        raise UsageError("has no effect on several loads.", field="shows_definitions")
    line = ProgressLine()
    sweep = BenchSweep(benchmark, objectives, share, line.show)
    try:
        _run_sweep(sweep, benchmark, builder, is_search=is_search)
    finally:
        line.clear()
    if as_json:
        click.echo(encode_json(sweep_fields(sweep)).decode())
    else:
        show_sweep(sweep, objectives)
    files.write_sweep(sweep)  # after the report, which a full disk must not lose
    return _sweep_exit_code(sweep)


def _run_sweep(
    sweep: BenchSweep, benchmark: Benchmark, builder: LoadBuilder, *, is_search: bool
) -> None:
    """Measure the loads of a sweep; Ctrl-C ends it, and keeps the loads that are measured."""
    if is_search:
        running = sweep.search(builder.load_at, builder.start_rate)
    else:
        running = sweep.measure_loads(builder.loads())
    try:
        with on_interrupt(benchmark.stop):
            run_in_event_loop(running)
    except KeyboardInterrupt:
        if not sweep.runs:
            raise
        sweep.interrupt()


def _sweep_exit_code(sweep: BenchSweep) -> int:
    if sweep.is_interrupted:
        return _INTERRUPTED_CODE
    if sweep.capacity is not None:
        return 0 if sweep.capacity.is_known else 1
    return 0 if all(run.result.audit.is_valid for run in sweep.runs) else 1


def _bench_one(
    benchmark: Benchmark,
    load: BenchLoad,
    objectives: Objectives,
    files: RunFiles,
    output: OutputForm,
) -> int:
    """Measure one load, report it, and return the exit code."""
    line = ProgressLine()
    try:
        with on_interrupt(benchmark.stop):
            result = run_in_event_loop(
                benchmark.run(load, objectives, functools.partial(line.show, load))
            )
    finally:
        line.clear()
    if output.as_json:
        fields = result_fields(result)
        if output.shows_definitions:
            fields["definitions"] = definition_fields(result)
        click.echo(encode_json(fields).decode())
    else:
        show_result(result, objectives)
        if output.shows_definitions:
            show_definitions(result)
    files.write_run(result)  # after the report, which a full disk must not lose
    if result.facts.is_interrupted:
        return _INTERRUPTED_CODE
    return 0 if result.audit.is_valid else 1


class OutputForm(Frozen):
    """How a run is printed: as JSON, and with the figures by other tools' definitions."""

    as_json: bool
    shows_definitions: bool


class RunFiles(Frozen):
    """The files to which a run or a sweep is written; None for a file that is not written."""

    record: Path | None
    csv: Path | None
    html: Path | None

    def write_run(self, result: BenchResult) -> None:
        """Write the files of a single run."""
        from twostroke.lab.bench.record import write_csv, write_record

        if self.record is not None:
            write_record(self.record, result.record)
        if self.csv is not None:
            write_csv(self.csv, [result.record.answers])
        if self.html is not None:
            write_html(self.html, [measured_run(result)])

    def write_sweep(self, sweep: BenchSweep) -> None:
        """Write the files of a sweep."""
        from twostroke.lab.bench.record import SweepRecord, write_csv, write_sweep
        from twostroke.lab.bench.sweep import describe_capacity

        records = tuple(run.result.record for run in sweep.runs)
        if self.record is not None:
            loads = tuple(run.point for run in sweep.runs)
            about = SweepRecord(records, loads, sweep.capacity, sweep.is_interrupted)
            write_sweep(self.record, about)
        if self.csv is not None:
            write_csv(self.csv, [record.answers for record in records])
        if self.html is not None:
            runs = sweep.runs_by_load
            summary = ""
            if sweep.capacity is not None:
                objectives = records[0].setup.objectives
                summary = describe_capacity(sweep.capacity, runs, objectives)
            write_html(self.html, [measured_run(run.result) for run in runs], summary)


def _check_search(objectives: Objectives, *, is_search: bool) -> None:
    """Raise UsageError if a search has no objectives, or an option of searches has no effect."""
    check_effect("share", "is_search", has_effect=is_search)
    if is_search and not objectives:
        facts = {"ttft": Field("ttft_s"), "tpot": Field("tpot_s"), "slo": Field("slo")}
        raise UsageError("needs an objective: {ttft}, {tpot} or {slo}.", field="is_search", **facts)


def _trust(url: str, values: dict[str, Any]) -> TlsTrust:
    """Return which TLS certificates are accepted, and remove the options from `values`."""
    from twostroke.lab.bench.endpoint import TlsTrust

    trust = TlsTrust(values.pop("ca_file"), values.pop("insecure"))
    for name in ("ca_file", "insecure"):
        if is_given_by_user(name) and not url.lower().startswith("https:"):
            raise UsageError("has no effect on a URL that is not https.", field=name)
    if trust.ca_file is not None and trust.is_insecure:
        reason = "cannot be combined with {other}: leave one of them out."
        raise UsageError(reason, field="ca_file", other=Field("insecure"))
    return trust


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
