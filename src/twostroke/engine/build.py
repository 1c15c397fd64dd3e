"""Puts the parts together: the only place where "auto" is resolved, once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Self

from twostroke.backends.cpu import CpuBackend
from twostroke.backends.cpu.library import choose_level
from twostroke.backends.reference import ReferenceBackend
from twostroke.cache import DEFAULT_FORMAT, FORMATS, PagePool, PrefixIndex
from twostroke.core.config import EngineOptions
from twostroke.core.errors import BackendError, ModelFormatError
from twostroke.core.machine import give_back_memory, memory_available, resolve_num_threads
from twostroke.engine.client import Client, ModelCard
from twostroke.engine.hardware import Limits
from twostroke.engine.loop import EngineLoop
from twostroke.engine.meter import Meter
from twostroke.engine.prompts import Chat
from twostroke.engine.sizing import size_cache
from twostroke.models import build_program
from twostroke.program.cost import CostModel
from twostroke.schedule import Scheduler, SchedulerConfig, make_policy
from twostroke.tokenize import from_gguf, from_tokenizer_json
from twostroke.weights import GgufTokenizer, LoadedModel, load, release_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twostroke.backends import Backend, BackendFacts
    from twostroke.core.config import BatchOptions, CacheOptions, ComputeOptions
    from twostroke.engine.sizing import CacheSize
    from twostroke.program import Program
    from twostroke.quant import QuantTensor
    from twostroke.tokenize import Tokenizer

    Progress = Callable[[int, int], None]


_MAX_RUNNING = 256
_FLOAT32_BACKENDS = ("reference", "torch")
_CHATML = {"<|im_start|>", "<|im_end|>"}  # markers that let a model chat without a template


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine: `client` takes requests, `facts` say what it is made of.

    `limits` are what the machine could do for it at best.
    """

    client: Client
    facts: BackendFacts
    context_length: int
    limits: Limits

    @property
    def card(self) -> ModelCard:
        """The model that it runs."""
        return self.client.card

    def close(self, drain_s: float = 0.0) -> None:
        """Stop, after at most `drain_s` seconds for running requests."""
        self.client.loop.close(drain_s)

    def __enter__(self) -> Self:
        """Use the engine in a `with` block, which closes it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the engine."""
        self.close()


def build(
    model: str,
    options: EngineOptions | None = None,
    progress: Progress | None = None,
    accept: Callable[[ModelCard], None] | None = None,
) -> Engine:
    """Load `model` (any name that `weights.load` understands) and start an engine for it.

    `accept(card)` is called before the weights are read: what it raises ends the build.
    `progress(done, total)` is called with bytes of weights as they are made ready.

    Raises:
        ModelNotFoundError, ModelFormatError, DownloadError: there is no such model, it cannot be
            fetched, or its files are not in order.
        MemoryLimitError: weights and key-value pages do not fit.
        BackendError: no backend can run here.
    """
    options = options or EngineOptions()
    loaded = load(model)
    program = build_program(loaded.spec)
    size_of_weights = weight_bytes(loaded, options.compute)
    size = size_cache(
        program,
        options.cache,
        options.batch.token_budget,
        size_of_weights,
        memory_available(),
        auto_format=auto_kv_format(options.compute),
    )
    card = _card(loaded, program, size)
    if accept is not None:
        accept(card)
    tensors, give_back = loaded.tensors, partial(release_tensors, loaded.mappings)
    del loaded  # the tokenizer's tables go with it, before the weights take their memory
    give_back_memory()
    limits = _limits(options.compute, size_of_weights)
    backend = _build_backend(tensors, program, options.compute, size, give_back, progress)
    try:
        scheduler = _build_scheduler(options.cache, options.batch, size, backend)
        loop = EngineLoop(backend, scheduler, Meter(card.cost.per_step()))
    except BaseException:
        backend.close()
        raise
    return Engine(Client(card, loop), backend.facts, size.context_length, limits)


