"""Builds an engine from a model and options; every option that is "auto" is resolved here."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Self

from msgspec.structs import replace

from twostroke.backends.activation_bits.resolve import (
    note,
    resolve_activation_bits,
)
from twostroke.backends.cpu.library import choose_level
from twostroke.backends.create import (
    check_backend,
    gpu_device,
    is_native,
)
from twostroke.backends.machine_limits import MachineLimits
from twostroke.backends.recipe import EngineRecipe
from twostroke.core.errors import MemoryLimitError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import resolve_num_threads
from twostroke.core.options import AUTO_BITS, DEFAULT_ACTIVATION_BITS, EngineOptions
from twostroke.core.process_tuning import return_freed_memory
from twostroke.engine.canary import FirstLoadCheck
from twostroke.engine.chat.conversation import Chat
from twostroke.engine.client import Client
from twostroke.engine.drafters import Draft, DraftHeads
from twostroke.engine.kv_cache import PagePool, PrefixIndex, StatePool
from twostroke.engine.kv_offload.build import check_tiers, start_offload, weights_digest
from twostroke.engine.kv_offload.tier import kv_cache_spec
from twostroke.engine.loop import EngineLoop
from twostroke.engine.model_card import ModelCard
from twostroke.engine.mtp_drafter import MtpLayer
from twostroke.engine.scheduler import Scheduler, SchedulerConfig, make_policy
from twostroke.engine.scheduler.recurrent_states import with_room_for_states
from twostroke.engine.speculation import (
    Lookahead,
    NgramProposer,
    Speculator,
    StepTimeModel,
    budget_function,
)
from twostroke.model.families.heads import last_hidden
from twostroke.model.program.mesh import ONE_RANK, Mesh
from twostroke.model.weights import GgufTokenizer, weights_identity

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
    from twostroke.engine.speculation import Proposer, Watcher
    from twostroke.engine.speculation.draft_model import DraftModel
    from twostroke.engine.speculation.heads import EagleHeads, MedusaHeads
    from twostroke.model.program.cost import CostModel, StepCost
    from twostroke.model.tokenizer import Tokenizer

    Progress = Callable[[int, int], None]


class Engine(Frozen):
    """A running engine for one model. Use it in a `with` block, or call `close`.

    Attributes:
        client: takes requests and returns their outputs.
        facts: properties of the backend.
        context_length: tokens that a prompt and its answer may have together.
        limits: the machine's memory bandwidth and arithmetic peak.
        draft: the name of the draft model, None without one.
        mesh: how ranks divide the model.
    """

    client: Client
    facts: BackendFacts
    context_length: int
    limits: MachineLimits
    draft: str | None = None
    mesh: Mesh = ONE_RANK

    @property
    def card(self) -> ModelCard:
        """The model card: facts about the engine's model for servers and commands."""
        return self.client.card

    def describe_gain(self) -> str:
        """Return a sentence that compares the predicted speed with all ranks and with one process.

        It is shown at the start of a model that is divided over ranks.
        """
        # Imported here: an engine of one process needs no module of `parallel`.
        from twostroke.backends.parallel.predicted_speed import describe_gain

        return describe_gain(
            facts=self.facts,
            cost=self.card.cost,
            mesh=self.mesh,
            limits=self.limits.hardware(),
            backend=self.client.loop.backend,
        )

    def close(self, drain_s: float = 0.0) -> None:
        """Wait at most `drain_s` seconds for running requests, then stop the engine."""
        self.client.loop.close(drain_s)

    def __enter__(self) -> Self:
        """Return the engine; the `with` block closes it at its end."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the engine at the end of a `with` block."""
        self.close()


