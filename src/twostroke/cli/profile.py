"""`twostroke profile`: the time of each operation of a step, beside the machine's limits."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.cli.fetch import fetch
from twostroke.cli.help import OneOf
from twostroke.cli.terminal import printable, show_table
from twostroke.core.config import (
    BACKENDS,
    DEFAULT_ACTIVATION_BITS,
    KV_FORMATS,
    CacheOptions,
    ComputeOptions,
)
from twostroke.core.errors import UsageError
from twostroke.measure import plots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.measure.profile import Rates, StepProfile
    from twostroke.measure.single_step import Shape

_MOST: Final = 1 << 20
_STREAMS: Final = (1, 16)
_PROMPT: Final = (512,)
_QUIET: Final = 0.03  # share of the processors that other programs may take without a note
_HEADINGS: Final = (
    "OPERATION", "CALLS", "MS", "SHARE", "WAITING", "MB", "GFLOP", "FLOP/B", "GB/S", "GFLOP/S",
    "FLOOR", "×FLOOR",
)  # fmt: skip


class Counts(click.ParamType):  # type: ignore[type-arg]
    """One or more whole numbers, such as 1,16."""

    name = "N,N"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers."""
        words = str(value).split(",")
        if not all(word.strip().isdecimal() and 0 < int(word) <= _MOST for word in words):
            self.fail(
                f"'{value}' is not a list of numbers from 1 to {_MOST}, such as 1,16.", param, ctx
            )
        return tuple(map(int, words))


@click.command("profile")
@click.argument("model")
@click.option("--streams", type=Counts(), help="Streams of the decode steps [default: 1,16].")
@click.option(
    "--context",
    type=click.IntRange(1),
    metavar="N",
    default=512,
    show_default=True,
    help="Tokens that each stream has when it decodes.",
)
@click.option("--prefill", type=Counts(), help="Tokens of the prefill steps [default: 512].")
@click.option(
    "--steps",
    type=click.IntRange(1),
    metavar="N",
    help="Steps to measure [default: for two seconds].",
)
@click.option("--layers", is_flag=True, help="Show each layer separately.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE.svg",
    help="Draw a roofline with the operations (needs twostroke[plots]).",
)
@click.option(
    "--threads", "num_threads", type=click.IntRange(1, 1024), metavar="N", help="Compute threads."
)
@click.option("--level", help="Instruction set [default: the best here].")
@click.option(
    "--kv-format", type=OneOf(KV_FORMATS), default="auto", help="Format of keys and values."
)
@click.option(
    "--activation-bits",
    type=int,
    default=DEFAULT_ACTIVATION_BITS,
    show_default=True,
    help="Precision of activations in products with quantized weights: 15, 9 or 8.",
)
@click.option("--backend", type=OneOf(BACKENDS), default="auto", hidden=True)
def command(model: str, as_json: bool, plot: Path | None, **given: Any) -> None:
    """Time each operation of a step, beside the least time that this machine needs for it.

    The same step is computed repeatedly, with nothing else running. If only --streams or only
    --prefill is given, only that is measured. Close other programs first.
    """
    from twostroke.measure.profile import Wanted, profile

    if plot is not None:
        _check_plot(plot)

    wanted = Wanted(
        _shapes(given),
        given["steps"],
        given["layers"],
        ComputeOptions(
            given["backend"],
            given["num_threads"],
            given["level"],
            activation_bits=given["activation_bits"],
        ),
        CacheOptions(kv_format=given["kv_format"]),
    )
    fetch(model, quiet=as_json)
    profiles: list[StepProfile] = []
    for one in profile(model, wanted, _notice):
        if not as_json:
            if not profiles:
                click.echo(printable(f"{model} · {_machine(one)}"))
            _show(one)
        profiles.append(one)
    if as_json:
        click.echo(json.dumps(_result(model, profiles)))
    if plot is not None:
        title = f"{model} on {profiles[0].hardware.name}: {profiles[0].detail}"
        series = [one.series() for one in profiles]
        plots.save(plots.roofline(title, profiles[0].hardware, series), plot)


