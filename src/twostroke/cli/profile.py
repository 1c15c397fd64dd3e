"""`twostroke profile`: times each operation of a step, and shows the least possible time."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from twostroke.cli.help import Command, CountListParam, option
from twostroke.cli.options import (
    PARALLEL_PARAMS,
    PLOT_SUFFIXES,
    check_file,
    click_params,
    engine_options,
    file_option,
)
from twostroke.cli.pull import fetch
from twostroke.cli.terminal import printable, show_table
from twostroke.core.errors import UsageError
from twostroke.core.files import atomic_output
from twostroke.core.message_text import counted_noun
from twostroke.core.options import CacheOptions, ComputeOptions
from twostroke.lab.measure import plots

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.lab.measure.profile import StepProfile

_MAX_QUIET_SHARE: Final = (
    0.03  # share of the processors that other programs may take without a note
)
_HEADINGS: Final = (
    "OPERATION", "CALLS", "MS", "SHARE", "WAITING", "MB", "GFLOP", "FLOP/B", "GB/S", "GFLOP/S",
    "FLOOR", "×FLOOR",
)  # fmt: skip


@click.command(
    "profile",
    cls=Command,
    params=[
        *click_params(ComputeOptions),
        *click_params(CacheOptions, only=("kv_format",)),
        *PARALLEL_PARAMS,
    ],
)
@click.argument("model")
@option(
    "--streams",
    type=CountListParam(),
    help="Numbers of streams of the decode steps [default: 1,16].",
)
@option(
    "--context",
    "context_tokens",
    type=click.IntRange(1),
    default=512,
    help="Tokens of context of each stream in the decode steps.",
)
@option(
    "--prefill",
    type=CountListParam(),
    help="Numbers of tokens of the prefill steps [default: 512].",
)
@option(
    "--steps",
    type=click.IntRange(1),
    help="Steps to measure [default: as many as 2 seconds allow].",
)
@option("--layers", is_flag=True, help="Show each layer separately.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@option(
    "--plot",
    **file_option(PLOT_SUFFIXES),
    help="Draw the operations under the machine's roofline (needs the extra [plots]).",
)
def command(model: str, as_json: bool, plot: Path | None, **values: Any) -> None:
    """Time each operation of a step, and show the least time that this machine needs for it.

    The same step is computed repeatedly, with nothing else running. With only --streams or only
    --prefill, only these steps are measured. Close other programs first.

    On several ranks (--tensor-parallel and others) the table shows the times of each rank and its
    waiting for other ranks, and compares the time in collectives with the engine's prediction.
    """
    from twostroke.lab.measure.profile import ProfileOptions, profile
    from twostroke.lab.measure.single_step import StepShape

    check_file(plot, "plot", PLOT_SUFFIXES)
    streams, prompts = values["streams"], values["prefill"]
    if streams is None and prompts is None:
        streams, prompts = (1, 16), (512,)
    shapes = [StepShape.decode(count, values["context_tokens"]) for count in streams or ()]
    shapes += map(StepShape.prefill, prompts or ())
    options = engine_options(values, model)
    if plot is not None and options.parallel.num_ranks > 1:
        raise UsageError("--plot draws the operations of one process: leave it out, or the ranks.")
    measurement = ProfileOptions(
        tuple(shapes), values["steps"], values["layers"], options.compute, options.cache
    )

    def notice(text: str) -> None:
        click.echo(f"{text}…", err=True)

    fetch(model, quiet=as_json)
    if options.parallel.num_ranks > 1:
        from twostroke.cli.rank_profile import show_ranks  # one process needs nothing of it

        show_ranks(model, measurement, options.parallel, notice, as_json=as_json)
        return
    profiles: list[StepProfile] = []
    for step_profile in profile(model, measurement, notice):
        if not as_json:
            if not profiles:
                click.echo(printable(f"{model} · {_machine(step_profile)}"))
            _show(step_profile)
        profiles.append(step_profile)
    if as_json:
        result = {
            "model": model,
            "backend": profiles[0].detail,
            "machine": msgspec.to_builtins(profiles[0].hardware),
            "steps": [_as_json(step_profile) for step_profile in profiles],
        }
        click.echo(json.dumps(result))
    if plot is not None:
        title = f"{model} on {profiles[0].hardware.name}: {profiles[0].detail}"
        with atomic_output(plot) as part:
            plots.save(plots.roofline(title, profiles), part)


def _machine(profile: StepProfile) -> str:
    hardware = profile.hardware
    return (
        f"{profile.detail} · {hardware.bandwidth / 1e9:.1f} GB/s · "
        f"{hardware.peak / 1e12:.2f} T operations/s ({hardware.peak_kind})"
    )


def _cells(figures: dict[str, float | None]) -> tuple[str, ...]:
    """Return the table cells of an operation's times and rates, in the units of the headings."""
    return (
        _number(figures["time_s"], 1e3),
        f"{figures['share']:.1%}",
        _number(figures["waiting_s"], 1e3),
        _number(figures["bytes"], 1e-6),
        _number(figures["flops"], 1e-9),
        _number(figures["flops_per_byte"]),
        _number(figures["bytes_per_s"], 1e-9),
        _number(figures["flops_per_s"], 1e-9),
        _number(figures["floor_s"], 1e3),
        _number(figures["times_floor"]) if (figures["times_floor"] or 0) < 1000 else ">999",
    )


