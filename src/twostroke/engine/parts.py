"""The parts that `build` puts together: a tokenizer and a backend for a loaded model."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from twostroke.backends.cpu import CpuBackend
from twostroke.backends.cpu.library import choose_level
from twostroke.cache import DEFAULT_FORMAT
from twostroke.core.config import ACTIVATION_BITS
from twostroke.core.errors import BackendError, ModelFormatError
from twostroke.core.machine import resolve_num_threads
from twostroke.tokenize import from_gguf, from_tokenizer_json
from twostroke.weights import GgufTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twostroke.backends import Backend
    from twostroke.core.config import ComputeOptions
    from twostroke.engine.sizing import CacheSize
    from twostroke.program import Program
    from twostroke.quant import QuantTensor
    from twostroke.tokenize import Tokenizer
    from twostroke.weights import LoadedModel

    Progress = Callable[[int, int], None]

FLOAT32_BACKENDS = ("reference", "torch")


def build_tokenizer(loaded: LoadedModel) -> Tokenizer:
    """Return the tokenizer that lies beside, or in, a model's weights.

    Raises:
        ModelFormatError: it cannot be read, or it makes tokens for which the model has no row.
    """
    source = loaded.tokenizer_source
    if isinstance(source, GgufTokenizer):
        return from_gguf(source.metadata)
    tokenizer = from_tokenizer_json(source.path)
    if tokenizer.num_text_ids > loaded.spec.vocab_size:
        raise ModelFormatError(
            f"{loaded.name}: its {source.path.name} has {tokenizer.num_text_ids} tokens, its "
            f"embedding table {loaded.spec.vocab_size} rows: it is the tokenizer of another model."
        )
    return tokenizer


def build_backend(
    loaded: LoadedModel, program: Program, compute: ComputeOptions, size: CacheSize
) -> Backend:
    """Return a backend alone, for evaluation."""
    return make_backend(loaded.tensors, program, compute, size, loaded.release, None)


def make_backend(  # noqa: PLR0913 - one argument a thing that only the builder knows
    tensors: Mapping[str, QuantTensor],
    program: Program,
    compute: ComputeOptions,
    size: CacheSize,
    release: Callable[[Sequence[QuantTensor]], None],
    progress: Progress | None,
    *,
    share_threads_with: Backend | None = None,
    tapped_value: str | None = None,
    embeds: bool = False,
) -> Backend:
    """Return a backend that has read its weights; the last arguments are as in `CpuBackend`.

    The other backends can always embed.

    It shares the threads of the one `beside` it, where that has any of its own.
    """
    if compute.backend == "reference":
        from twostroke.backends.reference import ReferenceBackend

        return ReferenceBackend(
            program, tensors, size.num_pages, size.page_size, tapped_value=tapped_value
        )
    if compute.backend == "torch":
        return _torch_backend(tensors, program, compute, size, tapped_value)
    return CpuBackend(
        program,
        tensors,
        size.num_pages,
        size.page_size,
        resolve_num_threads(compute.num_threads),
        level=compute.level,
        kv_format=size.kv_format,
        activation_bits=compute.activation_bits,
        release=release,
        progress=progress,
        share_threads_with=share_threads_with
        if isinstance(share_threads_with, CpuBackend)
        else None,
        tapped_value=tapped_value,
        embeds=embeds,
    )


def _torch_backend(
    tensors: Mapping[str, QuantTensor],
    program: Program,
    compute: ComputeOptions,
    size: CacheSize,
    tapped_value: str | None,
) -> Backend:
    device = _torch_device(compute)
    from twostroke.backends.torch import TorchBackend

    return TorchBackend(
        program, tensors, size.num_pages, size.page_size, device, tapped_value=tapped_value
    )


def _torch_device(compute: ComputeOptions) -> str:
    try:
        from twostroke.backends.torch import choose_device
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = "The torch backend needs PyTorch: pip install 'twostroke[gpu]'."
        raise BackendError(message) from None
    return choose_device(compute.device)


def check_can_run(compute: ComputeOptions) -> None:
    """Raise BackendError if this backend cannot run here, before anything is read for it."""
    if compute.backend == "torch":
        _torch_device(compute)
    elif compute.backend not in FLOAT32_BACKENDS:
        choose_level(compute.level)


def weight_bytes(loaded: LoadedModel, compute: ComputeOptions) -> int:
    """Return about how many bytes the weights take here; some backends make them float32."""
    if compute.backend not in FLOAT32_BACKENDS:
        return loaded.file_bytes
    return sum(4 * prod(tensor.shape) for tensor in loaded.tensors.values())


def stored_bytes(loaded: LoadedModel, program: Program) -> dict[str, int]:
    """Return the size of each of a Program's weights as its file has it."""
    return {name: loaded.tensors[name].num_bytes for name in program.weight_shapes}


def guessing(compute: ComputeOptions) -> ComputeOptions:
    """Return how guesses are computed: roughly where that is faster; no answer depends on it."""
    if compute.backend in FLOAT32_BACKENDS:
        return compute
    return replace(compute, activation_bits=min(ACTIVATION_BITS))


def auto_kv_format(compute: ComputeOptions) -> str:
    """Return how the backend stores keys and values where nothing is asked for."""
    return "f32" if compute.backend in FLOAT32_BACKENDS else DEFAULT_FORMAT
