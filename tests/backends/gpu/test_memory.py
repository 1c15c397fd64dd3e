"""The GPU memory that is planned before loading equals the memory that engines reserve."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from msgspec.structs import replace  # noqa: E402

from support.programs import PROGRAMS, SPEC, random_tensors  # noqa: E402
from support.tiny import Tiny, write_tiny_gguf  # noqa: E402
from twostroke.backends.gpu.backend import GpuBackend  # noqa: E402
from twostroke.backends.gpu.cache import DevicePages  # noqa: E402
from twostroke.backends.gpu.device import GpuDevice, find_device  # noqa: E402
from twostroke.backends.gpu.kernels.packed import PackedMatrix, concatenate, pack  # noqa: E402
from twostroke.backends.gpu.launch import listing  # noqa: E402
from twostroke.backends.gpu.lower import lower  # noqa: E402
from twostroke.backends.gpu.plan import GpuPlan, step_bytes  # noqa: E402
from twostroke.backends.gpu.weight_layout import device_bytes, runs_of_neighbours  # noqa: E402
from twostroke.core.errors import MemoryLimitError  # noqa: E402
from twostroke.core.options import CacheOptions, ComputeOptions, EngineOptions  # noqa: E402
from twostroke.model.families import build_program  # noqa: E402
from twostroke.model.quant import FORMATS, QuantTensor, e4m3  # noqa: E402
from twostroke.server.models.on_demand import OnDemandEngine  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.backends.gpu.weight_layout import Matrix

META = torch.device("meta")
WIDE = replace(SPEC, hidden_size=512, ffn_size=4096, head_dim=64, num_layers=1)


class Weights:
    """A stand-in for `DeviceWeights`, whose matrices and vectors take no memory."""

    def __init__(self, tensors: dict[str, QuantTensor]) -> None:
        self.packed: dict[str, PackedMatrix] = {}
        self.shapes: dict[str, Matrix] = {}
        self.matrices: dict[str, Any] = {}
        self.balances: dict[int, Any] = {}
        for name, tensor in tensors.items():
            if len(tensor.shape) > 1 and tensor.format.name not in {"F16", "BF16"}:
                self.packed[name] = pack(tensor, META)
                packed = self.packed[name]
                self.shapes[name] = packed.layout, packed.width, packed.depth
            elif len(tensor.shape) > 1:
                self.matrices[name] = torch.empty(tensor.shape, dtype=torch.float16, device=META)

    def factors(self, names: tuple[str, ...]) -> list[Any]:
        runs = runs_of_neighbours([self.shapes.get(name) for name in names])
        return [
            concatenate(parts, sum(part.width for part in parts))
            if (parts := [self.packed[names[i]] for i in run if names[i] in self.packed])
            else self.matrices[names[run[0]]]
            for run in runs
        ]

    def vector(self, _: object) -> Any:
        return torch.empty(1 << 16, device=META)

    norm_weight = vector


@cache
def tensors_of(program: Any, fmt: Any) -> dict[str, QuantTensor]:
    """Return weights in a format; None means E4M3 with a scale for each output."""
    return {
        name: QuantTensor.from_floats(
            np.ones(shape, np.float32),
            FORMATS["F32"] if len(shape) == 1 else fmt or e4m3(shape[1]),
        )
        for name, shape in program.weight_shapes.items()
    }


def planned_and_reserved(fmt: Any, rows: int, architecture: int) -> tuple[int, int, list[Any]]:
    """Return the planned and the reserved bytes, and the launches of a step with `rows` rows."""
    program, launches = build_program(WIDE), list[Any]()
    tensors = tensors_of(program, fmt)
    device = GpuDevice("none", META, architecture, 132)
    gpu = listing(launches, architecture)
    pages = DevicePages(gpu, program, 4, 16, "f16")
    width = -(-program.context_length // 16 // 4) * 4 + 4
    tables = torch.zeros((rows, 1, width), dtype=torch.int32, device=META)
    plan = GpuPlan(gpu, lower(program), cast("Any", Weights(tensors)), pages, tables, rows)
    plan.launch(rows)
    return step_bytes(program, tensors, device, rows), plan.num_bytes, launches


@pytest.mark.parametrize("rows", [1, 256, 512, 2048])
@pytest.mark.parametrize("fmt", [FORMATS["BF16"], FORMATS["Q4_K"], e4m3(128), None])
@pytest.mark.parametrize("architecture", [80, 90])
def test_steps_reserve_what_was_planned(fmt: Any, rows: int, architecture: int) -> None:
    planned, reserved, _ = planned_and_reserved(fmt, rows, architecture)
    assert planned >= reserved
    assert planned == pytest.approx(reserved, rel=0.05, abs=1 << 20)


def test_matrices_that_are_written_out_and_rounded_rows_are_counted() -> None:
    """The two largest unpacked matrices and the rounded rows dominate a 70B model's steps."""
    rows, largest = 640, 2 * 4096 * 512  # a gate and an up
    dense, _, _ = planned_and_reserved(FORMATS["BF16"], rows, 90)
    packed, _, launches = planned_and_reserved(FORMATS["Q4_K"], rows, 90)
    assert "_unpack_matrix" in {launch.kernel.__name__ for launch in launches}
    assert 2 * largest <= packed - dense < 3 * largest  # and sums in parts
    fp8, _, launches = planned_and_reserved(e4m3(128), rows, 90)
    assert "_round_rows" in {launch.kernel.__name__ for launch in launches}
    assert fp8 - dense == rows * 4096 + 4 * rows * 32  # codes, and scales of 128
    old, _, _ = planned_and_reserved(e4m3(128), rows, 80)
    assert 2 * largest <= old - dense < 3 * largest
    few, _, _ = planned_and_reserved(FORMATS["Q4_K"], 64, 90)
    dense, _, _ = planned_and_reserved(FORMATS["BF16"], 64, 90)
    assert few == dense


