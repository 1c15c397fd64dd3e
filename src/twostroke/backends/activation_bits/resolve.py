"""Resolves `activation_bits="auto"`: the choice for a model that is known, or is made now."""

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
    RightAnswers,
    checking_text,
    choose,
    choosing_text,
    products_of,
)
from twostroke.backends.cpu import CpuBackend
from twostroke.backends.create import is_native
from twostroke.core import env
from twostroke.core.activation_bits import ActivationBits
from twostroke.core.errors import TwostrokeError
from twostroke.core.hardware import give_back_memory, resolve_num_threads
from twostroke.core.json_io import read_checked_json, write_checked_json
from twostroke.core.options import AUTO_BITS, DEFAULT_ACTIVATION_BITS
from twostroke.model.load import build_tokenizer
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

    Say = Callable[[str], None]
    Check = Callable[[CpuBackend], None]

_NUM_TOKENS = 256
_PAGE_SIZE = 16
MOST_UNASKED: Final = 2_000_000_000  # weights in products, for which two cores take three minutes
note = logging.getLogger("twostroke.engine").info


def with_known_bits(
    compute: ComputeOptions,
    loaded: LoadedModel,
    program: Program,
    say: Say = note,
    most_weights: float = math.inf,
    check: Check = lambda _: None,
) -> ComputeOptions:
    """Return options in which "auto" bits of activations are those chosen for the model.

    A choice that is neither in the package nor in the cache folder is made now and kept, unless
    products have more than `most_weights`: they then keep 15 bits. `say` gets a line in both cases.
    `check` gets a backend with 15 bits before a choice is made; what it raises is passed on.

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
    if choice is None and num_weights > most_weights:
        say(
            "The model is computed more precisely than it may need: `twostroke compare MODEL "
            "--activation-bits auto` finds out, once, what makes it faster, and takes minutes "
            "with a model of this size."
        )
        return replace(compute, activation_bits=DEFAULT_ACTIVATION_BITS)
    if choice is None:
        say(
            f"Preparing {loaded.name} for this processor, once: measuring how precisely each of "
            "its parts must be computed (--activation-bits 15 skips this)."
        )
        began = time.perf_counter()
        choice = _choose(compute, loaded, program, products, model_id, check)
        with suppress(OSError):  # it is then made again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_checked_json(path, msgspec.to_builtins(choice))
        say(f"{loaded.name} is prepared; that took {time.perf_counter() - began:.0f} s.")
    return replace(compute, activation_bits=choice)


def _choose(
    compute: ComputeOptions,
    loaded: LoadedModel,
    program: Program,
    products: list[Product],
    model_id: str,
    check_backend: Check,
) -> ActivationBits:
    tokenizer, length = build_tokenizer(loaded), min(_NUM_TOKENS, program.context_length)
    begin = list(tokenizer.prefix_ids)  # as prompts have it
    tokens = [*begin, *tokenizer.encode(choosing_text())][:length]
    others, num_own = tokenizer.encode(checking_text()), max(length - len(begin), 1)
    pieces = [
        [*begin, *others[start : start + num_own]] for start in range(0, len(others), num_own)
    ]
    backend = CpuBackend(
        program,
        loaded.tensors,
        1,
        _PAGE_SIZE,
        resolve_num_threads(compute.num_threads),
        level=compute.level,
        release=loaded.release,
    )

    def score(bits: Mapping[str, int]) -> NDArray[np.float32]:
        return backend.score_with(bits, tokens)

    def check(bits: Mapping[str, int]) -> float:
        total = 0.0
        for piece in pieces:  # the logits of one at a time are in memory
            right = RightAnswers(backend.score_with({}, piece))
            total += len(piece) * right.divergence(backend.score_with(bits, piece))
        return total / sum(map(len, pieces))

    try:
        check_backend(backend)
        return choose(products, score, check, model_id)
    finally:
        backend.close()
        give_back_memory()


def _shipped(model_id: str) -> ActivationBits | None:
    """Return the choice for one of the catalogue's models."""
    file = resources.files("twostroke.backends.activation_bits").joinpath("shipped.json")
    known = msgspec.json.decode(file.read_bytes(), type=list[ActivationBits])
    return next((c for c in known if (c.model_id, c.version) == (model_id, METHOD)), None)


def _read(path: Path, model_id: str) -> ActivationBits | None:
    try:
        choice = msgspec.convert(read_checked_json(path), ActivationBits)
    except (TwostrokeError, msgspec.MsgspecError):
        return None
    return choice if (choice.model_id, choice.version) == (model_id, METHOD) else None
