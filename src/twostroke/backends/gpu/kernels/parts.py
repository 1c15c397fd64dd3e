"""Sums in parts: what a product split over its inputs leaves, and its reader adds up in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from torch import Tensor


class Parts(Frozen, eq=False):
    """Rows of `width` values in `count` parts, to be added in their order.

    `values` begins at the first value; rows are `row_stride` values apart and parts `part_stride`.
    It has float32, or the element type if there is one part.
    """

    values: Tensor
    width: int
    row_stride: int
    count: int = 1
    part_stride: int = 0

    def columns(self, first: int, width: int) -> Parts:
        """Return some columns."""
        values = self.values.view(-1)[first:]
        return Parts(values, width, self.row_stride, self.count, self.part_stride)


@triton.jit
def sum_parts(pointers, inside, count, part_stride):
    """Return the sums in float32 of what `pointers` and their like in later parts hold."""
    total = tl.load(pointers, inside, 0.0).to(tl.float32)
    for part in range(1, count):
        total += tl.load(pointers + part * part_stride, inside, 0.0).to(tl.float32)
    return total