def build(
    model: str,
    options: EngineOptions | None = None,
    progress: Progress | None = None,
    accept: Callable[[ModelCard], None] | None = None,
    watcher: Watcher | None = None,
    say: Callable[[str], None] = note,
) -> Engine:
    """Load `model`, a name or path, and start an engine that answers prompts with it.

    Args:
        model: the name or path of the model, or hf:owner/repo.
        options: all options of the engine; None for the defaults.
        progress: called as `progress(done, total)`, in bytes of weights that are ready.
        accept: called with the model's card before the weights are read. It may raise to end the
            build.
        watcher: sees every step, with the last hidden states of the rows that sampled a token.
        say: called with a line of text before and after slow work that is done once for a model.

    Raises:
        ModelNotFoundError, ModelFormatError, DownloadError: the model does not exist, cannot be
            downloaded, or has damaged files.
        QualityError: the model generates garbage.
        UsageError: the model cannot be divided over the requested number of ranks.
        MemoryLimitError: the weights and the KV cache do not fit into memory.
        BackendError: the backend cannot run on this machine.
    """
    options = options or EngineOptions()
    check_tiers(options.offload)
    recipe = _with_checked_options(EngineRecipe.of(model, options), say)
    recipe = _with_chosen_activation_bits(recipe, say)
    options = recipe.options
    with ExitStack() as resources:
        ranks = _start_other_ranks(recipe)
        resources.enter_context(ranks or nullcontext())
        size = ranks.size_kv_cache() if ranks else recipe.size_kv_cache()
        card = _card(recipe, size)
        if accept is not None:
            accept(card)
        heads = DraftHeads.from_options(options.speculation, recipe.loaded)
        mtp = MtpLayer.from_options(options, recipe.loaded, card)
        sources = _DraftSources(
            draft=None if mtp else Draft.from_options(options.speculation, model, card),
            heads=heads or mtp,
            watcher=watcher,
        )
        first_load = FirstLoadCheck.of(recipe, card.tokenizer)
        digest = weights_digest(recipe.loaded) if options.offload.is_used else ""
        recipe = recipe.without_tokenizer()  # the weights need the memory of its tables
        return_freed_memory()
        limits = _measure_limits(options.compute, recipe.weight_bytes, say)
        tapped = last_hidden(recipe.program) if watcher or sources.heads else None
        backend = (ranks or recipe).create_backend(
            size, progress=progress, tapped_value=tapped, embeds=True
        )
        resources.callback(backend.close)
        first_load.check(backend)
        card = replace(card, cost=replace(card.cost, stops_rows=backend.facts.stops_rows))
        scheduler, speculator, draft_name = _build_scheduler_and_speculator(
            backend, options, card, size, limits=limits, sources=sources, resources=resources
        )
        with ranks.own_cores() if ranks else nullcontext():  # the loop's thread computes, too
            client = Client(card, EngineLoop(backend, scheduler, speculator, card.cost.per_step()))
        _start_kv_transfers(client, digest, options, size, backend)
        resources.pop_all()
    return Engine(
        client=client,
        facts=backend.facts,
        context_length=size.context_length,
        limits=limits,
        draft=draft_name,
        mesh=recipe.mesh,
    )


def _with_checked_options(recipe: EngineRecipe, say: Callable[[str], None]) -> EngineRecipe:
    """Check that the backend and the options fit a recipe's model; return the recipe unchanged.

    Raises:
        BackendError: the selected backend cannot run the Program.
        UsageError: an option that a model with recurrent layers cannot have.
    """
    options, program = recipe.options, recipe.program
    check_backend(options, program, say)
    if not program.state_layers:
        return recipe
    name = f"{program.name} has recurrent layers, whose states"
    if options.speculation.method == "lookahead":
        raise UsageError(f"{name} cannot branch: leave out --speculate lookahead.")
    return recipe


class _DraftSources(NamedTuple):
    """The sources of drafts for the speculator: a draft model or heads, and a watcher of steps.

    The model's layer for multi-token prediction takes the place of draft heads. The weights of the
    draft model and of the heads are not read yet.
    """

    draft: Draft | None
    heads: DraftHeads | MtpLayer | None
    watcher: Watcher | None


