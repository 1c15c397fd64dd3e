"""The cost reader: floating-point operations and bytes of a Program for any batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen
from twostroke.program.pages import FLOAT16, CacheFormat
from twostroke.program.work import Cost, Count, StepCost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.program.batch import BatchShape
    from twostroke.program.ops import Op
    from twostroke.program.program import Program

__all__ = ["Cost", "CostModel", "StepCost"]


class CostModel(Frozen):
    """Counts the work of a Program's steps, given how its weights and its cache are stored.

    `weight_bytes` gives each weight's stored size.
    """

    program: Program
    weight_bytes: Mapping[str, int]
    cache: CacheFormat = FLOAT16

    def operation(self, op: Op, batch: BatchShape) -> Cost:
        """Return one operation's share of a step's cost."""
        return StepCost(tuple(op.work(self.weight_bytes, self.cache))).of(batch)

    def per_step(self) -> StepCost:
        """Return the cost of a step of all operations: their terms, one for each count."""
        terms: dict[Count, Cost] = {}
        for op in self.program.ops:
            for count, cost in op.work(self.weight_bytes, self.cache):
                terms[count] = terms.get(count, Cost(0)) + cost
        return StepCost(tuple(terms.items()))
