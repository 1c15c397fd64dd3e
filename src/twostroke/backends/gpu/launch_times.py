"""Measures what a launch in a graph takes, and whether launches that overlap are right and faster.

A chain of kernels doubles numbers, each those that the one before it wrote. A program reads what
another one wrote, and there are more than a GPU begins at once.
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
_MOST: Final = 1.05  # times as long: a margin, or equal ones would be chosen by chance


class LaunchTimes(Frozen):
    """Seconds of a launch in a chain: one after another, and overlapping, if these were right."""

    apart_s: float
    overlapping_s: float | None


def overlapping(device: GpuDevice, gpu: Gpu) -> Gpu:
    """Return a device's GPU with launches that overlap, where these are right and not slower."""
    if not device.may_overlap or (times := measure(device)) is None:
        return gpu
    overlapping_s = times.overlapping_s
    is_fast = overlapping_s is not None and overlapping_s <= _MOST * times.apart_s
    return replace(gpu, overlaps=is_fast)


def measure(device: GpuDevice) -> LaunchTimes | None:
    """Return the times on a GPU whose launches may overlap; None on others, or if one fails."""
    if device.torch_device.type != "cuda" or device.architecture < OLDEST_OVERLAPPING:
        return None
    try:
        with on(device.torch_device):
            return _measure(device)
    except (RuntimeError, TritonError):  # whatever it is, the engine will meet it, and say so
        return None


def _measure(device: GpuDevice) -> LaunchTimes:
    kernels = Kernels()
    plain = device.gpu(torch.bfloat16, kernels)
    chains = [_Chain(replace(plain, overlaps=overlaps)) for overlaps in (False, True)]
    with kernels.ahead():
        for chain in chains:
            chain.launch()
    for chain in chains:
        chain.capture(kernels)
    times: list[list[float]] = [[], []]
    for _ in range(_REPEATS):  # by turns: clocks rise
        for chain, own in zip(chains, times, strict=True):
            own.append(chain.seconds())
    apart_s, overlapping_s = (statistics.median(own) for own in times)
    is_right = torch.equal(*(chain.target.cpu() for chain in chains))
    return LaunchTimes(apart_s, overlapping_s if is_right else None)


class _Chain:
    """The launches of the chain, and the numbers that they write."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        ints = {"dtype": torch.int32, "device": gpu.device}
        self._header = torch.full((4,), _ROWS, **ints)
        self._chosen = torch.arange(_ROWS - 1, -1, -1, **ints)
        ones = partial(torch.ones, (_ROWS, _WIDTH), device=gpu.device)
        self._source, self._between, self.target = ones(), ones(), ones()
        self._graphs: Graphs

    def launch(self) -> None:
        """Launch all."""
        source = self._source
        for index in range(_NUM_LAUNCHES):
            target = self.target if index % 2 else self._between
            given = self._header, _ROWS, source, self._chosen, target
            pointwise.take_rows(self._gpu, *given, factor=2.0)
            source = target

    def capture(self, kernels: Kernels) -> None:
        """Make a graph of them, and replay it once."""
        self._graphs = Graphs(self._gpu, kernels)
        self._graphs.capture("chain", self.launch)
        self._graphs.run("chain", self.launch)

    def seconds(self) -> float:
        """Replay the graph, and return the seconds of a launch."""
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        self._graphs.run("chain", self.launch)
        events[1].record()
        torch.cuda.synchronize()
        elapsed_ms: float = events[0].elapsed_time(events[1])
        return elapsed_ms / 1e3 / _NUM_LAUNCHES
