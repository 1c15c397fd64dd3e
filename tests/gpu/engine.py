"""Runs whole engines on a GPU that is not there: their own launches, a driver that does nothing.

Tensors on `cuda:0` are PyTorch's `meta` ones: to read one on the processor fails, as does a launch
with one of the processor's. Kernels go through Triton's front end, not its optimizer. Prints, as
JSON, for each engine how many kernels were compiled ahead and late, and how many launches, captured
graphs and replays there were; with `--time`, the microseconds of a launch from Python, and of one
from a tape.
"""

from __future__ import annotations

import json
import sys
import threading
import timeit
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
from ahead import NoGpu
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from support.programs import PROGRAMS, random_tensors
from twostroke.backends.gpu.backend import GpuBackend
from twostroke.backends.gpu.device import GpuDevice
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import Slice, StepPlan
from twostroke.model.quant import QuantTensor, e4m3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from twostroke.model.program import Program

CUDA: Final = torch.device("cuda:0")
# Program, format of its matrices, that of keys and values, architecture
ENGINES: Final = (
    ("biases", "E4M3", "fp8", 90),
    ("many experts", "Q8_0", "int8", 120),
    ("latent", "BF16", "int8", 100),
    ("borrowing", "F16", "f16", 80),
)
_OPTIONS: Final = (
    SamplingParams(logprobs=3, top_p=0.5, top_k=5),
    SamplingParams(temperature=0, repetition_penalty=1.5),
)


class OnNoGpu(TorchFunctionMode):
    """Gives tensors of `cuda:0` no memory; numbers copied from there are 1."""

    def __init__(self) -> None:
        super().__init__()
        self._memories: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what PyTorch would do with a GPU, as far as the processor sees it."""
        name, options = getattr(func, "__name__", ""), {**(kwargs or {})}
        if func == torch.Tensor.device.__get__:
            return CUDA if args[0].is_meta else func(*args)
        if name == "pin_memory":
            return args[0]
        options.pop("pin_memory", None)
        if name == "copy_" and args[1].is_meta and not args[0].is_meta:
            return args[0].fill_(1)
        if name == "data_ptr" and args[0].is_meta:  # another for each memory
            memory = self._memories.setdefault(
                args[0].untyped_storage()._cdata, len(self._memories)
            )
            return (1 + memory << 40) + args[0].storage_offset() * args[0].itemsize
        if name == "cpu" and args[0].is_meta:
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        if options.get("device") == CUDA:
            options["device"] = "meta"
        return func(*("meta" if arg is CUDA else arg for arg in args), **options)


class Driver(NoGpu):
    """A driver that looks at the arguments of launches."""

    def __init__(self, architecture: int) -> None:
        super().__init__()
        self.architecture = architecture
        self.launches: list[Any] = []

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture  # for each there are kernels of its own

    def launch(self, *args: Any) -> None:
        grid, arguments = args[:3], args[9:]
        assert all(type(size) is int and size > 0 for size in grid), grid
        for argument in arguments:
            is_tensor = isinstance(argument, torch.Tensor)
            assert not is_tensor or argument.device == CUDA, "a tensor of the processor"
            self.launches.append(argument.data_ptr() if is_tensor else argument)
        self.launches.append(grid)
        self.num_launches += 1


class Graph:
    """A CUDA graph."""

    num_captured = num_replays = 0

    def replay(self) -> None:
        Graph.num_replays += 1


class Event:
    """A CUDA event; those of timelines are never late."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.enable_timing, self.is_recorded = enable_timing, False

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        assert self.is_recorded

    def elapsed_time(self, end: Event) -> float:
        assert self.enable_timing
        assert end.enable_timing
        return 1.0


