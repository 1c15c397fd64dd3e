"""Measures the time of a launch in a graph, and whether overlapping launches are correct and fast.

In a chain of kernels, each kernel doubles the numbers that the previous kernel wrote. A program
reads rows that another program wrote, and there are more programs than a GPU runs at the same time.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from msgspec.structs import replace
from triton.runtime.errors import TritonError

from twostroke.backends.gpu.graphs import Graphs
from twostroke.backends.gpu.kernels import pointwise
from twostroke.backends.gpu.launch import OLDEST_OVERLAPPING, Kernels
from twostroke.backends.gpu.transfers import on
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from twostroke.backends.gpu.device import GpuDevice
    from twostroke.backends.gpu.launch import Gpu

_ROWS, _WIDTH = 4096, 1024  # a program for each row
_NUM_LAUNCHES: Final = 64
_REPEATS: Final = 9
_MAX_TIME_RATIO: Final = 1.05  # a margin, so that equal times do not decide by chance


class LaunchTimes(Frozen):
    """Measured seconds of a kernel launch, with and without overlap of consecutive kernels.

    `overlapping_s` is None if results were wrong.
    """

    apart_s: float
    overlapping_s: float | None


def overlapping(device: GpuDevice, gpu: Gpu) -> Gpu:
    """Return the `Gpu` with overlapping kernels switched on, if this is correct and not slower."""
    if not device.may_overlap or (times := measure(device)) is None:
        return gpu
    overlapping_s = times.overlapping_s
    is_fast = overlapping_s is not None and overlapping_s <= _MAX_TIME_RATIO * times.apart_s
    return replace(gpu, overlaps=is_fast)


def measure(device: GpuDevice) -> LaunchTimes | None:
    """Measure launch times with and without overlap of consecutive kernels.

    None if kernels cannot overlap on the device, or fail.
    """
    if device.torch_device.type != "cuda" or device.architecture < OLDEST_OVERLAPPING:
        return None
    try:
        with on(device.torch_device):
            return _measure(device)
    except (RuntimeError, TritonError):  # the engine will fail in the same way, and report it
        return None


def _measure(device: GpuDevice) -> LaunchTimes:
    kernels = Kernels()
    plain = device.gpu(torch.bfloat16, kernels)
    chains = [_Chain(replace(plain, overlaps=overlaps)) for overlaps in (False, True)]
    with kernels.compile_only():
        for chain in chains:
            chain.launch()
    for chain in chains:
        chain.capture(kernels)
    times: list[list[float]] = [[], []]
    for _ in range(_REPEATS):  # alternating, because clocks change over time
        for chain, chain_times in zip(chains, times, strict=True):
            chain_times.append(chain.seconds())
    apart_s, overlapping_s = (statistics.median(chain_times) for chain_times in times)
    is_right = torch.equal(*(chain.target.cpu() for chain in chains))
    return LaunchTimes(apart_s, overlapping_s if is_right else None)


class _Chain:
    """A chain of dependent kernel launches to be timed, and their tensors."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        ints = {"dtype": torch.int32, "device": gpu.device}
        self._header = torch.full((4,), _ROWS, **ints)
        self._row_ids = torch.arange(_ROWS - 1, -1, -1, **ints)
        new_ones = partial(torch.ones, (_ROWS, _WIDTH), device=gpu.device)
        self._source, self._between, self.target = new_ones(), new_ones(), new_ones()
        self._graphs: Graphs

    def launch(self) -> None:
        """Launch all kernels of the chain."""
        source = self._source
        for index in range(_NUM_LAUNCHES):
            target = self.target if index % 2 else self._between
            pointwise.take_rows(
                self._gpu,
                self._header,
                num_rows=_ROWS,
                x=source,
                row_ids=self._row_ids,
                output=target,
                factor=2.0,
            )
            source = target

    def capture(self, kernels: Kernels) -> None:
        """Capture the chain of kernels as a CUDA graph, and replay it once."""
        self._graphs = Graphs(self._gpu, kernels)
        self._graphs.capture("chain", self.launch)
        self._graphs.run("chain", self.launch)

    def seconds(self) -> float:
        """Replay the chain's CUDA graph; return the mean seconds of a launch."""
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        self._graphs.run("chain", self.launch)
        events[1].record()
        torch.cuda.synchronize()
        elapsed_ms: float = events[0].elapsed_time(events[1])
        return elapsed_ms / 1e3 / _NUM_LAUNCHES
