"""Creates the backend that compute options name, and answers questions about that choice."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.backends.cpu import CpuBackend
from twostroke.backends.cpu.library import choose_level, usual_kv_format
from twostroke.backends.cpu.packed_store import PackedStore
from twostroke.core.env import cache_dir, install_command
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
    from twostroke.core.distributed_options import ParallelOptions
    from twostroke.core.options import ComputeOptions, EngineOptions
    from twostroke.model.program import Program
    from twostroke.model.program.mesh import Mesh
    from twostroke.model.quant import QuantTensor
    from twostroke.model.weights import LoadedModel

    Progress = Callable[[int, int], None]
    Release = Callable[[Sequence[QuantTensor]], None]

FLOAT32_BACKENDS = ("reference", "torch")
_CUDA_BYTES = 600 << 20  # GPU memory of CUDA and its libraries, apart from our tensors


def is_native(compute: ComputeOptions) -> bool:
    """Return whether compute options select the cpu backend, whose kernels are native code."""
    return compute.backend in {"auto", "cpu"}


def check_backend(options: EngineOptions, program: Program, notify: Callable[[str], None]) -> None:
    """Check that the backend which the options select can run a model's Program.

    With `--backend auto`, the cpu backend runs, even on a machine with a GPU; `notify` is then
    called with a hint about `--backend gpu`.

    Raises:
        BackendError: the selected backend cannot run the Program.
    """
    from twostroke.backends.gpu import device

    if program.state_layers and options.compute.backend == "gpu":
        raise BackendError(
            f"{program.name} has recurrent layers, which the backend gpu cannot compute yet: use "
            "--backend cpu."
        )
    if options.compute.backend == "gpu":
        check_gpu(program, options.compute)
    elif options.compute.backend == "auto" and device.may_exist():
        notify("There is a GPU, which --backend gpu uses; that backend is young.")


def check_gpu(program: Program, compute: ComputeOptions) -> None:
    """Raise BackendError if the gpu backend cannot run a model's Program on this machine."""
    gpu_device(compute)
    from twostroke.backends.gpu.lower import lower

    lower(program)


def gpu_device(compute: ComputeOptions) -> GpuDevice:
    """Return the GPU that the gpu backend uses.

    Raises:
        BackendError: there is no usable device.
    """
    from twostroke.backends.gpu.device import find_device

    return find_device(compute.device)


def memory_free(
    compute: ComputeOptions, program: Program, tensors: Mapping[str, QuantTensor], max_rows: int
) -> int:
    """Return the bytes that are free for weights and KV pages, on the GPU or in RAM.

    The backend that the compute options select decides which memory counts. On a GPU, the memory
    that a step needs for intermediate values is already subtracted.
    """
    if compute.backend != "gpu":
        return memory_available()
    reserved_bytes = working_bytes(compute, program, tensors, max_rows)
    return max(0, gpu_device(compute).memory_available - reserved_bytes)


def working_bytes(
    compute: ComputeOptions, program: Program, tensors: Mapping[str, QuantTensor], max_rows: int
) -> int:
    """Return the bytes of GPU memory that the gpu backend needs besides weights and KV pages.

    CUDA itself and a step's intermediate values take them.
    """
    device = gpu_device(compute)
    from twostroke.backends.gpu.plan import step_bytes

    return _CUDA_BYTES + step_bytes(
        program, tensors, device, max_rows, same_tokens=compute.same_tokens
    )


def unused_bytes(compute: ComputeOptions, backend: Backend) -> int:
    """Return how much of the memory that is reported as free a backend will still take.

    The cpu backend's pages take memory only once they are used; a GPU's are allocated at once.
    Weights in mapped files are reported as free, although they take memory.
    """
    facts = backend.facts
    return 0 if compute.backend == "gpu" else facts.cache_bytes + facts.shared_weight_bytes


def create_backend(  # noqa: PLR0913 - each is a fact that only the caller knows
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
    weight_shard: WeightShard | None = None,
    packed_source: str | None = None,
    max_rows: int = 256,
) -> Backend:
    """Create the backend that the compute options select, and load the model's weights into it.

    `release`, `progress`, `share_threads_with`, `tapped_value` and `embeds` are documented at
    `CpuBackend`. Only cpu backends share threads; other backends can always embed.

    `mesh`: the ranks of the reference backend, which runs them all in this process. `weight_shard`:
    this process is one rank of several, and loads this part of the model. `packed_source`: the
    stamp of the model's files; with it, the cpu backend stores packed weights for later starts.
    None: they are not stored. `max_rows`: the largest number of rows of a step.
    """
    if compute.backend == "gpu":
        from twostroke.backends.gpu.backend import GpuBackend

        return GpuBackend(
            program,
            tensors,
            num_pages=size.num_pages,
            page_size=size.page_size,
            device=gpu_device(compute),
            kv_format=size.kv_format,
            max_rows=max_rows,
            tapped_value=tapped_value,
            release=release,
            progress=progress or (lambda *_: None),
            same_tokens=compute.same_tokens,
        )
    if compute.backend == "reference":
        return _create_reference_backend(
            tensors, program, size, tapped_value=tapped_value, mesh=mesh
        )
    if compute.backend == "torch":
        return _create_torch_backend(
            tensors, program, compute, size, tapped_value=tapped_value, weight_shard=weight_shard
        )
    thread_owner = getattr(share_threads_with, "rank0_backend", share_threads_with)
    return CpuBackend(
        program,
        tensors,
        num_pages=size.num_pages,
        page_size=size.page_size,
        num_threads=resolve_num_threads(compute.num_threads),
        num_states=size.num_states,
        level=compute.level,
        kv_format=size.kv_format,
        activation_bits=compute.resolved_bits,
        release=release,
        progress=progress,
        share_threads_with=thread_owner if isinstance(thread_owner, CpuBackend) else None,
        tapped_value=tapped_value,
        embeds=embeds,
        weight_shard=weight_shard,
        packed_store=packed_store(compute, packed_source),
    )


