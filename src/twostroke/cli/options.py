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
from twostroke.core.sampling import BOUNDS, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.core.constraint import Constraint

F = TypeVar("F", bound="Callable[..., Any]")
T = TypeVar("T")

_BATCH = BatchOptions()
_TEMPERATURE: Final = 0.7
_NUMBERS: Final = tuple(name for name in BOUNDS if name not in {"n", "logprobs", "prompt_logprobs"})
_NO_DRAFT: Final = "none"


def option(section: str, *names: str, **attributes: Any) -> Callable[[F], F]:
    """Return `click.option` for an option under the heading `section`."""
    return click.option(*names, cls=SectionOption, section=section, **attributes)


def sampling_options(function: F) -> F:
    """Add the options of `SamplingParams`."""
    return add_options(
        function,
        "Choosing tokens",
        *(_number_option(name) for name in _NUMBERS),
        (("--stop",), {"multiple": True, "help": "Stop before this text; repeatable."}),
        (("--ignore-eos",), {"is_flag": True, "help": "Do not stop at end tokens."}),
    )


def _number_option(name: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    bounds = BOUNDS[name]
    defaults: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)}
    default = _TEMPERATURE if name == "temperature" else defaults[name]
    attributes = {"type": bounds.kind, "default": default, "help": bounds.description}
    return (f"--{name.replace('_', '-')}",), attributes


def compute_options(function: F) -> F:
    """Add the options of `ComputeOptions` and `CacheOptions`."""
    return add_options(
        function,
        "Machine",
        (("--backend",), {"type": OneOf(BACKENDS), "default": "auto", "help": "Compute backend."}),
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
                "help": "Precision of activations for quantized weights; 9 and 8 are faster.",
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
                "help": "Format of keys and values: f16 (auto), bf16, or int8 (half the memory).",
            },
        ),
        (("--page-size",), {"type": int, "default": 16, "help": "Tokens per page of that memory."}),
        (
            ("--prefix-cache/--no-prefix-cache",),
            {"default": True, "help": "Reuse the common beginning of prompts."},
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
                "help": "When requests join a batch; static waits until it is full.",
            },
        ),
        (
            ("--max-running",),
            {"type": int, "help": "Most requests that run at once [default: 256]."},
        ),
        (
            ("--token-budget",),
            {"type": int, "default": _BATCH.token_budget, "help": "Most tokens per step."},
        ),
        (
            ("--batch-size",),
            {
                "type": int,
                "default": _BATCH.batch_size,
                "help": "Size of dynamic and static batches.",
            },
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
                "help": "How tokens are guessed ahead; answers stay the same.",
            },
        ),
        (
            ("--draft",),
            {
                "default": draft,
                "metavar": "MODEL|auto|none",
                "help": "A smaller model that guesses ahead; auto: the catalogue's, if cached.",
            },
        ),
        (
            ("--heads",),
            {"help": "A folder of heads trained for the model (twostroke train-heads)."},
        ),
        (
            ("--drafts", "count"),
            {"type": int, "help": "Always guess this many tokens [default: as many as save time]."},
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
    names = (*_NUMBERS, "stop", "ignore_eos")
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
