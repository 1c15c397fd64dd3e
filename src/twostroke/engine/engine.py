"""Puts the parts of an engine together; its helpers resolve "auto", each once, while building."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from twostroke.backends.activation_bits.resolve import (
    MAX_AUTO_WEIGHTS,
    note,
    resolve_activation_bits,
)
from twostroke.backends.cpu.library import choose_level
from twostroke.backends.create import (
    auto_kv_format,
    check_backend,
    cost_model,
    create_backend,
    gpu_device,
    is_native,
    memory_free,
    weight_bytes,
)
from twostroke.backends.kv_size import size_kv_cache
from twostroke.backends.machine_limits import MachineLimits
from twostroke.backends.parallel.division import mesh_for
from twostroke.core.errors import MemoryLimitError
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import resolve_num_threads, return_freed_memory, scarcest_memory
from twostroke.core.options import DEFAULT_ACTIVATION_BITS, EngineOptions
from twostroke.engine.canary import FirstLoad
from twostroke.engine.chat.conversation import Chat
from twostroke.engine.client import Client
from twostroke.engine.drafters import Draft, DraftHeads
from twostroke.engine.kv_cache import PagePool, PrefixIndex
from twostroke.engine.kv_offload.build import check_tiers, start_offload, weights_digest
from twostroke.engine.kv_offload.tier import kv_cache_spec
from twostroke.engine.loop import EngineLoop
from twostroke.engine.model_card import ModelCard
from twostroke.engine.scheduler import Scheduler, SchedulerConfig, make_policy
from twostroke.engine.speculation import (
    Lookahead,
    NgramProposer,
    Speculator,
    StepTimeModel,
    budgets,
)
from twostroke.model.families import build_program
from twostroke.model.families.heads import last_hidden
from twostroke.model.loader import build_tokenizer, load
from twostroke.model.program.mesh import ONE_RANK, Mesh
from twostroke.model.weights import GgufTokenizer, LoadedModel, release_tensors, weights_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.backends.interface import Backend, BackendFacts
    from twostroke.backends.kv_size import CacheSize
    from twostroke.backends.parallel.rank_group import RankGroup
    from twostroke.core.options import (
        BatchOptions,
        CacheOptions,
        ComputeOptions,
        SpeculationOptions,
    )
    from twostroke.core.sampling import SamplingDefaults
    from twostroke.engine.speculation import Proposer, Watcher
    from twostroke.engine.speculation.draft_model import DraftModel
    from twostroke.engine.speculation.heads import EagleHeads, MedusaHeads
    from twostroke.model.program import Program
    from twostroke.model.program.cost import CostModel, StepCost
    from twostroke.model.tokenizer import Tokenizer

    Progress = Callable[[int, int], None]


class Engine(Frozen):
    """A running engine: `client` takes requests, `facts` are its backend's.

    `limits` are the machine's, `draft` is the name of the model that guesses tokens, and `mesh`
    says how ranks share the model.
    """

    client: Client
    facts: BackendFacts
    context_length: int
    limits: MachineLimits
    draft: str | None = None
    mesh: Mesh = ONE_RANK

    @property
    def card(self) -> ModelCard:
        """The engine's model."""
        return self.client.card

    def describe_gain(self) -> str:
        """Return in a sentence what this engine's ranks should gain over one process."""
        # One process needs nothing of it.
        from twostroke.backends.parallel.predicted_speed import describe_gain

        return describe_gain(
            facts=self.facts,
            cost=self.card.cost,
            mesh=self.mesh,
            limits=self.limits.hardware(),
            backend=self.client.loop.backend,
        )

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
    say: Callable[[str], None] = note,
) -> Engine:
    """Load `model` (any name that `loading.load` takes) and start an engine for it.

    `accept(card)` is called before the weights are read; if it raises, the build ends.
    `progress(done, total)` is called with bytes of weights that are ready. A `watcher` sees every
    step, with the last hidden states of the rows that drew a token. `say` gets a line before and
    after what takes long and is done once for a model.

    Raises:
        ModelNotFoundError, ModelFormatError, DownloadError: there is no such model, it cannot be
            fetched, or its files are damaged.
        QualityError: the model writes garbage.
        UsageError: the model cannot be divided into so many parts.
        MemoryLimitError: weights and key-value pages do not fit.
        BackendError: no backend can run here.
    """
    options = options or EngineOptions()
    check_tiers(options.offload)
    loaded = load(model)
    program = build_program(loaded.spec)
    check_backend(options, program, say)
    options = _with_known_bits(options, loaded, program, say)
    compute, speculation = options.compute, options.speculation
    mesh = mesh_for(options, program)
    num_weight_bytes = weight_bytes(loaded, compute)
    with ExitStack() as if_it_fails:
        ranks = _other_ranks(model, loaded, program, mesh, options)
        if ranks:
            if_it_fails.enter_context(ranks)
        size = ranks.size() if ranks else _size(loaded, program, mesh, options)
        card = _card(loaded, program, size, options)
        (accept or (lambda _: None))(card)
        draft = Draft.wanted(speculation, model, card)
        heads = DraftHeads.wanted(speculation, loaded)
        first_load = FirstLoad.of(loaded, card.tokenizer, program, options)
        digest = weights_digest(loaded) if options.offload.is_used else ""
        tensors, release = loaded.tensors, partial(release_tensors, loaded.mappings)
        del loaded  # so that the tokenizer's tables are freed before the weights take their memory
        return_freed_memory()
        limits = _limits(compute, num_weight_bytes, say)
        rows = options.batch.token_budget
        make = partial(create_backend, compute=compute, embeds=True, mesh=mesh, max_rows=rows)
        tapped = last_hidden(program) if watcher or heads else None
        backend = (ranks.backend if ranks else make)(
            tensors, program, size=size, release=release, progress=progress, tapped_value=tapped
        )
        if_it_fails.callback(backend.close)
        first_load.check(backend)
        facts, running = backend.facts, options.batch.effective_max_running
        ahead = _draws_ahead(facts, speculation, draft, heads, watcher)
        guessing = replace(speculation, method="off") if ahead else speculation
        scheduler = build_scheduler(options.cache, options.batch, size, facts, draws_ahead=ahead)
        trained = heads.build(options, running, backend, limits.hardware()) if heads else None
        _close_later(trained, if_it_fails)
        drafter = draft.build(options, card, backend, limits.hardware()) if draft else None
        _close_later(drafter, if_it_fails)
        helpers = [proposer for proposer in (trained, drafter) if proposer is not None]
        watchers = [one for one in (watcher, trained) if one is not None]
        card = replace(card, cost=replace(card.cost, stops_rows=facts.stops_rows))
        cost, together = card.cost.per_step(), facts.rows_together
        speculator = build_speculator(guessing, cost, limits, together, helpers, watchers)
        with ranks.own_cores() if ranks else nullcontext():  # the loop's thread computes, too
            client = Client(card, EngineLoop(backend, scheduler, speculator, cost))
        _begin_moving(client, digest, options, size, backend)
        if_it_fails.pop_all()
    name = draft.loaded.name if draft and drafter else None
    return Engine(client, facts, size.context_length, limits, name, mesh)


