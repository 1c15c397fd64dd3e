"""The cost reader: FLOPs and bytes of a Program for any batch shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.program.batch import BatchShape
from twostroke.program.ops import Attention, Embed, Logits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.program.ops import Op
    from twostroke.program.program import Program


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

    `weight_bytes` gives each weight's stored size, `cache_value_bytes` the size of one stored
    key or value.
    """

    program: Program
    weight_bytes: Mapping[str, int]
    cache_value_bytes: float = 2

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
        return sum(self.weight_bytes[name] for name in op.weights)

    def _cache_bytes(self, op: Op, batch: BatchShape) -> int:
        if not isinstance(op, Attention):
            return 0
        values = self.program.cache_layers[op.layer].values_per_token
        return round((batch.num_context + batch.num_rows) * values * self.cache_value_bytes)

    def per_step(self) -> StepCost:
        """Return this cost as a few coefficients, for use at every step of a running engine."""
        idle = BatchShape((), 0)
        first, second = BatchShape(((0, 1),), 0), BatchShape(((1, 1),), 0)
        sampled = BatchShape((), 1)
        return StepCost(
            fixed=self.step(idle),
            row=self.step(first) - self.step(idle),
            context=self.step(second) - self.step(first),
            sampled_flops=self.step(sampled).flops,
            sampled_bytes=self.step(sampled).weight_bytes - self.step(idle).weight_bytes,
        )


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of a step, linear in its rows and in the context behind them.

    A row behind n tokens costs `row + n * context`; what a step costs beside its rows is `fixed`;
    logits add their table once and `sampled_flops` a row.
    """

    fixed: Cost
    row: Cost
    context: Cost
    sampled_flops: int
    sampled_bytes: int

    def of(self, batch: BatchShape) -> Cost:
        """Return the cost of a step; equal to `CostModel.step`."""
        rows, attended, context = batch.num_rows, batch.num_attended, batch.num_context
        behind = attended - rows
        flops = rows * self.row.flops + behind * self.context.flops
        cache = rows * self.row.cache_bytes + (context - rows) * self.context.cache_bytes
        weights = self.fixed.weight_bytes + rows * self.row.weight_bytes
        if batch.num_sampled:
            flops += batch.num_sampled * self.sampled_flops
            weights += self.sampled_bytes
        return Cost(flops, weights, cache)
