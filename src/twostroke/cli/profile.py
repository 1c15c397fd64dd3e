"""`twostroke profile`: where a step's time goes, operation by operation, beside the limits."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.cli.fetch import fetch
from twostroke.cli.help import OneOf
from twostroke.cli.options import named_as_options
from twostroke.cli.roofline import Point, Roof, Series, draw
from twostroke.cli.terminal import printable, show_table
from twostroke.core.config import (
    BACKENDS,
    DEFAULT_ACTIVATION_BITS,
    KV_FORMATS,
    CacheOptions,
    ComputeOptions,
)
from twostroke.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.measure.profile import OperationProfile, StepProfile
    from twostroke.measure.single_step import Shape
    from twostroke.program.cost import Cost

_MOST: Final = 1 << 20
_STREAMS: Final = (1, 16)
_PROMPT: Final = (512,)
_QUIET: Final = 0.03  # of the processors' time that others may take unsaid
_LEAST_FLOPS: Final = 1e-4  # of a step's, for a place on the roofline
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
            self.fail(f"'{value}' is no list of numbers from 1 to {_MOST}, as 1,16 is.", param, ctx)
        return tuple(map(int, words))


@click.command("profile")
@click.argument("model")
@click.option("--streams", type=Counts(), help="Decode steps of so many streams [default: 1,16].")
@click.option(
    "--context",
    type=click.IntRange(1),
    metavar="N",
    default=512,
    show_default=True,
    help="Tokens behind which each stream writes.",
)
@click.option("--prefill", type=Counts(), help="Steps of so many prompt tokens [default: 512].")
@click.option(
    "--steps", type=click.IntRange(1), metavar="N", help="Measured [default: some two seconds]."
)
@click.option("--layers", is_flag=True, help="Show each layer by itself.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE.svg",
    help="Draw this machine's roofline with the operations under it.",
)
@click.option("--threads", type=click.IntRange(1, 1024), metavar="N", help="Compute threads.")
@click.option("--level", help="Instruction set [default: the best here].")
@click.option(
    "--kv-format", type=OneOf(KV_FORMATS), default="auto", help="How keys and values are stored."
)
@click.option(
    "--activation-bits",
    type=int,
    default=DEFAULT_ACTIVATION_BITS,
    show_default=True,
    help="Against quantized weights.",
)
@click.option("--backend", type=OneOf(BACKENDS), default="auto", hidden=True)
def command(model: str, as_json: bool, plot: Path | None, **given: Any) -> None:
    """Measure what each operation of a step takes, beside the least that this machine needs.

    A step is computed again and again, alone, with fresh requests behind real contexts. With only
    one of --streams and --prefill, only that is measured. Close other programs first.
    """
    if plot is not None:
        _check_plot(plot)
    from twostroke.measure.profile import Wanted, profile

    with named_as_options():
        wanted = Wanted(
            _shapes(given),
            given["steps"],
            given["layers"],
            ComputeOptions(
                given["backend"],
                given["threads"],
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
        _write(plot, _picture(model, profiles))


def _shapes(given: dict[str, Any]) -> tuple[Shape, ...]:
    from twostroke.measure.single_step import Shape

    streams, prompts = given["streams"], given["prefill"]
    if streams is None and prompts is None:
        streams, prompts = _STREAMS, _PROMPT
    decodes = [Shape.decode(count, given["context"]) for count in streams or ()]
    return (*decodes, *map(Shape.prefill, prompts or ()))


def _check_plot(path: Path) -> None:
    """Refuse, before anything is measured, what could not be written."""
    if path.suffix.lower() != ".svg":
        raise UsageError(f"--plot draws SVG: give a name that ends in .svg, not '{path.name}'.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot: there is no folder '{path.parent}'.")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:  # that of a full disk does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from None


def _notice(text: str) -> None:
    click.echo(f"{text}…", err=True)


def _machine(profile: StepProfile) -> str:
    hardware = profile.hardware
    return (
        f"{profile.detail} · {hardware.bandwidth / 1e9:.1f} GB/s · "
        f"{hardware.peak / 1e12:.2f} T operations/s ({hardware.peak_kind})"
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """What is shown of an operation, or of all together; None where nothing divides."""

    time_s: float
    share: float
    waiting_s: float
    bytes: int
    flops: int
    flops_per_byte: float | None
    bytes_per_s: float | None
    flops_per_s: float | None
    floor_s: float
    times_floor: float | None

    @classmethod
    def of(cls, operation: OperationProfile, step_s: float) -> Figures:
        """Work out an operation's figures."""
        time_s = operation.time_s.median
        return cls._of(time_s, step_s, operation.waiting_s, operation.cost, operation.floor_s)

    @classmethod
    def of_all(cls, profile: StepProfile) -> Figures:
        """Work out the figures of a whole step."""
        step_s, waiting_s = profile.step_s, sum(one.waiting_s for one in profile.operations)
        return cls._of(step_s, step_s, waiting_s, profile.cost, profile.floor_s)

    @classmethod
    def _of(
        cls, time_s: float, step_s: float, waiting_s: float, cost: Cost, floor_s: float
    ) -> Figures:
        return cls(
            time_s,
            time_s / step_s,
            waiting_s,
            cost.bytes,
            cost.flops,
            cost.flops / cost.bytes if cost.bytes else None,
            cost.bytes / time_s if time_s else None,
            cost.flops / time_s if time_s else None,
            floor_s,
            time_s / floor_s if floor_s else None,
        )

    def cells(self) -> tuple[str, ...]:
        """Return the figures in the units of `_HEADINGS`."""
        return (
            _number(self.time_s, 1e3),
            f"{self.share:.1%}",
            _number(self.waiting_s, 1e3),
            _number(self.bytes, 1e-6),
            _number(self.flops, 1e-9),
            _number(self.flops_per_byte),
            _number(self.bytes_per_s, 1e-9),
            _number(self.flops_per_s, 1e-9),
            _number(self.floor_s, 1e3),
            _number(self.times_floor) if (self.times_floor or 0) < 1000 else ">999",
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
            (str(one.label), str(one.calls), *Figures.of(one, step_s).cells())
            for one in profile.operations
        ),
        *(
            (name, "", _number(time_s, 1e3), f"{time_s / step_s:.1%}", *blank)
            for name, time_s in around.items()
        ),
        ("whole step", "", *Figures.of_all(profile).cells()),
    ]


