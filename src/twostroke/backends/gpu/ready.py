"""Compiles all kernels that steps can need, and captures their graphs, before there is a step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from twostroke.backends.gpu.graphs import LARGEST_BUCKET, bucket_of, buckets_up_to
from twostroke.backends.gpu.step_input import LOGIT_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from twostroke.backends.gpu.drawing import Drawing
    from twostroke.backends.gpu.graphs import Graphs
    from twostroke.backends.gpu.launch import Kernels
    from twostroke.backends.gpu.plan import GpuPlan

    Launching = Callable[[], None]


def prepare(graphs: Graphs, kernels: Kernels, plan: GpuPlan, drawing: Drawing) -> None:
    """Launch each bucket of steps, without rows.

    Larger steps have no graphs but tapes, and kernels like the smallest one of them or the next
    power of two, at which products change. The largest one brings the libraries' memory.
    """
    plan.input.clear()
    captured: dict[Hashable, Launching] = {}
    taped: dict[Hashable, Launching] = {}
    for num_rows in buckets_up_to(plan.max_rows):
        captured[num_rows] = partial(plan.launch, num_rows)
    for bucket in buckets_up_to(min(plan.max_rows, LOGIT_ROWS)):
        captured[0, bucket] = partial(plan.launch_logits, 0, bucket)
    larger = [bucket_of(LARGEST_BUCKET + 1), *(LARGEST_BUCKET << i for i in range(1, 20))]
    sizes = {*(rows for rows in larger if rows < plan.max_rows), plan.max_rows}
    for num_rows in sorted(size for size in sizes if size > LARGEST_BUCKET):
        taped[num_rows] = partial(plan.launch, num_rows)
    draw: Launching = partial(drawing.prepare, plan.logits, plan.results)
    with kernels.ahead():
        for launch in (*captured.values(), *taped.values(), draw):
            launch()
    for key, launch in captured.items():
        graphs.capture(key, launch)
    for key, launch in taped.items():
        graphs.run(key, launch)
    draw()
    if plan.input.device.device.type == "cuda":
        torch.cuda.synchronize()
