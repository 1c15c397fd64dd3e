"""Times the operations of a step on several ranks, and how long these wait for each other."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.backends.cpu.library import choose_level
from twostroke.backends.cpu.shared import lower_rank
from twostroke.backends.create import cost_model
from twostroke.backends.machine_limits import machine
from twostroke.backends.parallel.division import mesh_for
from twostroke.backends.parallel.predicted_speed import (
    TimeShares,
    divide,
    measure_link,
    own_cores,
    rates_of,
)
from twostroke.backends.parallel.rank_group import RankGroup
from twostroke.core.errors import MemoryLimitError
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import memory_available, resolve_num_threads
from twostroke.core.options import BatchOptions, EngineOptions
from twostroke.lab.measure.profile import FEWEST_STEPS, MEASURED_S, MOST_STEPS, Spread
from twostroke.lab.measure.report_text import Label, labels
from twostroke.lab.measure.single_step import SingleStep
from twostroke.model.families import build_program
from twostroke.model.families.heads import last_hidden
from twostroke.model.loader import load
from twostroke.model.program import ops
from twostroke.model.program.kv_layout import PageGroups
from twostroke.model.program.shard import shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from twostroke.backends.kv_size import CacheSize
    from twostroke.backends.parallel.backend import ParallelBackend
    from twostroke.backends.parallel.predicted_speed import Divided, LinkSpeed
    from twostroke.core.distributed_options import ParallelOptions
    from twostroke.lab.measure.profile import Wanted
    from twostroke.lab.measure.single_step import Shape
    from twostroke.model.program import Op, Program
    from twostroke.model.program.mesh import Mesh

    Pairs = list[tuple[float, float]]  # seconds of each operation, and of these waiting

_NOISE_S: Final = 0.5  # for which the noise of the machine is measured


class RankTime(Frozen):
    """What operations of one label take on a rank in a step, as means: of it waiting for others.

    `waiting_s` has what the threads of a rank wait for each other, too, where it has several.
    """

    calls: int
    time_s: float
    waiting_s: float


class RanksProfile(Frozen):
    """One shape's step on several ranks; `operations` has for each label the ranks that have it.

    Rank 0 waits `start_s` until all ranks have begun. `measured` and `predicted` are what it spends
    in collectives, as shares of a step; the prediction knows `link`, and how fast rank 0 computes.
    """

    shape: Shape
    detail: str
    num_ranks: int
    num_steps: int
    operations: dict[Label, dict[int, RankTime]]
    run_s: Spread
    start_s: float
    link: LinkSpeed
    measured: TimeShares
    predicted: TimeShares


def profile_ranks(
    model: str, wanted: Wanted, parallel: ParallelOptions, notice: Callable[[str], None]
) -> Iterator[RanksProfile]:
    """Yield a profile for each shape; arguments and errors are those of `profile`.

    Raises:
        BackendError: the ranks cannot be started, or one is lost.
        MemoryLimitError: there is no room for the keys and values of a shape.
    """
    loaded = load(model)
    program = build_program(loaded.spec)
    for shape in wanted.shapes:
        shape.check(program)
    longest = max(shape.num_tokens for shape in wanted.shapes)
    rows = max(shape.batch.num_rows for shape in wanted.shapes)
    cache = replace(wanted.cache, context_length=min(program.context_length, 2 * longest))
    options = EngineOptions(
        wanted.compute,
        cache,
        BatchOptions(token_budget=max(rows, 1), max_running=rows),
        parallel=parallel,
    )
    mesh = mesh_for(options, program)
    notice("Measuring the machine")
    num_threads = resolve_num_threads(wanted.compute.num_threads)
    level = choose_level(wanted.compute.level).level
    limits = machine(level, num_threads, loaded.file_bytes, remeasure=True)
    notice("Loading the model")
    with RankGroup(model, loaded, program, mesh, options) as group:
        size = _with_pages_for(wanted.shapes, program, group.size())
        backend = group.backend(
            loaded.tensors, program, size, release=loaded.release, tapped_value=None
        )
    try:
        cost = replace(cost_model(program, loaded.tensors, size.kv_format), stops_rows=True)
        link = measure_link(backend, _NOISE_S)
        with own_cores(backend):  # this thread computes, too
            divided = divide(cost, mesh, limits, backend.facts.ranks, link)
            for shape in wanted.shapes:
                notice(f"Measuring {shape.name}")
                yield _profile(shape, backend, divided, mesh, wanted)
    finally:
        backend.close()


def _with_pages_for(shapes: Sequence[Shape], program: Program, size: CacheSize) -> CacheSize:
    """Return a size with pages for the largest shape, which may be more than several contexts."""
    groups = PageGroups(size.page_size, tuple(group.window for group in program.cache_groups))
    largest = max(shapes, key=lambda shape: shape.num_pages(groups))
    num_pages = max(size.num_pages, largest.num_pages(groups))
    cache_bytes = size.cache_bytes // size.num_pages * num_pages
    free = memory_available()
    if num_pages > size.num_pages and cache_bytes > free:
        knob = "--prefill" if largest.num_prompt else "--streams or --context"
        raise MemoryLimitError(
            f"{program.name}: {largest.name} needs {cache_bytes / 1e6:,.0f} MB of keys and values, "
            f"and {free / 1e6:,.0f} MB of memory are free: lower {knob}."
        )
    return replace(size, num_pages=num_pages, cache_bytes=cache_bytes)


def with_rates(divided: Divided, backend: ParallelBackend, mesh: Mesh, shape: Shape) -> Divided:
    """Return a prediction that knows how fast rank 0 computes the operations of a shape's step.

    Steps are computed on the backend's first pages, whose contents are lost.
    """
    placed = _fused(divided.cost.program, mesh)
    single = SingleStep(backend, divided.cost.program, shape)
    try:
        with own_cores(backend):
            _, times, _ = _measure(backend, single, None)
    finally:
        single.close()
    return _rated(divided, placed[0], [step[0] for step in times], shape)


def _rated(
    divided: Divided, fused: Sequence[tuple[Op, ...]], steps: Sequence[Pairs], shape: Shape
) -> Divided:
    medians = [
        statistics.median(step[place][0] - step[place][1] for step in steps)
        for place in range(len(fused))
    ]
    timed = [
        (parts, seconds)
        for parts, seconds in zip(fused, medians, strict=True)
        if parts and not isinstance(parts[0], _COLLECTIVES)
    ]
    own = divided.cost.part(divided.parts[0])
    return replace(divided, rates=rates_of(timed, own, divided.limits[0], shape.batch))


_COLLECTIVES = (ops.AllGather, ops.AllReduce, ops.Send, ops.Receive)


def _profile(
    shape: Shape, backend: ParallelBackend, divided: Divided, mesh: Mesh, wanted: Wanted
) -> RanksProfile:
    program = divided.cost.program
    placed = _fused(program, mesh)
    single = SingleStep(backend, program, shape)
    try:
        runs_s, times, collective_s = _measure(backend, single, wanted.num_steps)
    finally:
        single.close()
    divided = _rated(divided, placed[0], [step[0] for step in times], shape)
    moved = [_moving(placed, step) for step in times]
    operations: dict[Label, dict[int, RankTime]] = {}
    for rank, fused in enumerate(placed):
        named = iter(labels(divided.parts[rank].program, [parts for parts in fused if parts]))
        for place, parts in enumerate(fused):
            if not parts:
                continue
            label = next(named)
            label = label if wanted.by_layer else Label(label.name)
            time_s = statistics.fmean(step[rank][place][0] for step in times)
            waiting_s = statistics.fmean(
                step[rank][place][0] - moving[rank, place]
                if (rank, place) in moving
                else step[rank][place][1]
                for step, moving in zip(times, moved, strict=True)
            )
            old = operations.setdefault(label, {}).get(rank, RankTime(0, 0.0, 0.0))
            operations[label][rank] = RankTime(
                old.calls + 1, old.time_s + time_s, old.waiting_s + waiting_s
            )
    run_s, all_s = statistics.fmean(runs_s), statistics.fmean(collective_s)
    moving_s = statistics.fmean(
        sum(seconds for (rank, _), seconds in moving.items() if rank == 0) for moving in moved
    )
    in_operations_s = moving_s + sum(one[0].waiting_s for one in operations.values() if 0 in one)
    return RanksProfile(
        shape=shape,
        detail=backend.facts.full_detail,
        num_ranks=len(placed),
        num_steps=len(runs_s),
        operations=operations,
        run_s=Spread.of(runs_s),
        start_s=max(0.0, all_s - in_operations_s),
        link=divided.link,
        measured=TimeShares((all_s - moving_s) / run_s, moving_s / run_s),
        predicted=divided.collective_shares(shape.batch),
    )


def _fused(program: Program, mesh: Mesh) -> list[list[tuple[Op, ...]]]:
    """Return the fused operations of each rank, as its kernels run them."""
    taps = [last_hidden(program)]  # what rank 0 keeps of each step
    parts = shard(program, mesh, taps)
    return [list(lower_rank(parts, rank, taps).parts) for rank in range(len(parts))]


def _moving(
    placed: Sequence[Sequence[tuple[Op, ...]]], step: Sequence[Pairs]
) -> Mapping[tuple[int, int], float]:
    """Return for each gather of a step, by rank and place, how long it took by itself.

    The last rank that arrives waits for nobody: what it spends there, all others spend as well.
    """
    met: dict[str, list[tuple[int, int]]] = {}
    for rank, fused in enumerate(placed):
        for place, parts in enumerate(fused):
            if parts and isinstance(parts[0], ops.AllGather | ops.AllReduce):
                key = f"{parts[0].team} {parts[0].exchange_name}"
                met.setdefault(key, []).append((rank, place))
    return {
        one: min(step[rank][place][0] for rank, place in members)
        for members in met.values()
        for one in members
    }


def _measure(
    backend: ParallelBackend, single: SingleStep, num_steps: int | None
) -> tuple[list[float], list[list[Pairs]], list[float]]:
    """Return of each step the seconds of the whole, the operations of each rank, collectives."""
    single.run()
    backend.times()
    runs_s: list[float] = []
    collective_s: list[float] = []
    times: list[list[Pairs]] = []
    began = time.monotonic()
    while len(runs_s) < (num_steps or MOST_STEPS):
        is_long = time.monotonic() - began > MEASURED_S
        if num_steps is None and is_long and len(runs_s) >= FEWEST_STEPS:
            break
        result = single.run()
        runs_s.append(result.elapsed_s)
        collective_s.append(result.collective_s)
        times.append([one.operations for one in backend.times()])
    return runs_s, times, collective_s
