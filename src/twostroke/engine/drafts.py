"""A draft: a second, smaller model in the same engine, which guesses for the first."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self

from twostroke.cache import FORMATS
from twostroke.core.config import PARTNER
from twostroke.core.errors import MemoryLimitError, TwostrokeError, UsageError
from twostroke.core.machine import memory_available
from twostroke.engine.loading import load
from twostroke.engine.parts import (
    auto_kv_format,
    build_tokenizer,
    guessing,
    make_backend,
    stored_bytes,
    weight_bytes,
)
from twostroke.engine.sizing import size_cache
from twostroke.fetch import known_draft
from twostroke.models import build_program
from twostroke.program.cost import CostModel
from twostroke.spec import DraftModel, StepTime, Words
from twostroke.tokenize import Translation
from twostroke.weights import release_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.backends import Backend
    from twostroke.core.config import EngineOptions, SpeculationOptions
    from twostroke.core.hardware import Hardware
    from twostroke.engine.client import ModelCard
    from twostroke.engine.sizing import CacheSize
    from twostroke.tokenize import Tokenizer
    from twostroke.weights import LoadedModel

_logger = logging.getLogger("twostroke.engine")


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft whose files are mapped and found to fit its target, and that is yet to be built.

    `words` are None where both models have the same vocabulary. One that nobody named
    (`is_optional`) is left out where it cannot be read or has no memory.
    """

    loaded: LoadedModel
    words: Words | None
    is_optional: bool = False

    @classmethod
    def wanted(cls, options: SpeculationOptions, model: str, target: ModelCard) -> Self | None:
        """Look at the draft that is asked for, by name or as the one known for `model`.

        Raises:
            UsageError: none is known here, but must be; and as `of`.
        """
        named = options.draft
        if named is None or (named == PARTNER and options.method not in {"auto", "draft"}):
            return None
        if named != PARTNER:
            return cls.of(named, target)
        if options.method == "auto" and options.heads is not None:
            return None
        known = known_draft(model)
        if known is None:
            if options.method == "auto":
                return None
            raise UsageError(
                f"There is no draft for {target.name} in the cache that the catalogue knows: name "
                "one with --draft MODEL."
            )
        if options.method == "draft":
            return cls.of(known, target)
        try:
            return replace(cls.of(known, target), is_optional=True)
        except TwostrokeError as error:
            leave_out(known, error)
            return None

    @classmethod
    def of(cls, model: str, target: ModelCard) -> Self:
        """Look at `model`, any name that `weights.load` understands.

        Raises:
            UsageError: its tokens cannot say what the target says.
            ModelNotFoundError, ModelFormatError: as for any model.
        """
        loaded = load(model)
        tokenizer = build_tokenizer(loaded)
        if _is_same(tokenizer, target.tokenizer):
            return cls(loaded, None)
        to_target = Translation(tokenizer, target.tokenizer)
        to_draft = Translation(target.tokenizer, tokenizer)
        if not to_target.is_able() or not to_draft.is_able():
            raise UsageError(
                f"{loaded.name} cannot be a draft of {target.name}: one has no tokens for what the "
                "other says. Take a smaller model of the same family."
            )
        return cls(loaded, Words(to_draft, to_target))

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
        with _naming_who_has_no_room(target.name):
            size = size_cache(
                program,
                cache,
                options.batch.token_budget,
                weight_bytes(self.loaded, options.compute),
                memory_available() - backend.facts.cache_bytes,
                auto_format=auto_kv_format(options.compute),
            )
            size = _no_more_than(size, backend.facts.num_pages, len(program.cache_groups))
            runner = make_backend(
                self.loaded.tensors,
                program,
                guessing(options.compute),
                size,
                partial(release_tensors, self.loaded.mappings),
                None,
                share_threads_with=backend,
            )
        cost = CostModel(program, stored_bytes(self.loaded, program), FORMATS[size.kv_format])
        return DraftModel(
            runner,
            StepTime(cost.per_step(), hardware, runner.facts.rows_together),
            vocab_size=target.cost.program.vocab_size,
            own_vocab_size=program.vocab_size,
            context_length=length,
            token_budget=options.batch.token_budget,
            words=self.words,
        )


@contextmanager
def _naming_who_has_no_room(target: str) -> Iterator[None]:
    """Let errors of memory say that it is the draft which does not fit."""
    try:
        yield
    except MemoryLimitError as error:
        message = f"The draft does not fit beside {target}. {error}"
        raise MemoryLimitError(message) from None


def leave_out(name: str, error: TwostrokeError) -> None:
    """Say that a draft which nobody named is not used."""
    _logger.warning("%s guesses nothing (--draft none: no draft): %s", name, error)


def _no_more_than(size: CacheSize, num_pages: int, num_groups: int) -> CacheSize:
    """Return a cache for as many tokens as `num_pages` hold, or one context if that is more."""
    for_one = -(-size.context_length // size.page_size) * num_groups
    num_pages = min(size.num_pages, max(num_pages, for_one))
    return replace(
        size, num_pages=num_pages, cache_bytes=size.cache_bytes // size.num_pages * num_pages
    )


def _is_same(ours: Tokenizer, theirs: Tokenizer) -> bool:
    """Whether each token id means the same text to both; either may have rows beyond its texts."""
    size = min(ours.vocab_size, theirs.vocab_size)
    return max(ours.num_text_ids, theirs.num_text_ids) <= size and all(
        ours.token_text(token_id) == theirs.token_text(token_id) for token_id in range(size)
    )
