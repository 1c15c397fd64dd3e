"""`twostroke simulate`: simulates a load of requests on replicas of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec.structs import replace

from twostroke.cli.availability import (
    FAILURE_PARAMS,
    FailureValues,
    show_availability,
    show_cost,
)
from twostroke.cli.help import ByteSizeParam, Command, WordParam, option
from twostroke.cli.options import (
    check_batching,
    check_effect,
    check_folder,
    click_params,
    engine_options,
    is_given_by_user,
)
from twostroke.cli.planning import (
    THIS_MACHINE,
    BoundedNumberParam,
    check_threads,
    correction_of,
    efficiency_options,
    kv_format_option,
    objective_options,
    price_option,
    threads_option,
    weights_option,
)
from twostroke.cli.terminal import printable, show_table
from twostroke.cli.what_if import read_variants, show_limits
from twostroke.core.distributed_options import DISAGGREGATE
from twostroke.core.errors import Field, UsageError
from twostroke.core.json_io import encode_json
from twostroke.core.load_options import LoadOptions
from twostroke.core.message_text import counted_noun
from twostroke.core.options import BatchOptions, CacheOptions
from twostroke.fleet.router.options import POLICY_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.lab.measure.requests import Objectives
    from twostroke.lab.simulator import LoadProbe, Simulation, SimulationSetup, Sweep, Workload

_SYNTHETIC: Final = ("arrivals", "burstiness", "prompt", "output", "spread", "shared")


@click.command(
    "simulate",
    cls=Command,
    params=[
        *click_params(CacheOptions, only=("context_length", "page_size", "prefix_cache")),
        *click_params(BatchOptions),
        *click_params(LoadOptions),
        *FAILURE_PARAMS,
    ],
)
@click.argument("model")
@option(
    "--on",
    "device",
    default=THIS_MACHINE,
    help="Device, as for `plan`: a name, a .toml file, or `here`.",
)
@option(
    "--devices",
    "count",
    default=1,
    help="Number of devices of each replica, which divide each layer.",
)
@threads_option
@option("--replicas", default=1, help="Number of replicas of the model.")
@option(
    "--prefill-replicas",
    default=0,
    help="How many of the replicas only prefill prompts for the others.",
)
@option(
    "--disaggregate",
    type=WordParam(DISAGGREGATE),
    default="auto",
    help="Which prompts the prefill replicas prefill; auto: prompts for which that saves time.",
)
@option(
    "--link",
    type=BoundedNumberParam(high=1e9, unit=1e9),
    help="GB/s of the link from prefill replicas to the others [default: the device's; required "
    "for this machine].",
)
@option(
    "--routing",
    type=WordParam(POLICY_NAMES),
    default="least-work",
    help="How to choose the replica of a request.",
)
@option(
    "--trace",
    help="Load: the trace azure-conv, azure-code, mooncake-conversation or mooncake-synthetic "
    "(fetched once), or a file: of --record-trace, .csv, .jsonl, or the .json of --record.",
)
@option(
    "--rate", type=float, help="Load: requests per second of a synthetic load, instead of a trace."
)
@option(
    "--requests",
    type=click.IntRange(1),
    help="Use the first N requests [default: all; 1000 with --rate].",
)
@option("--seed", type=click.IntRange(0), default=0, help="Seed of the random numbers.")
@objective_options()
@option(
    "--sweep",
    is_flag=True,
    help="Find the highest load at which --good of the requests meet the objectives.",
)
@option(
    "--what-if",
    "what_if",
    multiple=True,
    metavar="CHANGES",
    help="Also simulate with changed settings, such as replicas=2,token-budget=512, and show up to "
    "which multiple of the load the objectives are met; repeatable. `usual`: common changes.",
)
@option(
    "--good", "share", default=0.9, help="Share of requests, 0 to 1, that must meet the objectives."
)
@weights_option
@kv_format_option
@option(
    "--kv-memory",
    "memory_bytes",
    type=ByteSizeParam(),
    help="Memory of each replica for keys and values [default: the memory that weights leave].",
)
@option(
    "--page-cache-size",
    "page_cache_size",
    type=ByteSizeParam(),
    help="Give each replica a page cache of this size, as `serve --page-cache` does.",
)
@option(
    "--page-cache-speed",
    "page_cache_speed",
    type=BoundedNumberParam(high=1e9, unit=1e9),
    default=1.0,
    help="GB/s at which pages are loaded from the page cache.",
)
@efficiency_options(1.0, 1.0)
@option(
    "--acceptance", type=float, help="Speculate, with this probability that a draft is accepted."
)
@option("--draft-cost", default=0.0, help="Time of a draft token, as a share of a decode step.")
@option(
    "--overhead",
    "overhead_s",
    type=BoundedNumberParam(low=0, high=60_000, unit=1e-3),
    default=0.0,
    help="Time from client to engine for each request, in ms.",
)
@price_option
@option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the requests to this file.",
)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, *, as_json: bool, record: Path | None, **values: Any) -> None:
    """Simulate MODEL under a load of requests in virtual time, and show latencies and costs.

    The engine's own scheduler, KV pages, prefix cache and speculation run. Only the steps are not
    computed: each takes the predicted time of its operations on the device. MODEL is as for `plan`.
    """
    from twostroke.core.files import atomic_output
    from twostroke.lab.measure.requests import Objectives
    from twostroke.lab.simulator import simulate, sweep
    from twostroke.lab.simulator.sweep import check_objectives

    objectives = Objectives(values.pop("ttft_s"), values.pop("tpot_s"))
    is_sweep, share = values.pop("sweep"), values.pop("share")
    what_if = values.pop("what_if")
    failures = FailureValues(values)
    if is_sweep:
        check_objectives(objectives)
    if what_if:
        _check_what_if(objectives, is_sweep=is_sweep, is_recorded=record is not None)
        variants = read_variants(what_if, values)
    if record is not None:
        check_folder(record, "record")
    check_effect("share", "sweep", has_effect=is_sweep or bool(what_if))
    failures.check_alone(
        sweep=is_sweep,
        what_if=bool(what_if),
        record=record is not None,
        prefill_replicas=values["prefill_replicas"] > 0,
        page_cache_size=values["page_cache_size"] is not None,
    )
    _check_effects(values, has_failures=failures.has_rates)
    load = _workload(values)
    if what_if:
        show_limits(
            variants,
            lambda changes: _simulation_setup(model, {**values, **changes}),
            load,
            objectives,
            share=share,
            as_json=as_json,
        )
        return
    setup = _simulation_setup(model, values)
    if failures.has_rates:
        _simulate_failures(setup, load, objectives, failures, as_json=as_json)
        return
    if is_sweep:
        sweep_result = sweep(setup, load, objectives, share, _progress)
        simulation = sweep_result.best.simulation
    else:
        simulation = simulate(setup, load, objectives)
    if record is not None:
        log = encode_json({"requests": simulation.logs})
        with atomic_output(record) as part:
            part.write_bytes(log + b"\n")
    if as_json:
        click.echo(_json(simulation, sweep_result if is_sweep else None))
        return
    for line in facts(setup, load):
        click.echo(printable(line))
    if is_sweep:
        _show_sweep(sweep_result, share)
    _show(simulation, objectives)


def _json(simulation: Simulation, sweep_result: Sweep | None) -> str:
    """Return a simulation, or a sweep with its best simulation, as a JSON object."""
    printed: Any = replace(simulation, logs=())
    if sweep_result is not None:
        probes = [{"speed": p.speed, "rate": p.rate, "meets": p.meets} for p in sweep_result.probes]
        about = {"capacity": sweep_result.best.rate, "warning": sweep_result.warning}
        printed = about | {"probes": probes, "best": printed}
    return encode_json(printed).decode()


def _simulate_failures(
    setup: SimulationSetup,
    load: Workload,
    objectives: Objectives,
    failures: FailureValues,
    *,
    as_json: bool,
) -> None:
    """Show the availability of replicas that fail; with --availability, search for replicas."""
    from twostroke.lab.simulator import simulate

    if failures.target is not None:
        cost = failures.search(setup, load, objectives)
        if as_json:
            click.echo(encode_json(cost).decode())
            return
        for line in facts(setup, load):
            click.echo(printable(line))
        show_cost(cost, failures.rates(setup))
        return
    simulation = simulate(setup, load, objectives)
    availability = failures.estimate(setup, load, objectives)
    if as_json:
        undisturbed = replace(simulation, logs=())
        printed = {"without_failures": undisturbed, "availability": availability}
        click.echo(encode_json(printed).decode())
        return
    for line in facts(setup, load):
        click.echo(printable(line))
    click.echo("Without failures:\n")
    _show(simulation, objectives)
    show_availability(availability, failures.rates(setup))


def _check_what_if(objectives: Objectives, *, is_sweep: bool, is_recorded: bool) -> None:
    from twostroke.lab.simulator.sweep import check_objectives

    if is_sweep or is_recorded:
        name = "sweep" if is_sweep else "record"
        raise UsageError("cannot be combined with {other}.", field=name, other=Field("what_if"))
    check_objectives(objectives, "what_if")


def _check_effects(values: dict[str, Any], *, has_failures: bool) -> None:
    """Raise UsageError for options of `simulate` that have no effect.

    With `has_failures`, the seed has an effect, since it sets the random times of failures.
    """
    for name in ("link", "disaggregate"):
        check_effect(name, "prefill_replicas", has_effect=values["prefill_replicas"] > 0)
    has_page_cache = values["page_cache_size"] is not None
    check_effect("page_cache_speed", "page_cache_size", has_effect=has_page_cache)
    check_effect("draft_cost", "acceptance", has_effect=values["acceptance"] is not None)
    is_gamma, policy = values["arrivals"] == "gamma", values["policy"]
    if values["rate"] is not None:
        check_effect("burstiness", "arrivals", has_effect=is_gamma, value="gamma")
    check_effect("seed", "rate", has_effect=values["rate"] is not None or has_failures)
    check_batching(policy)


def _workload(values: dict[str, Any]) -> Workload:
    """Build the simulated workload from a command's `values`, and remove them from `values`."""
    from twostroke.lab.simulator import SyntheticWorkload, read_trace

    trace = values.pop("trace")
    rate = values.pop("rate")
    seed = values.pop("seed")
    count = values.pop("requests")
    speed = values.pop("speed")
    scale = values.pop("scale")
    shape = {name: values.pop(name) for name in _SYNTHETIC}
    shape = {name: value for name, value in shape.items() if value is not None}
    if (trace is None) is (rate is None):
        raise UsageError("Give either --trace or --rate.")
    if trace is None:
        shape |= {} if count is None else {"count": count}
        return SyntheticWorkload(rate, **shape).load(seed).changed(speed=speed, scale=scale)
    for name in shape:
        raise UsageError("needs {other}: a trace has its own.", field=name, other=Field("rate"))
    return read_trace(trace).first(count).changed(speed=speed, scale=scale)


