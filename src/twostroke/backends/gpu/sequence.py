"""Computes a sequence by itself, on pages of its own: for evaluation."""

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

_ROWS = 256  # of a step


def trace(
    gpu: Gpu,
    program: Program,
    weights: DeviceWeights,
    like: DevicePages,
    tokens: Sequence[int],
    values: Sequence[str],
    *,
    piece: int | None,
) -> dict[str, Array]:
    """Return values of the Program for a sequence, by name; pages are `like` the engine's."""
    count, logits = len(tokens), program.ops[-1].output
    lowered = lower(program, [name for name in values if name != logits])
    num_groups, places = len(program.cache_groups), -(-count // like.page_size)
    pages = DevicePages(gpu, program, num_groups * places, like.page_size, like.kv_format)
    width = -(-places // 4) * 4
    tables = torch.zeros((1, num_groups, width), dtype=torch.int32, device=gpu.device)
    ids = torch.arange(num_groups * places, dtype=torch.int32).view(num_groups, places)
    tables[0, :, :places] = ids
    most = bucket_of(min(count, _ROWS))
    plan = GpuPlan(gpu, lowered, weights, pages, tables, most, piece=piece)
    widths = program.value_widths
    found = {name: np.empty((count, widths[name]), np.float32) for name in values}
    for start in range(0, count, most):
        part = np.array(tokens[start : start + most], np.int32)
        rows = len(part)
        bucket = bucket_of(rows)
        plan.input.fill(_frame(part, start, has_logits=logits in found), _NO_CHANGES, bucket)
        plan.launch(bucket)
        for name in lowered.taps:
            found[name][start : start + rows] = plan.tap(name, rows).cpu().numpy()
        for chunk, first in enumerate(range(0, rows if logits in found else 0, LOGIT_ROWS)):
            taken = min(LOGIT_ROWS, rows - first)
            plan.launch_logits(chunk, bucket_of(taken))
            at = start + first
            found[logits][at : at + taken] = plan.logits[:taken].cpu().numpy()
    return found


_NO_CHANGES = np.zeros((0, 2), np.int32)


def _frame(tokens: NDArray[np.int32], start: int, *, has_logits: bool) -> StepFrame:
    rows = np.arange(len(tokens) if has_logits else 0, dtype=np.int32)
    slices = np.array([[0, len(tokens), start, 0]], np.int32)
    none = _NO_CHANGES
    return StepFrame(tokens, slices, rows, np.zeros_like(rows), none, none, none, len(tokens))
