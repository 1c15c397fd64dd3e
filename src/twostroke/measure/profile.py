"""Times each fused operation of a step, beside the least that it could take on this machine."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from twostroke.backends.cpu import CpuBackend
from twostroke.backends.cpu.library import choose_level
from twostroke.cache import FORMATS, PageGroups
from twostroke.core.config import CacheOptions, ComputeOptions
from twostroke.core.errors import MemoryLimitError, UsageError
from twostroke.core.hardware import OtherPrograms, memory_available, resolve_num_threads
from twostroke.engine.compute import auto_kv_format
from twostroke.engine.limits import machine
from twostroke.engine.loading import load
from twostroke.measure.labels import Label, labels
from twostroke.measure.plots import Point, Series
from twostroke.measure.single_step import SingleStep
from twostroke.models import build_program
from twostroke.program.cost import Cost, CostModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from twostroke.core.hardware import Hardware
    from twostroke.measure.single_step import Shape
    from twostroke.program import Program

_WORKING_BYTES: Final = 128 * 1024**2  # interpreter and buffers of a step
_MEASURED_S: Final = 2.0  # within these numbers of steps
_FEWEST_STEPS: Final = 5
_MOST_STEPS: Final = 200
_LEAST_FLOPS: Final = 1e-4  # of a step's, for a place on the roofline


@dataclass(frozen=True, slots=True)
class Wanted:
    """The shapes to measure, steps of each (None: about two seconds), and whether by layer."""

    shapes: tuple[Shape, ...]
    num_steps: int | None = None
    by_layer: bool = False
    compute: ComputeOptions = field(default_factory=ComputeOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)

    def __post_init__(self) -> None:
        """Refuse a backend without native kernels."""
        if self.compute.backend not in {"auto", "cpu"}:
            message = f"Only the cpu backend has kernels to profile, not {self.compute.backend}"
            raise UsageError(f"{message}: leave --backend out.")


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several measurements, between the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Return the spread of `values`."""
        every = sorted(values)
        return cls(statistics.median(every), every[0], every[-1])


@dataclass(frozen=True, slots=True)
class OperationProfile:
    """Fused operations of one label in a step: how often they ran, how long, and their cost.

    `waiting_s` is the time in which threads waited for each other (mean of the threads).
    `floor_s` is the least that this machine needs: for each call the longer of moving its bytes
    at the measured bandwidth and doing its arithmetic at the measured peak.
    """

    label: Label
    calls: int
    time_s: Spread
    waiting_s: float
    cost: Cost
    floor_s: float

    @property
    def above_s(self) -> float:
        """Seconds above the floor; 0 where caches made it faster than the floor."""
        return max(0.0, self.time_s.median - self.floor_s)


@dataclass(frozen=True, slots=True)
class Rates:
    """Figures of an operation or of a whole step; None where a divisor is 0."""

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
    def of(cls, time_s: float, step_s: float, waiting_s: float, cost: Cost, floor_s: float) -> Self:
        """Derive the figures of something that took `time_s` of a step's `step_s`."""
        return cls(
            time_s=time_s,
            share=time_s / step_s,
            waiting_s=waiting_s,
            bytes=cost.bytes,
            flops=cost.flops,
            flops_per_byte=cost.flops / cost.bytes if cost.bytes else None,
            bytes_per_s=cost.bytes / time_s if time_s else None,
            flops_per_s=cost.flops / time_s if time_s else None,
            floor_s=floor_s,
            times_floor=time_s / floor_s if floor_s else None,
        )


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One shape's step. `run_s` is the backend's whole call, to which `scheduler_s` is added.

    `detail` has the backend's level, threads and cache format. `set_up_s` is the part of the call
    outside operations: arrays, threads, results. Other programs took `others_share` of all
    processors meanwhile (None if unknown).
    """

    shape: Shape
    detail: str
    hardware: Hardware
    num_steps: int
    operations: tuple[OperationProfile, ...]
    run_s: Spread
    set_up_s: float
    scheduler_s: float
    others_share: float | None

    @property
    def step_s(self) -> float:
        """Seconds from one step to the next (medians)."""
        return self.run_s.median + self.scheduler_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens computed per second."""
        return self.shape.batch.num_rows / self.step_s

    @property
    def cost(self) -> Cost:
        """The cost of all operations."""
        return sum((operation.cost for operation in self.operations), Cost(0, 0, 0))

    @property
    def floor_s(self) -> float:
        """The least time that the operations need, one after another."""
        return sum(operation.floor_s for operation in self.operations)

    @property
    def worst(self) -> OperationProfile:
        """The operation with the most time above its floor."""
        return max(self.operations, key=lambda operation: operation.above_s)

    @property
    def rates(self) -> Rates:
        """The figures of the whole step."""
        waiting_s = sum(operation.waiting_s for operation in self.operations)
        return Rates.of(self.step_s, self.step_s, waiting_s, self.cost, self.floor_s)

    def rates_of(self, one: OperationProfile) -> Rates:
        """Return the figures of one of the operations."""
        return Rates.of(one.time_s.median, self.step_s, one.waiting_s, one.cost, one.floor_s)

    def series(self) -> Series:
        """Return the operations for a roofline, without those that hardly compute."""
        points = []
        for one in self.operations:
            rates = self.rates_of(one)
            is_drawn = one.cost.flops > _LEAST_FLOPS * self.cost.flops
            if is_drawn and rates.flops_per_byte and rates.flops_per_s:
                point = Point(str(one.label), rates.flops_per_byte, rates.flops_per_s, rates.share)
                points.append(point)
        return Series(f"{self.shape.name}: {self.step_s * 1e3:,.2f} ms", points)


