"""How an engine is to be built: small frozen parts, None where the engine may choose."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from twostroke.core.errors import UsageError, nearest

BACKENDS: Final = ("auto", "cpu", "reference", "torch")
POLICIES: Final = ("continuous", "dynamic", "static")
PAGE_SIZES: Final = (16, 32, 64)
ACTIVATION_BITS: Final = (15, 9, 8)
DEFAULT_ACTIVATION_BITS: Final = 15
KV_FORMATS: Final = ("auto", "f16", "bf16", "int8")
PARTNER: Final = "auto"  # the draft that the catalogue knows
SPECULATE: Final = ("auto", "off", "ngram", "draft", "lookahead", "medusa", "eagle")
MAX_DRAFTS: Final = 24  # behind one request in one step


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """Who computes: the backend, its threads, and the instruction-set level of the cpu backend.

    `device` is the torch backend's: "auto" is a GPU where there is one, else "cpu"; "cuda:1" names
    one of several. `activation_bits` is what the cpu backend keeps of an activation that meets
    quantized weights: 8 are up to 1.6 times faster on AVX-512, at prompts and many streams,
    and change answers as other engines that keep 8 do (docs/adr/0019-eight-bits-as-a-choice.md);
    9 are 15 where activations are large and 8 elsewhere (docs/adr/0031).
    """

    backend: str = "auto"
    num_threads: int | None = None
    level: str | None = None
    device: str = "auto"
    activation_bits: int = DEFAULT_ACTIVATION_BITS

    def __post_init__(self) -> None:
        """Refuse unknown names and numbers out of range."""
        _one_of("backend", self.backend, BACKENDS)
        if self.num_threads is not None and not 1 <= self.num_threads <= 1024:
            raise UsageError(f"threads must be from 1 to 1024, not {self.num_threads}.")
        if self.level is not None and self.backend not in {"auto", "cpu"}:
            raise UsageError(f"level is the cpu backend's, not {self.backend}'s.")
        if self.activation_bits not in ACTIVATION_BITS:
            *most, last = ACTIVATION_BITS
            bits = f"{', '.join(map(str, most))} or {last}"
            raise UsageError(f"activation_bits must be {bits}, not {self.activation_bits}.")
        if self.activation_bits != DEFAULT_ACTIVATION_BITS and self.backend not in {"auto", "cpu"}:
            raise UsageError(f"activation_bits is the cpu backend's, not {self.backend}'s.")
        if self.device != "auto" and self.backend != "torch":
            raise UsageError("device is the torch backend's: add --backend torch.")


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The key-value cache: its size and what is kept in it.

    `memory_bytes` None takes what the longest requests may need, within half of the memory that
    is free. `context_length` None is the model's own. `strict_prefix` keeps pages filled by
    generated rows out of the prefix cache on backends where these are computed otherwise.
    `kv_format` is how the cpu backend stores keys and values: "f16" (what "auto" takes), "bf16" for
    models whose keys or values go beyond 65504, or "int8" for about half of the memory
    (docs/adr/0011-keys-are-spread-before-int8.md has what it costs).
    """

    memory_bytes: int | None = None
    context_length: int | None = None
    page_size: int = 16
    prefix_cache: bool = True
    strict_prefix: bool = False
    kv_format: str = "auto"

    def __post_init__(self) -> None:
        """Refuse unknown names and numbers out of range."""
        _one_of("kv_format", self.kv_format, KV_FORMATS)
        if self.page_size not in PAGE_SIZES:
            *most, last = PAGE_SIZES
            sizes = f"{', '.join(map(str, most))} or {last}"
            raise UsageError(f"page size must be {sizes}, not {self.page_size}.")
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise UsageError(f"KV memory must be above 0 bytes, not {self.memory_bytes}.")
        if self.context_length is not None and self.context_length < 2:
            raise UsageError(f"context length must be at least 2, not {self.context_length}.")


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How requests share steps.

    `policy` is "continuous" (join at any step), "dynamic" (a batch starts when `batch_size`
    requests wait or `max_wait_s` passed) or "static" (a batch starts when `batch_size` wait).
    `token_budget` is the most tokens that a step computes, `max_running` the most requests that
    run at once: each gets at least one token a step, so None is 256 or the budget if that is less.
    """

    policy: str = "continuous"
    max_running: int | None = None
    token_budget: int = 256
    batch_size: int = 16
    max_wait_s: float = 0.05
    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 4_194_304

    def __post_init__(self) -> None:
        """Refuse unknown names and numbers out of range."""
        _one_of("policy", self.policy, POLICIES)
        for name, low in (
            ("max_running", 1),
            ("token_budget", 1),
            ("batch_size", 1),
            ("max_wait_s", 0),
            ("max_waiting_requests", 1),
            ("max_waiting_tokens", 1),
        ):
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise UsageError(f"{name} must be at least {low}, not {value}.")
            if value == math.inf:
                raise UsageError(f"{name} must be a finite number, not {value}.")


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """How tokens are guessed before they are computed; no answer depends on it, only its time.

    `method` is who guesses: "ngram" looks for the same words earlier in the request, in what its
    caller expects, and in the same tenant's answers; "draft" is a smaller model, named `draft`
    ("auto": the one that the catalogue knows for this model, if it is in the cache); "lookahead"
    lets the model itself guess several tokens at once; "medusa" and "eagle" are heads that were
    trained for the model and lie in the folder `heads`; "auto" is n-gram, and the draft and the
    heads if they are named. `count` None takes as many guesses as pay, a number that many always.

    A `draft` "auto" is left out where heads are named, where another method is asked for, and
    where there is no memory for it.
    """

    method: str = "auto"
    draft: str | None = None
    count: int | None = None
    heads: str | None = None

    def __post_init__(self) -> None:
        """Refuse unknown names and numbers out of range."""
        _one_of("speculate", self.method, SPECULATE)
        if self.method == "draft" and self.draft is None:
            raise UsageError("speculate can be draft only with a draft model: add --draft MODEL.")
        if self.draft not in {None, PARTNER} and self.method not in {"auto", "draft"}:
            message = (
                f"draft is of no use where --speculate is {self.method}: leave one of them out."
            )
            raise UsageError(message)
        if self.method in {"medusa", "eagle"} and self.heads is None:
            message = f"speculate can be {self.method} only with trained heads: add --heads FOLDER."
            raise UsageError(message)
        if self.heads is not None and self.method not in {"auto", "medusa", "eagle"}:
            message = (
                f"heads is of no use where --speculate is {self.method}: leave one of them out."
            )
            raise UsageError(message)
        if self.heads == "":
            raise UsageError("heads names no folder: leave it out, or name one with heads in it.")
        if self.count is not None and self.method == "off":
            raise UsageError("drafts is of no use where --speculate is off: leave one of them out.")
        if self.count is not None and not 1 <= self.count <= MAX_DRAFTS:
            raise UsageError(f"drafts must be from 1 to {MAX_DRAFTS}, not {self.count}.")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """All that `engine.build` needs besides the model."""

    compute: ComputeOptions = field(default_factory=ComputeOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)

    def __post_init__(self) -> None:
        """Refuse parts that do not go together."""
        backend = self.compute.backend
        if self.cache.kv_format != "auto" and backend not in {"auto", "cpu"}:
            raise UsageError(f"kv_format is the cpu backend's, not {backend}'s.")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        choices = ", ".join(known)
        message = f"Unknown {name} '{value}'; known: {choices}."
        raise UsageError(message + nearest(value, known))