@pytest.mark.parametrize(("rows", "architecture"), [(96, 90), (512, 90), (128, 100), (256, 120)])
def test_sums_in_parts_are_counted(rows: int, architecture: int) -> None:
    planned, reserved, launches = planned_and_reserved(FORMATS["Q4_K"], rows, architecture)
    assert planned >= reserved
    tiles = [launch for launch in launches if launch.kernel.__name__ == "_product_tiles"]
    assert len(tiles) == 4
    assert max(tile.grid[1] for tile in tiles) > 1


def test_models_that_take_turns_on_a_gpu_count_its_memory(tmp_path: Path) -> None:
    """Counts weights in the GPU's format, and the memory of steps and of CUDA."""
    path = str(write_tiny_gguf(tmp_path / "tiny.gguf", Tiny(seed=3, fmt="F32", num_layers=1)))
    cache = CacheOptions(context_length=64, memory_bytes=1 << 20)

    def engine(backend: str, budget_bytes: int) -> OnDemandEngine:
        options = EngineOptions(ComputeOptions(backend), cache)
        return OnDemandEngine.for_model(None, path, options, "info", budget_bytes, math.inf)

    on_gpu, on_cpu = engine("gpu", 10**10), engine("cpu", 10**10)
    assert on_gpu.num_bytes > on_cpu.num_bytes + (600 << 20)
    gpu_bytes, cpu_bytes = (
        sum(engine.card.cost.weight_bytes.values()) for engine in (on_gpu, on_cpu)
    )
    assert gpu_bytes < 0.7 * cpu_bytes  # matrices in 16 bits
    assert engine("cpu", 600 << 20).num_bytes
    with pytest.raises(MemoryLimitError, match=r"600 ?MB of memory for all models|\(--memory\)"):
        engine("gpu", 600 << 20)


@pytest.mark.parametrize("model", ["borrowing", "experts beside", "latent", "latent, many heads"])
@pytest.mark.parametrize("rows", [1, 300])
def test_engines_reserve_no_more_than_was_planned(model: str, rows: int) -> None:
    program, device = PROGRAMS[model], find_device()
    tensors = random_tensors(program, "F16", "F16")
    backend = GpuBackend(program, tensors, 8, 16, device, max_rows=rows)
    planned = step_bytes(program, tensors, device, rows)
    assert planned / 3 < backend.step_bytes <= planned  # whose tables are for a whole context
    stored = sum(device_bytes(program, tensors).values())
    assert 0.9 * stored < backend.facts.weight_bytes < stored + 1024  # and ones, as norms
    backend.close()
