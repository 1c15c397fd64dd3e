"""Replays launches: as CUDA graphs, one for each bucket of rows, or as tapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from twostroke.backends.gpu.launch import Gpu, Kernels, Tape

_BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
LARGEST_BUCKET: Final = _BUCKETS[-1]  # with a graph
_GRAIN: Final = 64  # larger buckets are multiples of 64 rows


def bucket_of(num_rows: int) -> int:
    """Return the padded number of rows with which a step of `num_rows` rows is launched.

    A CUDA graph exists for each of a few sizes (buckets), not for each number of rows.
    """
    fitting = (bucket for bucket in _BUCKETS if bucket >= num_rows)
    return next(fitting, -(-num_rows // _GRAIN) * _GRAIN)


def buckets_up_to(num_rows: int) -> tuple[int, ...]:
    """Return the bucket sizes with CUDA graphs that steps of up to `num_rows` rows use."""
    return tuple(b for b in _BUCKETS if b <= bucket_of(num_rows))


class Graphs:
    """Captures kernel launches as CUDA graphs by key, and replays them.

    On devices other than GPUs, kernels are only launched.
    """

    def __init__(self, gpu: Gpu, kernels: Kernels) -> None:
        self.num_captured = 0
        self.is_used, self._kernels = gpu.device.type == "cuda", kernels
        self._replays: dict[Hashable, torch.cuda.CUDAGraph | Tape] = {}

    def capture(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Compile the kernels that `launch` launches, and capture the launches as a CUDA graph.

        `launch` is called for this, so the step's input must have no rows. `run` finds the graph by
        `key`.
        """
        if not self.is_used:
            launch()
            return
        with self._kernels.taped() as tape:
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                tape.replay()
        except Exception as error:
            # CUDA's error for a capture that did not end hides the interrupt.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise
        self._replays[key] = graph
        self.num_captured += 1

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Replay the CUDA graph that was captured under `key`.

        Without a graph, `launch` is called once and its launches are recorded; later calls replay
        the recorded launches.
        """
        if not self.is_used:
            launch()
        elif (replay := self._replays.get(key)) is not None:
            replay.replay()
        else:
            with self._kernels.taped() as tape:
                launch()
            self._replays[key] = tape

    def drop(self) -> None:
        """Delete all CUDA graphs and recorded launches, because their memory has moved."""
        if self._replays:
            torch.cuda.synchronize()  # a step in flight may replay one
        self._replays = {}