def _simulation_setup(model: str, values: dict[str, Any]) -> SimulationSetup:
    """Build the simulated replicas and devices from the options of `simulate`."""
    from twostroke.lab import planner
    from twostroke.lab.simulator import SimulationSetup

    device = values.pop("device")
    weights = values.pop("weights")
    threads = values.pop("num_threads")
    check_threads(device)
    question_fields = {name: values.pop(name) for name in ("count", "mfu", "mbu", "usd_per_hour")}
    is_here = device == THIS_MACHINE
    kv_format = values.pop("kv_format") or planner.default_kv_format(is_here=is_here)
    question = planner.Question(kv_format=kv_format, **question_fields)
    disaggregate = values.pop("disaggregate")  # also an option of engines, where it needs a role
    options = engine_options(values, model)
    is_ideal = not is_here or is_given_by_user("mfu") or is_given_by_user("mbu")
    target = planner.this_machine(threads) if is_here else planner.find_device(device)
    planned = planner.load_planned_model(model)
    return SimulationSetup(
        model=planned.with_weights(weights) if weights else planned,
        device=target,
        question=question,
        cache=options.cache,
        batch=options.batch,
        calibration=None if is_ideal else correction_of(planned, target, threads),
        is_here=is_here,
        disaggregate=disaggregate,
        **values,
    )


