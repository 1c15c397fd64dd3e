"""The cost reader: FLOPs and bytes of a Program for any batch shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.program.batch import BatchShape
from twostroke.program.ops import Attention, Embed, Logits, MixtureOfExperts
from twostroke.program.program import FLOAT16

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.program.ops import Op
    from twostroke.program.program import CacheFormat, Program


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of a step or of one operation: floating-point operations, and bytes that must move.

    `weight_bytes` and `cache_bytes` (keys and values, read and written) are the traffic that no
    kernel can avoid; values between operations are left out, since they stay in the caches.
    """

    flops: int
    weight_bytes: int
    cache_bytes: int

    @property
    def bytes(self) -> int:
        """All bytes that must move."""
        return self.weight_bytes + self.cache_bytes

    def __add__(self, other: Cost) -> Cost:
        """Return both together."""
        return Cost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.cache_bytes + other.cache_bytes,
        )

    def __sub__(self, other: Cost) -> Cost:
        """Return what this costs more than `other`."""
        return Cost(
            self.flops - other.flops,
            self.weight_bytes - other.weight_bytes,
            self.cache_bytes - other.cache_bytes,
        )


@dataclass(frozen=True, slots=True)
class CostModel:
    """Counts what a Program's steps cost, given how its weights and its cache are stored.

    `weight_bytes` gives each weight's stored size.
    """

    program: Program
    weight_bytes: Mapping[str, int]
    cache: CacheFormat = FLOAT16

    def step(self, batch: BatchShape) -> Cost:
        """Return the cost of one step."""
        total = Cost(0, 0, 0)
        for op in self.program.ops:
            total += self.operation(op, batch)
        return total

    def operation(self, op: Op, batch: BatchShape) -> Cost:
        """Return one operation's share of a step's cost."""
        return Cost(op.flops(batch), self._weight_bytes(op, batch), self._cache_bytes(op, batch))

    def _weight_bytes(self, op: Op, batch: BatchShape) -> int:
        if isinstance(op, Embed):
            row_bytes = self.weight_bytes[op.table] // self.program.vocab_size
            return batch.num_rows * row_bytes
        if isinstance(op, Logits) and batch.num_sampled == 0:
            return 0
        size = sum(self.weight_bytes[name] for name in op.weights)
        if isinstance(op, MixtureOfExperts):
            return round(size * op.share_read(batch.num_rows))
        return size

    def _cache_bytes(self, op: Op, batch: BatchShape) -> int:
        if not isinstance(op, Attention):
            return 0
        positions = batch.num_context(op.window) + batch.num_rows
        return round(positions * self._position_bytes(op))

    def _position_bytes(self, op: Attention) -> float:
        """Return the bytes of one position's keys and values."""
        return self.program.cache_layers[op.layer].bytes_per_token(self.cache)

    def per_step(self) -> StepCost:
        """Return this cost as a few coefficients, for use at every step of a running engine."""
        attention: dict[int | None, tuple[int, float]] = {}
        experts: dict[tuple[int, int], int] = {}
        idle, row, sampled = (
            BatchShape((), (), 0),
            BatchShape((0,), (1,), 0),
            BatchShape((), (), 1),
        )
        fixed = rows = logits = Cost(0, 0, 0)
        for op in self.program.ops:
            if isinstance(op, Attention):
                flops, size = attention.get(op.window, (0, 0.0))
                attention[op.window] = flops + op.flops(row), size + self._position_bytes(op)
                continue
            if isinstance(op, MixtureOfExperts):
                key = (op.num_used, len(op.experts))
                stored = sum(self.weight_bytes[name] for name in op.weights)
                experts[key] = experts.get(key, 0) + stored
                rows += Cost(op.flops(row), 0, 0)
                continue
            at_rest = self.operation(op, idle)
            fixed += at_rest
            rows += self.operation(op, row) - at_rest
            logits += self.operation(op, sampled) - at_rest
        return StepCost(
            fixed=fixed,
            row=rows,
            sampled_flops=logits.flops,
            sampled_bytes=logits.weight_bytes,
            attention=tuple(AttentionCost(window, *cost) for window, cost in attention.items()),
            experts=tuple(ExpertCost(*key, size) for key, size in experts.items()),
        )


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """All attention with one window: FLOPs a (row, position), cache bytes a position."""

    window: int | None
    flops: int
    position_bytes: float


@dataclass(frozen=True, slots=True)
class ExpertCost:
    """All mixtures in which a row chooses `num_used` of `num_experts` experts; bytes of all."""

    num_used: int
    num_experts: int
    weight_bytes: int

    def bytes_read(self, num_rows: int) -> float:
        """Return the bytes that rows need which choose independently."""
        return self.weight_bytes * (1 - (1 - self.num_used / self.num_experts) ** num_rows)


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of a step as a sum of few terms.

    What a step costs beside its rows is `fixed`; a row costs `row`, and its `attention` as much as
    the positions it sees; logits add their table once and `sampled_flops` a row.
    """

    fixed: Cost
    row: Cost
    sampled_flops: int
    sampled_bytes: int
    attention: tuple[AttentionCost, ...]
    experts: tuple[ExpertCost, ...]

    def of(self, batch: BatchShape) -> Cost:
        """Return the cost of a step; equal to `CostModel.step` up to rounding."""
        rows = batch.num_rows
        flops = rows * self.row.flops
        weights = self.fixed.weight_bytes + rows * self.row.weight_bytes
        cache = 0.0
        for part in self.attention:
            flops += batch.num_attended(part.window) * part.flops
            cache += (batch.num_context(part.window) + rows) * part.position_bytes
        if batch.num_sampled:
            flops += batch.num_sampled * self.sampled_flops
            weights += self.sampled_bytes
        weights += round(sum(part.bytes_read(rows) for part in self.experts))
        return Cost(flops, weights, round(cache))
