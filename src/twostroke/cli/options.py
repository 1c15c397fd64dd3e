"""Options that several commands share, and what they are turned into."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

import click

from twostroke.core.config import (
    BACKENDS,
    POLICIES,
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
)
from twostroke.core.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class ByteSize(click.ParamType):
    """A number of bytes, such as 512M, 2GB or 1GiB."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the number of bytes."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", str(value).strip().lower())
        if match is None or match[2] not in _UNITS:
            self.fail(f"'{value}' is not a size: write 512M, 2GB or 1GiB.", param, ctx)
        return int(float(match[1]) * _UNITS[match[2]])


def compute_options(function: F) -> F:
    """Add the options of `ComputeOptions` and `CacheOptions`."""
    for decorate in reversed(
        (
            click.option(
                "--backend", type=click.Choice(BACKENDS), default="auto", show_default=True
            ),
            click.option("--threads", type=int, help="Compute threads [default: all cores]."),
            click.option(
                "--level", help="Instruction-set level [default: the best that runs here]."
            ),
            click.option("--context-length", type=int, help="Longest prompt and answer in tokens."),
            click.option("--kv-memory", type=ByteSize(), help="Memory for keys and values: 2GB."),
            click.option("--page-size", type=int, default=16, show_default=True),
            click.option("--prefix-cache/--no-prefix-cache", default=True, show_default=True),
            click.option(
                "--strict-prefix", is_flag=True, help="Never reuse pages of generated tokens."
            ),
        )
    ):
        function = decorate(function)
    return function


def batch_options(function: F) -> F:
    """Add the options of `BatchOptions`."""
    defaults = BatchOptions()
    for decorate in reversed(
        (
            click.option("--policy", type=click.Choice(POLICIES), default=defaults.policy),
            click.option("--max-running", type=int, default=defaults.max_running),
            click.option("--token-budget", type=int, default=defaults.token_budget),
            click.option("--batch-size", type=int, default=defaults.batch_size),
            click.option("--max-wait", "max_wait_s", type=float, default=defaults.max_wait_s),
            click.option("--max-waiting", type=int, default=defaults.max_waiting_requests),
        )
    ):
        function = decorate(function)
    return function


def sampling_options(function: F) -> F:
    """Add the options of `SamplingParams`."""
    for decorate in reversed(
        (
            click.option("--max-tokens", type=int, help="Most tokens to write."),
            click.option("--min-tokens", type=int, default=0),
            click.option("--temperature", type=float, default=0.7, show_default=True),
            click.option("--top-k", type=int, default=0),
            click.option("--top-p", type=float, default=1.0),
            click.option("--min-p", type=float, default=0.0),
            click.option("--repetition-penalty", type=float, default=1.0),
            click.option("--presence-penalty", type=float, default=0.0),
            click.option("--frequency-penalty", type=float, default=0.0),
            click.option("--seed", type=int),
            click.option("--stop", multiple=True, help="Stop before this text; repeatable."),
            click.option("--ignore-eos", is_flag=True, help="Do not stop at end tokens."),
        )
    ):
        function = decorate(function)
    return function


def engine_options(given: dict[str, Any]) -> EngineOptions:
    """Take the engine's options out of `given` and build them."""
    compute = ComputeOptions(given.pop("backend"), given.pop("threads"), given.pop("level"))
    cache = CacheOptions(
        memory_bytes=given.pop("kv_memory"),
        context_length=given.pop("context_length"),
        page_size=given.pop("page_size"),
        prefix_cache=given.pop("prefix_cache"),
        strict_prefix=given.pop("strict_prefix"),
    )
    if "policy" not in given:
        return EngineOptions(compute, cache)
    batch = BatchOptions(
        policy=given.pop("policy"),
        max_running=given.pop("max_running"),
        token_budget=given.pop("token_budget"),
        batch_size=given.pop("batch_size"),
        max_wait_s=given.pop("max_wait_s"),
        max_waiting_requests=given.pop("max_waiting"),
    )
    return EngineOptions(compute, cache, batch)


def sampling_params(given: dict[str, Any]) -> SamplingParams:
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
    return SamplingParams(**{name: given.pop(name) for name in names})
