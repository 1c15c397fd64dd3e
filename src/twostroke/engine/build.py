"""Puts the parts together: the only place where "auto" is resolved, once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

from twostroke.backends.cpu.library import choose_level
from twostroke.cache import FORMATS, PagePool, PrefixIndex
from twostroke.chat.conversation import Chat
from twostroke.core.config import EngineOptions
from twostroke.core.errors import TwostrokeError
from twostroke.core.machine import give_back_memory, memory_available, resolve_num_threads
from twostroke.engine.client import Client, ModelCard
from twostroke.engine.drafts import Draft, leave_out
from twostroke.engine.heads import Heads
from twostroke.engine.limits import Limits
from twostroke.engine.loading import load
from twostroke.engine.loop import EngineLoop
from twostroke.engine.parts import (
    FLOAT32_BACKENDS,
    auto_kv_format,
    build_tokenizer,
    make_backend,
    stored_bytes,
    weight_bytes,
)
from twostroke.engine.sizing import size_cache
from twostroke.models import build_program
from twostroke.models.heads import last_hidden
from twostroke.program.cost import CostModel
from twostroke.schedule import Scheduler, SchedulerConfig, make_policy
from twostroke.spec import Lookahead, NgramProposer, Speculator, StepTime, budgets
from twostroke.weights import LoadedModel, release_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.backends import Backend, BackendFacts
    from twostroke.core.config import (
        BatchOptions,
        CacheOptions,
        ComputeOptions,
        SpeculationOptions,
    )
    from twostroke.engine.sizing import CacheSize
    from twostroke.program import Program
    from twostroke.program.cost import StepCost
    from twostroke.spec import Proposer, Watcher

    Progress = Callable[[int, int], None]


_MAX_RUNNING = 256
_CHATML = {"<|im_start|>", "<|im_end|>"}  # markers that let a model chat without a template


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine: `client` takes requests, `facts` say what it is made of.

    `limits` are what the machine could do for it at best, `draft` the model that guesses for it.
    """

    client: Client
    facts: BackendFacts
    context_length: int
    limits: Limits
    draft: str | None = None

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
    watcher: Watcher | None = None,
) -> Engine:
    """Load `model` (any name that `weights.load` understands) and start an engine for it.

    `accept(card)` is called before the weights are read: what it raises ends the build.
    `progress(done, total)` is called with bytes of weights as they are made ready. A `watcher` is
    shown every step, with the last hidden states of the rows in which it drew.

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
    draft = Draft.wanted(options.speculation, model, card)
    guessing = options.speculation
    heads = Heads.of(guessing.heads, guessing.method, loaded) if guessing.heads else None
    tensors, give_back = loaded.tensors, partial(release_tensors, loaded.mappings)
    del loaded  # the tokenizer's tables go with it, before the weights take their memory
    give_back_memory()
    limits = _limits(options.compute, size_of_weights)
    tap = None if watcher is None and heads is None else last_hidden(program)
    backend = make_backend(
        tensors, program, options.compute, size, give_back, progress, tapped_value=tap, embeds=True
    )
    helpers: list[Proposer] = []
    watchers: list[Watcher] = [] if watcher is None else [watcher]
    try:
        scheduler = _build_scheduler(options.cache, options.batch, size, backend)
        if heads is not None:
            trained = heads.build(options, _max_running(options.batch), backend, limits.hardware())
            helpers.append(trained)
            watchers.append(trained)
        if draft is not None:
            try:
                helpers.append(draft.build(options, card, backend, limits.hardware()))
            except TwostrokeError as error:
                if not draft.is_optional:
                    raise
                leave_out(draft.loaded.name, error)
                draft = None
        cost, rows_together = card.cost.per_step(), backend.facts.rows_together
        speculator = build_speculator(guessing, cost, limits, rows_together, helpers, watchers)
        loop = EngineLoop(backend, scheduler, speculator, cost)
    except BaseException:
        for helper in helpers:
            helper.close()
        backend.close()
        raise
    draft_name = None if draft is None else draft.loaded.name
    return Engine(Client(card, loop), backend.facts, size.context_length, limits, draft_name)


def _limits(compute: ComputeOptions, weight_bytes: int) -> Limits:
    """Return the machine's limits for an engine that streams `weight_bytes`.

    A native engine's are measured now, if that was not done yet, while there is room for a stream
    of that size.
    """
    num_threads = resolve_num_threads(compute.num_threads)
    if compute.backend in FLOAT32_BACKENDS:
        return Limits("portable", num_threads, weight_bytes)
    limits = Limits(choose_level(compute.level).level, num_threads, weight_bytes)
    limits.hardware()
    return limits


def _build_scheduler(
    cache: CacheOptions, batch: BatchOptions, size: CacheSize, backend: Backend
) -> Scheduler:
    facts = backend.facts
    pool = PagePool(facts.num_pages, facts.page_size, facts.windows)
    reuse_generated = facts.one_arithmetic or not cache.strict_prefix
    index = PrefixIndex(pool, reuse_generated=reuse_generated) if cache.prefix_cache else None
    config = SchedulerConfig(
        context_length=size.context_length,
        max_running=_max_running(batch),
        token_budget=batch.token_budget,
        max_waiting_requests=batch.max_waiting_requests,
        max_waiting_tokens=batch.max_waiting_tokens,
    )
    return Scheduler(config, pool, index, make_policy(batch))


def _max_running(batch: BatchOptions) -> int:
    return batch.max_running or min(_MAX_RUNNING, batch.token_budget)


def build_speculator(
    options: SpeculationOptions,
    cost: StepCost,
    limits: Limits | None,
    rows_together: int,
    helpers: Sequence[Proposer] = (),
    watchers: Sequence[Watcher] = (),
) -> Speculator:
    """Return who guesses tokens, for steps of this cost on a machine with these limits.

    Up to `rows_together` rows take as long as the next power of two of them (`BackendFacts`).
    `helpers` are proposers with models of their own.
    """
    step_time = StepTime(cost, limits.hardware() if limits else None, rows_together)
    proposers: list[Proposer] = []
    if options.method in {"auto", "ngram"}:
        proposers.append(NgramProposer())
    proposers += helpers
    if options.method == "lookahead":
        proposers.append(Lookahead())
    on_request = [Lookahead()] if options.method == "auto" else []
    budget_of = budgets(step_time, options.count)
    return Speculator(proposers, budget_of, step_time, on_request, watchers)


def _card(loaded: LoadedModel, program: Program, size: CacheSize) -> ModelCard:
    tokenizer = build_tokenizer(loaded)
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
        cost=CostModel(program, stored_bytes(loaded, program), FORMATS[size.kv_format]),
        pooling=loaded.pooling,
    )
