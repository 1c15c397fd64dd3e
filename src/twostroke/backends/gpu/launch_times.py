"""Measures what a launch in a graph takes, and whether launches that overlap are right and faster.

A chain of kernels doubles numbers, each those that the one before it wrote.
"""

from __future__ import annotations

import statistics
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
from msgspec.structs import replace
from triton.runtime.errors import TritonError

from twostroke.backends.gpu.graphs import Graphs
from twostroke.backends.gpu.kernels import pointwise
from twostroke.backends.gpu.kernels.parts import Parts
from twostroke.backends.gpu.launch import OLDEST_OVERLAPPING, Kernels
from twostroke.backends.gpu.transfers import on
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from twostroke.backends.gpu.device import Device
    from twostroke.backends.gpu.launch import Gpu

_WIDTH: Final = 1 << 17  # some programs for each multiprocessor
_NUM_LAUNCHES: Final = 64
_REPEATS: Final = 9


class LaunchTimes(Frozen):
    """Seconds of a launch in a chain: one after another, and overlapping, if these were right."""

    apart_s: float
    overlapping_s: float | None


def overlapping(device: Device, gpu: Gpu) -> Gpu:
    """Return a device's GPU with launches that overlap, where these are right and not slower."""
    if not device.may_overlap or (times := measure(device)) is None:
        return gpu
    is_better = times.overlapping_s is not None and times.overlapping_s <= times.apart_s
    return replace(gpu, overlaps=is_better)


def measure(device: Device) -> LaunchTimes | None:
    """Return the times on a GPU whose launches may overlap; None on others, or if one fails."""
    if device.torch_device.type != "cuda" or device.architecture < OLDEST_OVERLAPPING:
        return None
    try:
        with on(device.torch_device):
            return _measure(device)
    except (RuntimeError, TritonError):  # whatever it is, the engine will meet it, and say so
        return None


def _measure(device: Device) -> LaunchTimes:
    kernels = Kernels()
    plain = device.gpu(torch.bfloat16, kernels)
    chains = [_Chain(replace(plain, overlaps=overlaps)) for overlaps in (False, True)]
    with kernels.ahead():
        for chain in chains:
            chain.launch()
    apart_s, overlapping_s = (chain.seconds(kernels) for chain in chains)
    is_right = torch.equal(*(chain.target.cpu() for chain in chains))
    return LaunchTimes(apart_s, overlapping_s if is_right else None)


class _Chain:
    """The launches of the chain, and the numbers that they write."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._header = torch.ones(4, dtype=torch.int32, device=gpu.device)
        ones = partial(torch.ones, (1, _WIDTH), device=gpu.device)
        self._source, self._between, self.target = ones(), ones(), ones()

    def launch(self) -> None:
        source = self._source
        for index in range(_NUM_LAUNCHES):
            target = self.target if index % 2 else self._between
            values = Parts(source, _WIDTH, _WIDTH)
            pointwise.combine(self._gpu, self._header, 1, values, target, factor=2.0)
            source = target

    def seconds(self, kernels: Kernels) -> float:
        """Return the median seconds of a launch in a graph."""
        graphs = Graphs(self._gpu, kernels)
        graphs.capture("chain", self.launch)
        events: list[Any] = []
        for _ in range(1 + _REPEATS):
            graphs.run("chain", self.launch)
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
        torch.cuda.synchronize()
        times: list[float] = [begin.elapsed_time(end) for begin, end in pairwise(events)]
        return statistics.median(times) / 1e3 / _NUM_LAUNCHES