def _show(profile: StepProfile) -> None:
    (fastest_s, slowest_s), others = profile.range_s, profile.others_share or 0.0
    disturbed = (
        f"; other programs took {others:.0%} of the processors" if others > _MAX_QUIET_SHARE else ""
    )
    click.echo()
    click.secho(profile.shape.name, bold=True)
    click.echo(
        f"{_ms(profile.step_s)} a step, {profile.tokens_per_s:,.0f} tokens/s "
        f"({counted_noun(profile.num_steps, 'step')} of {_ms(fastest_s)} to "
        f"{_ms(slowest_s)}{disturbed})\n"
    )
    show_table(_table(profile))
    click.echo(f"\n{_advice(profile)}")


def _table(profile: StepProfile) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [_HEADINGS]
    lines += [
        (str(operation.label), str(operation.calls), *_cells(profile.figures(operation)))
        for operation in profile.operations
    ]
    around = {"set-up and results": profile.set_up_s, "scheduler": profile.scheduler_s}
    blank = ("",) * (len(_HEADINGS) - 4)
    for name, time_s in around.items():
        lines.append((name, "", _number(time_s, 1e3), f"{time_s / profile.step_s:.1%}", *blank))
    return [*lines, ("whole step", "", *_cells(profile.figures()))]


def _advice(profile: StepProfile) -> str:
    if profile.hardware.source == "interpreted":
        return "The kernels were interpreted on the processor: these times say nothing about a GPU."
    worst, step_s = profile.worst, profile.step_s
    around_s = profile.set_up_s + profile.scheduler_s
    if around_s > worst.above_s:
        return (
            f"Improve next: set-up, results and scheduler, {_ms(around_s)} or "
            f"{around_s / step_s:.0%} of the step."
        )
    return (
        f"Improve next: {worst.label}, {_ms(worst.above_s)} above its floor of "
        f"{_ms(worst.floor_s)}; that is {worst.above_s / step_s:.0%} of the step."
    )


def _number(value: float | None, factor: float = 1.0) -> str:
    """Return a number times `factor` as text with three significant digits; a dash for None."""
    if value is None:
        return "–"
    value *= factor
    digits = 2 - math.floor(math.log10(value)) if value else 0
    return f"{value:,.{min(max(digits, 0), 3)}f}"


def _ms(time_s: float) -> str:
    return f"{_number(time_s, 1e3)} ms"


def _as_json(profile: StepProfile) -> dict[str, Any]:
    """Return the profile of a step as --json prints it; times are in seconds."""
    return {
        "name": profile.shape.name,
        **msgspec.to_builtins(profile.shape),
        "num_measured": profile.num_steps,
        "run_s": msgspec.to_builtins(profile.run_s),
        "set_up_s": profile.set_up_s,
        "scheduler_s": profile.scheduler_s,
        "tokens_per_s": profile.tokens_per_s,
        "others_share": profile.others_share,
        "whole": profile.figures(),
        "operations": [
            {
                "name": operation.label.name,
                "layer": operation.label.layer,
                "calls": operation.calls,
                **profile.figures(operation),
                "lowest_s": operation.time_s.low,
                "highest_s": operation.time_s.high,
            }
            for operation in profile.operations
        ],
        "mend_next": _advice(profile),
    }