def _advice(profile: StepProfile) -> str:
    worst, step_s = profile.worst, profile.step_s
    around_s = profile.set_up_s + profile.scheduler_s
    if around_s > worst.above_s:
        return (
            f"Mend next: what lies around the kernels takes {_ms(around_s)}, "
            f"{around_s / step_s:.0%} of the step."
        )
    return (
        f"Mend next: {worst.label} takes {_ms(worst.above_s)} more than its floor of "
        f"{_ms(worst.floor_s)}, {worst.above_s / step_s:.0%} of the step."
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
        "whole": asdict(Figures.of_all(profile)),
        "operations": [
            {
                "name": one.label.name,
                "layer": one.label.layer,
                "calls": one.calls,
                **asdict(Figures.of(one, profile.step_s)),
                "lowest_s": one.time_s.low,
                "highest_s": one.time_s.high,
            }
            for one in profile.operations
        ],
        "mend_next": _advice(profile),
    }


def _picture(model: str, profiles: Sequence[StepProfile]) -> str:
    """Return the roofline; operations that hardly compute have no place on it."""
    hardware = profiles[0].hardware
    roof = Roof(
        hardware.bandwidth,
        hardware.peak,
        f"{hardware.bandwidth / 1e9:.1f} GB/s, measured",
        f"{hardware.peak / 1e12:.2f} T operations/s, measured: {hardware.peak_kind}",
    )
    title = f"{model} on {hardware.name}: {profiles[0].detail}"
    return draw(title, roof, [_series(profile) for profile in profiles])


def _series(profile: StepProfile) -> Series:
    points = []
    for one in profile.operations:
        figures = Figures.of(one, profile.step_s)
        is_drawn = one.cost.flops > _LEAST_FLOPS * profile.cost.flops
        if is_drawn and figures.flops_per_byte and figures.flops_per_s:
            label = str(one.label)
            rates = figures.flops_per_byte, figures.flops_per_s
            points.append(Point(label, *rates, figures.share))
    return Series(f"{profile.shape.name}: {_ms(profile.step_s)}", points)
