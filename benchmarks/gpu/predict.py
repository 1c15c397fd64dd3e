"""Predict the steps of the GPU benchmark from bytes, FLOPs, launches, and rates of one H200.

Used by campaign.py. The rates below are fitted to its rows (docs/guide/gpu.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from benchmarks.gpu.models import program_of, stored_bytes
from benchmarks.gpu.rows import ROWS
from twostroke.backends.gpu.lower import lower
from twostroke.backends.gpu.lowered import Attend, MixExperts, Products
from twostroke.model.program.cost import CostModel
from twostroke.model.program.kv_layout import FORMATS as KV_FORMATS
from twostroke.model.program.ops import Attention, Linear, Logits, MixtureOfExperts

if TYPE_CHECKING:
    from benchmarks.gpu.rows import Row
    from twostroke.model.program import Op
    from twostroke.model.program.cost import Cost

LAUNCH_S: Final = 4.5e-6  # of a graph, in which kernels do not overlap
_EAGER_LAUNCH_S: Final = 130e-6  # from Python, without a tape
_MIX_LAUNCHES: Final = 5
_FEW_ROWS, _MORE_ROWS, _MOST_ROWS = 16, 64, 512  # of packed products; then they are written out
_FEW_WEIGHTS_S, _WEIGHTS_S = 4.2e12, 1.75e12  # that few and more rows make of codes in a second
_TILES_SHARE: Final = 0.6  # of the matrix rate, where packed products have more; assumed
_DECODE_SHARE, _PREFILL_SHARE = 0.6, 0.3  # of the limits, that attention reaches
_FP8_SHARE, _LIBRARY_SHARE = 0.5, 0.74  # of twice the matrix rate; our products, cuBLAS's


def predict(row: Row, bandwidth: float, peak: float) -> dict[str, Any]:
    """Return a row's bytes, FLOPs, launches and floor, and how long it should take."""
    limits = bandwidth, peak
    program = program_of(row.model)
    cost = CostModel(program, stored_bytes(program, row.fmt), KV_FORMATS[row.kv])
    step_cost = cost.per_step().of(row.batch)
    fast = sum(
        cost.operation(op, row.batch).flops
        for op in program.ops
        if row.is_fp8 and isinstance(op, Linear)
    )
    num_bytes, flops, launches = step_cost.bytes, step_cost.flops, _num_launches(row)
    if row.less:
        other = ROWS[row.less]
        less = predict(other, *limits)
        num_bytes -= row.times * less["bytes"]
        flops -= row.times * less["flops"]
        launches = sum(isinstance(op, Attention) for op in program.ops)
        step_s = _step_s(row, cost, limits, Attention)
        step_s -= row.times * _step_s(other, cost, limits, Attention)
    else:
        step_s = _step_s(row, cost, limits)
    step_s += 0 if row.less else launches * LAUNCH_S  # both have as many
    if not row.has_graphs:
        step_s = max(step_s, launches * _EAGER_LAUNCH_S)
    results: dict[str, Any] = {
        "step": f"{row.step.name}: attention" if row.less else row.step.name,
        "bytes": num_bytes,
        "flops": flops,
        "launches": launches,
        "floor_ms": round(1e3 * max(num_bytes / bandwidth, (flops - fast / 2) / peak), 4),
        "predicted_ms": round(1e3 * step_s, 4),
    }
    if not row.less and row.step.num_streams == 1 and not row.step.num_prompt:
        results["predicted_tokens_s"] = round(row.tokens / step_s, 1)
    return results


def _step_s(
    row: Row, cost: CostModel, limits: tuple[float, float], kind: type[Op] | None = None
) -> float:
    """Return how long a step's operations, perhaps those of one kind, should take."""
    return sum(
        seconds_of(row, op, cost.operation(op, row.batch), *limits)
        for op in cost.program.ops
        if kind is None or isinstance(op, kind)
    )


def _num_launches(row: Row) -> int:
    lowered = lower(program_of(row.model))
    kinds = [type(record) for record in lowered.records]
    num_more = kinds.count(Attend) + (_MIX_LAUNCHES - 1) * kinds.count(MixExperts) + 4
    is_packed = row.fmt != "BF16" and not row.is_fp8
    writes = row.is_written_out or (is_packed and row.batch.num_rows > _MOST_ROWS)
    num_more += kinds.count(Products) * (
        row.is_fp8 + writes
    )  # that round rows, or write matrices out
    return len(kinds) + num_more


def seconds_of(row: Row, op: Op, cost: Cost, bandwidth: float, peak: float) -> float:
    """Return how long an operation should take, launches aside."""
    if isinstance(op, Attention):
        few = row.batch.num_rows <= _FEW_ROWS * row.step.num_streams
        share = _DECODE_SHARE if few else _PREFILL_SHARE
        return max(cost.bytes / bandwidth, cost.flops / peak) / share
    at_limit_s = max(cost.bytes / bandwidth, cost.flops / peak)
    is_product = isinstance(op, Linear | MixtureOfExperts | Logits)
    if row.fmt == "BF16" or not is_product:
        return at_limit_s
    if row.is_fp8 and isinstance(op, Linear):
        share = _LIBRARY_SHARE if row.is_written_out else _FP8_SHARE
        written = cost.flops / row.batch.num_rows if row.is_written_out else 0  # and read
        return max(cost.bytes / bandwidth, cost.flops / (2 * share * peak)) + written / bandwidth
    if isinstance(op, Logits):
        num_rows, num_weights = row.step.num_streams, op.width * op.in_width
    else:
        num_rows = row.batch.num_rows
        num_weights = round(cost.flops / (2 * num_rows))
    if num_rows <= _MORE_ROWS or isinstance(op, Logits):
        rate = _FEW_WEIGHTS_S if num_rows <= _FEW_ROWS else _WEIGHTS_S
        return max(at_limit_s, num_weights / rate)
    if num_rows <= _MOST_ROWS:
        return max(at_limit_s, cost.flops / peak / _TILES_SHARE)
    return at_limit_s + 4 * num_weights / bandwidth  # in BF16, written and read again
