"""The options that `plan`, `plan buy` and `simulate` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.cli.help import WordParam, option
from twostroke.cli.options import check_effect
from twostroke.core.errors import Field, UsageError
from twostroke.core.frozen import check_number
from twostroke.model.program.cost import WEIGHTS
from twostroke.model.program.kv_layout import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.lab.measure.requests import Objectives
    from twostroke.lab.planner import Calibration, Device, PlannedModel
    from twostroke.lab.planner.reference_calibration import ReferenceCalibration


THIS_MACHINE: Final = "here"  # as in `planner.devices`, which --help does not need


def check_threads(device: str) -> None:
    """Raise UsageError if --threads is given for a device other than this machine."""
    check_effect("num_threads", "device", has_effect=device == THIS_MACHINE, value=THIS_MACHINE)


def correction_of(
    planned: PlannedModel, device: Device, threads: int | None
) -> Calibration | ReferenceCalibration | None:
    """Return the measured steps that correct the planned times of a model on this machine.

    `device` is this machine, and `threads` the number of threads, None for the default. The steps
    are the model's own measured steps, or else steps of another model; None if no steps were
    measured.
    """
    from twostroke.lab import planner

    return planner.load_calibration(planned.identity, threads) or planner.reference_steps(device)


def take_objectives(values: dict[str, Any]) -> Objectives:
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


class BoundedNumberParam(click.ParamType):  # type: ignore[type-arg]
    """An option type: a number within bounds; the option's value is the number times `unit`."""

    name = "float"

    def __init__(self, *, high: float, low: float | None = None, unit: float = 1.0) -> None:
        """Accept numbers from `low` to `high`, or above 0 if `low` is None."""
        self._high, self._low, self._unit = high, low, unit

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the option's number times `unit`; fail if the number is out of bounds."""
        number = float(click.FLOAT.convert(value, param, ctx))
        field = (param and param.name) or "value"
        check_number(field, number, high=self._high, low=self._low)
        return number * self._unit


MS: Final = BoundedNumberParam(high=1e9, unit=1e-3)  # from milliseconds to seconds

weights_option = option(
    "--weights",
    type=WordParam(tuple(WEIGHTS)),
    help="How weights are stored [default: as in the file].",
)
kv_format_option = option(
    "--kv-format",
    type=WordParam(tuple(FORMATS)),
    help="Number format of keys and values [default: as `serve` uses on this machine; f16 for "
    "other devices].",
)
threads_option = option(
    "--threads",
    "num_threads",
    type=click.IntRange(1, 1024),
    help="Compute threads of this machine [default: one for each core, as `serve` uses].",
)
price_option = option(
    "--price",
    "usd_per_hour",
    type=float,
    help="Price of a device in $ per hour [default: the table's].",
)


def objective_options(section: str = "Options") -> Callable[[Any], Any]:
    """Return a decorator that adds the options --ttft and --tpot to a command.

    The options set latency objectives in milliseconds; the command gets them in seconds.
    """
    ttft = "Objective for the time to the first token, in ms."
    tpot = "Objective for the time of each further token, in ms."

    def add(command: Any) -> Any:
        command = option("--tpot", "tpot_s", type=MS, help=tpot, section=section)(command)
        return option("--ttft", "ttft_s", type=MS, help=ttft, section=section)(command)

    return add


def efficiency_options(mfu: float, mbu: float) -> Callable[[Any], Any]:
    """Return a decorator that adds --mfu and --mbu to a command, with these defaults.

    The values are the shares of peak arithmetic and of bandwidth that an engine is assumed to
    reach.
    """
    bandwidth = "Share of the device's memory bandwidth that the engine reaches, from 0 to 1."
    arithmetic = "Share of the device's arithmetic peak that the engine reaches, from 0 to 1."

    def add(command: Any) -> Any:
        command = option("--mbu", default=mbu, help=bandwidth)(command)
        return option("--mfu", default=mfu, help=arithmetic)(command)

    return add