def _progress(probe: LoadProbe) -> None:
    share = probe.simulation.report.good_share or 0.0
    queue = ", but the queue grows" if probe.simulation.report.is_growing else ""
    click.echo(f"{probe.rate:.3g} requests/s: {share:.1%} are good{queue}", err=True)


def facts(setup: SimulationSetup, load: Workload) -> Iterator[str]:
    """Yield sentences about the simulated replicas and the load, and an empty line."""
    from twostroke.lab.planner.reference_calibration import REFERENCE, ReferenceCalibration
    from twostroke.lab.planner.served import thread_count_text
    from twostroke.lab.planner.words import describe_missing_fields, describe_reference

    question, count = setup.question, len(load.arrivals)
    devices = setup.device.name
    if question.count > 1:
        devices = f"{question.count} x {devices}"
    replicas = (
        f"{counted_noun(setup.replicas, 'replica')} ({setup.routing}), each "
        if setup.replicas > 1
        else ""
    )
    mean_prompt = sum(arrival.num_prompt for arrival in load.arrivals) / count
    mean_output = sum(arrival.num_output for arrival in load.arrivals) / count
    rate = f", {load.rate:.3g} per second" if load.rate else ""
    if setup.prefill_replicas:
        replicas = replicas.replace("(", f"({setup.prefill_replicas} for prefill, ")
    yield f"{setup.model.name} ({setup.model.stored}) on {replicas}{devices}"
    yield (
        f"{load.name}: {counted_noun(count, 'request', form=',')}{rate}, with {mean_prompt:,.0f} "
        f"prompt tokens and {mean_output:,.0f} output tokens on average"
    )
    yield from load.notes
    if setup.model.assumed:
        yield describe_missing_fields(setup.model.assumed, setup.model.name)
    if isinstance(setup.calibration, ReferenceCalibration):
        yield describe_reference(REFERENCE)
    elif setup.calibration is not None:
        calibration = setup.calibration
        yield (
            f"Times are corrected by {counted_noun(calibration.num_steps, 'step')} measured "
            f"{thread_count_text(calibration.num_threads)} on {calibration.date}."
        )
    elif (question.mfu, question.mbu) == (1.0, 1.0):
        yield "Times are limits, which no engine passes: set --mfu and --mbu to your engine's."
    else:
        yield (
            f"Steps reach {question.mfu:.0%} of the arithmetic and {question.mbu:.0%} of the "
            "bandwidth."
        )
    yield ""


