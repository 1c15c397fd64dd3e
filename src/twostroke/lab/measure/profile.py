"""Times each fused operation of a step, and computes the least that it could take."""

from __future__ import annotations

import statistics
import time
from itertools import product
from typing import TYPE_CHECKING, Final, Self, cast

from msgspec import field
from msgspec.structs import replace

from twostroke.backends.activation_bits.resolve import resolve_activation_bits
from twostroke.backends.cpu.library import choose_level
from twostroke.backends.create import (
    FLOAT32_BACKENDS,
    auto_kv_format,
    check_can_run,
    check_gpu,
    cost_model,
    create_backend,
    gpu_device,
    memory_free,
    weight_bytes,
)
from twostroke.backends.kv_size import CacheSize
from twostroke.backends.machine_limits import machine
from twostroke.core.errors import MemoryLimitError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import OtherPrograms, resolve_num_threads
from twostroke.core.options import CacheOptions, ComputeOptions
from twostroke.lab.measure.report_text import Label, labels
from twostroke.lab.measure.single_step import FILL_ROWS, SingleStep
from twostroke.model.families import build_program
from twostroke.model.loader import load
from twostroke.model.program.cost import Cost, CostModel
from twostroke.model.program.kv_layout import FORMATS, PageGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from twostroke.backends.cpu import CpuBackend
    from twostroke.backends.cpu.plan import MeasuredOpTime
    from twostroke.backends.gpu.backend import GpuBackend
    from twostroke.core.hardware import Hardware
    from twostroke.lab.measure.single_step import Shape
    from twostroke.model.program import Program
    from twostroke.model.weights import LoadedModel

    TimedBackend = CpuBackend | GpuBackend

_WORKING_BYTES: Final = 128 * 1024**2  # interpreter and buffers of a step
MEASURED_S: Final = 2.0  # within these numbers of steps
FEWEST_STEPS: Final = 5
MOST_STEPS: Final = 200