def _build_scheduler_and_speculator(
    backend: Backend,
    options: EngineOptions,
    card: ModelCard,
    size: CacheSize,
    *,
    limits: MachineLimits,
    sources: _DraftSources,
    resources: ExitStack,
) -> tuple[Scheduler, Speculator, str | None]:
    """Build an engine's scheduler and speculator; also return the name of its draft model.

    The name is None without a draft model. `resources` gets the parts that must be closed if the
    engine's build fails later.
    """
    facts = backend.facts
    hardware = limits.hardware()
    speculation = options.speculation
    draft, heads, watcher = sources
    draws_ahead = _draws_ahead(facts, speculation, *sources)
    if draws_ahead:
        speculation = replace(speculation, method="off")
    scheduler = build_scheduler(
        options.cache, options.batch, size=size, facts=facts, draws_ahead=draws_ahead
    )
    head_proposer = heads.build(options, backend, hardware) if heads else None
    _close_on_failure(head_proposer, resources)
    draft_model = draft.build(options, card, backend, hardware) if draft else None
    _close_on_failure(draft_model, resources)
    speculator = build_speculator(
        speculation,
        card.cost.per_step(),
        limits=limits,
        rows_together=facts.rows_together,
        model_proposers=[
            proposer for proposer in (head_proposer, draft_model) if proposer is not None
        ],
        watchers=[each for each in (watcher, head_proposer) if each is not None],
        can_branch=not card.cost.program.state_layers,
    )
    return scheduler, speculator, draft.loaded.name if draft and draft_model else None


def _close_on_failure(
    proposer: DraftModel | EagleHeads | MedusaHeads | None, resources: ExitStack
) -> None:
    if proposer is not None:
        resources.callback(proposer.close)


def _with_chosen_activation_bits(recipe: EngineRecipe, say: Callable[[str], None]) -> EngineRecipe:
    """Return a recipe in which `activation_bits` is chosen, where it was "auto".

    The choice can take minutes, so a model that does not fit into memory or generates garbage is
    refused before the choice.

    Raises:
        MemoryLimitError: the weights and the KV cache do not fit into memory.
        QualityError: the model generates garbage.
    """
    compute = recipe.options.compute
    if compute.activation_bits != AUTO_BITS or not is_native(compute):
        return recipe
    if recipe.mesh.num_ranks == 1:
        recipe.size_kv_cache()

    def check(backend: Backend) -> None:
        precise = replace(compute, activation_bits=DEFAULT_ACTIVATION_BITS)
        FirstLoadCheck.of(recipe.with_compute(precise), recipe.build_tokenizer()).check(backend)

    return recipe.with_compute(
        resolve_activation_bits(
            compute,
            recipe.loaded,
            recipe.program,
            notify=say,
            check=check,
        )
    )


def _draws_ahead(facts: BackendFacts, options: SpeculationOptions, *proposers: object) -> bool:
    """Whether a step may start before the host knows the tokens that the previous step sampled.

    Only some backends, such as GPUs, support such steps, and speculation is not possible with them.
    The speculation method "auto" prefers them to drafts, unless there are `proposers` (a draft
    model or heads).
    """
    is_free = options.method == "off" or (options.method == "auto" and options.count is None)
    return facts.draws_ahead > 0 and is_free and not any(proposers)


def build_speculator(
    options: SpeculationOptions,
    cost: StepCost,
    *,
    limits: MachineLimits | None,
    rows_together: int,
    model_proposers: Sequence[Proposer] = (),
    watchers: Sequence[Watcher] = (),
    can_branch: bool = True,
) -> Speculator:
    """Return the speculator, which adds draft tokens to steps, for a machine's limits.

    `cost` gives the work of a step, and `rows_together` how many rows kernels compute at once (see
    `BackendFacts`). `model_proposers` are a draft model or trained heads; proposers without a model
    are added as the options say. `watchers` see the results of steps. `can_branch`: whether drafts
    may be trees, which lookahead needs.
    """
    step_time = StepTimeModel(cost, limits.hardware() if limits else None, rows_together)
    proposers: list[Proposer] = []
    if options.method in {"auto", "ngram"}:
        proposers.append(NgramProposer())
    proposers += model_proposers
    if options.method == "lookahead":
        proposers.append(Lookahead())
    on_request = [Lookahead()] if options.method == "auto" and can_branch else []
    return Speculator(
        proposers, budget_function(step_time, options.count), step_time, on_request, watchers
    )


