"""Times the operations of a step on several ranks, and how long ranks wait for each other."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.backends.cpu.library import choose_level
from twostroke.backends.cpu.shared import lower_rank
from twostroke.backends.machine_limits import machine
from twostroke.backends.parallel.predicted_speed import (
    CollectiveShares,
    divide,
    measure_link,
    own_cores,
    rates_of,
)
from twostroke.backends.parallel.rank_group import RankGroup
from twostroke.backends.recipe import EngineRecipe
from twostroke.core.errors import MemoryLimitError
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import memory_available, resolve_num_threads
from twostroke.core.options import BatchOptions, EngineOptions
from twostroke.lab.measure.profile import MAX_STEPS, MIN_STEPS, TARGET_DURATION_S, Spread
from twostroke.lab.measure.report_text import OperationLabel, operation_labels
from twostroke.lab.measure.single_step import SingleStep
from twostroke.model.families.heads import last_hidden
from twostroke.model.program import ops
from twostroke.model.program.kv_layout import PageGroups
from twostroke.model.program.shard import shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from twostroke.backends.kv_size import CacheSize
    from twostroke.backends.parallel.backend import ParallelBackend
    from twostroke.backends.parallel.predicted_speed import Divided, LinkSpeed
    from twostroke.core.distributed_options import ParallelOptions
    from twostroke.lab.measure.profile import ProfileOptions
    from twostroke.lab.measure.single_step import StepShape
    from twostroke.model.program import Op, Program
    from twostroke.model.program.mesh import Mesh

    OpTimes = list[tuple[float, float]]  # of each operation: seconds, and seconds of waiting

_LINK_MEASUREMENT_S: Final = 0.5


class RankTime(Frozen):
    """The mean time that one rank spends, in a step, on all operations with one label.

    `calls` is the number of these operations in a step. `waiting_s` is the part spent waiting for
    other ranks, and for other threads of the rank.
    """

    calls: int
    time_s: float
    waiting_s: float


class RanksProfile(Frozen):
    """The measured times of a step of one shape on several ranks.

    Attributes:
        shape: the step.
        detail: kernels, threads and KV format of the backend.
        num_ranks: number of ranks.
        num_steps: number of measured steps.
        operations: by label and rank, the times of operations.
        run_s: seconds of rank 0's whole step.
        start_s: seconds that rank 0 waits until all ranks have started the step.
        link: measured speed of the link between ranks.
        measured: shares of the step that rank 0 spends in collectives.
        predicted: the shares that the engine predicts from `link` and the speed of rank 0.
    """

    shape: StepShape
    detail: str
    num_ranks: int
    num_steps: int
    operations: dict[OperationLabel, dict[int, RankTime]]
    run_s: Spread
    start_s: float
    link: LinkSpeed
    measured: CollectiveShares
    predicted: CollectiveShares


def profile_ranks(
    model: str, options: ProfileOptions, parallel: ParallelOptions, notice: Callable[[str], None]
) -> Iterator[RanksProfile]:
    """Yield a profile of each shape of step on several ranks.

    `profile` describes the arguments and further errors.

    Raises:
        BackendError: the ranks cannot be started, or one is lost.
        MemoryLimitError: the keys and values of a shape do not fit.
    """
    recipe = EngineRecipe.of(model, EngineOptions(options.compute))
    program = recipe.program
    for shape in options.shapes:
        shape.check(program)
    longest = max(shape.num_tokens for shape in options.shapes)
    rows = max(shape.batch.num_rows for shape in options.shapes)
    cache = replace(options.cache, context_length=min(program.context_length, 2 * longest))
    recipe = recipe.with_options(
        EngineOptions(
            options.compute,
            cache,
            BatchOptions(token_budget=max(rows, 1), max_running=rows),
            parallel=parallel,
        )
    )
    notice("Measuring the machine")
    num_threads = resolve_num_threads(options.compute.num_threads)
    level = choose_level(options.compute.level).level
    limits = machine(level, num_threads, recipe.loaded.file_bytes, remeasure=True)
    notice("Loading the model")
    with RankGroup(recipe) as group:
        size = _with_pages_for(options.shapes, program, group.size_kv_cache())
        backend = group.create_backend(size, embeds=True)
    try:
        cost = replace(recipe.cost_model(size.kv_format), stops_rows=True)
        link = measure_link(backend, _LINK_MEASUREMENT_S)
        with own_cores(backend):  # this thread also computes
            divided = divide(cost, recipe.mesh, limits, backend.facts.ranks, link)
            for shape in options.shapes:
                notice(f"Measuring {shape.name}")
                yield _profile(shape, backend, divided, recipe.mesh, options)
    finally:
        backend.close()


def _with_pages_for(shapes: Sequence[StepShape], program: Program, size: CacheSize) -> CacheSize:
    """Return a KV cache that has pages and recurrent states for the largest measured step.

    The step may be longer than the model's context.

    Raises:
        MemoryLimitError: the pages do not fit into memory.
    """
    groups = PageGroups(size.page_size, tuple(group.window for group in program.cache_groups))
    largest = max(shapes, key=lambda shape: shape.num_pages(groups))
    num_pages = max(size.num_pages, largest.num_pages(groups))
    num_states = max(shape.num_states for shape in shapes) if program.state_layers else 0
    page_bytes = (size.cache_bytes - size.num_states * program.state_bytes) // size.num_pages
    cache_bytes = page_bytes * num_pages + num_states * program.state_bytes
    free = memory_available()
    if cache_bytes > max(free, size.cache_bytes):
        option = "--prefill" if largest.num_prompt else "--streams or --context"
        raise MemoryLimitError(
            f"{program.name}: {largest.name} needs {cache_bytes / 1e6:,.0f} MB of keys and values, "
            f"and {free / 1e6:,.0f} MB of memory are free: lower {option}."
        )
    return replace(size, num_pages=num_pages, cache_bytes=cache_bytes, num_states=num_states)


def with_measured_speed(
    divided: Divided, backend: ParallelBackend, mesh: Mesh, shape: StepShape
) -> Divided:
    """Measure the speed of rank 0, and return a prediction of step times that is based on it.

    `divided` predicts the time of a step on the ranks of `mesh`. A step of the given shape is
    timed. It uses the backend's first pages, whose contents are lost.
    """
    fused_by_rank = _fused(divided.cost.program, mesh)
    single = SingleStep(backend, divided.cost.program, shape)
    try:
        with own_cores(backend):
            _, times, _ = _measure(backend, single, None)
    finally:
        single.close()
    return _with_measured_rates(divided, fused_by_rank[0], [step[0] for step in times], shape)


def _with_measured_rates(
    divided: Divided, fused: Sequence[tuple[Op, ...]], steps: Sequence[OpTimes], shape: StepShape
) -> Divided:
    """Return the prediction `divided` with the measured speeds of rank 0's operations.

    The speeds are medians over the measured `steps`. Collectives are left out.
    """
    medians = [
        statistics.median(step[index][0] - step[index][1] for step in steps)
        for index in range(len(fused))
    ]
    timed = [
        (parts, seconds)
        for parts, seconds in zip(fused, medians, strict=True)
        if parts and not isinstance(parts[0], _COLLECTIVES)
    ]
    rank_cost = divided.cost.part(divided.parts[0])
    return replace(divided, rates=rates_of(timed, rank_cost, divided.limits[0], shape.batch))


_COLLECTIVES = (ops.AllGather, ops.AllReduce, ops.Send, ops.Receive)


def _profile(
    shape: StepShape,
    backend: ParallelBackend,
    divided: Divided,
    mesh: Mesh,
    options: ProfileOptions,
) -> RanksProfile:
    program = divided.cost.program
    fused_by_rank = _fused(program, mesh)
    single = SingleStep(backend, program, shape)
    try:
        runs_s, times, collective_s = _measure(backend, single, options.num_steps)
    finally:
        single.close()
    divided = _with_measured_rates(divided, fused_by_rank[0], [step[0] for step in times], shape)
    moving_by_step = [_moving_s(fused_by_rank, step) for step in times]
    operations: dict[OperationLabel, dict[int, RankTime]] = {}
    for rank, fused in enumerate(fused_by_rank):
        rank_labels = iter(
            operation_labels(divided.parts[rank].program, [parts for parts in fused if parts])
        )
        for index, parts in enumerate(fused):
            if not parts:
                continue
            label = next(rank_labels)
            label = label if options.by_layer else OperationLabel(label.name)
            time_s = statistics.fmean(step[rank][index][0] for step in times)
            waiting_s = statistics.fmean(
                step[rank][index][0] - moving[rank, index]
                if (rank, index) in moving
                else step[rank][index][1]
                for step, moving in zip(times, moving_by_step, strict=True)
            )
            sums = operations.setdefault(label, {}).get(rank, RankTime(0, 0.0, 0.0))
            operations[label][rank] = RankTime(
                sums.calls + 1, sums.time_s + time_s, sums.waiting_s + waiting_s
            )
    run_s, all_s = statistics.fmean(runs_s), statistics.fmean(collective_s)
    moving_s = statistics.fmean(
        sum(seconds for (rank, _), seconds in moving.items() if rank == 0)
        for moving in moving_by_step
    )
    waiting_s = sum(by_rank[0].waiting_s for by_rank in operations.values() if 0 in by_rank)
    in_operations_s = moving_s + waiting_s
    return RanksProfile(
        shape=shape,
        detail=backend.facts.full_detail,
        num_ranks=len(fused_by_rank),
        num_steps=len(runs_s),
        operations=operations,
        run_s=Spread.of(runs_s),
        start_s=max(0.0, all_s - in_operations_s),
        link=divided.link,
        measured=CollectiveShares((all_s - moving_s) / run_s, moving_s / run_s),
        predicted=divided.collective_shares(shape.batch),
    )


def _fused(program: Program, mesh: Mesh) -> list[list[tuple[Op, ...]]]:
    """Return, for each rank, the fused operations that its kernels run."""
    taps = [last_hidden(program)]  # the value that rank 0 keeps of each step
    parts = shard(program, mesh, taps)
    return [list(lower_rank(parts, rank, taps).parts) for rank in range(len(parts))]


def _moving_s(
    fused_by_rank: Sequence[Sequence[tuple[Op, ...]]], step: Sequence[OpTimes]
) -> Mapping[tuple[int, int], float]:
    """Return the transfer seconds of each collective, by rank and index of the operation.

    The last rank to arrive at a collective does not wait, so its time is the time of the transfer.
    """
    members_by_exchange: dict[str, list[tuple[int, int]]] = {}
    for rank, fused in enumerate(fused_by_rank):
        for index, parts in enumerate(fused):
            if parts and isinstance(parts[0], ops.AllGather | ops.AllReduce):
                key = f"{parts[0].team} {parts[0].exchange_name}"
                members_by_exchange.setdefault(key, []).append((rank, index))
    return {
        member: min(step[rank][index][0] for rank, index in members)
        for members in members_by_exchange.values()
        for member in members
    }


def _measure(
    backend: ParallelBackend, single: SingleStep, num_steps: int | None
) -> tuple[list[float], list[list[OpTimes]], list[float]]:
    """Run a step repeatedly on all ranks, and time it.

    Returns, for each step, (seconds of the call, times by rank, seconds in collectives).
    """
    single.run()
    backend.times()
    runs_s: list[float] = []
    collective_s: list[float] = []
    times: list[list[OpTimes]] = []
    start_s = time.monotonic()
    while len(runs_s) < (num_steps or MAX_STEPS):
        is_long = time.monotonic() - start_s > TARGET_DURATION_S
        if num_steps is None and is_long and len(runs_s) >= MIN_STEPS:
            break
        result = single.run()
        runs_s.append(result.elapsed_s)
        collective_s.append(result.collective_s)
        times.append([rank_times.operations for rank_times in backend.times()])
    return runs_s, times, collective_s