def _shapes(given: dict[str, Any]) -> tuple[Shape, ...]:
    from twostroke.measure.single_step import Shape

    streams, prompts = given["streams"], given["prefill"]
    if streams is None and prompts is None:
        streams, prompts = _STREAMS, _PROMPT
    decodes = [Shape.decode(count, given["context"]) for count in streams or ()]
    return (*decodes, *map(Shape.prefill, prompts or ()))


def _check_plot(path: Path) -> None:
    """Raise UsageError, before anything is measured, if the plot could not be written."""
    if path.suffix.lower() != ".svg":
        raise UsageError(f"--plot writes SVG: use a name that ends in .svg, not '{path.name}'.")
    plots.new_figure(1, 1)


def _notice(text: str) -> None:
    click.echo(f"{text}…", err=True)


def _machine(profile: StepProfile) -> str:
    hardware = profile.hardware
    return (
        f"{profile.detail} · {hardware.bandwidth / 1e9:.1f} GB/s · "
        f"{hardware.peak / 1e12:.2f} T operations/s ({hardware.peak_kind})"
    )


def _cells(rates: Rates) -> tuple[str, ...]:
    """Return the figures in the units of `_HEADINGS`."""
    return (
        _number(rates.time_s, 1e3),
        f"{rates.share:.1%}",
        _number(rates.waiting_s, 1e3),
        _number(rates.bytes, 1e-6),
        _number(rates.flops, 1e-9),
        _number(rates.flops_per_byte),
        _number(rates.bytes_per_s, 1e-9),
        _number(rates.flops_per_s, 1e-9),
        _number(rates.floor_s, 1e3),
        _number(rates.times_floor) if (rates.times_floor or 0) < 1000 else ">999",
    )


def _show(profile: StepProfile) -> None:
    run, others = profile.run_s, profile.others_share or 0.0
    disturbed = f"; other programs took {others:.0%} of the processors" if others > _QUIET else ""
    click.echo()
    click.secho(profile.shape.name, bold=True)
    click.echo(
        f"{_ms(profile.step_s)} a step, {profile.tokens_per_s:,.0f} tokens/s "
        f"({profile.num_steps} steps of {_ms(run.low)} to {_ms(run.high)}{disturbed})\n"
    )
    show_table(_table(profile))
    click.echo(f"\n{_advice(profile)}")


def _table(profile: StepProfile) -> list[tuple[str, ...]]:
    step_s = profile.step_s
    around = {"set-up and results": profile.set_up_s, "scheduler": profile.scheduler_s}
    blank = ("",) * (len(_HEADINGS) - 4)
    return [
        _HEADINGS,
        *(
            (str(one.label), str(one.calls), *_cells(profile.rates_of(one)))
            for one in profile.operations
        ),
        *(
            (name, "", _number(time_s, 1e3), f"{time_s / step_s:.1%}", *blank)
            for name, time_s in around.items()
        ),
        ("whole step", "", *_cells(profile.rates)),
    ]


def _advice(profile: StepProfile) -> str:
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
    """Return three digits of a number, of small ones fewer; a dash for None."""
    if value is None:
        return "–"
    value *= factor
    digits = 2 - math.floor(math.log10(value)) if value else 0
    return f"{value:,.{min(max(digits, 0), 3)}f}"


def _ms(time_s: float) -> str:
    return f"{_number(time_s, 1e3)} ms"


def _result(model: str, profiles: Sequence[StepProfile]) -> dict[str, Any]:
    """Return what --json prints; times are in seconds."""
    return {
        "model": model,
        "backend": profiles[0].detail,
        "machine": asdict(profiles[0].hardware),
        "steps": [_step_result(profile) for profile in profiles],
    }


def _step_result(profile: StepProfile) -> dict[str, Any]:
    return {
        "name": profile.shape.name,
        **asdict(profile.shape),
        "num_measured": profile.num_steps,
        "run_s": asdict(profile.run_s),
        "set_up_s": profile.set_up_s,
        "scheduler_s": profile.scheduler_s,
        "tokens_per_s": profile.tokens_per_s,
        "others_share": profile.others_share,
        "whole": asdict(profile.rates),
        "operations": [
            {
                "name": one.label.name,
                "layer": one.label.layer,
                "calls": one.calls,
                **asdict(profile.rates_of(one)),
                "lowest_s": one.time_s.low,
                "highest_s": one.time_s.high,
            }
            for one in profile.operations
        ],
        "mend_next": _advice(profile),
    }