def _close_later(proposer: DraftModel | EagleHeads | MedusaHeads | None, stack: ExitStack) -> None:
    if proposer is not None:
        stack.callback(proposer.close)


def _with_known_bits(
    options: EngineOptions, loaded: LoadedModel, program: Program, say: Callable[[str], None]
) -> EngineOptions:
    """Return options with known bits of activations; garbage is refused before minutes of choosing.

    Raises:
        QualityError: the model writes garbage.
    """
    precise = replace(options.compute, activation_bits=DEFAULT_ACTIVATION_BITS)

    def check(backend: Backend) -> None:
        given = replace(options, compute=precise)
        FirstLoad.of(loaded, build_tokenizer(loaded), program, given).check(backend)

    compute = resolve_activation_bits(
        options.compute, loaded, program, notify=say, max_weights=MAX_AUTO_WEIGHTS, check=check
    )
    return replace(options, compute=compute)


def _draws_ahead(facts: BackendFacts, options: SpeculationOptions, *guessers: object) -> bool:
    """Whether requests draw ahead, after which nothing can be guessed; "auto" prefers it."""
    is_free = options.method == "off" or (options.method == "auto" and options.count is None)
    return facts.draws_ahead > 0 and is_free and not any(guessers)


def build_speculator(
    options: SpeculationOptions,
    cost: StepCost,
    limits: MachineLimits | None,
    rows_together: int,
    helpers: Sequence[Proposer] = (),
    watchers: Sequence[Watcher] = (),
) -> Speculator:
    """Return the speculator for steps of this cost on a machine with these limits.

    Up to `rows_together` rows take as long as the next power of two of them (`BackendFacts`).
    `helpers` are proposers with models of their own.
    """
    step_time = StepTimeModel(cost, limits.hardware() if limits else None, rows_together)
    proposers: list[Proposer] = []
    if options.method in {"auto", "ngram"}:
        proposers.append(NgramProposer())
    proposers += helpers
    if options.method == "lookahead":
        proposers.append(Lookahead())
    on_request = [Lookahead()] if options.method == "auto" else []
    budget_of = budgets(step_time, options.count)
    return Speculator(proposers, budget_of, step_time, on_request, watchers)


def _other_ranks(
    model: str, loaded: LoadedModel, program: Program, mesh: Mesh, options: EngineOptions
) -> RankGroup | None:
    """Start the ranks in other processes, if there are any."""
    if mesh.num_ranks == 1 or options.compute.backend == "reference":
        return None
    from twostroke.backends.parallel.rank_group import RankGroup  # one process needs nothing of it

    return RankGroup(model, loaded, program, mesh, options)


