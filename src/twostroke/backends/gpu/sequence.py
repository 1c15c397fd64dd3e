"""Computes a single sequence on separate pages, for evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from twostroke.backends.gpu.cache import DevicePages
from twostroke.backends.gpu.graphs import bucket_of
from twostroke.backends.gpu.lower import lower
from twostroke.backends.gpu.plan import GpuPlan
from twostroke.backends.gpu.step_input import LOGIT_ROWS
from twostroke.backends.step_frame import StepFrame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.weights import DeviceWeights
    from twostroke.model.program import Program

    Array = NDArray[np.float32]

_ROWS = 256  # rows of a step


def trace(
    gpu: Gpu,
    program: Program,
    weights: DeviceWeights,
    pages_like: DevicePages,
    tokens: Sequence[int],
    values: Sequence[str],
    *,
    piece: int | None,
) -> dict[str, Array]:
    """Compute a token sequence on separate KV pages; return named values of the Program.

    Each value is (len(tokens), width). The pages have the size and format of `pages_like`.
    """
    count, logits = len(tokens), program.ops[-1].output
    lowered = lower(program, [name for name in values if name != logits])
    num_groups, pages_per_group = len(program.cache_groups), -(-count // pages_like.page_size)
    pages = DevicePages(
        gpu, program, num_groups * pages_per_group, pages_like.page_size, pages_like.kv_format
    )
    width = -(-pages_per_group // 4) * 4
    tables = torch.zeros((1, num_groups, width), dtype=torch.int32, device=gpu.device)
    ids = torch.arange(num_groups * pages_per_group, dtype=torch.int32).view(
        num_groups, pages_per_group
    )
    tables[0, :, :pages_per_group] = ids
    max_rows = bucket_of(min(count, _ROWS))
    plan = GpuPlan(
        gpu,
        lowered,
        weights=weights,
        cache=pages,
        tables=tables,
        max_rows=max_rows,
        piece=piece,
    )
    widths = program.value_widths
    results = {name: np.empty((count, widths[name]), np.float32) for name in values}
    for start in range(0, count, max_rows):
        chunk_tokens = np.array(tokens[start : start + max_rows], np.int32)
        rows = len(chunk_tokens)
        bucket = bucket_of(rows)
        plan.input.fill(
            _frame(chunk_tokens, start, has_logits=logits in results), _NO_CHANGES, bucket
        )
        plan.launch(bucket)
        for name in lowered.taps:
            results[name][start : start + rows] = plan.tap(name, rows).cpu().numpy()
        for chunk, first in enumerate(range(0, rows if logits in results else 0, LOGIT_ROWS)):
            num_rows = min(LOGIT_ROWS, rows - first)
            plan.launch_logits(chunk, bucket_of(num_rows))
            first_row = start + first
            results[logits][first_row : first_row + num_rows] = plan.logits[:num_rows].cpu().numpy()
    return results


_NO_CHANGES = np.zeros((0, 2), np.int32)


def _frame(tokens: NDArray[np.int32], start: int, *, has_logits: bool) -> StepFrame:
    rows = np.arange(len(tokens) if has_logits else 0, dtype=np.int32)
    slices = np.array([[0, len(tokens), start, 0]], np.int32)
    return StepFrame(
        tokens=tokens,
        slices=slices,
        sampled_rows=rows,
        only_best=np.zeros_like(rows),
        stores=_NO_CHANGES,
        copies=_NO_CHANGES,
        page_tables=_NO_CHANGES,
        num_generated=len(tokens),
    )
