"""Parts that several kernels share: overlapping launches, and the sums of split products.

With programmatic dependent launch (NVIDIA, sm_90 and newer) a kernel starts and prefetches its
weights while the previous kernel ends. `begin` waits for the previous kernel's results.

A product that is split over its inputs leaves partial sums (`Parts`); the kernel that reads them
adds them in a fixed order (`sum_parts`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def begin(OVERLAPS: tl.constexpr):
    """Let the next kernel begin, and wait for all that earlier ones have written.

    Each kernel calls it before it returns, and before it reads or writes what others do.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(at):
    """Bring the lines of 128 bytes to which pointers point into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [at.to(tl.int64)], tl.int32, False, 1
    )


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
