"""Options of an engine, in small frozen parts; None lets the engine choose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from msgspec import field
from msgspec.structs import replace

from twostroke.core.activation_bits import ActivationBits
from twostroke.core.errors import Field, RequestError, UsageError, nearest
from twostroke.core.frozen import Frozen
from twostroke.core.sampling import (
    DEFAULTED,
    LOCAL_DEFAULTS,
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
PARTNER: Final = "auto"  # the draft model in the catalogue
SPECULATE: Final = ("auto", "off", "ngram", "draft", "lookahead", "medusa", "eagle")
MAX_DRAFTS: Final = 24  # for one request in one step
REDUCTIONS: Final = ("auto", "gather", "sum")
KV_SHARES: Final = ("auto", "heads", "places")
LAUNCHERS: Final = ("auto", "ray")
GENERATION_CONFIGS: Final = ("auto", "none", "openai")
MAX_RANKS: Final = 256
_MAX_RUNNING: Final = 256


ROLES: Final = ("mixed", "prefill", "decode")


DISAGGREGATE: Final = ("auto", "always", "never")


PEER_LINKS: Final = ("auto", "socket", "nixl", "nixl-read", "nixl-write")


DEFAULT_PEER_ADDRESS: Final = "127.0.0.1:7800"


DEFAULT_PAGE_CACHE_BYTES: Final = 10_000_000_000


_LEAST_BYTES: Final = 10_000_000


_SCHEMES: Final = ("redis://", "rediss://", "unix://")


class ComputeOptions(Frozen):
    """The backend, its threads, and the instruction-set level of the cpu backend.

    `backend` "auto" is "cpu". `device` is that of the backends gpu and torch: "auto" is a GPU, for
    torch "cpu" if there is none; "cuda:1" names one of several. `activation_bits` is the cpu
    backend's precision of activations at quantized weights: "auto" chooses for each product as few
    as the answers allow (docs/guide/quality.md). 8 for all is up to 1.6 times faster on AVX-512
    than 15 for prompts and many streams, and changes answers as in other engines that use 8; 9
    means 15 where activations are large and 8 elsewhere. `same_tokens`: a request's tokens do not
    depend on others, as always on the cpu backend.
    """

    backend: str = "auto"
    num_threads: int | None = None
    level: str | None = None
    device: str = "auto"
    activation_bits: int | str | ActivationBits = AUTO_BITS
    same_tokens: bool = False

    def __post_init__(self) -> None:
        """Refuse unknown names and numbers out of range."""
        _one_of("backend", self.backend, BACKENDS)
        if self.num_threads is not None and not 1 <= self.num_threads <= 1024:
            reason = f"must be from 1 to 1024, got {self.num_threads}."
            raise UsageError(reason, field="num_threads")
        if not isinstance(self.activation_bits, ActivationBits):
            _one_number_of("activation_bits", self.activation_bits, (AUTO_BITS, *ACTIVATION_BITS))
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
    def known_bits(self) -> int | ActivationBits:
        """The bits of activations, those of "auto" only after they were chosen."""
        bits = self.activation_bits
        return DEFAULT_ACTIVATION_BITS if isinstance(bits, str) else bits


class CacheOptions(Frozen):
    """The key-value cache: its size and its contents.

    `memory_bytes` None is as much as weights and one whole context take, or 128 tokens for each
    request that may run if that is more; within half of the free memory.
    `context_length` None is the model's own; `page_size` None is 16 tokens, or what places need.
    `strict_prefix` keeps pages filled by generated rows out of the prefix cache on backends that
    compute these rows differently. `kv_format` is how the backends cpu and gpu store keys and
    values: "f16", "bf16" for models whose keys or values exceed 65504, or "int8" for about half of
    the memory (its cost is in ADR 0011). The cpu backend also
    has "int16", which is the fastest on x86 processors and "auto" there; elsewhere that is "f16".
    The gpu backend also has "fp8", as small as int8.
    """

    memory_bytes: int | None = None
    context_length: int | None = None
    page_size: int | None = None
    prefix_cache: bool = True
    strict_prefix: bool = False
    kv_format: str = "auto"

    def __post_init__(self) -> None:
        """Refuse unknown names and numbers out of range."""
        _one_of("kv_format", self.kv_format, KV_FORMATS)
        _one_number_of("page_size", self.tokens_in_page, PAGE_SIZES)
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            reason = f"must be greater than 0, got {self.memory_bytes}."
            raise UsageError(reason, field="memory_bytes")
        if self.context_length is not None and self.context_length < 2:
            reason = f"must be at least 2, got {self.context_length}."
            raise UsageError(reason, field="context_length")

    @property
    def tokens_in_page(self) -> int:
        """The tokens in a page, unless keys and values are divided by places."""
        return DEFAULT_PAGE_SIZE if self.page_size is None else self.page_size


class BatchOptions(Frozen):
    """How requests share steps.

    `policy` is "continuous" (join at any step), "dynamic" (a batch starts when `batch_size`
    requests wait or `max_wait_s` passed) or "static" (a batch starts when `batch_size` wait, or
    `fill_timeout_s` after its first request; None never starts a batch that is not full).
    A step computes at most `token_budget` tokens, at least one for each of at most `max_running`
    requests; None is 256, or the budget if that is less.
    """

    policy: str = "continuous"
    max_running: int | None = None
    token_budget: int = 256
    batch_size: int = 16
    max_wait_s: float = 0.05
    fill_timeout_s: float | None = None
    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 4_194_304

    def __post_init__(self) -> None:
        """Refuse unknown names and numbers out of range."""
        _one_of("policy", self.policy, POLICIES)
        for name in self.__struct_fields__[1:]:
            value = getattr(self, name)
            low, kind = (0, (int, float)) if name.endswith("_s") else (1, int)
            if value is None and name in {"max_running", "fill_timeout_s"}:
                continue
            if not isinstance(value, kind) or isinstance(value, bool):
                what = "an integer" if kind is int else "a number"
                raise UsageError(f"must be {what}, got {value!r}.", field=name)
            if not value >= low:
                raise UsageError(f"must be at least {low}, got {value}.", field=name)
            if value == math.inf:
                raise UsageError(f"must be a finite number, got {value}.", field=name)

    @property
    def most_running(self) -> int:
        """How many requests may run at once."""
        return self.max_running or min(_MAX_RUNNING, self.token_budget)


class SpeculationOptions(Frozen):
    """How tokens are guessed before they are computed; this changes speed and never an answer.

    Attributes:
        method: "ngram" looks for the same words earlier in the request, in the answer that its
            caller expects, and in the tenant's other answers; "draft" is a smaller model;
            "lookahead" lets the model itself guess several tokens at once; "medusa" and "eagle"
            are heads that were trained for the model; "auto" is n-gram, with the draft and the
            heads if they are named. Where the backend draws ahead, "auto" is "off" without these.
        draft: the draft model; "auto" is the catalogue's for this model, if it is in the cache. It
            is left out if heads are named, another method is chosen, or memory is short.
        heads: the folder of the heads.
        count: that many guesses always; None takes as many as pay.
    """

    method: str = "auto"
    draft: str | None = None
    count: int | None = None
    heads: str | None = None

    def __post_init__(self) -> None:
        """Refuse unknown names and numbers out of range."""
        _one_of("method", self.method, SPECULATE)
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
        if self.count is not None and not 1 <= self.count <= MAX_DRAFTS:
            raise UsageError(f"must be from 1 to {MAX_DRAFTS}, got {self.count}.", field="count")

    def _refuse(self, field: str) -> NoReturn:
        reason = f"has no effect where {{other}} is {self.method}: leave one of them out."
        raise UsageError(reason, field=field, other=Field("method"))


class ParallelOptions(Frozen):
    """How many ranks run the model together, and what each has of it; 1 divides nothing.

    Ranks are processes or GPUs, on this machine or on several; their number is the product of the
    four degrees.

    Attributes:
        tensor: parts of every layer's weights and heads.
        pipeline: groups of layers, one after another.
        expert: parts of the experts of a mixture; other weights are divided as by `tensor`.
        context: parts of the rows of a step, for long prompts; each rank has all weights.
        shares: unequal parts, such as (3, 2): one number for each part of the weights, or for each
            group of layers if only these are divided.
        reduce: "gather" gives the tokens of one process, bit for bit; "sum" moves less and rounds
            otherwise (torch backend only); "auto" is "sum" on GPUs and "gather" elsewhere.
        kv_shares: "heads" divides keys and values by their heads, and with `context` not at all;
            "places" divides them evenly by the places of tokens; "auto" is "places" on the cpu
            backend of one machine where heads would store some of them twice, else "heads".
        launcher: "auto" takes the ranks of the launcher that started this process (torchrun, or any
            that sets RANK and WORLD_SIZE), else starts them on this machine; "ray" asks Ray.
        attention_shares: the shares of attention with its keys and values, where they differ: with
            shares (0, 1) and attention_shares (1, 0) attention and the rest are on different ranks.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    shares: tuple[int, ...] = ()
    reduce: str = "auto"
    kv_shares: str = "auto"
    launcher: str = "auto"
    attention_shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse unknown names and numbers out of range."""
        _one_of("reduce", self.reduce, REDUCTIONS)
        _one_of("kv_shares", self.kv_shares, KV_SHARES)
        _one_of("launcher", self.launcher, LAUNCHERS)
        for name in ("tensor", "pipeline", "expert", "context"):
            if not 1 <= getattr(self, name) <= MAX_RANKS:
                reason = f"must be from 1 to {MAX_RANKS}, got {getattr(self, name)}."
                raise UsageError(reason, field=name)
        if self.num_ranks > MAX_RANKS:
            degrees = f"{self.tensor} x {self.pipeline} x {self.expert} x {self.context}"
            reason = f"Degrees of {degrees} make {self.num_ranks} ranks; at most {MAX_RANKS} work."
            raise UsageError(reason)
        if self.launcher != "auto" and self.num_ranks == 1:
            reason = "needs several ranks, such as {other} 2."
            raise UsageError(reason, field="launcher", other=Field("tensor"))
        if self.kv_shares == "places" and self.num_ranks == self.pipeline:
            reason = "can be places only with {other} or {more}."
            facts = {"other": Field("tensor"), "more": Field("context")}
            raise UsageError(reason, field="kv_shares", **facts)
        if self.kv_shares == "places" and self.attention_shares:
            reason = "cannot be places with {other}."
            raise UsageError(reason, field="kv_shares", other=Field("attention_shares"))
        if self.shares:
            self._check_shares()
        if self.attention_shares:
            self._check_attention_shares()

    @property
    def num_ranks(self) -> int:
        """How many ranks there are in all."""
        return self.tensor * self.pipeline * self.expert * self.context

    @property
    def column_shares(self) -> tuple[int, ...]:
        """The share of each part of the weights."""
        count = self.tensor * self.expert
        return self.shares if self.shares and count > 1 else (1,) * count

    @property
    def stage_shares(self) -> tuple[int, ...]:
        """The share of each group of layers."""
        are_of_stages = self.shares and self.tensor * self.expert == 1
        return self.shares if are_of_stages else (1,) * self.pipeline

    def _check_shares(self) -> None:
        count = self.tensor * self.expert
        count = self.pipeline if count == 1 else count
        if count == 1:
            reason = "needs {other} or {more}: "
            reason += "rows are divided evenly." if self.context > 1 else "there is one part only."
            facts = {"other": Field("tensor"), "more": Field("pipeline")}
            raise UsageError(reason, field="shares", **facts)
        if len(self.shares) != count:
            reason = f"must be {count} numbers, one for each part, got {len(self.shares)}."
            raise UsageError(reason, field="shares")
        if min(self.shares) < 1 and not self.attention_shares:
            knob = "tensor" if self.tensor > 1 else "expert" if self.expert > 1 else "pipeline"
            reason = f"must be at least 1 each, got {min(self.shares)}: for fewer parts, lower "
            raise UsageError(f"{reason}{{other}}.", field="shares", other=Field(knob))

    def _check_attention_shares(self) -> None:
        name, count = "attention_shares", self.tensor * self.expert
        if count == 1:
            raise UsageError("needs {other}.", field=name, other=Field("tensor"))
        if len(self.attention_shares) != count:
            reason = (
                f"must be {count} numbers, one for each part, got {len(self.attention_shares)}."
            )
            raise UsageError(reason, field=name)
        for field_name in (name, "shares"):
            shares = getattr(self, field_name) or (1,)
            if min(shares) < 0 or not any(shares):
                reason = "must be 0 or more each, and not 0 for all."
                raise UsageError(reason, field=field_name)
        if 0 in map(sum, zip(self.column_shares, self.attention_shares, strict=True)):
            reason = "leaves a part without any work: its share is 0 in {other}, too."
            raise UsageError(reason, field=name, other=Field("shares"))


class DisaggregationOptions(Frozen):
    """Whether prompts are read by another engine than the one that answers.

    Attributes:
        role: "mixed" does both; "prefill" also reads prompts for decode engines, which connect to
            `peer_address`; "decode" lets the `prefill_peers` read prompts where `disaggregate` says
            so, and fetches the pages.
        peer_address: HOST:PORT to listen at; port 0 takes a free one.
        prefill_peers: HOST:PORT of each prefill engine.
        disaggregate: "always", "never", or "auto": where it saves time.
        peer_link: how pages travel between engines that share no memory: by their socket, or by
            NIXL, where the decode engine reads or the prefill engine writes. "auto" and "nixl" take
            what is measured to be faster.
    """

    role: str = "mixed"
    peer_address: str | None = None
    prefill_peers: tuple[str, ...] = ()
    disaggregate: str = "auto"
    peer_link: str = "auto"

    def __post_init__(self) -> None:
        """Refuse unknown names, and parts that do not fit together."""
        names = ("role", ROLES), ("disaggregate", DISAGGREGATE), ("peer_link", PEER_LINKS)
        for name, known in names:
            value = getattr(self, name)
            if value not in known:
                hint = nearest(value, known)
                reason = f"must be one of {', '.join(known)}, got '{{value}}'.{hint}"
                raise UsageError(reason, field=name, value=value)
        if self.role == "decode" and not self.prefill_peers:
            reason = "can be decode only with the address of a prefill engine: set {other}."
            raise UsageError(reason, field="role", other=Field("prefill_peers"))
        if self.role != "decode" and self.prefill_peers:
            reason = "needs {other} decode."
            raise UsageError(reason, field="prefill_peers", other=Field("role"))
        if self.role != "decode" and self.disaggregate != "auto":
            raise UsageError("needs {other} decode.", field="disaggregate", other=Field("role"))
        if self.role != "prefill" and self.peer_address is not None:
            raise UsageError("needs {other} prefill.", field="peer_address", other=Field("role"))
        if self.role == "mixed" and self.peer_link != "auto":
            reason = "needs {other} prefill or decode."
            raise UsageError(reason, field="peer_link", other=Field("role"))
        for address in self.prefill_peers:
            parse_address(address, "prefill_peers")
        parse_address(self.own_address, "peer_address")

    @property
    def own_address(self) -> str:
        """Where a prefill engine listens."""
        return self.peer_address or DEFAULT_PEER_ADDRESS


class OffloadOptions(Frozen):
    """A folder, a store that machines share, or both; with neither, pages are in memory only.

    `page_cache_bytes` is the most that the folder holds, of all models together; None is 10 GB.
    `page_store` is the URL of a Redis server.
    """

    page_cache: str | None = None
    page_cache_bytes: int | None = None
    page_store: str | None = None

    def __post_init__(self) -> None:
        """Refuse what has no effect."""
        if self.page_cache == "":
            raise UsageError("must name a folder: leave it out, or name one.", field="page_cache")
        if self.page_cache_bytes is not None:
            if self.page_cache is None:
                raise UsageError(
                    "needs {other}.", field="page_cache_bytes", other=Field("page_cache")
                )
            if self.page_cache_bytes < _LEAST_BYTES:
                reason = f"must be at least {_LEAST_BYTES // 10**6}MB."
                raise UsageError(reason, field="page_cache_bytes")
        if self.page_store is not None and not self.page_store.startswith(_SCHEMES):
            reason = f"must be a URL that begins with one of: {', '.join(_SCHEMES)}."
            raise UsageError(reason, field="page_store")

    @property
    def most_bytes(self) -> int:
        """The most that the folder holds."""
        return self.page_cache_bytes or DEFAULT_PAGE_CACHE_BYTES

    @property
    def is_used(self) -> bool:
        """Whether pages stay anywhere."""
        return self.page_cache is not None or self.page_store is not None

    @property
    def field(self) -> str:
        """The option that asks for pages to stay."""
        return "page_store" if self.page_cache is None else "page_cache"


class GenerationOptions(Frozen):
    """Default sampling values for requests that leave them out.

    `generation_config` is one of these:

    - "auto": the values that the model's publisher recommends (generation_config.json, or
      `general.sampling.*` in a GGUF file); for other values, the usual defaults of local servers.
    - "none": the usual defaults of local servers only.
    - "openai": temperature 1, and no token is cut off.

    `override_generation_config` has values by name, which replace all of these.
    """

    generation_config: str = "auto"
    override_generation_config: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse unknown names and values out of bounds."""
        _one_of("generation_config", self.generation_config, GENERATION_CONFIGS)
        self.override()

    def override(self) -> SamplingParams:
        """Return the values of `override_generation_config`."""
        name, values = "override_generation_config", self.override_generation_config
        if not isinstance(values, Mapping):
            raise UsageError("must be an object with names and values.", field=name)
        for key in values:
            if key not in DEFAULTED:
                reason = f"has {{key!r}}; known: {', '.join(DEFAULTED)}."
                raise UsageError(reason + nearest(str(key), DEFAULTED), field=name, key=key)
        try:
            return SamplingParams(**values)  # type: ignore[arg-type]
        except RequestError as error:
            raise UsageError("has a wrong value: {why}", field=name, why=error) from None

    def defaults(self, published: SamplingParams) -> SamplingDefaults:
        """Return the defaults for a model whose files recommend the values `published`."""
        usual = OPENAI_DEFAULTS if self.generation_config == "openai" else LOCAL_DEFAULTS
        override = self.override()
        if self.generation_config != "auto":
            return SamplingDefaults(override, usual)
        missing = [name for name in DEFAULTED if getattr(override, name) is None]
        recommended = {name: getattr(published, name) for name in missing}
        return SamplingDefaults(replace(override, **recommended), usual)