@contextmanager
def capture(_: Graph) -> Iterator[None]:
    """Capture a graph."""
    Graph.num_captured += 1
    yield


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make a device the current one."""
    assert device == CUDA
    yield


FAKES: Final[Mapping[str, Any]] = {
    "Event": Event,
    "Stream": lambda _: None,
    "CUDAGraph": Graph,
    "graph": capture,
    "device": current,
    "synchronize": lambda *_: None,
    "empty_cache": lambda: None,
    "_sleep": lambda _: None,
}


def front_end(all_stages: Callable[..., None]) -> Callable[..., None]:
    """Return stages of a compiler that ends after the first one."""

    def end(_: Any, metadata: dict[str, Any]) -> bytes:
        metadata |= {"shared": 0, "name": "none", "tmem_size": None}
        return b"none"

    def add(self: Any, stages: dict[str, Any], *args: Any) -> None:
        all_stages(self, stages, *args)
        first = stages["ttir"]
        stages.clear()
        stages |= {"ttir": first, "cubin": end}

    return add


def weights(program: Program, fmt: str) -> dict[str, QuantTensor]:
    """Return random weights; those in E4M3 have a scale for each output."""
    if fmt != "E4M3":
        return random_tensors(program, fmt, fmt)
    return {
        name: QuantTensor.from_floats(x.dequantize(), e4m3(x.shape[1])) if len(x.shape) > 1 else x
        for name, x in random_tensors(program).items()
    }


def run(program: Program, fmt: str, kv_format: str, driver: Driver) -> bool:
    """Do all that an engine does; return whether its launches overlap."""
    device, tensors = GpuDevice("none", CUDA, driver.architecture, 132), weights(program, fmt)
    backend = GpuBackend(program, tensors, 64, 16, device, max_rows=640, kv_format=kv_format)
    for number, count in enumerate((1, 30, 200, 600)):
        request = Request("a", [7] * count, count, _OPTIONS[number % 2], seed=1)
        request.pages = [[*range(40)] for _ in program.cache_groups]
        result = backend.run(StepPlan((Slice(request, 0, count, samples=True),)))
        request.tokens += result.tokens
        backend.start(StepPlan((Slice(request, count, 1, samples=True),)))
        backend.start(StepPlan((Slice(request, count + 1, 1, samples=True),)))
        results = result, backend.finish(), backend.finish()
        assert not any(outcome.num_compiled for outcome in results)
        assert len(backend.times()) == len(backend.fused)
        backend.forget(request)
    check_tape(backend, driver, request)
    backend.copy_page(1, 2)
    overlaps = backend._gpu.overlaps
    backend.close()
    return overlaps


def check_tape(backend: GpuBackend, driver: Driver, request: Request) -> None:
    """Repeat a step that is too large for a graph."""
    backend._graphs.drop()
    results = []
    for _ in ("noted", "repeated"):
        driver.launches = []
        backend.run(StepPlan((Slice(request, 0, 600, samples=True),)))
        results.append(driver.launches)
    assert len(backend._graphs._replays) == 2  # tapes of the step and of its logits
    others = [a for a, b in zip(*results, strict=True) if a != b]
    assert len(others) <= 3, others  # what the sampler is sent


def microseconds(program: Program, architecture: int) -> dict[str, float]:
    """Return what a launch of a large step takes, if the driver takes nothing."""
    device = GpuDevice("none", CUDA, architecture, 132)
    with OnNoGpu():
        backend = GpuBackend(program, weights(program, "Q8_0"), 64, 16, device, max_rows=640)
        tape = backend._graphs._replays[640]
    ways = {"from Python": lambda: backend._plan.launch(640), "from a tape": tape.replay}
    return {
        way: round(1e6 * min(timeit.repeat(launch, number=1, repeat=30)) / len(tape._calls), 1)
        for way, launch in ways.items()
    }


def main() -> None:
    """Run the engines, and print what happened."""
    CUDABackend.add_stages = front_end(CUDABackend.add_stages)
    for name, fake in FAKES.items():
        assert hasattr(torch.cuda, name)
        setattr(torch.cuda, name, fake)
    compiled = Counter[str]()

    def listen(**_: object) -> None:
        is_ahead = threading.current_thread().name.startswith("twostroke-compile")
        compiled["ahead" if is_ahead else "late"] += 1

    triton.knobs.compilation.listener = listen
    results = []
    with OnNoGpu():
        for name, *arguments, architecture in ENGINES:
            driver = Driver(architecture)
            triton.runtime.driver.set_active(driver)
            compiled.clear()
            Graph.num_captured = Graph.num_replays = 0
            overlaps = run(PROGRAMS[name], *arguments, driver)
            graphs = {"captured": Graph.num_captured, "replays": Graph.num_replays}
            graphs["overlaps"] = overlaps
            results.append({"launches": driver.num_launches, **compiled, **graphs})
    if "--time" in sys.argv:
        Driver.launch = lambda *_: None
        results = [microseconds(PROGRAMS[name], arch) for name, *_, arch in ENGINES]
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
