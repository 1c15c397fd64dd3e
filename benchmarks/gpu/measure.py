"""Measure rows of the GPU benchmark, all rows of one engine together. Used by campaign.py."""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from benchmarks.gpu.models import made_up, program_of, stored_bytes
from benchmarks.gpu.predict import LAUNCH_S, seconds_of
from benchmarks.gpu.rows import PAGE, Room
from twostroke.core.errors import MemoryLimitError
from twostroke.lab.measure.report_text import operation_labels
from twostroke.lab.measure.single_step import SingleStep
from twostroke.model.program.cost import CostModel
from twostroke.model.program.kv_layout import FORMATS as KV_FORMATS
from twostroke.model.program.ops import Linear

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.gpu.rows import Row
    from twostroke.core.step import StepPlan
    from twostroke.model.program import Program

MEASURED_S: Final = 2.0
_MOST_STEPS: Final = 500
_PROFILES: Final = 5


class Engines:
    """One engine at a time, which is kept while rows want it.

    It has room for all `rows` that want it, or for one, if there is too little memory.
    """

    def __init__(self, rows: Iterable[Row], limits: tuple[float, float]) -> None:
        self._rows, self._limits = tuple(rows), limits
        self._key: object = None
        self._room: Room | None = None
        self._backend: Any = None
        self._ready_s: float | None = None

    def measured(self, row: Row) -> dict[str, Any]:
        """Return what a row's steps take on this machine's GPU."""
        program = program_of(row.model)
        try:
            self._start(row, program)
        except MemoryLimitError as error:
            return {"refused": str(error)}
        result: dict[str, Any] = {}
        if self._ready_s is not None:
            result["ready_s"], self._ready_s = round(self._ready_s, 1), None
        graphs = self._backend._graphs  # noqa: SLF001 - what only the row without graphs wants
        were_used = graphs.is_used
        graphs.is_used &= row.has_graphs
        single = SingleStep(self._backend, program, row.step)
        try:
            if row.drafts:
                single.plan.slices[0].drafts = tuple(range(1, 1 + row.drafts))
            result |= self._timed(row, single)
            result |= self._kernels(row, program)
            if not row.drafts:
                host_s = statistics.median(single.scheduler_times())
                result["host_ms"] = round(result["launched_ms"] + 1e3 * host_s, 4)
        finally:
            single.close()
            graphs.is_used = were_used
        return result | {"detail": self._backend.facts.detail}

    def close(self) -> None:
        """Give back the GPU's memory."""
        if self._backend is not None:
            self._backend.close()
        self._backend, self._key = None, None
        gc.collect()

    def _start(self, row: Row, program: Program) -> None:
        row_room = Room.of([row], program)
        if self._key == row.engine and self._room is not None and self._room.holds(row_room):
            return
        every = Room.of(
            [other for other in self._rows if other.engine == row.engine] or [row], program
        )
        self.close()
        try:
            self._make(row, program, every)
        except MemoryLimitError:
            if row_room == every:
                raise
            self.close()
            self._make(row, program, row_room)

    def _make(self, row: Row, program: Program, room: Room) -> None:
        from twostroke.backends.gpu.backend import GpuBackend
        from twostroke.backends.gpu.device import find_device

        tensors, began_s = made_up(program, row.fmt), time.perf_counter()
        self._backend = GpuBackend(
            *(
                program,
                tensors,
                room.num_pages,
                PAGE,
                replace(find_device(), may_overlap=not row.is_sequential),
            ),
            max_rows=room.max_rows,
            kv_format=row.kv,
            same_tokens=row.same_tokens,
        )
        self._ready_s = time.perf_counter() - began_s
        self._key, self._room = row.engine, room

    def _timed(self, row: Row, single: SingleStep) -> dict[str, Any]:
        """Return times of steps alone, and of steps of which one more is in flight, as served."""
        backend, plan = self._backend, single.plan
        for _ in range(2):
            single.run()
        alone: list[float] = []
        launched: list[float] = []
        compiled = 0
        while not alone or (sum(alone) < MEASURED_S / 2 and len(alone) < _MOST_STEPS):
            began_s = time.perf_counter()
            backend.start(plan)
            launched.append(time.perf_counter() - began_s)
            result = backend.finish()
            alone.append(time.perf_counter() - began_s)
            compiled += result.num_compiled
        step_s, count = _in_flight(backend, plan)
        return {
            "ms": round(1e3 * step_s, 4),
            "alone_ms": round(1e3 * statistics.median(alone), 4),
            "launched_ms": round(1e3 * statistics.median(launched), 4),
            "tokens_s": round(row.step.num_streams * row.tokens / step_s, 1),
            "steps": count,
            "compiled_late": compiled,
        }

    def _kernels(self, row: Row, program: Program) -> dict[str, Any]:
        """Return the GPU's time for each launch of a step, those of all layers together."""
        steps = [self._backend.times() for _ in range(_PROFILES)]
        times = [statistics.median(s[i].elapsed_s for s in steps) for i in range(len(steps[0]))]
        kernels = costs_of(row, program, self._backend.fused, self._limits)
        for label, at in places_of(program, self._backend.fused).items():
            kernels[label]["us"] = round(1e6 * sum(times[i] for i in at), 2)
        return {"kernels": kernels, "gpu_ms": round(1e3 * sum(times), 4)}


def _in_flight(backend: Any, plan: StepPlan) -> tuple[float, int]:
    """Return the seconds from one step's end to the next one's, and how many there were."""
    backend.start(plan)
    backend.start(plan)
    backend.finish()
    began_s, count = time.perf_counter(), 0
    while not count or (time.perf_counter() - began_s < MEASURED_S and count < _MOST_STEPS):
        backend.start(plan)
        backend.finish()
        count += 1
    step_s = (time.perf_counter() - began_s) / count
    backend.finish()
    return step_s, count


def places_of(program: Program, fused: Any) -> dict[str, list[int]]:
    """Return which of `fused` have each name, in all layers."""
    indices = defaultdict(list)
    for index, label in enumerate(operation_labels(program, fused)):
        indices[label.name].append(index)
    return dict(indices)


def costs_of(
    row: Row, program: Program, fused: Any, limits: tuple[float, float]
) -> dict[str, dict[str, float]]:
    """Return calls, bytes, FLOPs, the floor and a prediction of each of `fused`.

    Those of all layers are together.
    """
    bandwidth, peak = limits
    cost = CostModel(program, stored_bytes(program, row.fmt), KV_FORMATS[row.kv])
    results = {}
    for name, at in places_of(program, fused).items():
        sums, predicted_s = [], len(at) * LAUNCH_S
        for index in at:
            op_costs = [(op, cost.operation(op, row.batch)) for op in fused[index]]
            predicted_s += sum(seconds_of(row, op, c, *limits) for op, c in op_costs)
            flops = sum(c.flops for _, c in op_costs)
            fast = sum(c.flops for op, c in op_costs if row.is_fp8 and isinstance(op, Linear))
            sums.append((sum(c.bytes for _, c in op_costs), flops, flops - fast / 2))
        floor_s = sum(max(size / bandwidth, work / peak) for size, _, work in sums)
        results[name] = {
            "calls": len(at),
            "bytes": sum(size for size, _, _ in sums),
            "flops": sum(flops for _, flops, _ in sums),
            "floor_us": round(1e6 * floor_s, 2),
            "predicted_us": round(1e6 * predicted_s, 2),
        }
    return results