def profile(model: str, wanted: Wanted, notice: Callable[[str], None]) -> Iterator[StepProfile]:
    """Yield a profile for each shape. `notice(text)` is called before what takes time.

    The machine's limits are measured again first; the best of all measurements counts.

    Raises:
        UsageError: a shape that the model's context cannot hold.
        MemoryLimitError: one whose keys and values do not fit.
        BackendError: the level cannot be used here.
        TwostrokeError: as `weights.load`.
    """
    level = choose_level(wanted.compute.level).level
    num_threads = resolve_num_threads(wanted.compute.num_threads)
    loaded = load(model)
    program = build_program(loaded.spec)
    kv_format = wanted.cache.kv_format
    if kv_format == "auto":
        kv_format = auto_kv_format(wanted.compute)
    num_pages = _num_pages(program, wanted, kv_format, loaded.file_bytes)
    sizes = {name: loaded.tensors[name].num_bytes for name in program.weight_shapes}
    cost = CostModel(program, sizes, FORMATS[kv_format])
    notice("Measuring the machine")
    hardware = machine(level, num_threads, loaded.file_bytes, again=True)
    notice("Loading the model")
    backend = CpuBackend(
        program,
        loaded.tensors,
        num_pages,
        wanted.cache.page_size,
        num_threads,
        level=level,
        kv_format=kv_format,
        activation_bits=wanted.compute.activation_bits,
        release=loaded.release,
    )
    try:
        for shape in wanted.shapes:
            notice(f"Measuring {shape.name}")
            yield _profile(shape, backend, cost, hardware, wanted)
    finally:
        backend.close()


def _num_pages(program: Program, wanted: Wanted, kv_format: str, weight_bytes: int) -> int:
    """Return how many pages the largest shape needs."""
    page_size = wanted.cache.page_size
    groups = PageGroups(page_size, tuple(group.window for group in program.cache_groups))
    for shape in wanted.shapes:
        shape.check(program)
    largest = max(wanted.shapes, key=lambda shape: shape.num_pages(groups))
    num_pages = largest.num_pages(groups)
    needed = num_pages * program.page_bytes(page_size, FORMATS[kv_format])
    free = max(0, memory_available() - weight_bytes - _WORKING_BYTES)
    if needed > free:
        knob = "--prefill" if largest.num_prompt else "--streams or --context"
        raise MemoryLimitError(
            f"{program.name}: {largest.name} needs {needed / 1e6:,.0f} MB of keys and values, and "
            f"the weights leave {free / 1e6:,.0f} MB of memory free: lower {knob}."
        )
    return num_pages


@dataclass(frozen=True, slots=True)
class _Step:
    """One measured step: seconds of the whole call, and of each fused operation."""

    run_s: float
    elapsed_s: tuple[float, ...]
    waiting_s: tuple[float, ...]


def _profile(
    shape: Shape, backend: CpuBackend, cost: CostModel, hardware: Hardware, wanted: Wanted
) -> StepProfile:
    single = SingleStep(backend, cost.program, shape)
    try:
        watch = OtherPrograms()
        steps = _measure(backend, single, wanted.num_steps)
        others_share = watch.share()
        scheduler_s = statistics.median(single.scheduler_times())
    finally:
        single.close()
    places: dict[Label, list[int]] = {}
    for place, label in enumerate(labels(cost.program, backend.fused)):
        key = label if wanted.by_layer else Label(label.name)
        places.setdefault(key, []).append(place)
    costs = [
        sum((cost.operation(op, shape.batch) for op in parts), Cost(0, 0, 0))
        for parts in backend.fused
    ]
    return StepProfile(
        shape=shape,
        detail=backend.facts.detail,
        hardware=hardware,
        num_steps=len(steps),
        operations=tuple(
            _operation(label, [costs[place] for place in at], at, steps, hardware)
            for label, at in places.items()
        ),
        run_s=Spread.of(step.run_s for step in steps),
        set_up_s=statistics.median(step.run_s - sum(step.elapsed_s) for step in steps),
        scheduler_s=scheduler_s,
        others_share=others_share,
    )


def _measure(backend: CpuBackend, single: SingleStep, num_steps: int | None) -> list[_Step]:
    """Compute the step once to warm up, then as often as wanted."""
    single.run()
    backend.times()
    steps: list[_Step] = []
    began = time.monotonic()
    while len(steps) < (num_steps or _MOST_STEPS):
        is_long = time.monotonic() - began > _MEASURED_S
        if num_steps is None and is_long and len(steps) >= _FEWEST_STEPS:
            break
        run_s, times = single.run().elapsed_s, backend.times()
        elapsed_s = tuple(time.elapsed_s for time in times)
        steps.append(_Step(run_s, elapsed_s, tuple(time.waiting_s for time in times)))
    return steps


def _operation(
    label: Label,
    costs: Sequence[Cost],
    places: Sequence[int],
    steps: Sequence[_Step],
    hardware: Hardware,
) -> OperationProfile:
    return OperationProfile(
        label=label,
        calls=len(places),
        time_s=Spread.of(sum(step.elapsed_s[place] for place in places) for step in steps),
        waiting_s=statistics.median(
            sum(step.waiting_s[place] for place in places) for step in steps
        ),
        cost=sum(costs, Cost(0, 0, 0)),
        floor_s=sum(
            max(cost.bytes / hardware.bandwidth, cost.flops / hardware.peak) for cost in costs
        ),
    )
