"""The size of the key-value cache, and whether the model fits into memory at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.errors import MemoryLimitError, UsageError
from twostroke.core.files import megabytes as _mb
from twostroke.core.frozen import Frozen
from twostroke.model.program.kv_layout import DEFAULT_FORMAT, FORMATS, PageGroups
from twostroke.model.program.mesh import ONE_RANK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.control_groups import MemoryLimit
    from twostroke.core.options import CacheOptions
    from twostroke.model.program import Program
    from twostroke.model.program.mesh import Mesh

_MOST_CONTEXTS = 8  # of full length
_TOKENS_OF_ONE = 128  # for each request that may run
_SHARE_OF_FREE = 0.5  # of the memory that the weights leave
WORKING_BYTES = 128 * 1024**2  # interpreter, tokenizer, buffers of a step


class CacheSize(Frozen):
    """The longest request, and the pages for all requests."""

    context_length: int
    num_pages: int
    page_size: int
    cache_bytes: int
    kv_format: str = DEFAULT_FORMAT


def size_kv_cache(  # noqa: PLR0913 - what only the builder knows
    program: Program,
    options: CacheOptions,
    token_budget: int,
    weight_bytes: int,
    available_bytes: int,
    *,
    most_running: int = 1,
    auto_format: str = DEFAULT_FORMAT,
    parts: Sequence[Program] = (),
    mesh: Mesh = ONE_RANK,
    group_limit: MemoryLimit | None = None,
) -> CacheSize:
    """Choose the number of pages; `auto_format` is the format that "auto" stands for.

    `group_limit` is the control group that makes `available_bytes` so few, for errors.

    Of the ranks of a `mesh`, `parts` are those of the Program that store their keys and values in
    this memory.

    In time the prefix cache fills all pages, so a small model gets few: by default as many bytes as
    the weights and one whole context together, or the pages of `most_running` short requests if
    those are more. Half of the free memory is the limit, except for one whole context.

    A request of `context_length` tokens needs pages for all of them in cache groups without a
    window, and in groups with one for the window and the `token_budget` rows of a step.

    Raises:
        UsageError: the context asked for is longer than the model's own.
        MemoryLimitError: weights and one whole context do not fit; says what would.
    """
    context_length = options.context_length or program.context_length
    if context_length > program.context_length:
        message = f"{program.name} was made for at most {program.context_length} tokens of context"
        raise UsageError(f"{message}, not {context_length}: lower --context-length.")
    page_size, memory_bytes = mesh.page_size(options.tokens_in_page), options.memory_bytes
    kv_format = auto_format if options.kv_format == "auto" else options.kv_format
    stored = parts or (program,)
    page_bytes = max(1, sum(one.page_bytes(page_size, FORMATS[kv_format]) for one in stored))
    groups = PageGroups(page_size, tuple(group.window for group in program.cache_groups))
    free_bytes = max(available_bytes - weight_bytes - WORKING_BYTES, 0)

    pages_for_one = groups.num_needed(context_length, token_budget)
    if memory_bytes is not None:
        num_pages = memory_bytes // page_bytes
    else:
        num_pages = max(
            pages_for_one + weight_bytes // page_bytes,
            groups.num_needed(min(_TOKENS_OF_ONE, context_length), token_budget) * most_running,
        )
        num_pages = min(num_pages, _MOST_CONTEXTS * pages_for_one)
        num_pages = min(num_pages, int(free_bytes * _SHARE_OF_FREE) // page_bytes)
        if num_pages < pages_for_one <= free_bytes // page_bytes:
            num_pages = pages_for_one
    asks_too_much = memory_bytes is not None and memory_bytes > free_bytes
    if num_pages >= pages_for_one and not asks_too_much:
        cache_bytes = num_pages * page_bytes
        return CacheSize(context_length, num_pages, page_size, cache_bytes, kv_format)

    allowed_bytes = free_bytes if memory_bytes is None else min(memory_bytes, free_bytes)
    shortage = _Shortage(
        name=program.name,
        weight_bytes=weight_bytes,
        available_bytes=available_bytes,
        free_bytes=free_bytes,
        memory_bytes=memory_bytes,
        context_length=context_length,
        needed_bytes=pages_for_one * page_bytes,
        fitting=groups.max_tokens(
            allowed_bytes // page_bytes, program.context_length, token_budget
        ),
        group_limit=group_limit,
    )
    raise shortage.too_much_asked() if asks_too_much else shortage.too_small()


class _Shortage(Frozen):
    """Why weights and pages do not fit; `fitting` tokens of context would."""

    name: str
    weight_bytes: int
    available_bytes: int
    free_bytes: int
    memory_bytes: int | None
    context_length: int
    needed_bytes: int
    fitting: int
    group_limit: MemoryLimit | None

    def too_much_asked(self) -> MemoryLimitError:
        """Return the error for a `--kv-memory` that is not free."""
        facts = (
            f"{self.name} needs {_mb(self.weight_bytes)} for its weights, and --kv-memory asks for "
            f"{_mb(self.memory_bytes or 0)} of KV cache; {self._free_memory()}"
        )
        most_mb = self.free_bytes // 10**6
        advice = f". Lower --kv-memory to at most {most_mb}MB, which holds {self.fitting} tokens"
        return self._error(facts, f"{advice} of context.", fits=most_mb > 0)

    def too_small(self) -> MemoryLimitError:
        """Return the error for a context that the pages cannot hold."""
        facts = (
            f"{self.name} needs {_mb(self.weight_bytes)} for its weights and "
            f"{_mb(self.needed_bytes)} of KV cache for {self.context_length} tokens of context; "
        )
        if self.memory_bytes is None:
            facts += self._free_memory()
        else:
            facts += f"--kv-memory allows {_mb(self.memory_bytes)} of {_mb(self.free_bytes)} free"
        more_mb = -(-self.needed_bytes // 10**6)
        more = f"--kv-memory {more_mb}MB"
        can_raise = self.memory_bytes is not None and more_mb * 10**6 <= self.free_bytes
        if can_raise and self.fitting < 2:
            return MemoryLimitError(f"{facts}, too little for any context: use {more}.")
        advice = f". {self.fitting} tokens would fit: use --context-length {self.fitting}"
        return self._error(facts, f"{advice}, or {more}." if can_raise else f"{advice}.")

    def _free_memory(self) -> str:
        facts = f"{_mb(self.available_bytes)} of memory are free"
        limit = self.group_limit
        return f"{facts} ({limit.source} allows {_mb(limit.limit_bytes)})" if limit else facts

    def _error(self, facts: str, advice: str, *, fits: bool = True) -> MemoryLimitError:
        if self.fitting < 2 or not fits:
            remedy = "Raise that limit" if self.group_limit else "Free memory"
            advice = f": no context would fit. {remedy}, or take a smaller model."
        return MemoryLimitError(facts + advice)
