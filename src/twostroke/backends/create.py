"""From compute options to a backend, and what the choice of a backend implies."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.backends.cpu import CpuBackend
from twostroke.backends.cpu.library import choose_level, usual_kv_format
from twostroke.core.env import install_command
from twostroke.core.errors import BackendError
from twostroke.core.hardware import memory_available, resolve_num_threads
from twostroke.core.options import ACTIVATION_BITS
from twostroke.model.families import build_program
from twostroke.model.program.cost import CostModel
from twostroke.model.program.kv_layout import DEFAULT_FORMAT, FORMATS
from twostroke.model.program.mesh import ONE_RANK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twostroke.backends.gpu.device import GpuDevice
    from twostroke.backends.interface import Backend, WeightShard
    from twostroke.backends.kv_size import CacheSize
    from twostroke.core.options import ComputeOptions, EngineOptions, ParallelOptions
    from twostroke.model.program import Program
    from twostroke.model.program.mesh import Mesh
    from twostroke.model.quant import QuantTensor
    from twostroke.model.weights import LoadedModel

    Progress = Callable[[int, int], None]
    Release = Callable[[Sequence[QuantTensor]], None]

FLOAT32_BACKENDS = ("reference", "torch")
_CUDA_BYTES = 600 << 20  # what CUDA and its libraries take of a GPU besides our tensors


def is_native(compute: ComputeOptions) -> bool:
    """Whether the cpu backend runs: weights in the form of its kernels, and its precision."""
    return compute.backend in {"auto", "cpu"}


def check_backend(options: EngineOptions, program: Program, say: Callable[[str], None]) -> None:
    """Refuse a Program that the gpu backend cannot run, if it was asked for.

    "auto" stays the cpu backend until the other has been measured; `say` gets a line where there is
    a GPU.

    Raises:
        BackendError: "gpu" was asked for, and cannot run this.
    """
    from twostroke.backends.gpu import device

    if options.compute.backend == "gpu":
        check_gpu(program, options.compute)
    elif options.compute.backend == "auto" and device.may_exist():
        say("There is a GPU, which --backend gpu uses; that backend is young.")


def check_gpu(program: Program, compute: ComputeOptions) -> None:
    """Raise BackendError if the gpu backend cannot run a Program here."""
    gpu_device(compute)
    from twostroke.backends.gpu.lower import lower

    lower(program)


def gpu_device(compute: ComputeOptions) -> GpuDevice:
    """Return the gpu backend's device.

    Raises:
        BackendError: there is none that it can use.
    """
    from twostroke.backends.gpu.device import find

    return find(compute.device)


def memory_free(
    compute: ComputeOptions, program: Program, tensors: Mapping[str, QuantTensor], max_rows: int
) -> int:
    """Return how many bytes weights and pages can take here, beside what steps need on a GPU."""
    if compute.backend != "gpu":
        return memory_available()
    own = working_bytes(compute, program, tensors, max_rows)
    return max(0, gpu_device(compute).memory_available - own)


def working_bytes(
    compute: ComputeOptions, program: Program, tensors: Mapping[str, QuantTensor], max_rows: int
) -> int:
    """Return how many bytes of its memory a GPU needs besides weights and pages."""
    device = gpu_device(compute)
    from twostroke.backends.gpu.plan import step_bytes

    given = program, tensors, device, max_rows
    return _CUDA_BYTES + step_bytes(*given, same_tokens=compute.same_tokens)


def unused_bytes(compute: ComputeOptions, backend: Backend) -> int:
    """Return how many bytes of a backend's pages still count as free memory: none of a GPU's."""
    return 0 if compute.backend == "gpu" else backend.facts.cache_bytes


def create_backend(  # noqa: PLR0913 - what only the builder knows
    tensors: Mapping[str, QuantTensor],
    program: Program,
    compute: ComputeOptions,
    size: CacheSize,
    *,
    release: Release = lambda _: None,
    progress: Progress | None = None,
    share_threads_with: Backend | None = None,
    tapped_value: str | None = None,
    embeds: bool = False,
    mesh: Mesh = ONE_RANK,
    share: WeightShard | None = None,
    max_rows: int = 256,
) -> Backend:
    """Return a backend that has read its weights; options by name are those of `CpuBackend`.

    Threads are shared only between cpu backends. The other backends can always embed. The ranks of
    a `mesh` run in this process, which only the reference does; with a `share` this process is one
    rank. Steps have up to `max_rows` rows.
    """
    sizes = size.num_pages, size.page_size
    if compute.backend == "gpu":
        from twostroke.backends.gpu.backend import GpuBackend

        return GpuBackend(
            *(program, tensors, *sizes, gpu_device(compute)),
            kv_format=size.kv_format,
            max_rows=max_rows,
            tapped_value=tapped_value,
            release=release,
            progress=progress or (lambda *_: None),
            same_tokens=compute.same_tokens,
        )
    if compute.backend == "reference":
        from twostroke.backends.reference import ReferenceBackend

        return ReferenceBackend(program, tensors, *sizes, tapped_value=tapped_value, mesh=mesh)
    if compute.backend == "torch":
        device = torch_device(compute)
        from twostroke.backends.torch import TorchBackend

        return TorchBackend(
            *(program, tensors, *sizes, device),
            num_threads=compute.num_threads,
            tapped_value=tapped_value,
            share=share,
        )
    threads_of = getattr(share_threads_with, "own", share_threads_with)  # of several ranks
    return CpuBackend(
        *(program, tensors, *sizes, resolve_num_threads(compute.num_threads)),
        level=compute.level,
        kv_format=size.kv_format,
        activation_bits=compute.known_bits,
        release=release,
        progress=progress,
        share_threads_with=threads_of if isinstance(threads_of, CpuBackend) else None,
        tapped_value=tapped_value,
        embeds=embeds,
        share=share,
    )


def check_can_run(compute: ComputeOptions) -> None:
    """Raise BackendError if the backend cannot run here, before a model is read."""
    if compute.backend == "gpu":
        gpu_device(compute)
    elif compute.backend == "torch":
        torch_device(compute)
    elif is_native(compute):
        choose_level(compute.level)


def weight_bytes(loaded: LoadedModel, compute: ComputeOptions) -> int:
    """Return about how many bytes the weights take here; some backends store them otherwise."""
    if is_native(compute):
        tensors = loaded.tensors.values()
        return loaded.file_bytes + sum(one.packed_bytes - one.num_bytes for one in tensors)
    if compute.backend == "gpu":
        gpu_device(compute)
        from twostroke.backends.gpu.stored import device_bytes

        return sum(device_bytes(build_program(loaded.spec), loaded.tensors).values())
    return sum(4 * prod(tensor.shape) for tensor in loaded.tensors.values())


def cost_model(
    program: Program,
    tensors: Mapping[str, QuantTensor],
    kv_format: str = DEFAULT_FORMAT,
    backend: str = "auto",
) -> CostModel:
    """Return the cost of a Program with its weights as a backend's kernels read them."""
    return CostModel(program, stored_bytes(program, tensors, backend), FORMATS[kv_format])


