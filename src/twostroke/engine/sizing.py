"""How much key-value cache to have, and whether the model fits this machine at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.cache import DEFAULT_FORMAT, FORMATS, PageGroups
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
    kv_format: str = DEFAULT_FORMAT


def size_cache(
    program: Program,
    options: CacheOptions,
    token_budget: int,
    weight_bytes: int,
    available_bytes: int,
    *,
    auto_format: str = DEFAULT_FORMAT,
) -> CacheSize:
    """Choose the number of pages; `auto_format` is what the backend stores if none is asked for.

    A request of `context_length` tokens needs pages for all of them in the cache groups that see
    everything, and in a group with a window for the window and the `token_budget` rows of a step.

    Raises:
        UsageError: the context asked for is longer than the model's own.
        MemoryLimitError: weights and one whole context do not fit; says what would.
    """
    context_length = options.context_length or program.context_length
    if context_length > program.context_length:
        message = f"{program.name} was made for at most {program.context_length} tokens of context"
        raise UsageError(f"{message}, not {context_length}: lower --context-length.")
    kv_format = auto_format if options.kv_format == "auto" else options.kv_format
    room = _Room(
        name=program.name,
        weight_bytes=weight_bytes,
        available_bytes=available_bytes,
        page_bytes=program.page_bytes(options.page_size, FORMATS[kv_format]),
        groups=PageGroups(options.page_size, tuple(g.window for g in program.cache_groups)),
        num_rows=token_budget,
        max_context=program.context_length,
    )
    if options.memory_bytes is not None and options.memory_bytes > room.free_bytes:
        raise room.too_much_asked(options.memory_bytes)
    pages_for_one = room.num_pages(context_length)
    if options.memory_bytes is not None:
        num_pages = options.memory_bytes // room.page_bytes
    else:
        num_pages = int(room.free_bytes * _SHARE_OF_FREE) // room.page_bytes
        num_pages = min(_FULL_CONTEXTS * pages_for_one, num_pages)
        if num_pages < pages_for_one <= room.free_bytes // room.page_bytes:
            num_pages = pages_for_one
    if num_pages < pages_for_one:
        raise room.too_small(context_length, options.memory_bytes)
    cache_bytes = num_pages * room.page_bytes
    return CacheSize(context_length, num_pages, options.page_size, cache_bytes, kv_format)


@dataclass(frozen=True, slots=True)
class _Room:
    """What there is to share out, and the sentences that say why it is not enough."""

    name: str
    weight_bytes: int
    available_bytes: int
    page_bytes: int
    groups: PageGroups
    num_rows: int
    max_context: int

    @property
    def free_bytes(self) -> int:
        """What the weights and the work itself leave for pages."""
        return max(self.available_bytes - self.weight_bytes - _WORKING_BYTES, 0)

    def num_pages(self, context_length: int) -> int:
        """Return the pages that one request of so many tokens may need."""
        return self.groups.num_needed(context_length, self.num_rows)

    def too_much_asked(self, memory_bytes: int) -> MemoryLimitError:
        """Return the error for a `--kv-memory` that is not there."""
        start = (
            f"{self.name} needs {_mb(self.weight_bytes)} for its weights, and --kv-memory asks for "
            f"{_mb(memory_bytes)} of KV cache; {_mb(self.available_bytes)} of memory are free"
        )
        fitting = self._fitting(self.free_bytes)
        if fitting < 2:
            return self._nothing_fits(start)
        return MemoryLimitError(
            f"{start}. Lower --kv-memory to at most {self.free_bytes // 10**6}MB, "
            f"which holds {fitting} tokens of context."
        )

    def too_small(self, context_length: int, memory_bytes: int | None) -> MemoryLimitError:
        """Return the error for a context that the pages cannot hold."""
        needed = self.num_pages(context_length) * self.page_bytes
        start = (
            f"{self.name} needs {_mb(self.weight_bytes)} for its weights and {_mb(needed)} of KV "
            f"cache for {context_length} tokens of context; "
        )
        if memory_bytes is None:
            start += f"{_mb(self.available_bytes)} of memory are free"
        else:
            start += f"--kv-memory allows {_mb(memory_bytes)} of {_mb(self.free_bytes)} free"
        fitting = self._fitting(self.free_bytes if memory_bytes is None else memory_bytes)
        raised_mb = -(-needed // 10**6)
        raised = f"--kv-memory {raised_mb}MB"
        can_raise = memory_bytes is not None and raised_mb * 10**6 <= self.free_bytes
        if fitting >= 2:
            more = f", or {raised}" if can_raise else ""
            return MemoryLimitError(
                f"{start}. {fitting} tokens would fit: use --context-length {fitting}{more}."
            )
        if can_raise:
            return MemoryLimitError(f"{start}, too little for any context: use {raised}.")
        return self._nothing_fits(start)

    def _fitting(self, num_bytes: int) -> int:
        """Return how many tokens of context fit into `num_bytes` of pages."""
        return self.groups.most_tokens(
            num_bytes // self.page_bytes, self.max_context, self.num_rows
        )

    def _nothing_fits(self, start: str) -> MemoryLimitError:
        return MemoryLimitError(
            f"{start}: no context would fit. Free memory, or take a smaller model."
        )


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"