class EngineOptions(Frozen):
    """All options of `engine.build`.

    With `accept_quality` a model that writes garbage is used, with a warning. `chat_template`
    replaces the model's own: a Jinja source, or the name of a built-in template.
    """

    compute: ComputeOptions = field(default_factory=ComputeOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    accept_quality: bool = False
    handover: DisaggregationOptions = field(default_factory=DisaggregationOptions)
    tiers: OffloadOptions = field(default_factory=OffloadOptions)
    generation: GenerationOptions = field(default_factory=GenerationOptions)
    chat_template: str | None = None

    def __post_init__(self) -> None:
        """Refuse parts that do not fit together."""
        backend = self.compute.backend
        if self.tiers.is_used:
            self._check_tiers()
        if self.cache.kv_format != "auto" and backend not in {"auto", "cpu", "gpu"}:
            raise UsageError("needs the backend cpu or gpu.", field="kv_format")
        if self.cache.kv_format == "int16" and backend == "gpu":
            raise UsageError("can be int16 only on the backend cpu.", field="kv_format")
        if self.cache.kv_format == "fp8" and backend != "gpu":
            reason = "can be fp8 only on the backend gpu; int8 is as small."
            raise UsageError(reason, field="kv_format")
        if backend == "gpu":
            self._check_gpu()
        if self.handover.role != "mixed" and not self.cache.prefix_cache:
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

    def _check_tiers(self) -> None:
        field = self.tiers.field
        if not self.cache.prefix_cache:
            raise UsageError("needs {other}.", field=field, other=Field("prefix_cache"))
        if self.parallel.num_ranks > 1:
            reason = "needs a model in one process: each rank would have a part of every page."
            raise UsageError(reason, field=field)
        if self.compute.backend == "torch":
            reason = f"is not for the backend {self.compute.backend}."
            raise UsageError(reason, field=field)


def options_of(fields: Mapping[str, Any]) -> EngineOptions:
    """Return engine options with the given values of fields such as `num_threads`.

    Raises:
        UsageError: no part has such a field, or its value is wrong.
    """
    parts = {name: type(getattr(EngineOptions(), name)) for name in EngineOptions.__struct_fields__}
    homes = {
        field_name: part
        for part, kind in parts.items()
        for field_name in getattr(kind, "__struct_fields__", (part,))
    }
    values: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        if name not in homes:
            reason = f"There is no option '{name}'.{nearest(name, homes)}"
            raise UsageError(f"{reason} There are {', '.join(sorted(homes))}.")
        values.setdefault(homes[name], {})[name] = value
    flags = {part: values.pop(part)[part] for part in ("accept_quality",) if part in values}
    options = {part: parts[part](**part_fields) for part, part_fields in values.items()}
    return EngineOptions(**options, **flags)


def parse_address(text: str, field: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT.

    Raises:
        UsageError: it is something else.
    """
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UsageError("must be HOST:PORT, got {value!r}.", field=field, value=text)
    return host.removeprefix("[").removesuffix("]"), int(port)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        reason = f"must be one of {', '.join(known)}, got '{{value}}'.{nearest(value, known)}"
        raise UsageError(reason, field=name, value=value)


def _one_number_of(name: str, value: int | str, known: tuple[int | str, ...]) -> None:
    if value not in known:
        *most, last = known
        numbers = f"{', '.join(map(str, most))} or {last}"
        raise UsageError(f"must be {numbers}, got {value}.", field=name)
