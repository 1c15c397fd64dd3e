"""Resolves `activation_bits="auto"`: reads the choice for a model, or makes it now."""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from importlib import resources
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from twostroke.backends.activation_bits import (
    METHOD,
    MIN_WEIGHTS,
    ExpectedLogits,
    checking_text,
    choose,
    choosing_text,
    products_of,
)
from twostroke.backends.cpu import CpuBackend
from twostroke.backends.create import is_native
from twostroke.core import env
from twostroke.core.errors import TwostrokeError
from twostroke.core.hardware import resolve_num_threads
from twostroke.core.json_io import read_checked_json, write_checked_json
from twostroke.core.options import AUTO_BITS, DEFAULT_ACTIVATION_BITS, ActivationBits
from twostroke.core.process_tuning import return_freed_memory
from twostroke.model.loader import build_tokenizer
from twostroke.model.weights import weights_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from twostroke.backends.activation_bits import Product
    from twostroke.core.options import ComputeOptions
    from twostroke.model.program import Program
    from twostroke.model.weights import LoadedModel

    Notify = Callable[[str], None]
    Check = Callable[[CpuBackend], None]

_NUM_TOKENS = 256
_PAGE_SIZE = 16
# Models with more weights in products are not measured unless asked: two cores need three minutes.
MAX_AUTO_WEIGHTS: Final = 2_000_000_000
note = logging.getLogger("twostroke.engine").info


def resolve_activation_bits(
    compute: ComputeOptions,
    loaded: LoadedModel,
    program: Program,
    notify: Notify = note,
    max_weights: float = math.inf,
    check: Check = lambda _: None,
) -> ComputeOptions:
    """Replace "auto" activation bits in compute options by the choice for the model.

    The choice comes from the package or the cache folder; else it is measured now and cached. If
    the products have more than `max_weights` weights, nothing is measured and they keep 15 bits.
    `notify` gets a line in both cases. Before measuring, `check` is called with a backend that
    computes with 15 bits; its errors are passed on.

    Raises:
        BackendError, MemoryLimitError: the model cannot be run here.
    """
    if compute.activation_bits != AUTO_BITS or not is_native(compute):
        return compute
    products = products_of(program, loaded.tensors)
    num_weights = sum(product.num_weights for product in products)
    if num_weights < MIN_WEIGHTS:
        return replace(compute, activation_bits=DEFAULT_ACTIVATION_BITS)
    model_id = weights_identity(loaded.tensors)
    path = env.cache_dir() / "activation-bits" / f"{model_id[:16]}.json"
    choice = _shipped(model_id) or _read(path, model_id)
    if choice is None and num_weights > max_weights:
        notify(
            "The model is computed more precisely than it may need: `twostroke compare MODEL "
            "--activation-bits auto` finds out, once, what makes it faster, and takes minutes "
            "with a model of this size."
        )
        return replace(compute, activation_bits=DEFAULT_ACTIVATION_BITS)
    if choice is None:
        notify(
            f"Preparing {loaded.name} for this processor, once: measuring how precisely each of "
            "its parts must be computed (--activation-bits 15 skips this)."
        )
        start_s = time.perf_counter()
        choice = _choose(
            compute,
            loaded,
            program=program,
            products=products,
            model_id=model_id,
            check_backend=check,
        )
        with suppress(OSError):  # without a cache, the next start measures again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_checked_json(path, msgspec.to_builtins(choice))
        notify(f"{loaded.name} is prepared; that took {time.perf_counter() - start_s:.0f} s.")
    return replace(compute, activation_bits=choice)


def _choose(
    compute: ComputeOptions,
    loaded: LoadedModel,
    program: Program,
    products: list[Product],
    model_id: str,
    check_backend: Check,
) -> ActivationBits:
    """Measure the model's errors with fewer activation bits, and choose bits within the limit."""
    tokenizer = build_tokenizer(loaded)
    length = min(_NUM_TOKENS, program.context_length)
    prefix = list(tokenizer.prefix_ids)
    tokens = [*prefix, *tokenizer.encode(choosing_text())][:length]
    checking_tokens = tokenizer.encode(checking_text())
    piece_tokens = max(length - len(prefix), 1)
    chunks = [
        [*prefix, *checking_tokens[start : start + piece_tokens]]
        for start in range(0, len(checking_tokens), piece_tokens)
    ]
    backend = CpuBackend(
        program,
        loaded.tensors,
        num_pages=1,
        page_size=_PAGE_SIZE,
        num_threads=resolve_num_threads(compute.num_threads),
        level=compute.level,
        release=loaded.release,
    )

    def score(bits: Mapping[str, int]) -> NDArray[np.float32]:
        return backend.score_with(bits, tokens)

    def check(bits: Mapping[str, int]) -> float:
        total = 0.0
        for chunk in chunks:  # keeps the logits of only one chunk in memory
            expected = ExpectedLogits(backend.score_with({}, chunk))
            total += len(chunk) * expected.divergence(backend.score_with(bits, chunk))
        return total / sum(map(len, chunks))

    try:
        check_backend(backend)
        return choose(products, score, check, model_id)
    finally:
        backend.close()
        return_freed_memory()


def _shipped(model_id: str) -> ActivationBits | None:
    """Return the activation bits that the package ships for a model, or None."""
    file = resources.files("twostroke.backends.activation_bits").joinpath("shipped.json")
    choices = msgspec.json.decode(file.read_bytes(), type=list[ActivationBits])
    current = (choice for choice in choices if choice.version == METHOD)
    return next((choice for choice in current if choice.model_id == model_id), None)


def _read(path: Path, model_id: str) -> ActivationBits | None:
    try:
        choice = msgspec.convert(read_checked_json(path), ActivationBits)
    except (TwostrokeError, msgspec.MsgspecError):
        return None
    return choice if (choice.model_id, choice.version) == (model_id, METHOD) else None
