"""Measured steps of a model on this machine, by which its planned times are corrected."""

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
from twostroke.core.options import ComputeOptions
from twostroke.lab.measure.single_step import Shape
from twostroke.lab.planner.overhead import (
    OverheadRatio,
    cell_of,
    factors_at,
    mean_near,
    middle_of,
    nearness,
    place_of,
)
from twostroke.lab.planner.roofline import Factors, is_attention
from twostroke.lab.planner.served import ServedStep, merged, on_threads, threads_of, watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from twostroke.lab.measure.profile import StepProfile
    from twostroke.lab.planner.models import PlannedModel
    from twostroke.lab.planner.roofline import Roofline
    from twostroke.model.program.batch import BatchShape

_VERSION: Final = 3  # before it, activations had 15 bits by default
_CONTEXTS: Final = (128, 1024, 4096)
_STREAMS: Final = (1, 4, 16, 32)
_PROMPTS: Final = (64, 256, 1024)
_ROUNDS: Final = 3  # through all shapes: what disturbs a machine for seconds counts in one alone
WATCH_S: Final = 30.0


class Point(Frozen):
    """A measured step: seconds of attention, of other operations, and of what is around them.

    It has `streams` requests with a row each after `context` tokens, or `prompt` rows of one.
    """

    streams: int
    context: int
    prompt: int
    attention_s: float
    products_s: float
    rest_s: float

    @classmethod
    def of(cls, profiles: Sequence[StepProfile]) -> Point:
        """Return the point of one shape's profiles: medians."""
        shape = profiles[0].shape
        sizes = (shape.num_streams, shape.context, shape.num_prompt)
        return cls(*sizes, *map(median, zip(*map(_parts, profiles), strict=True)))

    @property
    def batch(self) -> BatchShape:
        """The step's shape."""
        return Shape(self.streams, self.context, self.prompt).batch

    @property
    def name(self) -> str:
        """A readable name."""
        return Shape(self.streams, self.context, self.prompt).name

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.attention_s + self.products_s + self.rest_s


def _parts(one: StepProfile) -> tuple[float, float, float]:
    """Return seconds of attention, of other operations, and of what is around them."""
    seconds = {True: 0.0, False: 0.0}
    for op in one.operations:
        seconds[is_attention(op.label.name)] += op.time_s.median
    return seconds[True], seconds[False], max(0.0, one.step_s - sum(seconds.values()))


class Calibration(Frozen):
    """Measured steps of one model on `num_threads` threads; `date` is that of the last.

    `served` are those of a server, whose loop does more than compute: where there are some, they
    say by how much a step takes longer than `points` make believe.
    """

    points: tuple[Point, ...]
    date: str
    num_threads: int
    version: int = _VERSION
    served: tuple[ServedStep, ...] = ()

    @property
    def num_steps(self) -> int:
        """How many shapes of steps were measured."""
        return len(self.points) + len(self.served)

    def factors(self, roofline: Roofline, batch: BatchShape) -> Factors:
        """Return how a step like `batch` is corrected: as the measured ones near it.

        Logarithms of rows, rows of a request and context are coordinates; a point counts by the
        inverse fourth power of its distance. Contexts matter to attention alone. `roofline` gives
        the least times.
        """
        return self._factors_at(roofline, place_of(batch))

    def _factors_at(self, roofline: Roofline, place: Sequence[float]) -> Factors:
        factors = self._computed_at(roofline, place)
        if not self.served:
            return factors
        ratios = _ratios(self, roofline)
        longer = math.exp(mean_near(place, ratios))
        nearest = max(range(len(ratios)), key=lambda n: nearness(place, ratios[n][0]))
        return Factors(
            attention=longer * factors.attention,
            products=longer * factors.products,
            rest_s=longer * factors.rest_s,
            nearest=self.served[nearest].name,
            between=mean_near(
                place,
                [
                    (there, one.between_s / one.seconds)
                    for (there, _), one in zip(ratios, self.served, strict=True)
                ],
            ),
        )

    def _computed_at(self, roofline: Roofline, place: Sequence[float]) -> Factors:
        """Return the factors for the engine alone, without a server's loop."""
        if not self.points:
            return Factors(attention=1.0, products=1.0, rest_s=0.0, nearest="")
        return factors_at(place, _over_least(self, roofline))

    def cell(self, batch: BatchShape) -> tuple[int, ...]:
        """Return the coordinates of a step, as multiples of an eighth of a doubling."""
        return cell_of(batch)

    def factors_in(self, roofline: Roofline, cell: tuple[int, ...]) -> Factors:
        """Return how a step in the middle of a cell is corrected."""
        return self._factors_at(roofline, middle_of(cell))

    def errors(self, roofline: Roofline) -> list[float]:
        """Return for each measured step the error of what the others say of it, as a share.

        Steps of a server are told by its other steps, where there are some.
        """
        if len(self.served) < 2:
            return [
                abs(self._without(one).seconds(roofline, one.batch) / one.seconds - 1)
                for one in self.points
            ]
        ratios = _ratios(self, roofline)
        told = [
            mean_near(place, [*ratios[:n], *ratios[n + 1 :]]) for n, (place, _) in enumerate(ratios)
        ]
        return [abs(math.expm1(t - own)) for t, (_, own) in zip(told, ratios, strict=True)]

    def error(self, roofline: Roofline) -> float | None:
        """Return the median of the errors; None if one step is all that was measured."""
        return median(errors) if (errors := self.errors(roofline)) else None

    def seconds(self, roofline: Roofline, batch: BatchShape) -> float:
        """Return the corrected time of a step."""
        factors, floor = self.factors(roofline, batch), roofline.least(batch)
        products_s, attention_s = floor.products_s, floor.attention_s
        return factors.products * products_s + factors.attention * attention_s + factors.rest_s

    def _without(self, point: Point) -> Calibration:
        others = tuple(one for one in self.points if one != point)
        return Calibration(others, self.date, self.num_threads)


