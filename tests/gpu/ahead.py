"""Compiles some launches together, then launches them on a driver that does nothing.

Prints, as JSON, how many kernels were compiled and how many were found in Triton's cache on disk,
before the launches and during them, and how many launches there were.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from twostroke.backends.gpu.kernels import pages, pointwise
from twostroke.backends.gpu.kernels.common import Parts
from twostroke.backends.gpu.launch import Gpu, Kernels


class NoGpu:
    """Triton's driver of an H100 that is not there."""

    def __init__(self) -> None:
        self.num_launches, self.utils = 0, self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def load_binary(self, *_: object) -> tuple[Any, ...]:
        return None, None, 0, 0, 1024

    def launcher_cls(self, *_: object) -> Any:
        return self.launch

    def launch(self, *_: object) -> None:
        self.num_launches += 1


def launch_all(gpu: Gpu) -> None:
    """Launch kernels of each kind: with constants, changing numbers, and an unaligned pointer."""
    header, floats = torch.zeros(64, dtype=torch.int32), torch.zeros(1024)
    output = torch.zeros(8, 32, dtype=torch.float16)
    pages.change(gpu, header, 4, header, header)
    for count, part in ((1, floats), (2, floats), (3, floats[1:])):
        parts = Parts(part, 32, 32, count, 256)
        pointwise.combine(gpu, header, 8, parts, output, factor=2.0)
    pointwise.take_rows(gpu, header, 8, floats.view(-1, 32), header, output)


def main() -> None:
    """Compile ahead, launch twice, and print what happened."""
    driver, kernels = NoGpu(), Kernels()
    triton.runtime.driver.set_active(driver)
    phases = {"ahead": Counter[str](), "launching": Counter[str]()}

    def listen(*, cache_hit: bool, **_: object) -> None:
        phase = "launching" if is_ready else "ahead"
        phases[phase]["found" if cache_hit else "compiled"] += 1

    triton.knobs.compilation.listener = listen
    gpu = Gpu(torch.device("cpu"), 90, 132, torch.float16, kernels.start)
    is_ready = False
    with kernels.compile_only():
        launch_all(gpu)
    is_ready = True
    assert not driver.num_launches
    launch_all(gpu)
    launch_all(gpu)
    counts = {"variants": len(kernels), "launches": driver.num_launches}
    json.dump(counts | phases, sys.stdout)


if __name__ == "__main__":
    main()
