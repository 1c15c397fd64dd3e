"""Options of an engine, in immutable structs; None lets the engine choose a value.

Each field is declared with its flag, range, default and help (`core/option_schema.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, NoReturn, TypeAlias

from msgspec import field
from msgspec.structs import replace

from twostroke.core.distributed_options import (
    DisaggregationOptions,
    OffloadOptions,
    ParallelOptions,
)
from twostroke.core.errors import Field, RequestError, UsageError, nearest
from twostroke.core.frozen import Frozen
from twostroke.core.option_schema import Option, OptionStruct, check
from twostroke.core.sampling import (
    LOCAL_DEFAULTS,
    MODEL_DEFAULT_FIELDS,
    OPENAI_DEFAULTS,
    SamplingDefaults,
    SamplingParams,
)

BACKENDS: Final = ("auto", "cpu", "gpu", "reference", "torch")
POLICIES: Final = ("continuous", "dynamic", "static")
PAGE_SIZES: Final = (16, 32, 64)
DEFAULT_PAGE_SIZE: Final = 16  # tokens
ACTIVATION_BITS: Final = (15, 9, 8)
DEFAULT_ACTIVATION_BITS: Final = 15
AUTO_BITS: Final = "auto"  # chosen for each product of the model
KV_FORMATS: Final = ("auto", "f16", "bf16", "int16", "int8", "fp8")
PARTNER: Final = "auto"  # the catalogue's draft model for the main model
SPECULATE: Final = ("auto", "off", "ngram", "draft", "lookahead", "medusa", "eagle", "mtp")
MAX_DRAFTS: Final = 24  # for one request in one step
GENERATION_CONFIGS: Final = ("auto", "none", "openai")
_DEFAULT_MAX_RUNNING: Final = 256  # requests
_MAX_THREADS: Final = 1024


# Bits of activations: one number for all products, or a number for each matrix by its name.
Bits: TypeAlias = "int | Mapping[str, int]"


class ActivationBits(Frozen):
    """The number of bits to which a model's activations are rounded, for each matrix product.

    Attributes:
        model_id: the `weights_identity` of the model's file.
        version: the version of the method that chose the bits.
        bits: the number of bits by matrix name, for matrices whose activations have fewer than 15
            bits.
        divergence: the mean KL divergence in nats from the model with 15 bits everywhere, measured
            on the text for which the bits were chosen.
        num_products: how many matrices the method can give fewer than 15 bits.
    """

    model_id: str
    version: int
    bits: dict[str, int]
    divergence: float
    num_products: int

    def __str__(self) -> str:
        """Return a short name of this choice of bits; equal choices have equal names everywhere."""
        lines = "".join(f"{name} {bits}\n" for name, bits in sorted(self.bits.items()))
        return f"chosen-{hashlib.sha256(lines.encode()).hexdigest()[:12]}"

    def describe(self) -> str:
        """Return a text that says how many matrix products use each number of activation bits."""
        product_bits = list(self.bits.values())
        counts = {
            8: product_bits.count(8),
            9: product_bits.count(9),
            15: self.num_products - len(self.bits),
        }
        text = ", ".join(f"{count} of {bits}" for bits, count in counts.items() if count)
        return f"products by bits of activations: {text}" if text else "15-bit activations"


def activation_bits_or_map(bits: int | ActivationBits) -> Bits:
    """Return activation bits in the form for backends: one number, or a number by matrix name."""
    return bits.bits if isinstance(bits, ActivationBits) else bits


class ComputeOptions(OptionStruct):
    """The backend, its device and threads, and the precision of its activations.

    `activation_bits` "auto" gives each product as few bits as the answers allow
    (docs/guide/quality.md). 8 bits everywhere are up to 1.6 times as fast as 15 for prompts and
    many streams on AVX-512, but change answers, like the 8 bits of other engines. The value 9 means
    15 bits where activations are large and 8 elsewhere.
    """

    SECTION: ClassVar[str] = "Machine"

    backend: Annotated[
        str,
        Option("--backend", choices=BACKENDS, help="Compute backend; auto is cpu."),
    ] = "auto"
    num_threads: Annotated[
        int | None,
        Option(
            "--threads",
            low=1,
            high=_MAX_THREADS,
            default="one for each available core",
            help="Threads that compute.",
        ),
    ] = None
    level: Annotated[
        str | None,
        Option(
            "--level",
            default="the best that runs here, see `twostroke doctor`",
            help="Instruction-set level of the backend cpu, such as avx2.",
        ),
    ] = None
    device: Annotated[
        str,
        Option(
            "--device",
            help="Device of the backends gpu and torch, such as cuda:1; auto is a GPU, and for "
            "torch the CPU if there is no GPU.",
        ),
    ] = "auto"
    activation_bits: Annotated[
        int | str | ActivationBits,
        Option(
            "--activation-bits",
            choices=(AUTO_BITS, *ACTIVATION_BITS),
            help="Bits of activations at quantized weights, backend cpu: 15, 9 or 8 (fewer are "
            "faster); auto takes as few for each product as the answers allow, chosen once for a "
            "model.",
        ),
    ] = AUTO_BITS
    packed_cache_bytes: Annotated[
        int | None,
        Option(
            "--packed-cache",
            form="size",
            low=0,
            named_values=(("off", 0),),
            default="half of the disk space that is free",
            help="Most disk space in the cache folder for weights that are packed for the kernels "
            "of the backend cpu, such as 50GB, or off; with them, later starts take less time, and "
            "processes with the same model share its memory.",
        ),
    ] = None
    same_tokens: Annotated[
        bool,
        Option(
            "--same-tokens",
            help="Backend gpu: make a request's tokens independent of the other requests in its "
            "batch, as they always are on the backend cpu.",
        ),
    ] = False

    def __post_init__(self) -> None:
        """Raise UsageError if an option is not valid or does not fit the backend."""
        check(self)
        if self.backend not in {"auto", "cpu"}:
            if self.level is not None:
                raise UsageError("needs the backend cpu.", field="level")
            if self.activation_bits not in (AUTO_BITS, DEFAULT_ACTIVATION_BITS):
                raise UsageError("needs the backend cpu.", field="activation_bits")
        if self.device != "auto" and self.backend not in {"gpu", "torch"}:
            raise UsageError("needs the backend gpu or torch.", field="device")
        if self.same_tokens and self.backend == "torch":
            raise UsageError("needs the backend cpu or gpu.", field="same_tokens")

    @property
    def resolved_bits(self) -> int | ActivationBits:
        """The bits of activations; 15 while the option "auto" is not resolved for a model."""
        bits = self.activation_bits
        return DEFAULT_ACTIVATION_BITS if isinstance(bits, str) else bits


class CacheOptions(OptionStruct):
    """The KV cache: its size, its number format, and the reuse of cached prompts.

    `kv_format` "auto" is "int16" on the backend cpu of x86 processors, and "f16" elsewhere. "bf16"
    is for models whose keys or values exceed 65504. The errors of "int8" are in
    docs/development/adr/0011-keys-are-spread-before-int8.md.
    """

    SECTION: ClassVar[str] = "Machine"

    memory_bytes: Annotated[
        int | None,
        Option(
            "--kv-memory",
            form="size",
            low=0,
            excludes_low=True,
            default="as much as the weights and one whole context, or 128 tokens for each of "
            "--max-running if that is more; at most half of the free memory",
            help="Memory for keys and values, such as 2GB; in time, the prefix cache fills it.",
        ),
    ] = None
    context_length: Annotated[
        int | None,
        Option(
            "--context-length",
            low=2,
            default="the model's limit",
            help="Most tokens of a prompt and its answer together.",
        ),
    ] = None
    page_size: Annotated[
        int | None,
        Option(
            "--page-size",
            choices=PAGE_SIZES,
            default=f"{DEFAULT_PAGE_SIZE}, or 64 for each rank if --kv-shares is places",
            help="Tokens in a page of the KV cache.",
        ),
    ] = None
    prefix_cache: Annotated[
        bool,
        Option(
            "--prefix-cache/--no-prefix-cache",
            help="Reuse the keys and values of earlier prompts that begin with the same tokens.",
        ),
    ] = True
    strict_prefix: Annotated[
        bool,
        Option(
            "--strict-prefix",
            help="Reuse only keys and values of prompts, not of generated tokens, on processors "
            "that round the two differently.",
        ),
    ] = False
    kv_format: Annotated[
        str,
        Option(
            "--kv-format",
            choices=KV_FORMATS,
            help="Number format of keys and values: f16, bf16, int16 (the fastest on x86 "
            "processors; backend cpu), int8 (half the memory), or fp8 (half the memory; backend "
            "gpu).",
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        """Raise UsageError if an option of the KV cache is not valid."""
        check(self)

    @property
    def tokens_in_page(self) -> int:
        """The number of tokens in a KV page: the option `page_size`, or its default.

        If ranks divide keys and values by tokens (`kv_shares` "places"), pages are larger: see
        `Mesh.page_size`.
        """
        return DEFAULT_PAGE_SIZE if self.page_size is None else self.page_size


class BatchOptions(OptionStruct):
    """How requests are batched: when a request joins the steps of other requests.

    `policy` is "continuous" (a request joins at any step), "dynamic" (a batch starts when
    `batch_size` requests wait, or after `max_wait_s`) or "static" (a batch starts when `batch_size`
    requests wait, or `fill_timeout_s` after its first request).
    """

    SECTION: ClassVar[str] = "Batching"

    policy: Annotated[
        str,
        Option(
            "--policy",
            choices=POLICIES,
            help="When waiting requests start: at any step (continuous), or together in batches "
            "(dynamic, static).",
        ),
    ] = "continuous"
    max_running: Annotated[
        int | None,
        Option(
            "--max-running",
            low=1,
            default=f"{_DEFAULT_MAX_RUNNING}, or --token-budget if that is less",
            help="Most requests that run at the same time.",
        ),
    ] = None
    token_budget: Annotated[
        int,
        Option("--token-budget", low=1, help="Most tokens that one step computes."),
    ] = 256
    batch_size: Annotated[
        int,
        Option("--batch-size", low=1, help="Requests in a dynamic or static batch."),
    ] = 16
    max_wait_s: Annotated[
        float,
        Option(
            "--max-wait",
            low=0,
            help="Seconds that a dynamic batch waits for more requests. A static batch of `serve` "
            "waits 10 seconds if this option is not given.",
        ),
    ] = 0.05
    fill_timeout_s: Annotated[
        float | None,
        Option(
            "",
            low=0,
            default="no timeout",
            help="Seconds after its first request when a static batch starts though it is not "
            "full.",
        ),
    ] = None
    max_waiting_requests: Annotated[
        int,
        Option(
            "--max-waiting",
            low=1,
            help="Most requests in the queue; further requests are refused.",
        ),
    ] = 4096
    max_waiting_tokens: Annotated[
        int,
        Option("", low=1, help="Most prompt tokens in the queue; further requests are refused."),
    ] = 4_194_304

    def __post_init__(self) -> None:
        """Raise UsageError if an option of batching is not valid."""
        check(self)

    @property
    def effective_max_running(self) -> int:
        """How many requests may run at once: `max_running`, or its default."""
        return self.max_running or min(_DEFAULT_MAX_RUNNING, self.token_budget)


class SpeculationOptions(OptionStruct):
    """How draft tokens are proposed for speculative decoding; changes speed, never an answer.

    `method` is one of these:

    - "ngram": repeats text that followed the same words earlier in the request, in the caller's
      predicted output, or in other answers of the tenant.
    - "draft": a smaller model.
    - "lookahead": the model itself drafts several tokens at once.
    - "medusa", "eagle": heads that were trained for the model.
    - "mtp": the model's own layer for multi-token prediction.
    - "auto": n-grams, and also the draft model and the heads if the options name them, or else the
      model's layer for multi-token prediction if it has one. On backends that start a step before
      the previous step's tokens are known, "auto" uses no drafts, unless a draft model or heads are
      named.

    `draft` "auto" is the draft model that the catalogue names for this model, if it is in the
    cache. It is left out if heads are named, another method is chosen, the model has a layer for
    multi-token prediction, or memory is short.
    """

    SECTION: ClassVar[str] = "Speculation"

    method: Annotated[
        str,
        Option(
            "--speculate",
            choices=SPECULATE,
            help="How to draft tokens ahead. Answers stay the same; only their speed changes.",
        ),
    ] = "auto"
    draft: Annotated[
        str | None,
        Option(
            "--draft",
            metavar="MODEL|auto|none",
            default="none",
            help="Smaller model that drafts tokens; auto is the catalogue's draft model, if it is "
            "in the cache.",
        ),
    ] = None
    count: Annotated[
        int | None,
        Option(
            "--drafts",
            low=1,
            high=MAX_DRAFTS,
            default="as many as save time",
            help="Always draft this many tokens.",
        ),
    ] = None
    heads: Annotated[
        str | None,
        Option(
            "--heads",
            metavar="DIR",
            default="none",
            help="Folder of draft heads that `twostroke train-heads` wrote.",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raise UsageError if the draft model, the heads or the count do not fit the method."""
        check(self)
        method, draft, heads = self.method, self.draft, self.heads
        if method == "draft" and draft is None:
            reason = "can be draft only with a draft model: set {other} as well."
            raise UsageError(reason, field="method", other=Field("draft"))
        if method in {"medusa", "eagle"} and heads is None:
            reason = f"can be {method} only with trained heads: set {{other}} as well."
            raise UsageError(reason, field="method", other=Field("heads"))
        if draft not in {None, PARTNER} and method not in {"auto", "draft"}:
            self._refuse("draft")
        if heads is not None and method not in {"auto", "medusa", "eagle"}:
            self._refuse("heads")
        if self.count is not None and method == "off":
            self._refuse("count")
        if heads == "":
            raise UsageError("must name a folder: leave it out, or name one.", field="heads")

    def _refuse(self, field: str) -> NoReturn:
        reason = f"has no effect where {{other}} is {self.method}: leave one of them out."
        raise UsageError(reason, field=field, other=Field("method"))