@lru_cache(maxsize=4)
def _over_least(calibration: Calibration, roofline: Roofline) -> tuple[OverheadRatio, ...]:
    found = []
    for one in calibration.points:
        floor = roofline.least(one.batch)
        factors = one.attention_s / floor.attention_s, one.products_s / floor.products_s
        found.append(OverheadRatio(place_of(one.batch), one.name, *factors, one.rest_s))
    return tuple(found)


@lru_cache(maxsize=4)
def _ratios(
    calibration: Calibration, roofline: Roofline
) -> tuple[tuple[tuple[float, ...], float], ...]:
    """Return for each served step its place, and the logarithm of what it takes over `points`."""
    alone = replace(calibration, served=())
    found = []
    for one in calibration.served:
        batch = one.batch
        found.append((place_of(batch), math.log(one.seconds / alone.seconds(roofline, batch))))
    return tuple(found)


def calibrate(
    model: str,
    identity: str,
    context_length: int,
    notice: Callable[[str], None],
    num_threads: int | None = None,
) -> None:
    """Measure steps of `model` on this machine, and keep them for its plans.

    Threads are as many as an engine takes unless `num_threads` says how many.

    Raises:
        UsageError: the model has no weights here.
        TwostrokeError: as `profile`.
    """
    if not identity:
        raise UsageError("A configuration alone cannot be measured: name a model with weights.")
    measure(model, identity, usual_shapes(context_length), notice, num_threads=num_threads)


def usual_shapes(context_length: int) -> list[Shape]:
    """Return the steps that are measured of a model, those that its context holds."""
    decode = [Shape.decode(count, size) for size in _CONTEXTS for count in _STREAMS]
    shapes = [*decode, *map(Shape.prefill, _PROMPTS)]
    return [one for one in shapes if one.num_tokens <= context_length]


def measure(
    model: str,
    identity: str,
    shapes: Sequence[Shape],
    notice: Callable[[str], None],
    num_steps: int | None = None,
    num_threads: int | None = None,
) -> Calibration:
    """Measure steps of these shapes, and keep them; `num_steps` as in `Wanted`."""
    num_threads = resolve_num_threads(num_threads)
    points = measured_points(model, shapes, notice, num_steps, num_threads)
    return _keep(identity, Calibration(points, _today(), num_threads))


def measured_points(
    model: str,
    shapes: Sequence[Shape],
    notice: Callable[[str], None],
    num_steps: int | None = None,
    num_threads: int | None = None,
) -> tuple[Point, ...]:
    """Measure a step of each shape, in several rounds through all; see `measure`."""
    from twostroke.lab.measure.profile import Wanted, profile  # plans need none of it

    compute = ComputeOptions(num_threads=num_threads)
    wanted = Wanted(tuple(shapes), num_steps, compute=compute, rounds=_ROUNDS)
    profiles = list(profile(model, wanted, notice))
    return tuple([Point.of(profiles[n :: len(shapes)]) for n in range(len(shapes))])


def calibrate_from(
    url: str, key: str | None, model: PlannedModel, notice: Callable[[str], None]
) -> int:
    """Watch a busy server of `model` on this machine, and keep its steps for plans.

    Return its number of threads: its steps correct plans for as many.

    Raises:
        UsageError: the model has no weights here, or as `watch`.
        EngineStoppedError: as `watch`.
    """
    if not model.identity:
        raise UsageError("A configuration alone has no server: name a model with weights.")
    num_threads = threads_of(url, key, model)
    notice(f"Watching {url} for {WATCH_S:.0f} s.")
    steps = watch(url, key, model, WATCH_S)
    known = known_calibration(model.identity, num_threads)
    points, served = ((), ()) if known is None else (known.points, known.served)
    notice(f"Steps of {len(steps)} shapes were seen, {on_threads(num_threads)}.")
    _keep(model.identity, Calibration(points, _today(), num_threads, served=merged(served, steps)))
    return num_threads


def _keep(identity: str, found: Calibration) -> Calibration:
    path = _path(identity, found.num_threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_checked_json(path, msgspec.to_builtins(found))
    return found


def _today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def known_calibration(identity: str, num_threads: int | None = None) -> Calibration | None:
    """Return what was measured of a model on this machine, None if nothing was.

    Steps on another number of threads do not count; None is as many as an engine takes.
    """
    num_threads = resolve_num_threads(num_threads)
    with suppress(ModelFormatError, msgspec.ValidationError):
        path = _path(identity, num_threads)
        calibration = msgspec.convert(read_checked_json(path), Calibration)
        has_steps = bool(calibration.served) or len(calibration.points) > 1
        if calibration.version == _VERSION and has_steps:
            return calibration
    return None


def calibrated_threads(identity: str) -> list[int]:
    """Return the numbers of threads on which steps of a model were measured here."""
    counts = range(1, num_cores() + 1)
    return [one for one in counts if known_calibration(identity, one) is not None]


def _path(identity: str, num_threads: int) -> Path:
    key = f"{processor_name()}|{num_threads}|{identity}"
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    return env.cache_dir() / "calibrations" / f"{name}.json"
