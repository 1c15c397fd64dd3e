"""`twostroke advise`: the options with which a server meets objectives under recorded traffic."""

from __future__ import annotations

import math
import shlex
import time
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from msgspec.structs import replace

from twostroke.cli.help import ByteSizeParam, Command, option
from twostroke.cli.options import check_effect
from twostroke.cli.planning import (
    THIS_MACHINE,
    BoundedNumberParam,
    check_threads,
    correction_of,
    objective_options,
    take_objectives,
    threads_option,
)
from twostroke.cli.terminal import on_interrupt, printable, show_table
from twostroke.core.errors import UsageError
from twostroke.core.json_io import encode_json
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.lab.measure.requests import Objectives
    from twostroke.lab.simulator import SimulationSetup, Workload
    from twostroke.lab.simulator.advice import Advice, Estimate, FleetAdvice
    from twostroke.lab.simulator.gain import Gain, Interval
    from twostroke.lab.simulator.machine_speed import MachineSpeed

_FLAGS: Final = {
    "token_budget": "--token-budget",
    "max_running": "--max-running",
    "kv_format": "--kv-format",
    "page_cache_size": "--page-cache DIR --page-cache-size",
}
_INTERRUPTED_CODE: Final = 130
_ANSWERS_CHANGE: Final = "changes answers a little: compare them first (twostroke compare)"


@click.command("advise", cls=Command)
@click.argument("model")
@click.argument("trace")
@objective_options()
@option(
    "--slo",
    help="Objectives by name: MLPerf's, such as llama-3.1-8b-server, or reading (a fast reader).",
)
@option("--speed", default=1.0, help="Advise for X times the load.")
@option("--scale", default=1.0, help="Multiply the lengths of prompts and answers by X.")
@option(
    "--requests",
    type=click.IntRange(1),
    default=2000,
    help="Use the first N requests.",
)
@option(
    "--good", "share", default=0.9, help="Share of requests, 0 to 1, that must meet the objectives."
)
@option(
    "--max-replicas",
    type=click.IntRange(1, 64),
    default=1,
    help="Also advise a fleet of up to N such servers, if one server is not enough.",
)
@option(
    "--link",
    type=BoundedNumberParam(high=1e9, unit=1e9),
    help="GB/s of the link between servers, to try disaggregation [default: the device's].",
)
@option(
    "--allow-int8-kv",
    is_flag=True,
    help="Also advise int8 keys and values, which change answers a little.",
)
@option(
    "--page-cache-size",
    type=ByteSizeParam(),
    help="Also advise a page cache of this size.",
)
@option(
    "--page-cache-speed",
    type=BoundedNumberParam(high=1e9, unit=1e9),
    default=1.0,
    help="GB/s at which pages are loaded from the page cache.",
)
@option(
    "--on",
    "device",
    default=THIS_MACHINE,
    help="Device, as for `plan`: a name, a .toml file, or `here`.",
)
@threads_option
@option(
    "--kv-memory",
    "memory_bytes",
    type=ByteSizeParam(),
    help="Memory for keys and values [default: as `serve`].",
)
@option(
    "--time-limit",
    "time_limit_s",
    type=BoundedNumberParam(high=1e9),
    default=None,
    help="End the search after X seconds with the best setting so far; its gain is still computed.",
)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, trace: str, *, as_json: bool, **values: Any) -> int:
    """Find the options of `serve` with which MODEL meets objectives under the traffic of TRACE.

    TRACE is a file of --record-trace, or another trace, as for `simulate`. Each tried setting is
    simulated with steps that were measured on this machine, and its gain has a 95% interval: for
    the speed that the machine had while it recorded the trace, and for other draws of the requests.
    If no setting is better than the defaults at the low end, the advice is to keep them.

    Ctrl-C ends the search, and computes the gain of the best setting so far. A second Ctrl-C ends
    the command at once.
    """
    from twostroke.lab.simulator import read_trace

    objectives = take_objectives(values)
    if not objectives:
        raise UsageError("Which objectives? Give --ttft, --tpot or --slo.")
    trace_load = read_trace(trace).first(values["requests"])
    load = trace_load.changed(speed=values["speed"], scale=values["scale"])
    check_effect("page_cache_speed", "page_cache_size", has_effect=bool(values["page_cache_size"]))
    setup = server_setup(model, values)
    search_end = _SearchEnd(values["time_limit_s"])
    with on_interrupt(search_end.interrupt):
        machine = _machine_speed(setup, trace_load, load)
        advice, withheld, fleet = _search(
            setup, load, objectives, machine=machine, values=values, search_end=search_end
        )
    commands = [*_commands(model, advice, fleet)]
    if as_json:
        printed = {"advice": advice, "fleet": fleet, "withheld": withheld, "commands": commands}
        click.echo(encode_json(printed).decode())
    else:
        for line in _text(setup, load, advice, withheld, fleet):
            click.echo(printable(line))
        click.echo("\nRun:")
        for line in commands:
            click.echo(f"  {line}")
    return _INTERRUPTED_CODE if search_end.is_interrupted else 0


