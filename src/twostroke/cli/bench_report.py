"""The options of `bench` about the endpoint's machine, and its HTML report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.cli.help import option
from twostroke.cli.options import check_effect, check_file, file_option
from twostroke.cli.planning import THIS_MACHINE, kv_format_option, price_option
from twostroke.core.files import atomic_output

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from twostroke.lab.bench.benchmark import BenchResult
    from twostroke.lab.bench.html_report import MeasuredRun
    from twostroke.lab.bench.resources import BenchMachine

_OPTIONS: Final = (
    option(
        "--on",
        "device",
        help="Device of the endpoint, for MFU, MBU and costs: as for `plan`, a name, a .toml file "
        "or `here` [default with --model-config: here, if URL is on this machine].",
    ),
    option("--devices", "count", type=click.IntRange(1, 1024), default=1, help="Its devices."),
    price_option,
    option(
        "--model-config",
        help="The endpoint's model, for MFU and MBU: as for `plan`, a name, file or folder.",
    ),
    kv_format_option,
    option(
        "--energy/--no-energy",
        default=None,
        help="Count this machine's energy (RAPL, NVML) [default: if URL is on this machine].",
    ),
    option(
        "--html",
        **file_option((".html",)),
        help="Write a report of one page with charts (needs the extra [plots]).",
    ),
)


def report_options(command: Any) -> Any:
    """Add the options about the endpoint's machine, and --html, to a command."""
    for add_option in reversed(_OPTIONS):
        command = add_option(command)
    return command


def check_html(path: Path | None) -> None:
    """Check before a run that its HTML report can be written; raise UsageError if it cannot."""
    check_file(path, "html", (".html",))


def take_machine(url: str, values: dict[str, Any]) -> BenchMachine:
    """Return the endpoint's machine from a command's `values`, and remove them from `values`.

    If only a model is named, an endpoint at a loopback `url` is taken to run on this machine.
    """
    from twostroke.fleet.router.upstream import Address
    from twostroke.lab import planner
    from twostroke.lab.bench.resources import BenchMachine, is_loopback

    device_name, model_name = values.pop("device"), values.pop("model_config")
    count, usd_per_hour = values.pop("count"), values.pop("usd_per_hour")
    kv_format = values.pop("kv_format")
    check_effect("kv_format", "model_config", has_effect=model_name is not None)
    if model_name is not None and device_name is None:
        is_local = is_loopback(Address.of(url, field="url").host)
        device_name = THIS_MACHINE if is_local else None
    device = None
    if device_name is not None:
        is_here = device_name == THIS_MACHINE
        device = planner.this_machine() if is_here else planner.find_device(device_name)
    is_here = device_name == THIS_MACHINE
    return BenchMachine(
        device=device,
        num_devices=count,
        usd_per_hour=usd_per_hour,
        model=None if model_name is None else planner.load_planned_model(model_name),
        kv_format=kv_format or planner.default_kv_format(is_here=is_here),
        counts_energy=values.pop("energy"),
    )


def measured_run(result: BenchResult) -> MeasuredRun:
    """Convert a finished run to the form from which HTML reports are made."""
    from twostroke.lab.bench.html_report import MeasuredRun

    return MeasuredRun(result.record, result.report)


def write_html(path: Path, runs: Sequence[MeasuredRun], summary: str = "") -> None:
    """Write the HTML report of a run, or of the loads of a sweep, to a file.

    `summary` is the result of the sweep in a sentence.
    """
    from twostroke.lab.bench.html_report import html_report

    with atomic_output(path) as part:
        part.write_text(html_report(runs, summary), encoding="utf-8")
