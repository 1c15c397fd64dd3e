"""Options that several commands share, and what they are turned into."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from twostroke.cli.help import ByteSize, OneOf, SectionOption
from twostroke.core.config import (
    BACKENDS,
    DEFAULT_ACTIVATION_BITS,
    KV_FORMATS,
    PARTNER,
    POLICIES,
    SPECULATE,
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    SpeculationOptions,
)
from twostroke.core.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.core.constraint import Constraint

F = TypeVar("F", bound="Callable[..., Any]")
T = TypeVar("T")

_BATCH = BatchOptions()
_NO_DRAFT: Final = "none"


def option(section: str, *names: str, **attributes: Any) -> Callable[[F], F]:
    """Return `click.option` for an option under the heading `section`."""
    return click.option(*names, cls=SectionOption, section=section, **attributes)


def sampling_options(function: F) -> F:
    """Add the options of `SamplingParams`."""
    return add_options(
        function,
        "Choosing tokens",
        (("--max-tokens",), {"type": int, "help": "Most tokens to write [default: the context]."}),
        (
            ("--temperature",),
            {"type": float, "default": 0.7, "help": "0 always takes the likeliest token."},
        ),
        (("--seed",), {"type": int, "help": "The same seed gives the same answer again."}),
        (("--top-k",), {"type": int, "default": 0, "help": "Among the k likeliest; 0: all."}),
        (
            ("--top-p",),
            {"type": float, "default": 1.0, "help": "Among the likeliest that sum to p."},
        ),
        (
            ("--min-p",),
            {"type": float, "default": 0.0, "help": "Among those with p times the best's chance."},
        ),
        (
            ("--repetition-penalty",),
            {"type": float, "default": 1.0, "help": "Above 1: against tokens met before."},
        ),
        (
            ("--presence-penalty",),
            {"type": float, "default": 0.0, "help": "Against tokens written before."},
        ),
        (
            ("--frequency-penalty",),
            {"type": float, "default": 0.0, "help": "The same, for each time."},
        ),
        (("--stop",), {"multiple": True, "help": "Stop before this text; repeatable."}),
        (("--min-tokens",), {"type": int, "default": 0, "help": "Do not end before so many."}),
        (("--ignore-eos",), {"is_flag": True, "help": "Do not stop at end tokens."}),
    )


def compute_options(function: F) -> F:
    """Add the options of `ComputeOptions` and `CacheOptions`."""
    return add_options(
        function,
        "Machine",
        (("--backend",), {"type": OneOf(BACKENDS), "default": "auto", "help": "Who computes."}),
        (
            ("--threads", "num_threads"),
            {"type": int, "help": "Compute threads [default: one per core]."},
        ),
        (("--level",), {"help": "Instruction set [default: the best here, see doctor]."}),
        (("--device",), {"default": "auto", "help": "Of the torch backend, such as cuda:1."}),
        (
            ("--activation-bits",),
            {
                "type": int,
                "default": DEFAULT_ACTIVATION_BITS,
                "help": "Kept against quantized weights: 15; less near: 9, faster, and 8, fastest; "
                "not faster at the level 'portable'.",
            },
        ),
        (
            ("--context-length",),
            {"type": int, "help": "Most tokens of prompt and answer [default: the model's]."},
        ),
        (
            ("--kv-memory", "memory_bytes"),
            {"type": ByteSize(), "help": "Memory for keys and values, such as 2GB."},
        ),
        (
            ("--kv-format",),
            {
                "type": OneOf(KV_FORMATS),
                "default": "auto",
                "help": "Their numbers: f16 (auto), bf16, or int8 in half the room.",
            },
        ),
        (("--page-size",), {"type": int, "default": 16, "help": "Tokens a page of that memory."}),
        (
            ("--prefix-cache/--no-prefix-cache",),
            {"default": True, "help": "Reuse what prompts have in common."},
        ),
        (("--strict-prefix",), {"is_flag": True, "help": "Never reuse pages of generated tokens."}),
    )


def batch_options(function: F) -> F:
    """Add the options of `BatchOptions`."""
    return add_options(
        function,
        "Batching",
        (
            ("--policy",),
            {
                "type": OneOf(POLICIES),
                "default": _BATCH.policy,
                "help": "Who joins when; static waits for a whole batch.",
            },
        ),
        (
            ("--max-running",),
            {"type": int, "help": "Most requests side by side [default: 256]."},
        ),
        (
            ("--token-budget",),
            {"type": int, "default": _BATCH.token_budget, "help": "Most tokens a step."},
        ),
        (
            ("--batch-size",),
            {"type": int, "default": _BATCH.batch_size, "help": "Of dynamic and static batches."},
        ),
        (
            ("--max-wait", "max_wait_s"),
            {
                "type": float,
                "default": _BATCH.max_wait_s,
                "help": "Seconds that a dynamic batch waits to fill.",
            },
        ),
        (
            ("--max-waiting", "max_waiting_requests"),
            {
                "type": int,
                "default": _BATCH.max_waiting_requests,
                "help": "Requests in the queue; more are refused.",
            },
        ),
    )


def speculation_options(function: F, draft: str = _NO_DRAFT) -> F:
    """Add the options of `SpeculationOptions`; `draft` is who guesses if nothing is said."""
    return add_options(
        function,
        "Guessing ahead",
        (
            ("--speculate", "method"),
            {
                "type": OneOf(SPECULATE),
                "default": "auto",
                "help": "Who guesses tokens; answers stay the same.",
            },
        ),
        (
            ("--draft",),
            {
                "default": draft,
                "metavar": "MODEL|auto|none",
                "help": "A smaller model, to guess for this one; auto: the catalogue's, if here.",
            },
        ),
        (
            ("--heads",),
            {"help": "A folder of heads trained for the model (twostroke train-heads)."},
        ),
        (
            ("--drafts", "count"),
            {"type": int, "help": "Always guess so many [default: as many as pay]."},
        ),
    )


def lasting_speculation_options(function: F) -> F:
    """Add the options of `SpeculationOptions` for an engine that lasts, worth a draft."""
    return speculation_options(function, draft=PARTNER)


def engine_options(given: dict[str, Any]) -> EngineOptions:
    """Take the engine's options out of `given` and build them.

    An option has the name of the field that it sets; what a command does not offer stays as it is.
    """
    draft = given.get("draft")
    if draft is not None and draft.lower() in {_NO_DRAFT, PARTNER}:
        given["draft"] = None if draft.lower() == _NO_DRAFT else PARTNER
    return EngineOptions(
        _taken(ComputeOptions, given),
        _taken(CacheOptions, given),
        _taken(BatchOptions, given),
        _taken(SpeculationOptions, given),
    )


def _taken(kind: type[T], given: dict[str, Any]) -> T:
    names = [field.name for field in fields(kind) if field.name in given]  # type: ignore[arg-type]
    return kind(**{name: given.pop(name) for name in names})


def sampling_params(given: dict[str, Any], constraint: Constraint | None = None) -> SamplingParams:
    """Take the sampling options out of `given` and build them."""
    names = (
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
        "ignore_eos",
    )
    return SamplingParams(**{name: given.pop(name) for name in names}, constraint=constraint)


def add_options(function: F, section: str, *options: tuple[tuple[str, ...], dict[str, Any]]) -> F:
    """Add options to a command's function, in the order in which the help shows them.

    Each is its names and `click.option`'s attributes.
    """
    for names, attributes in reversed(options):
        shown = attributes.get("default") is not None
        decorate: Callable[[F], F] = option(section, *names, show_default=shown, **attributes)
        function = decorate(function)
    return function
