"""A draft: a second, smaller model in the same engine, which guesses for the first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self

from twostroke.cache import FORMATS
from twostroke.core.errors import MemoryLimitError, UsageError
from twostroke.core.machine import memory_available
from twostroke.engine.parts import (
    auto_kv_format,
    build_tokenizer,
    guessing,
    make_backend,
    stored_bytes,
    weight_bytes,
)
from twostroke.engine.sizing import size_cache
from twostroke.models import build_program
from twostroke.program.cost import CostModel
from twostroke.spec import DraftModel, Pace
from twostroke.weights import load, release_tensors

if TYPE_CHECKING:
    from twostroke.backends import Backend
    from twostroke.core.config import EngineOptions
    from twostroke.core.hardware import Hardware
    from twostroke.engine.client import ModelCard
    from twostroke.tokenize import Tokenizer
    from twostroke.weights import LoadedModel


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft whose files are mapped and found to fit its target, and that is yet to be built."""

    loaded: LoadedModel

    @classmethod
    def of(cls, model: str, target: ModelCard) -> Self:
        """Look at `model`, any name that `weights.load` understands.

        Raises:
            UsageError: its tokens are not the target's.
            ModelNotFoundError, ModelFormatError: as for any model.
        """
        loaded = load(model)
        _check_vocabulary(loaded.name, build_tokenizer(loaded), target)
        return cls(loaded)

    def build(
        self, options: EngineOptions, target: ModelCard, backend: Backend, hardware: Hardware | None
    ) -> DraftModel:
        """Read the weights; the draft computes on the threads of `backend`, which outlives it.

        Raises:
            MemoryLimitError: it does not fit beside its target.
        """
        program = build_program(self.loaded.spec)
        length = min(program.context_length, target.context_length)
        cache = replace(options.cache, context_length=length, memory_bytes=None)
        try:
            size = size_cache(
                program,
                cache,
                options.batch.token_budget,
                weight_bytes(self.loaded, options.compute),
                memory_available() - backend.facts.cache_bytes,
                auto_format=auto_kv_format(options.compute),
            )
        except MemoryLimitError as error:
            message = f"The draft does not fit beside {target.name}. {error.message}"
            raise MemoryLimitError(message) from None
        cost = CostModel(program, stored_bytes(self.loaded, program), FORMATS[size.kv_format])
        runner = make_backend(
            self.loaded.tensors,
            program,
            guessing(options.compute),
            size,
            partial(release_tensors, self.loaded.mappings),
            None,
            beside=backend,
        )
        return DraftModel(
            runner,
            Pace(cost.per_step(), hardware),
            vocab_size=target.cost.program.vocab_size,
            context_length=length,
            token_budget=options.batch.token_budget,
        )


def _check_vocabulary(name: str, tokenizer: Tokenizer, target: ModelCard) -> None:
    """Refuse a draft whose token ids mean other texts than the target's."""
    theirs = target.tokenizer
    size = min(tokenizer.vocab_size, theirs.vocab_size)
    sizes_fit = tokenizer.num_text_ids <= theirs.vocab_size >= size
    different = next(
        (i for i in range(size) if tokenizer.token_text(i) != theirs.token_text(i)), None
    )
    if different is None and sizes_fit and theirs.num_text_ids <= tokenizer.vocab_size:
        return
    what = f"has {tokenizer.vocab_size} tokens where that has {theirs.vocab_size}"
    if different is not None:
        what = (
            f"calls {tokenizer.token_text(different)!r} what that calls "
            f"{theirs.token_text(different)!r} (token {different})"
        )
    raise UsageError(
        f"{name} cannot be a draft of {target.name}: it {what}. A draft must have its target's "
        "vocabulary, as a smaller model of the same family mostly does."
    )
