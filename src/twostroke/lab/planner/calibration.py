"""Calibration: steps of a model measured on this machine, which correct its planned times."""

from __future__ import annotations

import hashlib
import math
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from twostroke.core import env
from twostroke.core.errors import ModelFormatError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import num_cores, processor_name, resolve_num_threads
from twostroke.core.json_io import read_checked_json, write_checked_json
from twostroke.core.message_text import counted_noun
from twostroke.core.options import ComputeOptions
from twostroke.lab.measure.single_step import StepShape
from twostroke.lab.planner.overhead import (
    OverheadRatio,
    cell_center,
    cell_of,
    cells_of,
    coordinates,
    factors_at,
    nearness,
    weighted_mean,
)
from twostroke.lab.planner.roofline import Factors, is_attention
from twostroke.lab.planner.served import (
    ServedStep,
    merge_steps,
    server_threads,
    thread_count_text,
    watch_server,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from twostroke.lab.measure.profile import StepProfile
    from twostroke.lab.planner.models import PlannedModel
    from twostroke.lab.planner.roofline import Roofline
    from twostroke.model.program.batch import BatchShape, DecodeRun

_VERSION: Final = 3  # of the stored file; in older files activations had 15 bits by default
_CONTEXTS: Final = (128, 1024, 4096)
_STREAMS: Final = (1, 4, 16, 32)
_PROMPTS: Final = (64, 256, 1024)
_NUM_ROUNDS: Final = 3  # passes over all shapes, so that a short disturbance spoils one pass only
WATCH_S: Final = 30.0


class MeasuredStep(Frozen):
    """Median times of one measured shape of step of an engine on this machine.

    `attention_s` is the time of attention, `products_s` of all other operations, and `rest_s` of
    the work around operations.
    """

    streams: int
    context: int
    prompt: int
    attention_s: float
    products_s: float
    rest_s: float

    @classmethod
    def of(cls, profiles: Sequence[StepProfile]) -> MeasuredStep:
        """Return the median times of several profiles of one shape of step."""
        shape = profiles[0].shape
        attention_s, products_s, rest_s = map(
            median, zip(*map(_times_of_parts, profiles), strict=True)
        )
        return cls(
            streams=shape.num_streams,
            context=shape.context,
            prompt=shape.num_prompt,
            attention_s=attention_s,
            products_s=products_s,
            rest_s=rest_s,
        )

    @property
    def batch(self) -> BatchShape:
        """The shape of the measured step."""
        return StepShape(self.streams, self.context, self.prompt).batch

    @property
    def name(self) -> str:
        """A name of the measured step for people."""
        return StepShape(self.streams, self.context, self.prompt).name

    @property
    def seconds(self) -> float:
        """Seconds of the whole measured step."""
        return self.attention_s + self.products_s + self.rest_s


def _times_of_parts(profile: StepProfile) -> tuple[float, float, float]:
    """Return the seconds of attention, of other operations, and of the rest in a measured step."""
    attention_s = products_s = 0.0
    for op in profile.operations:
        if is_attention(op.label.name):
            attention_s += op.time_s.median
        else:
            products_s += op.time_s.median
    return attention_s, products_s, max(0.0, profile.step_s - attention_s - products_s)


class Calibration(Frozen):
    """Measured steps of one model on this machine, which correct the times of its plans.

    It implements `Correction`, and is stored in the cache folder.

    Attributes:
        points: steps of an engine without a server.
        date: day of the last measurement.
        num_threads: number of threads that computed all steps.
        version: version of the stored file.
        served_steps: steps of a running server. Its loop also does other work than computing, so
            these steps show how much longer a step takes than `points` predict.
    """

    points: tuple[MeasuredStep, ...]
    date: str
    num_threads: int
    version: int = _VERSION
    served_steps: tuple[ServedStep, ...] = msgspec.field(name="served", default=())

    @property
    def num_steps(self) -> int:
        """The number of shapes of steps that were measured for the calibration."""
        return len(self.points) + len(self.served_steps)

    def factors(self, roofline: Roofline, batch: BatchShape) -> Factors:
        """Return the factors that correct the time of a step, from measured steps near its shape.

        The coordinates of a step are the logarithms of rows, rows per request and context. The
        factors are means over measured steps, weighted by the inverse fourth power of the distance.
        The context influences only attention. `roofline` gives the minimum times.
        """
        return self._factors_at(roofline, coordinates(batch))

    def _factors_at(self, roofline: Roofline, position: Sequence[float]) -> Factors:
        factors = self._engine_factors_at(roofline, position)
        if not self.served_steps:
            return factors
        ratios = _server_log_ratios(self, roofline)
        ratio = math.exp(weighted_mean(position, ratios))
        nearest = max(range(len(ratios)), key=lambda n: nearness(position, ratios[n][0]))
        between_shares = [
            (step_position, step.between_s / step.seconds)
            for (step_position, _), step in zip(ratios, self.served_steps, strict=True)
        ]
        return Factors(
            attention=ratio * factors.attention,
            products=ratio * factors.products,
            rest_s=ratio * factors.rest_s,
            nearest=self.served_steps[nearest].name,
            between_share=weighted_mean(position, between_shares),
        )

    def _engine_factors_at(self, roofline: Roofline, position: Sequence[float]) -> Factors:
        """Return the correction factors of a step, for an engine without a server.

        `position` is the step's position as `coordinates` returns it.
        """
        if not self.points:
            return Factors(attention=1.0, products=1.0, rest_s=0.0, nearest="")
        return factors_at(position, _overhead_ratios(self, roofline))

    def cell(self, batch: BatchShape) -> tuple[int, ...]:
        """Return a key for steps of similar shape, which get the same correction factors."""
        return cell_of(batch)

    def cells(self, run: DecodeRun) -> list[tuple[int, ...]]:
        """Return the key `cell` of each decode step of a run."""
        return cells_of(run)

    def factors_in(self, roofline: Roofline, cell: tuple[int, ...]) -> Factors:
        """Return the correction factors for all steps of similar shape, given their key `cell`."""
        return self._factors_at(roofline, cell_center(cell))

    def errors(self, roofline: Roofline) -> list[float]:
        """Predict each measured step from the other measured steps; return the relative errors.

        The errors say how accurate the calibration is. With at least two steps of a running server,
        only these steps are predicted, from each other.
        """
        if len(self.served_steps) < 2:
            return [
                abs(self._without(point).seconds(roofline, point.batch) / point.seconds - 1)
                for point in self.points
            ]
        ratios = _server_log_ratios(self, roofline)
        errors = []
        for index, (position, ratio) in enumerate(ratios):
            predicted = weighted_mean(position, [*ratios[:index], *ratios[index + 1 :]])
            errors.append(abs(math.expm1(predicted - ratio)))
        return errors

    def error(self, roofline: Roofline) -> float | None:
        """Return the median of `errors`; None if only one step was measured."""
        return median(errors) if (errors := self.errors(roofline)) else None

    def seconds(self, roofline: Roofline, batch: BatchShape) -> float:
        """Return the corrected time of a step of this shape, in seconds."""
        factors = self.factors(roofline, batch)
        min_step = roofline.min_step(batch)
        products_s = factors.products * min_step.products_s
        attention_s = factors.attention * min_step.attention_s
        return products_s + attention_s + factors.rest_s

    def _without(self, point: MeasuredStep) -> Calibration:
        others = tuple(other for other in self.points if other != point)
        return Calibration(others, self.date, self.num_threads)


@lru_cache(maxsize=4)
def _overhead_ratios(calibration: Calibration, roofline: Roofline) -> tuple[OverheadRatio, ...]:
    ratios = []
    for point in calibration.points:
        min_step = roofline.min_step(point.batch)
        ratios.append(
            OverheadRatio(
                coordinates(point.batch),
                point.name,
                attention=point.attention_s / min_step.attention_s,
                products=point.products_s / min_step.products_s,
                rest_s=point.rest_s,
            )
        )
    return tuple(ratios)


@lru_cache(maxsize=4)
def _server_log_ratios(
    calibration: Calibration, roofline: Roofline
) -> tuple[tuple[tuple[float, ...], float], ...]:
    """Return how much longer each step of a running server took than the engine alone would.

    Each entry has the step's position among measured steps, and the logarithm of its measured time
    divided by the time that `points` predict.
    """
    engine = replace(calibration, served_steps=())
    ratios = []
    for step in calibration.served_steps:
        batch = step.batch
        log_ratio = math.log(step.seconds / engine.seconds(roofline, batch))
        ratios.append((coordinates(batch), log_ratio))
    return tuple(ratios)


def calibrate(
    model: str,
    identity: str,
    context_length: int,
    notice: Callable[[str], None],
    num_threads: int | None = None,
) -> None:
    """Measure steps of `model` on this machine, and store them for its plans.

    `num_threads` defaults to the number that an engine uses.

    Raises:
        UsageError: the model has no weights here.
        TwostrokeError: as `profile`.
    """
    if not identity:
        raise UsageError("A configuration alone cannot be measured: name a model with weights.")
    measure(model, identity, calibration_shapes(context_length), notice, num_threads=num_threads)


def calibration_shapes(context_length: int) -> list[StepShape]:
    """Return the shapes of steps that a calibration measures and that fit into the context."""
    decode = [StepShape.decode(count, size) for size in _CONTEXTS for count in _STREAMS]
    shapes = [*decode, *map(StepShape.prefill, _PROMPTS)]
    return [shape for shape in shapes if shape.num_tokens <= context_length]


def measure(
    model: str,
    identity: str,
    shapes: Sequence[StepShape],
    notice: Callable[[str], None],
    num_steps: int | None = None,
    num_threads: int | None = None,
) -> Calibration:
    """Measure steps of these shapes, and store them as the model's calibration.

    `num_steps` is as in `ProfileOptions`.
    """
    num_threads = resolve_num_threads(num_threads)
    points = measured_points(model, shapes, notice, num_steps, num_threads)
    return _store(identity, Calibration(points, _today(), num_threads))


def measured_points(
    model: str,
    shapes: Sequence[StepShape],
    notice: Callable[[str], None],
    num_steps: int | None = None,
    num_threads: int | None = None,
) -> tuple[MeasuredStep, ...]:
    """Measure a step of each shape, and return the median times without storing them.

    There are several passes over all shapes, so that a short disturbance spoils only one. `measure`
    describes the arguments.
    """
    from twostroke.lab.measure.profile import ProfileOptions, profile  # not needed for plans

    compute = ComputeOptions(num_threads=num_threads)
    options = ProfileOptions(tuple(shapes), num_steps, compute=compute, rounds=_NUM_ROUNDS)
    profiles = list(profile(model, options, notice))
    return tuple([MeasuredStep.of(profiles[n :: len(shapes)]) for n in range(len(shapes))])


def calibrate_from_server(
    url: str, key: str | None, model: PlannedModel, notice: Callable[[str], None]
) -> int:
    """Watch the steps of a busy server of `model` on this machine, and store them for plans.

    Returns the server's number of threads; the steps correct plans for this number.

    Raises:
        UsageError: the model has no weights here; or the server does not exist, serves another
            model, refuses the key, or is not busy.
        EngineStoppedError: the server cannot be reached.
    """
    if not model.identity:
        raise UsageError("A configuration alone has no server: name a model with weights.")
    num_threads = server_threads(url, key, model)
    notice(f"Watching {url} for {WATCH_S:.0f} s.")
    steps = watch_server(url, key, model, WATCH_S)
    notice(
        f"Steps of {counted_noun(len(steps), 'shape')} were seen, {thread_count_text(num_threads)}."
    )
    old = load_calibration(model.identity, num_threads)
    points = () if old is None else old.points
    if old is not None:
        steps = merge_steps(old.served_steps, steps)
    _store(model.identity, Calibration(points, _today(), num_threads, served_steps=steps))
    return num_threads


def _store(identity: str, calibration: Calibration) -> Calibration:
    path = _path(identity, calibration.num_threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_checked_json(path, msgspec.to_builtins(calibration))
    return calibration


def _today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def load_calibration(identity: str, num_threads: int | None = None) -> Calibration | None:
    """Return the measured steps of a model that this machine stores; None if there are none.

    Only steps on `num_threads` threads count; it defaults to the number that an engine uses.
    """
    num_threads = resolve_num_threads(num_threads)
    with suppress(ModelFormatError, msgspec.ValidationError):
        path = _path(identity, num_threads)
        calibration = msgspec.convert(read_checked_json(path), Calibration)
        has_steps = bool(calibration.served_steps) or len(calibration.points) > 1
        if calibration.version == _VERSION and has_steps:
            return calibration
    return None


def calibrated_threads(identity: str) -> list[int]:
    """Return the numbers of threads for which steps of a model are stored on this machine."""
    counts = range(1, num_cores() + 1)
    return [count for count in counts if load_calibration(identity, count) is not None]


def _path(identity: str, num_threads: int) -> Path:
    key = f"{processor_name()}|{num_threads}|{identity}"
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    return env.cache_dir() / "calibrations" / f"{name}.json"
