"""Models that draft tokens for a target model: a smaller draft model, or trained heads."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from twostroke.backends.create import (
    auto_kv_format,
    cost_model,
    create_backend,
    is_native,
    memory_free,
    options_for_drafts,
    unused_bytes,
)
from twostroke.backends.kv_size import CacheSize
from twostroke.backends.recipe import EngineRecipe
from twostroke.core.errors import MemoryLimitError, TwostrokeError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.core.options import PARTNER
from twostroke.engine.speculation import (
    AcceptanceRate,
    DraftModel,
    EagleHeads,
    MedusaHeads,
    StepTimeModel,
    TokenTranslator,
)
from twostroke.engine.speculation.heads import MAX_WAITING_STATES
from twostroke.model.families import build_program
from twostroke.model.families.heads import EAGLE, NUMBERS, TABLE, build_heads, last_hidden
from twostroke.model.hub import local_draft
from twostroke.model.loader import build_tokenizer, load
from twostroke.model.program.kv_layout import FORMATS as CACHE_FORMATS
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.tokenizer import Translation
from twostroke.model.weights import load_heads, numbers_table, target_identity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.backends.interface import Backend
    from twostroke.core.hardware import Hardware
    from twostroke.core.options import ComputeOptions, EngineOptions, SpeculationOptions
    from twostroke.engine.model_card import ModelCard
    from twostroke.model.program import Program
    from twostroke.model.tokenizer import Tokenizer
    from twostroke.model.weights import LoadedHeads, LoadedModel

_MIN_STEP_ROWS = 256  # of a step of heads; more if the requests can have more drafts
_SPARE_TOKENS = 128  # of a request, besides its window, for waiting states and drafts
_PACKED = FORMATS["Q8_0"]
_logger = logging.getLogger("twostroke.engine")


class Draft(Frozen):
    """A draft model that fits its target model. Its files are mapped; no weights are read yet.

    Attributes:
        loaded: the draft model's files.
        words: translates tokens between the vocabularies of the two models; None if both
            vocabularies are the same.
        is_optional: whether the engine starts without the draft model if it cannot be read or does
            not fit into memory. The draft model is optional if the user did not name it.
    """

    loaded: LoadedModel
    words: TokenTranslator | None
    is_optional: bool = False

    @classmethod
    def from_options(
        cls, options: SpeculationOptions, model: str, target: ModelCard
    ) -> Self | None:
        """Open the draft model that the options name, or the catalogue's draft for `model`.

        Returns None if the options use no draft model, or an optional one cannot be opened.

        Raises:
            UsageError: the method "draft" has no draft model in the catalogue, or its tokens cannot
                express the target's text.
            ModelNotFoundError, ModelFormatError: the draft model is missing or damaged.
        """
        is_required = options.method == "draft"
        if options.draft not in {None, PARTNER}:
            return cls.of(options.draft, target)
        is_useful = is_required or (options.method == "auto" and not options.heads)
        if options.draft is None or not is_useful:
            return None
        draft_name = local_draft(model)
        if draft_name is None:
            if not is_required:
                return None
            raise UsageError(
                f"The catalogue has no draft model for {target.name} in the cache: name one with "
                "--draft MODEL."
            )
        try:
            return replace(cls.of(draft_name, target), is_optional=not is_required)
        except TwostrokeError as error:
            if is_required:
                raise
            _warn_unused(draft_name, error)
            return None

    @classmethod
    def of(cls, model: str, target: ModelCard) -> Self:
        """Open `model`, a name or path of a model, as a draft model for `target`.

        Raises:
            UsageError: the vocabulary of one model cannot express the other's text.
            ModelNotFoundError, ModelFormatError: the draft model is missing or damaged.
        """
        loaded = load(model)
        tokenizer = build_tokenizer(loaded)
        if has_same_tokens(tokenizer, target.tokenizer):
            return cls(loaded, None)
        to_target = Translation(tokenizer, target.tokenizer)
        to_draft = Translation(target.tokenizer, tokenizer)
        if not to_target.preserves_text() or not to_draft.preserves_text():
            raise UsageError(
                f"{loaded.name} cannot draft for {target.name}: the vocabulary of one model cannot "
                "express the other's text. Use a smaller model of the same family."
            )
        return cls(loaded, TokenTranslator(to_draft, to_target))

    def build(
        self, options: EngineOptions, target: ModelCard, backend: Backend, hardware: Hardware | None
    ) -> DraftModel | None:
        """Read the draft model's weights, and return the model as a proposer of draft tokens.

        The draft model shares the threads of `backend`: close it before `backend`. Returns None if
        the draft model is optional and cannot be built.

        Raises:
            MemoryLimitError: the draft model does not fit into memory with its target.
        """
        recipe = self._recipe(options, target)
        try:
            if recipe.program.state_layers:
                raise UsageError(
                    f"{self.loaded.name} has recurrent layers, whose states cannot take back "
                    "drafts: name another draft model with --draft MODEL."
                )
            size = _draft_cache_size(recipe, backend)
            runner = recipe.create_backend(size, share_threads_with=backend)
        except TwostrokeError as error:
            if isinstance(error, MemoryLimitError):
                error = MemoryLimitError(
                    f"The draft model does not fit into memory with {target.name}. {error}"
                )
            if not self.is_optional:
                raise error from None
            _warn_unused(self.loaded.name, error)
            return None
        cost = recipe.cost_model(size.kv_format)
        return DraftModel(
            runner,
            StepTimeModel(cost.per_step(), hardware, runner.facts.rows_together),
            vocab_size=target.cost.program.vocab_size,
            own_vocab_size=recipe.program.vocab_size,
            context_length=size.context_length,
            token_budget=recipe.max_rows,
            translator=self.words,
        )

    def _recipe(self, options: EngineOptions, target: ModelCard) -> EngineRecipe:
        """Return the recipe of the draft model, for an engine with these options."""
        program = build_program(self.loaded.spec)
        length = min(program.context_length, target.context_length)
        draft_options = replace(
            options,
            compute=options_for_drafts(options.compute),
            cache=replace(options.cache, context_length=length, memory_bytes=None),
        )
        loaded = self.loaded.without_tokenizer()
        return EngineRecipe(loaded.name, draft_options, loaded, program)  # each rank runs all of it


def _draft_cache_size(recipe: EngineRecipe, target: Backend) -> CacheSize:
    """Return the size of a draft model's KV cache: at most the tokens of its target's cache."""
    unused = unused_bytes(recipe.options.compute, target)
    size = recipe.size_kv_cache(recipe.free_bytes() - unused)
    pages_of_one_request = -(-size.context_length // size.page_size)
    pages_of_one_request *= len(recipe.program.cache_groups)
    facts = target.facts
    num_target = facts.num_pages * facts.page_size // size.page_size
    num_pages = min(size.num_pages, max(num_target, pages_of_one_request))
    cache_bytes = size.cache_bytes // size.num_pages * num_pages
    return replace(size, num_pages=num_pages, cache_bytes=cache_bytes)


class DraftHeads(Frozen):
    """Trained draft heads that fit their target model. Files are mapped; no weights are read yet.

    `table` is the target's embedding table, which an EAGLE head reads.
    """

    loaded: LoadedHeads
    table: QuantTensor

    @classmethod
    def from_options(cls, options: SpeculationOptions, target: LoadedModel) -> Self | None:
        """Open the draft heads in the folder that the options name; None if they name none.

        Raises:
            UsageError, ModelNotFoundError, ModelFormatError: as `of`.
        """
        return cls.of(options.heads, options.method, target) if options.heads else None

    @classmethod
    def of(cls, folder: str, method: str, target: LoadedModel) -> Self:
        """Open the draft heads in `folder` for a speculation method, which may be "auto".

        Raises:
            UsageError: the heads are of another method, or were trained for another model.
            ModelNotFoundError, ModelFormatError: the heads are missing or damaged.
        """
        loaded = load_heads(Path(folder))
        facts = loaded.facts
        kind = facts.spec.kind
        shape = facts.spec.layer
        if method not in {"auto", kind}:
            raise UsageError(
                f"{folder} holds {kind} heads: use --speculate {kind}, or auto, not {method}."
            )
        sizes = target.spec.vocab_size, target.spec.hidden_size
        fits = (shape.vocab_size, shape.hidden_size) == sizes
        if not fits or facts.target_id != target_identity(target.tensors):
            raise UsageError(
                f"{folder} holds heads of {facts.target}, which cannot draft for "
                f"{target.name}: train heads for it with `twostroke train-heads {target.name}`."
            )
        return cls(loaded, target.tensors[TABLE])

    def build(
        self, options: EngineOptions, backend: Backend, hardware: Hardware | None
    ) -> EagleHeads | MedusaHeads:
        """Read the draft heads' weights, and return the heads as a proposer of draft tokens.

        The heads share the threads of `backend`: close them before `backend`.

        Raises:
            MemoryLimitError: the pages of the heads do not fit into memory with the target's.
        """
        facts = self.loaded.facts
        max_running = options.batch.effective_max_running
        is_eagle = facts.spec.kind == EAGLE
        layer = facts.spec.layer
        size = HeadsSize(
            context_length=layer.context_length,
            num_tokens=layer.window.size if layer.window else 0,
            num_requests=max_running if is_eagle else 0,
            max_rows=min(
                MAX_WAITING_STATES * max_running,
                max(_MIN_STEP_ROWS, facts.spec.depth * max_running),
            ),
        )
        tensors = self._tensors(packed=is_native(options_for_drafts(options.compute)))
        runner, step_time = create_heads_runner(
            (build_heads(facts.spec), tensors),
            size,
            options.compute,
            backend,
            hardware,
            name=f"The draft heads of {self.loaded.path}",
            remedy="train heads with a smaller --window",
        )
        rate = AcceptanceRate(facts.right_if_sure, facts.accepted[0])
        if not is_eagle:
            return MedusaHeads(runner, step_time, rate, facts.token_ids, len(facts.accepted))
        return EagleHeads(
            runner,
            step_time,
            rate,
            facts.token_ids,
            context_length=size.context_length,
            token_budget=size.max_rows,
        )

    def _tensors(self, *, packed: bool) -> Mapping[str, QuantTensor]:
        """Return the weights of the draft heads; with `packed`, matrices in the format Q8_0."""
        tensors = {TABLE: self.table, NUMBERS: numbers_table(self.loaded.facts.spec.depth)}
        for name, tensor in self.loaded.tensors.items():
            tensors[name] = in_packed_format(tensor) if packed else tensor
        return tensors


def in_packed_format(tensor: QuantTensor) -> QuantTensor:
    """Return a matrix of floats in the format Q8_0, which takes less time to read.

    Other tensors are returned unchanged. Use this only for weights that make drafts, because it
    rounds the weights.
    """
    is_matrix = len(tensor.shape) == 2 and tensor.shape[1] % _PACKED.block_size == 0
    if not is_matrix or tensor.format.block_size > 1:
        return tensor
    return QuantTensor.from_floats(tensor.dequantize(), _PACKED)


class HeadsSize(Frozen):
    """Sizes of the memory of draft heads.

    Attributes:
        context_length: maximum number of tokens of a sequence.
        num_tokens: number of tokens of a sequence whose keys and values are stored, in addition to
            its newest tokens.
        num_requests: maximum number of requests whose keys and values are stored at the same time.
        max_rows: maximum number of rows of a step.
    """

    context_length: int
    num_tokens: int
    num_requests: int
    max_rows: int


def create_heads_runner(
    model: tuple[Program, Mapping[str, QuantTensor]],
    size: HeadsSize,
    compute: ComputeOptions,
    target: Backend,
    hardware: Hardware | None,
    *,
    name: str,
    remedy: str,
) -> tuple[Backend, StepTimeModel]:
    """Read the weights of draft heads into a backend, which shares the threads of `target`.

    `model` has the Program and the weights of the heads; `name` is their name in errors, and
    `remedy` tells how to need less memory. Also returns a model that predicts the time of the
    backend's steps.

    Raises:
        MemoryLimitError: the pages do not fit into memory with the target's.
    """
    program, tensors = model
    compute = options_for_drafts(compute)
    page_size, kv_format = target.facts.page_size, auto_kv_format(compute)
    pages_of_request = -(-(_SPARE_TOKENS + size.num_tokens) // page_size) + 1
    num_pages = max(1, pages_of_request * size.num_requests)
    cache_bytes = num_pages * program.page_bytes(page_size, CACHE_FORMATS[kv_format])
    free_bytes = memory_free(compute, program, tensors, size.max_rows)
    free_bytes -= unused_bytes(compute, target)
    if cache_bytes > free_bytes:
        raise MemoryLimitError(
            f"{name} cannot be used: keys and values of "
            f"{counted_noun(size.num_requests, 'request')} take {cache_bytes / 1e6:,.0f} MB, and "
            f"{max(0, free_bytes) / 1e6:,.0f} MB of memory are free. Lower --max-running, or "
            f"{remedy}."
        )
    runner = create_backend(
        tensors,
        program,
        compute,
        CacheSize(size.context_length, num_pages, page_size, cache_bytes, kv_format),
        share_threads_with=target,
        tapped_value=last_hidden(program),
        max_rows=size.max_rows,
    )
    cost = cost_model(program, tensors, kv_format, compute.backend).per_step()
    return runner, StepTimeModel(cost, hardware, runner.facts.rows_together)


def _warn_unused(name: str, error: TwostrokeError) -> None:
    _logger.warning("%s is not used as a draft (--draft none: no draft): %s", name, error)


def has_same_tokens(ours: Tokenizer, theirs: Tokenizer) -> bool:
    """Whether each token id stands for the same text in two tokenizers.

    If so, a draft model's tokens need no translation. Ids that pad a vocabulary, after the last
    token with a text, are not compared.
    """
    size = min(ours.vocab_size, theirs.vocab_size)
    return max(ours.num_text_ids, theirs.num_text_ids) <= size and all(
        ours.token_text(token_id) == theirs.token_text(token_id) for token_id in range(size)
    )