def packed_store(compute: ComputeOptions, source: str | None) -> PackedStore | None:
    """Return the store for packed weights; None if the options turn it off or `source` is None."""
    if source is None or compute.packed_cache_bytes == 0:
        return None
    folder = cache_dir() / "packed-weights"
    return PackedStore(folder, source, max_bytes=compute.packed_cache_bytes)


def _create_reference_backend(
    tensors: Mapping[str, QuantTensor],
    program: Program,
    size: CacheSize,
    *,
    tapped_value: str | None,
    mesh: Mesh,
) -> Backend:
    from twostroke.backends.reference import ReferenceBackend

    return ReferenceBackend(
        program,
        tensors,
        size.num_pages,
        size.page_size,
        num_states=size.num_states,
        tapped_value=tapped_value,
        mesh=mesh,
    )


def _create_torch_backend(
    tensors: Mapping[str, QuantTensor],
    program: Program,
    compute: ComputeOptions,
    size: CacheSize,
    *,
    tapped_value: str | None,
    weight_shard: WeightShard | None,
) -> Backend:
    device = torch_device(compute)  # raises if PyTorch is not installed
    from twostroke.backends.torch import TorchBackend

    return TorchBackend(
        program,
        tensors,
        num_pages=size.num_pages,
        page_size=size.page_size,
        device=device,
        num_threads=compute.num_threads,
        num_states=size.num_states,
        tapped_value=tapped_value,
        weight_shard=weight_shard,
    )


def check_can_run(compute: ComputeOptions) -> None:
    """Raise BackendError if the selected backend cannot run on this machine with any model."""
    if compute.backend == "gpu":
        gpu_device(compute)
    elif compute.backend == "torch":
        torch_device(compute)
    elif is_native(compute):
        choose_level(compute.level)


def weight_bytes(loaded: LoadedModel, compute: ComputeOptions) -> int:
    """Estimate the bytes of memory that a model's weights take in the format of its backend."""
    if is_native(compute):
        tensors = loaded.tensors.values()
        return loaded.file_bytes + sum(tensor.packed_bytes - tensor.num_bytes for tensor in tensors)
    if compute.backend == "gpu":
        gpu_device(compute)
        from twostroke.backends.gpu.weight_layout import device_bytes

        return sum(device_bytes(build_program(loaded.spec), loaded.tensors).values())
    return sum(4 * prod(tensor.shape) for tensor in loaded.tensors.values())


def cost_model(
    program: Program,
    tensors: Mapping[str, QuantTensor],
    kv_format: str = DEFAULT_FORMAT,
    backend: str = "auto",
) -> CostModel:
    """Return a model's cost model: the bytes and FLOPs of its operations on the given backend."""
    return CostModel(program, stored_bytes(program, tensors, backend), FORMATS[kv_format])


def stored_bytes(
    program: Program, tensors: Mapping[str, QuantTensor], backend: str
) -> dict[str, int]:
    """Return the bytes of each weight of a model in a backend's format, by the weight's name."""
    program_tensors = {name: tensors[name] for name in program.weight_shapes}
    if backend == "gpu":
        from twostroke.backends.gpu.weight_layout import device_bytes

        return device_bytes(program, program_tensors)
    return {name: tensor.packed_bytes for name, tensor in program_tensors.items()}


def options_for_drafts(compute: ComputeOptions) -> ComputeOptions:
    """Return compute options for a draft model: on the cpu backend, the fewest activation bits.

    Answers stay the same, because the main model verifies every draft token.
    """
    if not is_native(compute):
        return compute
    return replace(compute, activation_bits=min(ACTIVATION_BITS))


def auto_kv_format(compute: ComputeOptions) -> str:
    """Return the name of the KV cache format that `--kv-format auto` stands for.

    Raises:
        UsageError: the chosen instruction-set level does not exist.
        BackendError: the level is not built, or cannot run on this machine.
    """
    if is_native(compute):
        return usual_kv_format(choose_level(compute.level).level)
    return "f32" if compute.backend in FLOAT32_BACKENDS else DEFAULT_FORMAT


def splits_sums(compute: ComputeOptions, parallel: ParallelOptions) -> bool:
    """Return whether tensor-parallel ranks split the sums of products and all-reduce the terms.

    Fewer bytes then move between ranks, but sums are rounded differently. By default, only GPUs
    split sums.
    """
    if parallel.reduce != "auto" or compute.backend != "torch":
        return parallel.reduce == "sum"
    return torch_device(compute).startswith("cuda")


def torch_device(compute: ComputeOptions, local_rank: int | None = None) -> str:
    """Return the name of the torch backend's device; each rank of a machine gets a different GPU.

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
