"""A draft: a second, smaller model in the same engine that guesses for the first."""

from __future__ import annotations

import logging
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
    from twostroke.backends import Backend
    from twostroke.core.config import EngineOptions, SpeculationOptions
    from twostroke.core.hardware import Hardware
    from twostroke.engine.client import ModelCard
    from twostroke.program import Program
    from twostroke.tokenize import Tokenizer
    from twostroke.weights import LoadedModel

_logger = logging.getLogger("twostroke.engine")


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft that fits its target; its files are mapped and its weights not read yet.

    `words` are None where both models have the same vocabulary. An optional draft, which the user
    did not name, is left out if it cannot be read or has no memory.
    """

    loaded: LoadedModel
    words: Words | None
    is_optional: bool = False

    @classmethod
    def wanted(cls, options: SpeculationOptions, model: str, target: ModelCard) -> Self | None:
        """Open the draft that is asked for, by name or as the catalogue's for `model`.

        Raises:
            UsageError: a draft is required and the catalogue has none; and as `of`.
        """
        named, is_required = options.draft, options.method == "draft"
        if named not in {None, PARTNER}:
            return cls.of(named, target)
        if named is None or not (is_required or (options.method == "auto" and not options.heads)):
            return None
        known = known_draft(model)
        if known is None and is_required:
            raise UsageError(
                f"The catalogue has no draft for {target.name} that is in the cache: name one with "
                "--draft MODEL."
            )
        if known is None:
            return None
        if is_required:
            return cls.of(known, target)
        try:
            return replace(cls.of(known, target), is_optional=True)
        except TwostrokeError as error:
            leave_out(known, error)
            return None

    @classmethod
    def of(cls, model: str, target: ModelCard) -> Self:
        """Open `model`, any name that `weights.load` understands.

        Raises:
            UsageError: its tokens cannot express the target's text.
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
                f"{loaded.name} cannot be a draft of {target.name}: one vocabulary cannot express "
                "the other's text. Take a smaller model of the same family."
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
        try:
            runner, kv_format = self._runner(program, length, options, backend)
        except MemoryLimitError as error:
            message = f"The draft does not fit beside {target.name}. {error}"
            raise MemoryLimitError(message) from None
        cost = CostModel(program, stored_bytes(self.loaded, program), FORMATS[kv_format])
        return DraftModel(
            runner,
            StepTime(cost.per_step(), hardware, runner.facts.rows_together),
            vocab_size=target.cost.program.vocab_size,
            own_vocab_size=program.vocab_size,
            context_length=length,
            token_budget=options.batch.token_budget,
            words=self.words,
        )

    def _runner(
        self, program: Program, length: int, options: EngineOptions, backend: Backend
    ) -> tuple[Backend, str]:
        """Return the draft's backend, with no more pages than the target's, and their format."""
        size = size_cache(
            program,
            replace(options.cache, context_length=length, memory_bytes=None),
            options.batch.token_budget,
            weight_bytes(self.loaded, options.compute),
            memory_available() - backend.facts.cache_bytes,
            auto_format=auto_kv_format(options.compute),
        )
        for_one = -(-size.context_length // size.page_size) * len(program.cache_groups)
        num_pages = min(size.num_pages, max(backend.facts.num_pages, for_one))
        cache_bytes = size.cache_bytes // size.num_pages * num_pages
        size = replace(size, num_pages=num_pages, cache_bytes=cache_bytes)
        give_back = partial(release_tensors, self.loaded.mappings)
        compute = guessing(options.compute)
        runner = make_backend(
            self.loaded.tensors, program, compute, size, give_back, None, share_threads_with=backend
        )
        return runner, size.kv_format


def leave_out(name: str, error: TwostrokeError) -> None:
    """Log that an optional draft is not used."""
    _logger.warning("%s guesses nothing (--draft none: no draft): %s", name, error)


def _is_same(ours: Tokenizer, theirs: Tokenizer) -> bool:
    """Return whether each id means the same text to both; either may have rows without a text."""
    size = min(ours.vocab_size, theirs.vocab_size)
    return max(ours.num_text_ids, theirs.num_text_ids) <= size and all(
        ours.token_text(token_id) == theirs.token_text(token_id) for token_id in range(size)
    )