class Wanted(Frozen):
    """What to measure: each shape for `num_steps` steps (None: about two seconds).

    In several `rounds` through all shapes, each takes its part of these in every one.
    """

    shapes: tuple[Shape, ...]
    num_steps: int | None = None
    by_layer: bool = False
    compute: ComputeOptions = field(default_factory=ComputeOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    rounds: int = 1

    def __post_init__(self) -> None:
        """Refuse backends that do not time their operations."""
        if self.compute.backend in FLOAT32_BACKENDS:
            raise UsageError("must be cpu or gpu, which time their operations.", field="backend")

    @property
    def most_rows(self) -> int:
        """Most rows of a step, those that fill contexts included."""
        return max(FILL_ROWS, *(shape.batch.num_rows for shape in self.shapes))


class Spread(Frozen):
    """The median of several measurements, between the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Return the spread of `values`."""
        every = sorted(values)
        return cls(statistics.median(every), every[0], every[-1])


class OperationProfile(Frozen):
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


class StepProfile(Frozen):
    """One shape's step. `run_s` is the backend's whole call, to which `scheduler_s` is added.

    `detail` has the backend's level, threads and cache format. `set_up_s` is the part of the call
    outside operations: arrays, threads, on a GPU draws of tokens, results. Other programs took
    `others_share` of all processors meanwhile (None if unknown).
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
    def worst(self) -> OperationProfile:
        """The operation with the most time above its floor."""
        return max(self.operations, key=lambda operation: operation.above_s)

    def figures(self, one: OperationProfile | None = None) -> dict[str, float | None]:
        """Return times and rates of one operation, or of the whole step; None for a divisor of 0.

        The floor of the step is that of its operations, one after another.
        """
        parts = self.operations if one is None else (one,)
        time_s = self.step_s if one is None else one.time_s.median
        cost = sum((part.cost for part in parts), Cost(0, 0, 0))
        floor_s = sum(part.floor_s for part in parts)
        return {
            "time_s": time_s,
            "share": time_s / self.step_s,
            "waiting_s": sum(part.waiting_s for part in parts),
            "bytes": cost.bytes,
            "flops": cost.flops,
            "flops_per_byte": cost.flops / cost.bytes if cost.bytes else None,
            "bytes_per_s": cost.bytes / time_s if time_s else None,
            "flops_per_s": cost.flops / time_s if time_s else None,
            "floor_s": floor_s,
            "times_floor": time_s / floor_s if floor_s else None,
        }


def profile(model: str, wanted: Wanted, notice: Callable[[str], None]) -> Iterator[StepProfile]:
    """Yield a profile for each shape in each round. `notice(text)` is called before long parts.

    The machine's limits are measured again first; the best of all measurements counts.

    Raises:
        UsageError: a shape that the model's context cannot hold.
        MemoryLimitError: one whose keys and values do not fit.
        BackendError: the backend cannot be used here.
        TwostrokeError: as `weights.load`.
    """
    check_can_run(wanted.compute)
    loaded = load(model)
    program = build_program(loaded.spec)
    if wanted.compute.backend == "gpu":
        check_gpu(program, wanted.compute)
    compute = resolve_activation_bits(wanted.compute, loaded, program)
    kv_format = wanted.cache.kv_format
    if kv_format == "auto":
        kv_format = auto_kv_format(wanted.compute)
    size = _size(loaded, program, wanted, kv_format)
    cost = cost_model(program, loaded.tensors, kv_format, compute.backend)
    notice("Measuring the machine")
    hardware = _hardware(compute, loaded.file_bytes)
    notice("Loading the model")
    made = create_backend(
        loaded.tensors, program, compute, size, release=loaded.release, max_rows=wanted.most_rows
    )
    backend = cast("TimedBackend", made)
    cost = replace(cost, stops_rows=backend.facts.stops_rows)
    try:
        for number, shape in product(range(wanted.rounds), wanted.shapes):
            part = f" ({number + 1} of {wanted.rounds})" if wanted.rounds > 1 else ""
            notice(f"Measuring {shape.name}{part}")
            yield _profile(shape, backend, cost, hardware, wanted)
    finally:
        backend.close()


def _hardware(compute: ComputeOptions, stream_bytes: int) -> Hardware:
    """Measure the limits of what computes."""
    if compute.backend == "gpu":
        from twostroke.backends.gpu.limits import measure

        return measure(gpu_device(compute))
    level, num_threads = choose_level(compute.level).level, resolve_num_threads(compute.num_threads)
    return machine(level, num_threads, stream_bytes, remeasure=True)


def _size(loaded: LoadedModel, program: Program, wanted: Wanted, kv_format: str) -> CacheSize:
    """Return the pages that the largest shape needs."""
    page_size = wanted.cache.tokens_in_page
    groups = PageGroups(page_size, tuple(group.window for group in program.cache_groups))
    for shape in wanted.shapes:
        shape.check(program)
    largest = max(wanted.shapes, key=lambda shape: shape.num_pages(groups))
    num_pages = largest.num_pages(groups)
    needed = num_pages * program.page_bytes(page_size, FORMATS[kv_format])
    free = memory_free(wanted.compute, program, loaded.tensors, wanted.most_rows)
    free = max(0, free - weight_bytes(loaded, wanted.compute) - _WORKING_BYTES)
    if needed > free:
        knob = "--prefill" if largest.num_prompt else "--streams or --context"
        raise MemoryLimitError(
            f"{program.name}: {largest.name} needs {needed / 1e6:,.0f} MB of keys and values, and "
            f"the weights leave {free / 1e6:,.0f} MB of memory free: lower {knob}."
        )
    return CacheSize(program.context_length, num_pages, page_size, needed, kv_format)


def _profile(
    shape: Shape, backend: TimedBackend, cost: CostModel, hardware: Hardware, wanted: Wanted
) -> StepProfile:
    single = SingleStep(backend, cost.program, shape)
    try:
        watch = OtherPrograms()
        runs_s, times = _measure(backend, single, wanted)
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

    def operation(label: Label, at: Sequence[int]) -> OperationProfile:
        """Return the operations at these places as one."""
        own = [costs[place] for place in at]
        return OperationProfile(
            label=label,
            calls=len(at),
            time_s=Spread.of(sum(step[place].elapsed_s for place in at) for step in times),
            waiting_s=statistics.median(
                sum(step[place].waiting_s for place in at) for step in times
            ),
            cost=sum(own, Cost(0, 0, 0)),
            floor_s=sum(max(c.bytes / hardware.bandwidth, c.flops / hardware.peak) for c in own),
        )

    return StepProfile(
        shape=shape,
        detail=backend.facts.full_detail,
        hardware=hardware,
        num_steps=len(runs_s),
        operations=tuple(operation(label, at) for label, at in places.items()),
        run_s=Spread.of(runs_s),
        set_up_s=statistics.median(
            max(0.0, run_s - sum(one.elapsed_s for one in step))
            for run_s, step in zip(runs_s, times, strict=True)
        ),
        scheduler_s=scheduler_s,
        others_share=others_share,
    )


def _measure(
    backend: TimedBackend, single: SingleStep, wanted: Wanted
) -> tuple[list[float], list[list[MeasuredOpTime]]]:
    """Compute the step once to warm up, then as often as wanted.

    Returns, for each step, the seconds of the whole call and the times of its operations.
    """
    single.run()
    backend.times()
    runs_s: list[float] = []
    times: list[list[MeasuredOpTime]] = []
    began, rounds = time.monotonic(), wanted.rounds
    while len(runs_s) * rounds < (wanted.num_steps or MOST_STEPS):
        is_long = (time.monotonic() - began) * rounds > MEASURED_S
        if wanted.num_steps is None and is_long and len(runs_s) * rounds >= FEWEST_STEPS:
            break
        runs_s.append(single.run().elapsed_s)
        times.append(backend.times())
    return runs_s, times
