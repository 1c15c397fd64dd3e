"""Steps that are launched again: as CUDA graphs, one for each bucket of rows, or as tapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from twostroke.backends.gpu.launch import Gpu, Kernels, Tape

_BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
LARGEST_BUCKET: Final = _BUCKETS[-1]  # that has a graph
_GRAIN: Final = 64  # rows of larger buckets


def bucket_of(num_rows: int) -> int:
    """Return how many rows are launched for so many."""
    fitting = (bucket for bucket in _BUCKETS if bucket >= num_rows)
    return next(fitting, -(-num_rows // _GRAIN) * _GRAIN)


def buckets_up_to(num_rows: int) -> tuple[int, ...]:
    """Return the buckets that have graphs, for steps of up to `num_rows` rows."""
    return tuple(b for b in _BUCKETS if b <= bucket_of(num_rows))


class Graphs:
    """Replays what was launched while it `is_used`, as on a GPU; else launches."""

    def __init__(self, gpu: Gpu, kernels: Kernels) -> None:
        self.num_captured = 0
        self.is_used, self._kernels = gpu.device.type == "cuda", kernels
        self._kept: dict[Hashable, torch.cuda.CUDAGraph | Tape] = {}

    def capture(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Compile the kernels of a launch, and keep it as `key`; nothing may be computed by it."""
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
            if isinstance(
                error.__context__, KeyboardInterrupt
            ):  # CUDA, about a capture without end
                raise KeyboardInterrupt from None
            raise
        self._kept[key] = graph
        self.num_captured += 1

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Replay `key`; what was not captured is launched once, and then replayed from a tape."""
        if not self.is_used:
            launch()
        elif (kept := self._kept.get(key)) is not None:
            kept.replay()
        else:
            with self._kernels.taped() as tape:
                launch()
            self._kept[key] = tape

    def drop(self) -> None:
        """Forget all graphs and tapes: memory that they name has moved."""
        if self._kept:
            torch.cuda.synchronize()  # a step in flight may replay one
        self._kept = {}
