"""Resolves `activation_bits="auto"`: reads the choice for a model, or makes it now."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from importlib import resources
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from msgspec.structs import replace

from twostroke.backends.activation_bits import (
    FULL_SEARCH,
    METHOD,
    MIN_WEIGHTS,
    QUICK_SEARCH,
    ExpectedLogits,
    checking_text,
    choose,
    choosing_text,
    is_certain,
    mean_of,
    products_of,
)
from twostroke.backends.cpu import CpuBackend
from twostroke.backends.create import is_native, packed_store
from twostroke.core import env
from twostroke.core.errors import TwostrokeError
from twostroke.core.hardware import resolve_num_threads
from twostroke.core.json_io import read_checked_json, write_checked_json
from twostroke.core.options import AUTO_BITS, DEFAULT_ACTIVATION_BITS, ActivationBits
from twostroke.core.process_tuning import return_freed_memory
from twostroke.model.loader import build_tokenizer
from twostroke.model.weights import weights_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from twostroke.backends.activation_bits import Product
    from twostroke.core.options import ComputeOptions
    from twostroke.model.program import Program
    from twostroke.model.weights import LoadedModel

    Notify = Callable[[str], None]
    Check = Callable[[CpuBackend], None]

_PAGE_SIZE = 16
# Models with more weights in products are searched quickly, and scored on less text. The number of
# weights decides, not the time: the same file must get the same bits on each machine.
LARGE_WEIGHTS: Final = 2_000_000_000
_MIN_CHOOSING_TOKENS, _MAX_CHOOSING_TOKENS = 64, 256
_CHOOSING_WORK = 0.5e12  # tokens times weights that a token reads, at most, for large models
_MIN_CHECKING_TOKENS = 128
_CHECKING_WORK = 2e12
_KEPT_LOGITS_BYTES = 256 << 20  # of the checking text, for further checks
note = logging.getLogger("twostroke.engine").info


def resolve_activation_bits(
    compute: ComputeOptions,
    loaded: LoadedModel,
    program: Program,
    notify: Notify = note,
    check: Check = lambda _: None,
) -> ComputeOptions:
    """Replace "auto" activation bits in compute options by the choice for the model.

    The choice comes from the package or the cache folder. If neither has one, it is measured now
    and cached, and `notify` gets a line before and after. Before measuring, `check` is called with
    a backend that computes with 15 bits; its errors are passed on.

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
    is_large = sum(product.num_weights for product in products) > LARGE_WEIGHTS
    num_read_weights = sum(product.costs[15] for product in products)  # by one token
    length = min(_MAX_CHOOSING_TOKENS, program.context_length)
    prefix = list(tokenizer.prefix_ids)
    tokens = [*prefix, *tokenizer.encode(choosing_text())][:length]
    checking_tokens = tokenizer.encode(checking_text())
    if is_large:
        num_choosing = max(_MIN_CHOOSING_TOKENS, int(_CHOOSING_WORK / num_read_weights))
        num_checking = max(_MIN_CHECKING_TOKENS, int(_CHECKING_WORK / num_read_weights))
        tokens, checking_tokens = tokens[:num_choosing], checking_tokens[:num_checking]
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
        packed_store=packed_store(compute, loaded.file_stamp),
    )

    def score(bits: Mapping[str, int], num_tokens: int | None) -> NDArray[np.float32]:
        return backend.score_with(bits, tokens[:num_tokens])

    check = _CheckingText(backend, chunks, stops_early=is_large).mean_error
    try:
        check_backend(backend)
        effort = QUICK_SEARCH if is_large else FULL_SEARCH
        return choose(products, score, check, model_id, effort)
    finally:
        backend.close()
        return_freed_memory()


class _CheckingText:
    """The longer text on which choices of activation bits are checked, in chunks."""

    def __init__(
        self, backend: CpuBackend, chunks: Sequence[Sequence[int]], *, stops_early: bool
    ) -> None:
        """Set the chunks of the text.

        With `stops_early`, chunks are used only until the error is clearly above or below the
        limit.
        """
        self._backend, self._chunks, self._stops_early = backend, chunks, stops_early
        self._expected: dict[int, ExpectedLogits] = {}  # by the number of the chunk

    def mean_error(self, bits: Mapping[str, int]) -> float:
        """Return the mean KL divergence on the text; `bits` is as in `choose`."""
        errors = np.empty(0)
        for number, chunk in enumerate(self._chunks):
            expected = self._expected_logits(number)
            new_errors = expected.divergences(self._backend.score_with(bits, chunk))
            errors = np.concatenate([errors, new_errors])
            if self._stops_early and is_certain(errors):
                break
        return mean_of(errors)

    def _expected_logits(self, number: int) -> ExpectedLogits:
        """Return the logits of chunk `number` with 15 bits; the first chunks' logits are cached."""
        if number in self._expected:
            return self._expected[number]
        expected = ExpectedLogits(self._backend.score_with({}, self._chunks[number]))
        if sum(logits.num_bytes for logits in self._expected.values()) < _KEPT_LOGITS_BYTES:
            self._expected[number] = expected
        return expected


def _shipped(model_id: str) -> ActivationBits | None:
    """Return the activation bits that the package contains for a model; None if it has none."""
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
