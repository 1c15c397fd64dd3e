"""How much key-value cache to have, and whether the model fits this machine at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.core.errors import MemoryLimitError, UsageError

if TYPE_CHECKING:
    from twostroke.core.config import CacheOptions
    from twostroke.program import Program

_FULL_CONTEXTS = 8  # as many of the longest requests side by side, where memory allows
_SHARE_OF_FREE = 0.5  # of the memory that the weights leave
_WORKING_BYTES = 128 * 1024**2  # interpreter, tokenizer, buffers of a step


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How long a request may be, and how many pages there are for all of them."""

    context_length: int
    num_pages: int
    page_size: int
    cache_bytes: int


def size_cache(
    program: Program, options: CacheOptions, weight_bytes: int, available_bytes: int
) -> CacheSize:
    """Choose the number of pages.

    Raises:
        UsageError: the context asked for is longer than the model's own.
        MemoryLimitError: weights and one whole context do not fit; says what would.
    """
    context_length = options.context_length or program.context_length
    if context_length > program.context_length:
        message = f"{program.name} was made for at most {program.context_length} tokens of context"
        raise UsageError(f"{message}, not {context_length}: lower --context-length.")
    page_bytes = options.page_size * program.cache_bytes_per_token()
    pages_for_one = -(-context_length // options.page_size)
    free = available_bytes - weight_bytes - _WORKING_BYTES
    if options.memory_bytes is None:
        limit = max(int(free * _SHARE_OF_FREE), 0)
        num_pages = min(_FULL_CONTEXTS * pages_for_one, limit // page_bytes)
        if num_pages < pages_for_one <= free // page_bytes:
            num_pages = pages_for_one
    else:
        num_pages = options.memory_bytes // page_bytes
    if num_pages < pages_for_one or num_pages * page_bytes > free:
        budget = free if options.memory_bytes is None else min(free, options.memory_bytes)
        _refuse(program, options, weight_bytes, available_bytes, budget, context_length)
    return CacheSize(context_length, num_pages, options.page_size, num_pages * page_bytes)


def _refuse(
    program: Program,
    options: CacheOptions,
    weight_bytes: int,
    available_bytes: int,
    budget: int,
    context_length: int,
) -> None:
    token_bytes = program.cache_bytes_per_token()
    fitting = max(budget, 0) // (token_bytes * options.page_size) * options.page_size
    needed = context_length * token_bytes
    parts = (
        f"{program.name} needs {_mb(weight_bytes)} for its weights and {_mb(needed)} of KV cache "
        f"for {context_length} tokens of context; {_mb(available_bytes)} of memory are free"
    )
    if options.memory_bytes is not None:
        parts += f" and the KV cache may take {_mb(options.memory_bytes)}"
    if fitting < 2:
        raise MemoryLimitError(
            f"{parts}: no context would fit. Free memory, or take a smaller model."
        )
    knob = f"--context-length {fitting}"
    if options.memory_bytes is not None and needed <= available_bytes - weight_bytes:
        knob += f", or raise --kv-memory to {_mb(needed)}"
    raise MemoryLimitError(f"{parts}. {fitting} tokens would fit: use {knob}.")


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"