class GenerationOptions(OptionStruct):
    """Default sampling values for requests that leave them out.

    `generation_config` is one of these:

    - "auto": the values that the model's publisher recommends (generation_config.json, or
      `general.sampling.*` in a GGUF file); for values without a recommendation, the usual defaults
      of local servers.
    - "none": the usual defaults of local servers only.
    - "openai": temperature 1, and no token is cut off.

    `override_generation_config` has values by name, which replace all of these.
    """

    SECTION: ClassVar[str] = "Choosing tokens"

    generation_config: Annotated[
        str,
        Option(
            "--generation-config",
            choices=GENERATION_CONFIGS,
            help="Sampling values of requests that leave them out; auto: as the model's files "
            "recommend, else as usual for local servers; none: as usual for local servers; "
            "openai: temperature 1, no token cut off.",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        Mapping[str, float],
        Option(
            "--override-generation-config",
            form="json",
            metavar="JSON",
            help="Sampling values that replace the values of --generation-config, such as "
            '\'{"temperature": 0.6, "top_k": 20}\'.',
        ),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise UsageError if an option is not valid.

        The names and values in `override_generation_config` are checked, too.
        """
        check(self)
        self.override()

    def override(self) -> SamplingParams:
        """Return the sampling values of `override_generation_config`."""
        name, values = "override_generation_config", self.override_generation_config
        if not isinstance(values, Mapping):
            raise UsageError("must be an object with names and values.", field=name)
        for key in values:
            if key not in MODEL_DEFAULT_FIELDS:
                reason = f"has {{key!r}}; known: {', '.join(MODEL_DEFAULT_FIELDS)}."
                raise UsageError(
                    reason + nearest(str(key), MODEL_DEFAULT_FIELDS), field=name, key=key
                )
        try:
            return SamplingParams(**values)  # type: ignore[arg-type]
        except RequestError as error:
            raise UsageError("has a wrong value: {why}", field=name, why=error) from None

    def defaults(self, published: SamplingParams) -> SamplingDefaults:
        """Return the sampling defaults of a model whose files recommend the values `published`."""
        usual = OPENAI_DEFAULTS if self.generation_config == "openai" else LOCAL_DEFAULTS
        override = self.override()
        if self.generation_config != "auto":
            return SamplingDefaults(override, usual)
        missing = [name for name in MODEL_DEFAULT_FIELDS if getattr(override, name) is None]
        recommended = {name: getattr(published, name) for name in missing}
        return SamplingDefaults(replace(override, **recommended), usual)


class EngineOptions(OptionStruct):
    """All options of an engine, grouped into one struct for each area.

    `LLM(model, name=value)` takes the fields of these structs by their names (`from_mapping`).
    """

    compute: ComputeOptions = field(default_factory=ComputeOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    accept_quality: Annotated[
        bool,
        Option(
            "--accept-quality",
            section="Machine",
            help="Use a model whose output is garbage, with a warning, instead of refusing it at "
            "its first load.",
        ),
    ] = False
    disaggregation: DisaggregationOptions = field(default_factory=DisaggregationOptions)
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    generation: GenerationOptions = field(default_factory=GenerationOptions)
    chat_template: Annotated[
        str | None,
        Option(
            "--chat-template",
            section="Conversations",
            metavar="NAME|FILE|TEXT",
            default="the model's own",
            help="Chat template to use instead of the model's: the name of a built-in one, such as "
            "chatml, or Jinja source.",
        ),
    ] = None
    stable_prefix: Annotated[
        bool,
        Option(
            "--stable-prefix",
            section="Conversations",
            help="Remove lines that change with each request from the instructions of agents, so "
            "that the prefix cache finds the rest: billing headers, dates, ids of sessions.",
        ),
    ] = False

    def __post_init__(self) -> None:
        """Raise UsageError if options of different areas contradict each other."""
        backend = self.compute.backend
        if self.offload.is_used:
            self._check_offload()
        if self.cache.kv_format != "auto" and backend not in {"auto", "cpu", "gpu"}:
            raise UsageError("needs the backend cpu or gpu.", field="kv_format")
        if self.cache.kv_format == "int16" and backend == "gpu":
            raise UsageError("can be int16 only on the backend cpu.", field="kv_format")
        if self.cache.kv_format == "fp8" and backend != "gpu":
            reason = "can be fp8 only on the backend gpu; int8 is as small."
            raise UsageError(reason, field="kv_format")
        if backend == "gpu":
            self._check_gpu()
        if self.disaggregation.role != "mixed" and not self.cache.prefix_cache:
            reason = "needs the prefix cache: leave {other} on."
            raise UsageError(reason, field="role", other=Field("prefix_cache"))
        if self.parallel.reduce == "sum" and backend != "torch":
            raise UsageError("can be sum only on the backend torch.", field="reduce")
        if self.parallel.kv_shares == "places":
            if backend == "torch":
                raise UsageError("cannot be places on the backend torch.", field="kv_shares")
            if self.cache.page_size is not None:
                reason = "cannot be chosen where {other} is places."
                raise UsageError(reason, field="page_size", other=Field("kv_shares"))

    def _check_gpu(self) -> None:
        for name in ("tensor", "pipeline", "expert", "context"):
            if getattr(self.parallel, name) > 1:
                raise UsageError("needs the backend cpu or torch.", field=name)

    def _check_offload(self) -> None:
        field = self.offload.field
        if not self.cache.prefix_cache:
            raise UsageError("needs {other}.", field=field, other=Field("prefix_cache"))
        if self.parallel.num_ranks > 1:
            reason = "needs a model in one process: each rank would have a part of every page."
            raise UsageError(reason, field=field)
        if self.compute.backend == "torch":
            reason = f"is not for the backend {self.compute.backend}."
            raise UsageError(reason, field=field)