def _show_sweep(sweep_result: Sweep, share: float) -> None:
    from twostroke.lab.measure.report_text import format_ms

    rows: list[tuple[str, ...]] = [("REQUESTS/S", "GOOD", "TTFT P90 MS", "TPOT P90 MS", "QUEUE")]
    for probe in sweep_result.probes:
        report = probe.simulation.report
        times = [report.latencies.get(name) for name in ("ttft", "tpot")]
        cells = ["–" if t is None else format_ms(t.percentiles["p90"].value) for t in times]
        queue = "grows" if report.is_growing else ""
        rows.append((f"{probe.rate:.3g}", f"{report.good_share:.1%}", *cells, queue))
    show_table(rows, range(4))
    good = f"{share:.0%} of requests meet the objectives"
    warning = f" {sweep_result.warning}" if sweep_result.warning else ""
    click.echo(f"\nUp to {sweep_result.best.rate:.3g} requests/s {good}.{warning} At that load:\n")


def _show(simulation: Simulation, objectives: Objectives) -> None:
    from twostroke.lab.measure.requests import latency_rows

    show_table(latency_rows(simulation.report))
    for line in _answer(simulation, objectives):
        click.echo(printable(line))


def _answer(simulation: Simulation, objectives: Objectives) -> Iterator[str]:
    from twostroke.lab.measure.requests import describe_rates

    report = simulation.report
    yield ""
    yield describe_rates(report)
    if report.is_growing:
        yield "The load is too high: the queue grows until the last request arrives."
    if objectives:
        good = f"{report.good_share:.1%} of requests meet the objectives"
        yield f"{good}, {report.good_per_s:.3g} per second."
    yield (
        f"Prefix cache: {report.hit_rate:.1%} of prompt tokens. Preemptions: "
        f"{simulation.preemptions:,}. Refused: {report.num_refused:,}."
    )
    if simulation.num_page_loads:
        loads = counted_noun(simulation.num_page_loads, "request", form=",")
        yield f"Page cache: pages were loaded for {loads}."
    if simulation.decisions:
        words = (f"{reason} {count:,}" for reason, count in simulation.decisions.items())
        yield f"Decisions about prefill: {', '.join(words)}."
    if simulation.refusal:
        yield f"First refusal: {simulation.refusal}"
    busy = simulation.busy
    each = f" ({min(busy):.0%} to {max(busy):.0%})" if len(busy) > 1 else ""
    yield (
        f"Busy {sum(busy) / len(busy):.0%} of the time{each}; during steps MFU "
        f"{simulation.mfu:.1%}, MBU {simulation.mbu:.1%}."
    )
    if simulation.usd_per_million is not None:
        prices = {
            "1M output tokens": simulation.usd_per_million,
            "1,000 requests": simulation.usd_per_1k,  # None if no request ends in the time
            "1,000 requests that meet the objectives": simulation.usd_per_1k_good,
        }
        costs = [f"${usd:.3g} per {unit}" for unit, usd in prices.items() if usd is not None]
        yield f"{', '.join(costs)}."
