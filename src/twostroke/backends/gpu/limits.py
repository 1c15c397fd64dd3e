"""Measures a GPU's limits: memory bandwidth, and the peak of BF16 matrix products."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Final

import torch

from twostroke.backends.gpu.transfers import is_out_of_memory
from twostroke.core.errors import MemoryLimitError
from twostroke.core.hardware import Hardware

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.backends.gpu.device import GpuDevice

_COPIED_BYTES: Final = 1 << 30
_SIDE: Final = 8192  # rows and columns of the matrices
_SMALL_DIVISOR: Final = 64  # sizes are divided by it if there is little memory, or no GPU
_REPEATS: Final = 10


def measure(device: GpuDevice) -> Hardware:
    """Measure a GPU's memory bandwidth (bytes/s read and written) and peak FLOP/s.

    The measurement takes some tenths of a second, and 3 GB of the GPU's memory if they are free.

    Raises:
        MemoryLimitError: there is too little memory for the smallest measurement.
    """
    try:
        bandwidth, peak = _measure(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        message = f"{device.name} has too little free memory to measure its limits"
        raise MemoryLimitError(f"{message}: end what else uses it.") from None
    return Hardware(
        name=device.name,
        num_threads=1,
        memory_bytes=device.memory_total,
        bandwidth=bandwidth,
        peak=peak,
        peak_kind="BF16 products",
        source="interpreted" if device.is_interpreted else "measured",
    )


def _measure(device: GpuDevice) -> tuple[float, float]:
    is_small = device.is_interpreted or device.memory_available < 4 * _COPIED_BYTES
    size, side = (
        (_COPIED_BYTES // _SMALL_DIVISOR, _SIDE // _SMALL_DIVISOR)
        if is_small
        else (_COPIED_BYTES, _SIDE)
    )
    where = device.torch_device
    source = torch.zeros(size, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    copy_s = _seconds(device, lambda: target.copy_(source))
    # Random values: with equal values, products take less power and are faster on some GPUs.
    matrix = torch.randn(side, side, dtype=torch.bfloat16, device=where)
    product = torch.empty_like(matrix)
    product_s = _seconds(device, lambda: torch.mm(matrix, matrix, out=product))
    return 2 * size / copy_s, 2 * side**3 / product_s


def _seconds(device: GpuDevice, run: Callable[[], object]) -> float:
    """Return the median seconds of repeated calls of `run`, without the first call."""
    times = []
    for _ in range(1 + _REPEATS):
        _wait(device)
        start_s = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[1:])


def _wait(device: GpuDevice) -> None:
    if not device.is_interpreted:
        torch.cuda.synchronize(device.torch_device)
