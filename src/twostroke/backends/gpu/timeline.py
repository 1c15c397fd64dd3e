"""Measures the device time of consecutive parts of a step."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.backends.gpu.launch import Gpu

_PARTS: Final = 64  # parts between two waits; CUDA queues about 1,000 launches
_CYCLES: Final = 1 << 24  # the first wait, about 10 ms


def seconds_of(gpu: Gpu, launch: Callable[[Callable[[], None]], None]) -> list[float]:
    """Measure the GPU seconds of consecutive parts of `launch`, which calls `mark` between them.

    Launching a small kernel takes longer than running it. Therefore the GPU is first made to wait
    while launches are queued. If the queue still runs empty, everything is launched again with a
    longer wait. Interpreted kernels are timed on the processor.
    """
    if gpu.device.type != "cuda":
        marks: list[float] = []
        launch(lambda: marks.append(time.perf_counter()))
        return [end - begin for begin, end in pairwise(marks)]
    cycles = _CYCLES
    while True:
        line = _Timeline(cycles)
        launch(line.mark)
        line.check()
        if not line.was_late:
            return line.seconds()
        cycles *= 2


class _Timeline:
    """CUDA events that divide the launches on a stream into timed parts.

    `was_late`: the GPU waited for the processor, so the times are wrong.
    """

    def __init__(self, cycles: int) -> None:
        """Prepare to make the GPU wait for `cycles` clock cycles at a time."""
        self._cycles, self.was_late = cycles, False
        self._start: Any = None  # the end of the last wait
        self._begin: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def mark(self) -> None:
        """End the current timed part, and begin the next part."""
        now = _event()
        if self._begin is not None:
            self._spans.append((self._begin, now))
        if len(self._spans) % _PARTS == 0:
            self.check()
            torch.cuda._sleep(self._cycles)  # noqa: SLF001 - PyTorch's own way to time launches
            self._start = now = _event()
        self._begin = now

    def check(self) -> None:
        """Note whether the GPU's last wait ended before all launches were queued."""
        self.was_late |= self._start is not None and self._start.query()

    def seconds(self) -> list[float]:
        """Wait for the GPU, and return the seconds of each timed part."""
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in self._spans]


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
