"""The format of recorded traces: the times and lengths of requests and shared beginnings, no text.

A recorded trace is a file of JSON lines: a header, then a line for each answer, in the order in
which requests ended. A server that starts again adds another header to the same file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import field

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_RECENT_BLOCKS: Final = 1 << 17  # twice as many are remembered at most, in some 30 MB
TRACE_VERSION: Final = 1
BLOCK_TOKENS: Final = 16  # the length of a shared beginning is a multiple of it


class TraceHeader(Frozen):
    """The line before the requests of one run of a server."""

    recorded_trace: int = TRACE_VERSION
    block_tokens: int = BLOCK_TOKENS


class TracedRequest(Frozen, omit_defaults=True):
    """The line of one answer.

    Attributes:
        arrival_s: when its request arrived, in seconds of Unix time.
        prompt_tokens, output_tokens, cached_tokens: numbers of tokens; `cached_tokens` of the
            prompt came from the prefix cache.
        ttft_s, e2e_s: seconds from the arrival to the first token and to the last one.
        service_tier: the request's service tier.
        outcome: "completed"; "cancelled" if the client disconnected; "failed".
        tenant: a hash of the tenant, which differs from server to server.
        shared: two numbers, if the prompt begins like an earlier one: how many lines before this
            one the earlier prompt stands, and how many tokens the two share.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    ttft_s: float | None = None
    e2e_s: float | None = None
    service_tier: str = field(default="default", name="class")
    outcome: str = "completed"
    tenant: str = ""
    shared: tuple[int, int] | None = None


class SharedPrefixes:
    """Finds the longest beginning that a prompt shares with an earlier prompt of its tenant.

    Prompts are compared by the hashes of their blocks. Only recent hashes are remembered.
    """

    def __init__(self, max_recent_blocks: int = _MAX_RECENT_BLOCKS) -> None:
        """Remember at least `max_recent_blocks` blocks, and at most twice as many."""
        self._max_recent_blocks = max_recent_blocks
        self._recent: dict[int, int] = {}  # the number of the last prompt with a block, by hash
        self._older: dict[int, int] = {}
        self._num_prompts = 0

    def add(self, tenant: str, prompt: Sequence[int]) -> tuple[int, int] | None:
        """Add a prompt, and find the most similar earlier prompt.

        Returns how many prompts ago the earlier prompt was added, and the number of tokens that
        both begin with; None if the prompt shares no whole block with an earlier one.
        """
        number, self._num_prompts = self._num_prompts, self._num_prompts + 1
        similar_prompt, num_shared = 0, 0
        chain = hash(tenant)
        for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            # Each hash stands for all tokens up to the end of its block.
            chain = hash((chain, tuple(prompt[start : start + BLOCK_TOKENS])))
            if num_shared == start:
                known_prompt = self._recent.get(chain, self._older.get(chain))
                if known_prompt is not None:
                    similar_prompt, num_shared = known_prompt, start + BLOCK_TOKENS
            self._recent[chain] = number
        if len(self._recent) > self._max_recent_blocks:
            self._older, self._recent = self._recent, {}
        return (number - similar_prompt, num_shared) if num_shared else None
