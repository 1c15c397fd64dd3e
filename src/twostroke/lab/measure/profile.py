"""Times each fused operation of a step, and compares it with the minimum time of the machine."""

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
    gpu_device,
)
from twostroke.backends.kv_size import CacheSize
from twostroke.backends.machine_limits import machine
from twostroke.backends.recipe import EngineRecipe
from twostroke.core.errors import MemoryLimitError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import OtherProgramsLoad, resolve_num_threads
from twostroke.core.options import BatchOptions, CacheOptions, ComputeOptions, EngineOptions
from twostroke.lab.measure.report_text import OperationLabel, operation_labels
from twostroke.lab.measure.single_step import FILL_ROWS, SingleStep
from twostroke.model.program.cost import Cost, CostModel
from twostroke.model.program.kv_layout import FORMATS, PageGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from twostroke.backends.cpu import CpuBackend
    from twostroke.backends.cpu.plan import MeasuredOpTime
    from twostroke.backends.gpu.backend import GpuBackend
    from twostroke.core.hardware import Hardware
    from twostroke.lab.measure.single_step import StepShape

    TimedBackend = CpuBackend | GpuBackend

_WORKING_BYTES: Final = 128 * 1024**2  # interpreter and buffers of a step
TARGET_DURATION_S: Final = 2.0  # within the limits of the number of steps
MIN_STEPS: Final = 5
MAX_STEPS: Final = 200