def stored_bytes(
    program: Program, tensors: Mapping[str, QuantTensor], backend: str
) -> dict[str, int]:
    """Return how many bytes each weight of a Program takes as a backend's kernels read it."""
    own = {name: tensors[name] for name in program.weight_shapes}
    if backend == "gpu":
        from twostroke.backends.gpu.stored import device_bytes

        return device_bytes(program, own)
    return {name: tensor.packed_bytes for name, tensor in own.items()}


def for_guesses(compute: ComputeOptions) -> ComputeOptions:
    """Return options for guesses: with less precision where that is faster.

    No answer depends on it.
    """
    if not is_native(compute):
        return compute
    return replace(compute, activation_bits=min(ACTIVATION_BITS))


def auto_kv_format(compute: ComputeOptions) -> str:
    """Return the format of keys and values that "auto" stands for.

    Raises:
        UsageError, BackendError: as `choose_level`.
    """
    if is_native(compute):
        return usual_kv_format(choose_level(compute.level).level)
    return "f32" if compute.backend in FLOAT32_BACKENDS else DEFAULT_FORMAT


def splits_sums(compute: ComputeOptions, parallel: ParallelOptions) -> bool:
    """Whether ranks split sums, which moves less: on GPUs, unless the options say otherwise."""
    if parallel.reduce != "auto" or compute.backend != "torch":
        return parallel.reduce == "sum"
    return torch_device(compute).startswith("cuda")


def torch_device(compute: ComputeOptions, local_rank: int | None = None) -> str:
    """Return the torch backend's device; each rank of a machine has a GPU for itself.

    Raises:
        BackendError: PyTorch is not installed, or does not have this device here.
    """
    try:
        from twostroke.backends.torch import choose_device
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = f"The torch backend needs PyTorch: {install_command('gpu')}."
        raise BackendError(message) from None
    return choose_device(compute.device, local_rank)