def _limits(compute: ComputeOptions, weight_bytes: int) -> Limits:
    """Return the machine's limits for an engine that streams `weight_bytes`.

    A native engine's are measured now, if that was not done yet, while there is room for a stream
    of that size.
    """
    num_threads = resolve_num_threads(compute.num_threads)
    if compute.backend in _FLOAT32_BACKENDS:
        return Limits("portable", num_threads, weight_bytes)
    limits = Limits(choose_level(compute.level).level, num_threads, weight_bytes)
    limits.hardware()
    return limits


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
    return _build_backend(loaded.tensors, program, compute, size, loaded.release, None)


def check_can_run(compute: ComputeOptions) -> None:
    """Raise BackendError if this backend cannot run here, before anything is read for it."""
    if compute.backend == "torch":
        _torch_device(compute)
    elif compute.backend not in _FLOAT32_BACKENDS:
        choose_level(compute.level)


def _build_backend(
    tensors: Mapping[str, QuantTensor],
    program: Program,
    compute: ComputeOptions,
    size: CacheSize,
    release: Callable[[Sequence[QuantTensor]], None],
    progress: Progress | None,
) -> Backend:
    if compute.backend == "reference":
        return ReferenceBackend(program, tensors, size.num_pages, size.page_size)
    if compute.backend == "torch":
        return _torch_backend(tensors, program, compute, size)
    return CpuBackend(
        program,
        tensors,
        size.num_pages,
        size.page_size,
        resolve_num_threads(compute.num_threads),
        level=compute.level,
        kv_format=size.kv_format,
        release=release,
        progress=progress,
    )


def _torch_backend(
    tensors: Mapping[str, QuantTensor], program: Program, compute: ComputeOptions, size: CacheSize
) -> Backend:
    device = _torch_device(compute)
    from twostroke.backends.torch import TorchBackend

    return TorchBackend(program, tensors, size.num_pages, size.page_size, device)


def _torch_device(compute: ComputeOptions) -> str:
    try:
        from twostroke.backends.torch import choose_device
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = "The torch backend needs PyTorch: pip install 'twostroke[gpu]'."
        raise BackendError(message) from None
    return choose_device(compute.device)


def weight_bytes(loaded: LoadedModel, compute: ComputeOptions) -> int:
    """Return about how many bytes the weights take here; some backends make them float32."""
    if compute.backend not in _FLOAT32_BACKENDS:
        return loaded.file_bytes
    return sum(4 * prod(tensor.shape) for tensor in loaded.tensors.values())


def auto_kv_format(compute: ComputeOptions) -> str:
    """Return how the backend stores keys and values where nothing is asked for."""
    return "f32" if compute.backend in _FLOAT32_BACKENDS else DEFAULT_FORMAT


def _build_scheduler(
    cache: CacheOptions, batch: BatchOptions, size: CacheSize, backend: Backend
) -> Scheduler:
    facts = backend.facts
    pool = PagePool(facts.num_pages, facts.page_size, facts.windows)
    reuse_generated = facts.one_arithmetic or not cache.strict_prefix
    index = PrefixIndex(pool, reuse_generated=reuse_generated) if cache.prefix_cache else None
    config = SchedulerConfig(
        context_length=size.context_length,
        max_running=batch.max_running or min(_MAX_RUNNING, batch.token_budget),
        token_budget=batch.token_budget,
        max_waiting_requests=batch.max_waiting_requests,
        max_waiting_tokens=batch.max_waiting_tokens,
    )
    return Scheduler(config, pool, index, make_policy(batch))


def _card(loaded: LoadedModel, program: Program, size: CacheSize) -> ModelCard:
    tokenizer = build_tokenizer(loaded)
    sizes = {name: loaded.tensors[name].num_bytes for name in program.weight_shapes}
    has_chat = bool(tokenizer.chat_templates) or set(tokenizer.special_texts()) >= _CHATML
    formats = sorted(
        {tensor.format.name for tensor in loaded.tensors.values() if len(tensor.shape) > 1}
    )
    return ModelCard(
        name=loaded.name,
        architecture=loaded.spec.architecture,
        format=", ".join(formats),
        context_length=size.context_length,
        file_bytes=loaded.file_bytes,
        created_s=int(time.time()),
        licence=loaded.licence,
        tokenizer=tokenizer,
        chat_template=Chat(tokenizer) if has_chat else None,
        cost=CostModel(program, sizes, FORMATS[size.kv_format]),
    )