def _start_other_ranks(recipe: EngineRecipe) -> RankGroup | None:
    """Start a process for each other rank; return None if the model has a single rank."""
    if recipe.mesh.num_ranks == 1 or recipe.options.compute.backend == "reference":
        return None
    from twostroke.backends.parallel.rank_group import RankGroup  # not needed in one process

    return RankGroup(recipe)


def _start_kv_transfers(
    client: Client, digest: str, options: EngineOptions, size: CacheSize, backend: Backend
) -> None:
    """Start the threads of disaggregation and of KV offload, if the options ask for them."""
    is_disaggregated = options.disaggregation.role != "mixed"
    if not is_disaggregated and not options.offload.is_used:
        return
    try:
        spec = kv_cache_spec(client.card, options, size, backend)
        if is_disaggregated:  # imported here: other engines do not need it
            from twostroke.engine.disaggregation.build import start_disaggregation

            start_disaggregation(options.disaggregation, client, backend, spec)
        if options.offload.is_used:
            start_offload(client, spec, digest, options.offload)
    except BaseException:  # also after Ctrl-C: the loop's thread must not stay
        client.loop.close()
        raise


def _measure_limits(
    compute: ComputeOptions, num_weight_bytes: int, say: Callable[[str], None] = note
) -> MachineLimits:
    """Return the machine's memory bandwidth and arithmetic peak, which MBU and MFU need.

    The bandwidth is for steps that read all weights. Limits that are not stored yet are measured
    here, before the weights fill the memory. A GPU without memory for the measurement has no
    limits, and `say` gets a line that says so.
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
    *,
    size: CacheSize,
    facts: BackendFacts,
    clock: Callable[[], float] = time.monotonic,
    draws_ahead: bool = False,
) -> Scheduler:
    """Return a scheduler with its page pool and prefix cache, for a backend with these facts.

    With `draws_ahead`, the backend's steps may start before earlier steps have sampled their
    tokens.

    Raises:
        MemoryLimitError: the recurrent states of a static batch do not fit into memory.
    """
    pool = PagePool(facts.num_pages, facts.page_size, facts.windows, clock)
    reuse_generated = facts.one_arithmetic or not cache.strict_prefix
    index = PrefixIndex(pool, reuse_generated=reuse_generated) if cache.prefix_cache else None
    config = SchedulerConfig.from_options(
        batch,
        size.context_length,
        steps_ahead=facts.draws_ahead if draws_ahead else facts.steps_ahead,
        samples_ahead=draws_ahead,
    )
    config = with_room_for_states(config, batch, facts.num_states)
    states = StatePool(facts.num_states) if facts.num_states else None
    return Scheduler(config, pool, index, make_policy(batch), clock, states=states)


def _card(recipe: EngineRecipe, size: CacheSize) -> ModelCard:
    loaded = recipe.loaded
    card = make_card(
        recipe,
        recipe.build_tokenizer(),
        context_length=size.context_length,
        cost=recipe.cost_model(size.kv_format),
        identity=weights_identity(loaded.tensors),
    )
    loaded.release(loaded.tensors.values())  # file pages that the identity has read
    return card


def make_card(
    recipe: EngineRecipe,
    tokenizer: Tokenizer,
    *,
    context_length: int,
    cost: CostModel,
    identity: str,
) -> ModelCard:
    """Return the model card of a model whose files are mapped: facts for servers and commands."""
    loaded = recipe.loaded
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
        chat_template=Chat.of(tokenizer, stable_prefix=recipe.options.stable_prefix),
        cost=cost,
        pooling=loaded.pooling,
        container="gguf" if isinstance(loaded.tokenizer_source, GgufTokenizer) else "safetensors",
        identity=identity,
        sampling=recipe.options.generation.defaults(loaded.sampling),
    )
