"""Lets a step's kernels overlap: one begins, and fetches weights, while the one before it ends.

NVIDIA calls it programmatic dependent launch (sm_90 and newer).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
