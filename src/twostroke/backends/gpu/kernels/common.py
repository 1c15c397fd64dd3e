"""Parts that several kernels share: overlapping launches, and the sums of split products.

With programmatic dependent launch (NVIDIA, sm_90 and newer) a kernel starts and prefetches its
weights while the previous kernel ends. `overlap_kernels` waits for the previous kernel's results.

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
def overlap_kernels(OVERLAPS: tl.constexpr):
    """Let the next kernel start early, and wait for the results of all earlier kernels.

    Uses programmatic dependent launch. Each kernel calls it once, before it reads results of other
    kernels or writes its own.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(at):
    """Prefetch the 128-byte lines at these pointers into the L2 cache."""
    tl.inline_asm_elementwise(
        asm="prefetch.global.L2 [$1]; // $0", constraints="=r,l", args=[at.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


class Parts(Frozen, eq=False):
    """A matrix product's result as `count` partial sums; the kernel that reads it adds them up.

    A row has `width` values. `values` begins at the first value of the first part. `row_stride` and
    `part_stride` are in values. The type is float32, or the element type if there is only one part.
    """

    values: Tensor
    width: int
    row_stride: int
    count: int = 1
    part_stride: int = 0

    def columns(self, first: int, width: int) -> Parts:
        """Return a view of `width` columns of the result, from `first` on, in all partial sums."""
        values = self.values.view(-1)[first:]
        return Parts(values, width, self.row_stride, self.count, self.part_stride)


@triton.jit
def sum_parts(pointers, inside, count, part_stride):
    """Load all `count` partial sums of values, and return their float32 sum.

    `pointers` point into the first part.
    """
    total = tl.load(pointers, inside, 0.0).to(tl.float32)
    for part in range(1, count):
        total += tl.load(pointers + part * part_stride, inside, 0.0).to(tl.float32)
    return total