def _begin_moving(
    client: Client, digest: str, options: EngineOptions, size: CacheSize, backend: Backend
) -> None:
    """Let pages come from tiers and from other engines, as far as the options say so."""
    is_alone = options.disaggregation.role == "mixed"
    if is_alone and not options.offload.is_used:
        return
    try:
        kind = kv_cache_spec(client.card, options, size, backend)
        if not is_alone:
            from twostroke.engine.disaggregation.build import (
                start_disaggregation,  # most engines need nothing of it
            )

            start_disaggregation(options.disaggregation, client, backend, kind)
        if options.offload.is_used:
            start_offload(client, kind, digest, options.offload)
    except BaseException:
        client.loop.close()
        raise


def _size(loaded: LoadedModel, program: Program, mesh: Mesh, options: EngineOptions) -> CacheSize:
    rows = options.batch.token_budget
    return size_kv_cache(
        program,
        options.cache,
        rows,
        weight_bytes(loaded, options.compute),
        memory_free(options.compute, program, loaded.tensors, rows),
        max_running=options.batch.effective_max_running,
        auto_format=auto_kv_format(options.compute),
        mesh=mesh,
        group_limit=None if options.compute.backend == "gpu" else scarcest_memory(),
    )


def _limits(
    compute: ComputeOptions, num_weight_bytes: int, say: Callable[[str], None] = note
) -> MachineLimits:
    """Return the machine's limits for steps that stream the weights.

    They are measured now if they are not known, while there is memory for a stream of that size. A
    GPU without room for that goes on without them, and `say` gets a line.
    """
    num_threads = resolve_num_threads(compute.num_threads)
    if compute.backend == "gpu":
        from twostroke.backends.gpu.limits import measure

        try:
            return MachineLimits.of_hardware(measure(gpu_device(compute)))
        except MemoryLimitError as error:
            say(f"{error} There is no MBU and no MFU without them.")
            return MachineLimits.of_hardware(None)
    if not is_native(compute):
        return MachineLimits("portable", num_threads, num_weight_bytes)
    limits = MachineLimits(choose_level(compute.level).level, num_threads, num_weight_bytes)
    limits.hardware()
    return limits


def build_scheduler(
    cache: CacheOptions,
    batch: BatchOptions,
    size: CacheSize,
    facts: BackendFacts,
    clock: Callable[[], float] = time.monotonic,
    *,
    draws_ahead: bool = False,
) -> Scheduler:
    """Return the scheduler of a backend with these facts, its pages and its prefix cache.

    With `draws_ahead`, requests draw ahead as far as the backend can.
    """
    pool = PagePool(facts.num_pages, facts.page_size, facts.windows, clock)
    reuse_generated = facts.one_arithmetic or not cache.strict_prefix
    index = PrefixIndex(pool, reuse_generated=reuse_generated) if cache.prefix_cache else None
    config = SchedulerConfig(
        context_length=size.context_length,
        max_running=batch.effective_max_running,
        token_budget=batch.token_budget,
        max_waiting_requests=batch.max_waiting_requests,
        max_waiting_tokens=batch.max_waiting_tokens,
        steps_ahead=facts.draws_ahead if draws_ahead else facts.steps_ahead,
        samples_ahead=draws_ahead,
    )
    return Scheduler(config, pool, index, make_policy(batch), clock)


def _card(
    loaded: LoadedModel, program: Program, size: CacheSize, options: EngineOptions
) -> ModelCard:
    cost = cost_model(program, loaded.tensors, size.kv_format, options.compute.backend)
    identity = weights_identity(loaded.tensors)
    loaded.release(loaded.tensors.values())  # pages around what it read
    sampling = options.generation.defaults(loaded.sampling)
    tokenizer = build_tokenizer(loaded, options.chat_template)
    return make_card(
        loaded,
        tokenizer,
        context_length=size.context_length,
        cost=cost,
        identity=identity,
        sampling=sampling,
    )


def make_card(
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    *,
    context_length: int,
    cost: CostModel,
    identity: str,
    sampling: SamplingDefaults,
) -> ModelCard:
    """Return the facts about a model whose files are mapped."""
    formats = {tensor.format.name for tensor in loaded.tensors.values() if len(tensor.shape) > 1}
    return ModelCard(
        name=loaded.name,
        architecture=loaded.spec.architecture,
        format=", ".join(sorted(formats)),
        context_length=context_length,
        file_bytes=loaded.file_bytes,
        created_s=int(time.time()),
        licence=loaded.licence,
        tokenizer=tokenizer,
        chat_template=Chat.of(tokenizer),
        cost=cost,
        pooling=loaded.pooling,
        container="gguf" if isinstance(loaded.tokenizer_source, GgufTokenizer) else "safetensors",
        identity=identity,
        sampling=sampling,
    )