class _SearchEnd:
    """Ends a search at Ctrl-C, or after its time.

    Attributes:
        is_interrupted: whether Ctrl-C was pressed.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._end_s = math.inf if limit_s is None else time.monotonic() + limit_s
        self.is_interrupted = False

    def interrupt(self) -> None:
        """End the search."""
        self.is_interrupted = True
        click.echo("ending: computing the gain of the best setting so far", err=True)

    def has_time(self) -> bool:
        """Whether the search may continue."""
        return not self.is_interrupted and time.monotonic() < self._end_s


def _search(
    setup: SimulationSetup,
    load: Workload,
    objectives: Objectives,
    *,
    machine: MachineSpeed,
    values: dict[str, Any],
    search_end: _SearchEnd,
) -> tuple[Advice, Advice | None, FleetAdvice | None]:
    """Search for the options that meet the objectives.

    Returns the advice; advice about int8 keys and values, which the user has not allowed and which
    is only mentioned; and advice about a fleet of several replicas. The last two are None if they
    do not apply, or if the search has ended early.
    """
    from twostroke.lab.simulator import advice as lab
    from twostroke.lab.simulator.advice import INT8, OptionChoices, advise

    size = values["page_cache_size"]
    page_cache_sizes = () if size is None else (size,)
    formats = (INT8,) if setup.question.kv_format != INT8 else ()
    allowed = formats if values["allow_int8_kv"] else ()
    advice = advise(
        setup,
        load,
        objectives,
        choices=OptionChoices(kv_formats=allowed, page_cache_sizes=page_cache_sizes),
        machine=machine,
        watch=_progress,
        has_time=search_end.has_time,
    )
    advised = lab.changed_setup(setup, advice.changes)
    withheld = None
    if formats and not allowed and search_end.has_time():
        choices = OptionChoices(fixed=("token_budget", "max_running"), kv_formats=formats)
        withheld = advise(
            advised,
            load,
            objectives,
            choices=choices,
            machine=machine,
            watch=_progress,
            has_time=search_end.has_time,
        )

    def watch_fleet(tried: dict[str, Any], estimate: Estimate) -> bool:
        _progress(tried, estimate)
        return search_end.has_time()

    fleet = None
    needs_fleet = values["max_replicas"] > 1 and advice.advised.good_share < values["share"]
    if needs_fleet and not search_end.has_time():
        advice = replace(advice, is_partial=True)
    elif needs_fleet:
        fleet = lab.advise_fleet(
            replace(advised, link=values["link"]),
            load,
            objectives,
            max_replicas=values["max_replicas"],
            share=values["share"],
            machine=machine,
            watch=watch_fleet,
        )
    return advice, withheld, fleet


def server_setup(model: str, values: dict[str, Any]) -> SimulationSetup:
    """Return the setup to simulate a server with default options on a device.

    `values` has the values of --on, --threads and --kv-memory, and may have --page-cache-speed.
    """
    from twostroke.core.options import CacheOptions
    from twostroke.lab import planner
    from twostroke.lab.simulator import SimulationSetup

    device, threads = values["device"], values["num_threads"]
    check_threads(device)
    is_here = device == THIS_MACHINE
    target = planner.this_machine(threads) if is_here else planner.find_device(device)
    planned = planner.load_planned_model(model)
    return SimulationSetup(
        model=planned,
        device=target,
        question=planner.Question(kv_format=planner.default_kv_format(is_here=is_here)),
        cache=CacheOptions(memory_bytes=values["memory_bytes"]),
        calibration=correction_of(planned, target, threads) if is_here else None,
        is_here=is_here,
        page_cache_speed=values.get("page_cache_speed", 1e9),
    )


def _machine_speed(setup: SimulationSetup, recorded: Workload, load: Workload) -> MachineSpeed:
    """Return how much longer this machine's steps took than simulated, while it recorded a trace.

    `recorded` are the requests whose times are compared, and `load` the requests to simulate.

    If the simulated device is not this machine, default ratios are assumed.
    """
    from twostroke.lab.simulator.machine_speed import MachineSpeed, recorded_speed

    if not setup.is_here:
        return MachineSpeed()
    if recorded is not load:
        click.echo("simulating the recorded load, to compare its times", err=True)
    return recorded_speed(setup, recorded)


def _progress(changes: dict[str, Any], estimate: Estimate) -> None:
    settings = ", ".join(f"{name} {value}" for name, value in changes.items()) or "defaults"
    click.echo(f"{settings}: {estimate.good_share:.1%} are good", err=True)


def _commands(model: str, advice: Advice, fleet: FleetAdvice | None) -> Iterator[str]:
    """Yield the command of the server, or the commands of the fleet's servers and router."""
    serve = f"twostroke serve {shlex.quote(model)}{_options(advice.changes)}"
    if fleet is None or fleet.replicas == 1:
        yield serve
        return
    urls = []
    for number in range(fleet.replicas):
        role = " --role prefill" if number < fleet.prefill_replicas else ""
        yield f"{serve}{role}  # on machine {number + 1}"
        if not role:
            urls.append(f"--replica http://MACHINE-{number + 1}:8000")
    yield f"twostroke route --policy {fleet.routing} {' '.join(urls)}"