class ProfileOptions(Frozen):
    """Shapes of steps, and options, for `twostroke profile`.

    Attributes:
        shapes: steps to measure.
        num_steps: steps per shape; None for about two seconds.
        by_layer: measure layers separately.
        compute, cache: options of the engine.
        rounds: passes over all shapes; each pass measures its part of the steps.
    """

    shapes: tuple[StepShape, ...]
    num_steps: int | None = None
    by_layer: bool = False
    compute: ComputeOptions = field(default_factory=ComputeOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    rounds: int = 1

    def __post_init__(self) -> None:
        """Raise UsageError for a backend that cannot time its operations."""
        if self.compute.backend in FLOAT32_BACKENDS:
            raise UsageError("must be cpu or gpu, which time their operations.", field="backend")

    @property
    def max_rows(self) -> int:
        """The maximum number of rows in a measured step, or in a step that fills its context."""
        return max(FILL_ROWS, *(shape.batch.num_rows for shape in self.shapes))


class Spread(Frozen):
    """The median, minimum and maximum of several measurements of one time, in seconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Return the median, minimum and maximum of measured values."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])


class OperationProfile(Frozen):
    """The measured times, in one step, of all fused operations with the same label.

    Attributes:
        label: name of the operations, and their layer if layers are measured separately.
        calls: number of operations with this label in a step.
        time_s: seconds of all these operations per step.
        waiting_s: seconds in which threads waited for each other, as a mean over threads.
        cost: bytes and arithmetic of the operations per step.
        floor_s: minimum time on this machine. For each call it is the time of its memory traffic at
            the measured bandwidth, or of its arithmetic at the measured peak, if that is longer.
    """

    label: OperationLabel
    calls: int
    time_s: Spread
    waiting_s: float
    cost: Cost
    floor_s: float

    @property
    def above_s(self) -> float:
        """Seconds by which the operations exceed the machine's minimum time.

        It is 0 if processor caches made them faster than the minimum.
        """
        return max(0.0, self.time_s.median - self.floor_s)


class StepProfile(Frozen):
    """The measured times of a step of one shape, by operation.

    Attributes:
        shape: the step.
        detail: kernels, threads and KV format of the backend.
        hardware: limits of the machine.
        num_steps: number of measured steps.
        operations: times by label.
        run_s: time of the backend's whole call.
        set_up_s: part of `run_s` outside operations: arrays, threads, sampling on a GPU,
            results.
        scheduler_s: time of the scheduler, in addition to `run_s`.
        others_share: share of all processors that other programs used; None if unknown.
    """

    shape: StepShape
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
        """Seconds from one step to the next, computed from medians."""
        return self.run_s.median + self.scheduler_s

    @property
    def range_s(self) -> tuple[float, float]:
        """Seconds of the fastest and of the slowest step, from one step to the next."""
        return self.run_s.low + self.scheduler_s, self.run_s.high + self.scheduler_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the step computes per second."""
        return self.shape.batch.num_rows / self.step_s

    @property
    def cost(self) -> Cost:
        """Bytes and arithmetic of all operations of the step together."""
        return sum((operation.cost for operation in self.operations), Cost(0, 0, 0))

    @property
    def worst(self) -> OperationProfile:
        """The operation that exceeds the machine's minimum time by the most seconds."""
        return max(self.operations, key=lambda operation: operation.above_s)

    def figures(self, operation: OperationProfile | None = None) -> dict[str, float | None]:
        """Return the times and rates of one operation, or of the whole step if it is None.

        A rate is None if its divisor is 0. The minimum time of the step is the sum over its
        operations.
        """
        parts = self.operations if operation is None else (operation,)
        time_s = self.step_s if operation is None else operation.time_s.median
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


def profile(
    model: str, options: ProfileOptions, notice: Callable[[str], None]
) -> Iterator[StepProfile]:
    """Yield a profile of each shape in each round; `notice` gets lines of progress.

    First the machine's limits are measured again; the best of all measurements counts.

    Raises:
        UsageError: the model's context is too short for a shape.
        MemoryLimitError: the keys and values of a shape do not fit.
        BackendError: the backend cannot be used here.
        TwostrokeError: as `load`.
    """
    check_can_run(options.compute)
    batch = BatchOptions(token_budget=options.max_rows, max_running=1)
    recipe = EngineRecipe.of(model, EngineOptions(options.compute, options.cache, batch))
    loaded, program = recipe.loaded, recipe.program
    if options.compute.backend == "gpu":
        check_gpu(program, options.compute)
    compute = resolve_activation_bits(options.compute, loaded, program)
    recipe = recipe.with_compute(compute)
    kv_format = options.cache.kv_format
    if kv_format == "auto":
        kv_format = auto_kv_format(options.compute)
    size = _size(recipe, options.shapes, kv_format)
    cost = recipe.cost_model(kv_format)
    notice("Measuring the machine")
    hardware = _hardware(compute, loaded.file_bytes)
    notice("Loading the model")
    backend = cast("TimedBackend", recipe.create_backend(size))
    cost = replace(cost, stops_rows=backend.facts.stops_rows)
    try:
        for number, shape in product(range(options.rounds), options.shapes):
            part = f" ({number + 1} of {options.rounds})" if options.rounds > 1 else ""
            notice(f"Measuring {shape.name}{part}")
            yield _profile(shape, backend, cost, hardware, options)
    finally:
        backend.close()


def _hardware(compute: ComputeOptions, stream_bytes: int) -> Hardware:
    """Measure the memory bandwidth and arithmetic peak of the machine or GPU to be profiled."""
    if compute.backend == "gpu":
        from twostroke.backends.gpu.limits import measure

        return measure(gpu_device(compute))
    level, num_threads = choose_level(compute.level).level, resolve_num_threads(compute.num_threads)
    return machine(level, num_threads, stream_bytes, remeasure=True)


def _size(recipe: EngineRecipe, shapes: Sequence[StepShape], kv_format: str) -> CacheSize:
    """Return the size of a KV cache that has the pages which the largest shape needs."""
    program, page_size = recipe.program, recipe.options.cache.tokens_in_page
    groups = PageGroups(page_size, tuple(group.window for group in program.cache_groups))
    for shape in shapes:
        shape.check(program)
    largest = max(shapes, key=lambda shape: shape.num_pages(groups))
    num_pages = largest.num_pages(groups)
    num_states = max(shape.num_states for shape in shapes) if program.state_layers else 0
    needed = num_pages * program.page_bytes(page_size, FORMATS[kv_format])
    needed += num_states * program.state_bytes
    free = max(0, recipe.free_bytes() - recipe.weight_bytes - _WORKING_BYTES)
    if needed > free:
        option = "--prefill" if largest.num_prompt else "--streams or --context"
        raise MemoryLimitError(
            f"{program.name}: {largest.name} needs {needed / 1e6:,.0f} MB of keys and values, and "
            f"the weights leave {free / 1e6:,.0f} MB of memory free: lower {option}."
        )
    return CacheSize(
        program.context_length, num_pages, page_size, needed, kv_format, num_states=num_states
    )


def _profile(
    shape: StepShape,
    backend: TimedBackend,
    cost: CostModel,
    hardware: Hardware,
    options: ProfileOptions,
) -> StepProfile:
    single = SingleStep(backend, cost.program, shape)
    try:
        other_programs = OtherProgramsLoad()
        runs_s, times = _measure(backend, single, options)
        others_share = other_programs.share()
        scheduler_s = statistics.median(single.scheduler_times())
    finally:
        single.close()
    indices_by_label: dict[OperationLabel, list[int]] = {}
    for index, label in enumerate(operation_labels(cost.program, backend.fused)):
        key = label if options.by_layer else OperationLabel(label.name)
        indices_by_label.setdefault(key, []).append(index)
    costs = [
        sum((cost.operation(op, shape.batch) for op in parts), Cost(0, 0, 0))
        for parts in backend.fused
    ]

    def operation(label: OperationLabel, indices: Sequence[int]) -> OperationProfile:
        """Return one profile entry for the fused operations with these indices."""
        op_costs = [costs[index] for index in indices]
        return OperationProfile(
            label=label,
            calls=len(indices),
            time_s=Spread.of(sum(step[i].elapsed_s for i in indices) for step in times),
            waiting_s=statistics.median(sum(step[i].waiting_s for i in indices) for step in times),
            cost=sum(op_costs, Cost(0, 0, 0)),
            floor_s=sum(
                max(c.bytes / hardware.bandwidth, c.flops / hardware.peak) for c in op_costs
            ),
        )

    return StepProfile(
        shape=shape,
        detail=backend.facts.full_detail,
        hardware=hardware,
        num_steps=len(runs_s),
        operations=tuple(operation(label, indices) for label, indices in indices_by_label.items()),
        run_s=Spread.of(runs_s),
        set_up_s=statistics.median(
            max(0.0, run_s - sum(op_time.elapsed_s for op_time in step))
            for run_s, step in zip(runs_s, times, strict=True)
        ),
        scheduler_s=scheduler_s,
        others_share=others_share,
    )


def _measure(
    backend: TimedBackend, single: SingleStep, options: ProfileOptions
) -> tuple[list[float], list[list[MeasuredOpTime]]]:
    """Compute a step once to warm up, then as often as the options say.

    Returns, for each step, the seconds of the whole call and the times of its operations.
    """
    single.run()
    backend.times()
    runs_s: list[float] = []
    times: list[list[MeasuredOpTime]] = []
    start_s, rounds = time.monotonic(), options.rounds
    while len(runs_s) * rounds < (options.num_steps or MAX_STEPS):
        is_long = (time.monotonic() - start_s) * rounds > TARGET_DURATION_S
        if options.num_steps is None and is_long and len(runs_s) * rounds >= MIN_STEPS:
            break
        runs_s.append(single.run().elapsed_s)
        times.append(backend.times())
    return runs_s, times
