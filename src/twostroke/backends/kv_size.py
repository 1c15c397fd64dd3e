"""Chooses the size of the KV cache, and checks that the model fits into memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.core.errors import MemoryLimitError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.core.message_text import format_bytes as _mb
from twostroke.core.options import MAX_DRAFTS
from twostroke.model.program.kv_layout import DEFAULT_FORMAT, FORMATS, PageGroups
from twostroke.model.program.mesh import ONE_RANK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.control_groups import MemoryLimit
    from twostroke.core.options import CacheOptions
    from twostroke.model.program import Program
    from twostroke.model.program.mesh import Mesh

_MAX_CONTEXTS = 8  # the default cache holds at most this many contexts of full length
_MIN_TOKENS_PER_REQUEST = 128  # the default cache holds this many for each running request
_MAX_STATE_RATIO = 0.25  # of the free memory that recurrent states take
# How much less memory may be free at the next start: a share of the available memory, and a
# difference in the memory of the process itself (4 MB were seen).
_FREE_MEMORY_CHANGE = 0.01
_OWN_MEMORY_CHANGE = 6 * 10**6  # bytes
_MAX_FREE_MEMORY_RATIO = 0.5  # of the memory that is free after loading the weights
WORKING_BYTES = 128 * 1024**2  # of the interpreter, the tokenizer and a step's buffers


class CacheSize(Frozen):
    """The size of a KV cache: the longest context in tokens, and the pages of all requests.

    `num_states`: slots for recurrent states, of models that have such states. Their bytes are part
    of `cache_bytes`.
    """

    context_length: int
    num_pages: int
    page_size: int
    cache_bytes: int
    kv_format: str = DEFAULT_FORMAT
    num_states: int = 0


def size_kv_cache(  # noqa: PLR0913 - each is a fact that only the caller knows
    program: Program,
    options: CacheOptions,
    token_budget: int,
    weight_bytes: int,
    available_bytes: int,
    *,
    max_running: int = 1,
    auto_format: str = DEFAULT_FORMAT,
    parts: Sequence[Program] = (),
    mesh: Mesh = ONE_RANK,
    group_limit: MemoryLimit | None = None,
) -> CacheSize:
    """Choose the number of pages of the KV cache, from the options and the free memory.

    In time the prefix cache fills all pages, so a small model gets a small cache. By default the
    cache is as large as the weights plus one full context, or as `max_running` short requests if
    these need more. It takes at most half of the free memory, except for one full context.

    A request needs pages for all of its tokens in cache groups without a window; in groups with a
    window, for the window and the `token_budget` rows of a step.

    Args:
        program: the model.
        options: the cache options of the user.
        token_budget: the largest number of rows of a step.
        weight_bytes: bytes that the weights take.
        available_bytes: free memory before weights and cache are allocated.
        max_running: requests that may run at the same time.
        auto_format: the KV format that "auto" stands for.
        parts: the Programs of the ranks that store KV pages in this memory.
        mesh: the mesh of these ranks.
        group_limit: the control group that limits `available_bytes`, for error messages.

    Raises:
        UsageError: the requested context is longer than the model's own.
        MemoryLimitError: weights and one full context do not fit; the message says which context or
            options would fit.
    """
    context_length = _context_length(program, options)
    page_size, memory_bytes = mesh.page_size(options.tokens_in_page), options.memory_bytes
    kv_format = auto_format if options.kv_format == "auto" else options.kv_format
    stored = parts or (program,)
    page_bytes = max(1, sum(part.page_bytes(page_size, FORMATS[kv_format]) for part in stored))
    groups = PageGroups(page_size, tuple(group.window for group in program.cache_groups))
    free_bytes = max(available_bytes - weight_bytes - WORKING_BYTES, 0)
    allowed_bytes = free_bytes if memory_bytes is None else min(memory_bytes, free_bytes)
    num_states = _num_states(program, mesh, allowed_bytes, max_running, stored)
    state_bytes = num_states * sum(part.state_bytes for part in stored)
    pages_for_one = groups.num_needed(context_length, token_budget)
    if memory_bytes is not None:
        num_pages = max(0, memory_bytes - state_bytes) // page_bytes
    else:
        num_pages = max(
            pages_for_one + weight_bytes // page_bytes,
            groups.num_needed(min(_MIN_TOKENS_PER_REQUEST, context_length), token_budget)
            * max_running,
        )
        num_pages = min(num_pages, _MAX_CONTEXTS * pages_for_one)
        page_memory = free_bytes - state_bytes
        num_pages = min(num_pages, int(page_memory * _MAX_FREE_MEMORY_RATIO) // page_bytes)
        if num_pages < pages_for_one <= page_memory // page_bytes:
            num_pages = pages_for_one
    asks_too_much = memory_bytes is not None and memory_bytes > free_bytes
    if num_pages >= pages_for_one and not asks_too_much:
        cache_bytes = num_pages * page_bytes + state_bytes
        size = CacheSize(context_length, num_pages, page_size, cache_bytes, kv_format)
        return replace(size, num_states=num_states)

    change_bytes = int(_FREE_MEMORY_CHANGE * available_bytes) + _OWN_MEMORY_CHANGE
    safe_bytes = max(0, free_bytes - change_bytes)
    max_pages = max(0, min(allowed_bytes, safe_bytes) - state_bytes) // page_bytes
    shortage = _Shortage(
        name=program.name,
        weight_bytes=weight_bytes,
        available_bytes=available_bytes,
        free_bytes=free_bytes,
        safe_bytes=safe_bytes,
        memory_bytes=memory_bytes,
        context_length=context_length,
        needed_bytes=pages_for_one * page_bytes + state_bytes,
        fitting=groups.max_tokens(max_pages, program.context_length, token_budget),
        group_limit=group_limit,
    )
    raise shortage.kv_memory_error() if asks_too_much else shortage.context_error()


def _context_length(program: Program, options: CacheOptions) -> int:
    """Return the context length that the options ask for, by default the model's own.

    Raises UsageError if it is longer than the model's.
    """
    context_length = options.context_length or program.context_length
    if context_length > program.context_length:
        tokens = counted_noun(program.context_length, "token")
        message = f"{program.name} was made for at most {tokens} of context"
        raise UsageError(f"{message}, not {context_length}: lower --context-length.")
    return context_length


def _num_states(
    program: Program,
    mesh: Mesh,
    allowed_bytes: int,
    max_running: int,
    parts: Sequence[Program],
) -> int:
    """Return the number of slots for recurrent states: running requests, snapshots, and drafts.

    There are as many slots for snapshots as for running requests, and some more for drafts, which
    snapshots use, too. A step reads one slot of a request and writes another; with pipeline stages,
    several steps are in flight. Slots take at most a quarter of the `allowed_bytes`, except for one
    request; the scheduler then runs fewer requests at the same time. `parts`: the Programs of the
    ranks that keep states in this memory. It may have none, if all recurrent layers are on other
    machines.
    """
    if not program.state_layers:
        return 0
    slot_bytes = sum(part.state_bytes for part in parts)
    per_request = 1 + len(mesh.stages)
    num_wanted = 2 * per_request * max_running + MAX_DRAFTS
    num_fitting = int(allowed_bytes * _MAX_STATE_RATIO) // max(1, slot_bytes)
    return max(per_request + 1, min(num_wanted, num_fitting))


class _Shortage(Frozen):
    """The facts of a failed check that weights and KV pages fit into memory, for its error.

    `safe_bytes`: memory for the KV cache that should be free again at the next start. `fitting`:
    the longest context, in tokens, whose KV pages fit into `safe_bytes`.
    """

    name: str
    weight_bytes: int
    available_bytes: int
    free_bytes: int
    safe_bytes: int
    memory_bytes: int | None
    context_length: int
    needed_bytes: int
    fitting: int
    group_limit: MemoryLimit | None

    def kv_memory_error(self) -> MemoryLimitError:
        """Return the error for a `--kv-memory` that is larger than the free memory."""
        facts = (
            f"{self.name} needs {_mb(self.weight_bytes)} for its weights, and --kv-memory asks for "
            f"{_mb(self.memory_bytes or 0)} of KV cache; {self._free_memory()}"
        )
        max_mb = self.safe_bytes // 10**6
        advice = (
            f". Lower --kv-memory to at most {max_mb}MB, which holds "
            f"{counted_noun(self.fitting, 'token')}"
        )
        return self._error(facts, f"{advice} of context.", fits=max_mb > 0)

    def context_error(self) -> MemoryLimitError:
        """Return the error for a context whose KV pages do not fit into the KV cache's memory."""
        facts = (
            f"{self.name} needs {_mb(self.weight_bytes)} for its weights and "
            f"{_mb(self.needed_bytes)} of KV cache for "
            f"{counted_noun(self.context_length, 'token')} of context; "
        )
        if self.memory_bytes is None:
            facts += self._free_memory()
        else:
            facts += f"--kv-memory allows {_mb(self.memory_bytes)} of {_mb(self.free_bytes)} free"
        needed_mb = -(-self.needed_bytes // 10**6)
        option = f"--kv-memory {needed_mb}MB"
        can_raise = self.memory_bytes is not None and needed_mb * 10**6 <= self.free_bytes
        if can_raise and self.fitting < 2:
            return MemoryLimitError(f"{facts}, too little for any context: use {option}.")
        advice = (
            f". {counted_noun(self.fitting, 'token')} would fit: use --context-length "
            f"{self.fitting}"
        )
        return self._error(facts, f"{advice}, or {option}." if can_raise else f"{advice}.")

    def _free_memory(self) -> str:
        facts = f"{_mb(self.available_bytes)} of memory are free"
        limit = self.group_limit
        return f"{facts} ({limit.source} allows {_mb(limit.limit_bytes)})" if limit else facts

    def _error(self, facts: str, advice: str, *, fits: bool = True) -> MemoryLimitError:
        if self.fitting < 2 or not fits:
            remedy = "Raise that limit" if self.group_limit else "Free memory"
            advice = f": no context would fit. {remedy}, or take a smaller model."
        return MemoryLimitError(facts + advice)
