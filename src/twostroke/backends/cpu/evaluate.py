"""Whole sequences through a plan of their own: all their logits, and values on the way."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from twostroke.backends.cpu.records import StepRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.backends.cpu.plan import NativePlan

    Array = NDArray[np.float32]

_STEP_ROWS = 512


def evaluate(
    plan: NativePlan,
    tokens: Sequence[int],
    logits: Array | None,
    taps: Sequence[Array],
    *,
    num_groups: int,
    generated: bool,
) -> None:
    """Compute a sequence, as prompt or as `generated` rows, on the plan's pages.

    Each of the `num_groups` cache groups has an equal part of these, as many as the tokens need.

    Writes `logits` (len(tokens), vocab_size) and the plan's `taps` (len(tokens), width).
    """
    table = np.arange(plan.num_pages, dtype=np.int32)
    for start in range(0, len(tokens), _STEP_ROWS):
        part = np.array(tokens[start : start + _STEP_ROWS], np.int32)
        count = len(part)
        rows = np.arange(count, dtype=np.int32)
        slices = np.array([0, count, start, 0], np.int32)
        plan.run(
            StepRecord(
                tokens=part.ctypes.data,
                slices=slices.ctypes.data,
                page_tables=table.ctypes.data,
                sampled_rows=rows.ctypes.data,
                logits=None if logits is None else logits[start:].ctypes.data,
                taps=(ctypes.c_void_p * len(taps))(*(tap[start:].ctypes.data for tap in taps)),
                table_stride=len(table) // num_groups,
                num_rows=count,
                num_generated=count if generated else 0,
                num_slices=1,
                num_sampled=0 if logits is None else count,
            )
        )
