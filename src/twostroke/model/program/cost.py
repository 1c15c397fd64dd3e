"""Counts the floating-point operations and bytes of a Program for any batch."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.core.message_text import format_bytes
from twostroke.model.program.kv_layout import FLOAT16, CacheFormat
from twostroke.model.program.work import (
    Cost,
    Count,
    EachCached,
    EachRead,
    StepCost,
    each_row,
    of_logits_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twostroke.model.program.batch import BatchShape
    from twostroke.model.program.operation import Work
    from twostroke.model.program.ops import Op
    from twostroke.model.program.program import Program
    from twostroke.model.program.shard import RankProgram

__all__ = ["Cost", "CostModel", "StepCost"]


class CostModel(Frozen):
    """Counts FLOPs and bytes of a model's steps, for given formats of weights and KV cache.

    `weight_bytes` gives each weight's stored size. If this is one rank's cost model, the rank
    computes row part `row_part` of `num_row_parts` of each step. With `stops_rows`, rows without
    logits are not computed after the last attention has stored its keys and values
    (`Program.logits_only_outputs`).
    """

    program: Program
    weight_bytes: Mapping[str, int]
    cache: CacheFormat = FLOAT16
    row_part: int = 0
    num_row_parts: int = 1
    stops_rows: bool = False

    def __repr__(self) -> str:
        """Return a short text, without each weight's size."""
        size = format_bytes(sum(self.weight_bytes.values()))
        return f"<CostModel {self.program.name}: {size} of weights, {self.cache}>"

    def part(self, rank: RankProgram) -> CostModel:
        """Return the cost model of one rank's part of the model."""
        all_shapes = self.program.weight_shapes
        weight_bytes = {
            name: self.weight_bytes[name] * prod(shape) // prod(all_shapes[name])
            for name, shape in rank.program.weight_shapes.items()
        }
        return CostModel(rank.program, weight_bytes, self.cache, rank.row_part, rank.num_row_parts)

    def operation(self, op: Op, batch: BatchShape) -> Cost:
        """Return the FLOPs and bytes of one operation in a step of this batch."""
        return self._of(self.work(op)).of(batch)

    def work(self, op: Op) -> Work:
        """Yield the terms of an operation's cost: (count, cost) pairs.

        `count` is a function of the batch, such as its number of rows; the cost is multiplied by
        it.
        """
        only_logits_rows = self.stops_rows and op.output in self.program.logits_only_outputs
        for count, cost in op.work(self.weight_bytes, self.cache):
            if only_logits_rows and isinstance(count, EachCached):  # all rows still store
                yield each_row, cost
                yield of_logits_rows(EachRead(count.window, count.is_chunked)), cost
            else:
                yield of_logits_rows(count) if only_logits_rows else count, cost

    def per_step(self) -> StepCost:
        """Return the cost of a step as a function of its batch, prepared for fast evaluation.

        Costs of operations that are multiplied by the same count are added up once, here.
        """
        terms: dict[Count, Cost] = {}
        for op in self.program.ops:
            for count, cost in self.work(op):
                terms[count] = terms.get(count, Cost(0)) + cost
        return self._of(terms.items())

    def _of(self, terms: Iterable[tuple[Count, Cost]]) -> StepCost:
        return StepCost(tuple(terms), self.row_part, self.num_row_parts)


class WeightStorage(Frozen):
    """How a model's layer matrices are stored and multiplied: bits per weight, and arithmetic.

    `twostroke plan` compares such storages (`WEIGHTS`). Weights outside of layer matrices have 16
    bits.
    """

    bits: float
    arithmetic: str


_GROUP: Final = 128  # weights that share a float16 scale
WEIGHTS: Final = {
    "bf16": WeightStorage(16, "bf16"),
    "fp8": WeightStorage(8, "fp8"),
    "int8": WeightStorage(8, "int8"),
    "w4a16": WeightStorage(4 + 16 / _GROUP, "bf16"),
    "nvfp4": WeightStorage(4.5, "fp4"),  # a scale of 8 bits for 16 weights
}
