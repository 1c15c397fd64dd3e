"""Steps as CUDA graphs, one for each bucket of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from twostroke.backends.gpu.launch import Gpu

_BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LARGEST_BUCKET: Final = _BUCKETS[-1]  # that has a graph
_GRAIN: Final = 64  # rows of larger buckets, which are launched as they are


def bucket_of(num_rows: int) -> int:
    """Return how many rows are launched for so many."""
    fitting = (bucket for bucket in _BUCKETS if bucket >= num_rows)
    return next(fitting, -(-num_rows // _GRAIN) * _GRAIN)


def buckets_up_to(num_rows: int) -> tuple[int, ...]:
    """Return the buckets that have graphs, for steps of up to `num_rows` rows."""
    return tuple(b for b in _BUCKETS if b <= bucket_of(num_rows))


class Graphs:
    """Replays what was launched, where there is a GPU; else launches."""

    def __init__(self, gpu: Gpu) -> None:
        self.num_captured = 0
        self._has_graphs = gpu.device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def capture(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Compile the kernels of a launch, and keep it as `key`; nothing may be computed by it."""
        launch()
        if not self._has_graphs:
            return
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                launch()
        except Exception as error:
            if isinstance(
                error.__context__, KeyboardInterrupt
            ):  # CUDA, about a capture without end
                raise KeyboardInterrupt from None
            raise
        self._graphs[key] = graph
        self.num_captured += 1

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Replay `key`, or launch where it was not captured."""
        graph = self._graphs.get(key)
        if graph is None:
            launch()
        else:
            graph.replay()

    def drop(self) -> None:
        """Forget all graphs: memory that they name has moved."""
        if self._graphs:
            torch.cuda.synchronize()  # a step in flight replays one
        self._graphs = {}