def _text(
    setup: SimulationSetup,
    load: Workload,
    advice: Advice,
    withheld: Advice | None,
    fleet: FleetAdvice | None,
) -> Iterator[str]:
    """Yield the lines of the report, before the commands."""
    from twostroke.cli.simulate import facts

    yield from list(facts(setup, load))[:-1]
    if setup.calibration is None or not hasattr(setup.calibration, "num_steps"):
        yield "First measure this model's steps for better estimates: twostroke plan --calibrate"
    yield ""
    rows: list[tuple[str, ...]] = [("", "GOOD", "GOOD/S", "TTFT P99 MS", "TPOT P99 MS")]
    rows.append(("defaults", *_cells(advice.default)))
    if advice.changes:
        rows.append(("advised", *_cells(advice.advised)))
    if fleet is not None:
        rows.append((counted_noun(fleet.replicas, "server"), *_cells(fleet.estimate)))
    show_table(rows, range(1, 5))
    yield ""
    if advice.is_partial:
        yield (
            f"This is a part of the advice: the search ended after "
            f"{counted_noun(advice.num_tried, 'setting')}, so other settings may be better."
        )
    yield _machine_text(advice.machine)
    if advice.changes:
        assert advice.gain is not None, "changes have a gain"
        yield f"Expected: {gain_text(advice.gain)}."
        if "kv_format" in advice.changes:
            yield f"--kv-format {advice.changes['kv_format']} {_ANSWERS_CHANGE}."
    elif advice.gain is not None:
        yield (
            "Keep the defaults: no other setting is better beyond the noise. Expected with the "
            f"best,{_options(advice.best)}: {gain_text(advice.gain)}."
        )
    elif advice.is_partial:
        yield "Keep the defaults: no better setting was found before the end."
    else:
        yield "Keep the defaults: no other setting is better."
    if withheld is not None and withheld.changes:
        assert withheld.gain is not None, "changes have a gain"
        yield (
            f"Not proposed: --kv-format int8 {_ANSWERS_CHANGE}. Expected with it: "
            f"{gain_text(withheld.gain)}. --allow-int8-kv allows it."
        )
    if fleet is not None and fleet.is_partial:
        yield "The search for a fleet ended early, so a larger one may be needed."
    elif fleet is not None and not fleet.is_enough:
        yield f"Even {counted_noun(fleet.replicas, 'server')} do not meet the objectives."


def _cells(estimate: Estimate) -> tuple[str, ...]:
    from twostroke.lab.measure.report_text import format_ms

    times_s = (estimate.ttft_p99_s, estimate.tpot_p99_s)
    times = ["–" if time_s is None else format_ms(time_s) for time_s in times_s]
    return (f"{estimate.good_share:.1%}", f"{estimate.good_per_s:.3g}", *times)


def gain_text(gain: Gain) -> str:
    """Return the gains of changed settings as text, each with its 95% interval.

    Positive numbers are better for goodput and for the share of good requests, and worse for the
    P99 latency over its objective.
    """
    parts = [f"{_percent(gain.share, ' points')} of the requests that meet the objectives"]
    if gain.goodput is not None:
        parts.insert(0, f"goodput {_percent(gain.goodput)}")
    if gain.tail is not None:
        parts.append(f"P99 over its objective {_percent(gain.tail)}")
    return ", ".join(parts)


def _percent(interval: Interval, unit: str = "%") -> str:
    expected, low, high = (100 * value for value in msgspec.structs.astuple(interval))
    return f"{expected:+.0f}{unit} ({low:+.0f} to {high:+.0f})"


def _options(changes: dict[str, Any]) -> str:
    return "".join(f" {_FLAGS[name]} {value}" for name, value in changes.items())


def _machine_text(machine: MachineSpeed) -> str:
    """Return a sentence that compares the machine's recorded speed with its measured steps."""
    first, last = machine.slowness[0], machine.slowness[-1]
    if not machine.num_recorded:
        return (
            "The trace has no times of this server, so steps are assumed to take "
            f"{first:g} to {last:g} times as long as expected."
        )
    text = (
        f"By the times of {counted_noun(machine.num_recorded, 'recorded request', form=',')}, "
        f"steps take {first:.2g} to {last:.2g} times as long as expected."
    )
    if machine.is_out_of_range:
        text += (
            " That is far from the measured steps: measure them again, as plan --calibrate does."
        )
    return text
