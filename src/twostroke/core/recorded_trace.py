"""The format of recorded traces: times and lengths of requests and shared prefixes, but no text.

A recorded trace is a file of JSON lines: a header, then a line for each answer, in the order in
which requests ended. A server that starts again adds another header to the same file.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from msgspec import field

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_RECENT_BLOCKS: Final = 1 << 17  # twice as many are remembered at most, in some 30 MB
TRACE_VERSION: Final = 1
BLOCK_TOKENS: Final = 16  # the length of a shared beginning is a multiple of it


class ServerSettings(Frozen):
    """The settings of a server on which the duration of its requests depends.

    Both fields are as in `SchedulerConfig`.
    """

    token_budget: int
    max_running: int


class TraceHeader(Frozen):
    """The line before the requests of one run of a server, or before requests with other settings.

    `settings` is None in the trace of a router. With `continues`, the requests after the header are
    from the same run as the requests before it, so prompts may share prefixes with prompts before
    the header.

    A recorded trace is a workload file, which `twostroke simulate --trace` replays.
    """

    recorded_trace: int = TRACE_VERSION
    block_tokens: int = BLOCK_TOKENS
    settings: ServerSettings | None = None
    continues: bool = False


class TracedRequest(Frozen, omit_defaults=True):
    """The line of one answer in a recorded trace, a workload file for `twostroke simulate`.

    Attributes:
        arrival_s: when its request arrived, in seconds of Unix time.
        prompt_tokens, output_tokens, cached_tokens: numbers of tokens; `cached_tokens` of the
            prompt came from the prefix cache.
        ttft_s, e2e_s: seconds from the arrival to the first token and to the last one.
        service_tier: the request's service tier.
        outcome: "completed"; "cancelled" if the client disconnected; "failed"; "refused" by a
            router, since no server had room.
        tenant: a hash of the tenant's name, which differs from server to server.
        shared: two numbers, if the prompt shares a prefix with an earlier prompt: how many lines
            before this line the earlier prompt is, and how many tokens the prompts share.
        parts_at: the exact number of tokens at the beginning that the prompt shares with the most
            similar earlier prompt of its tenant (from a router, an estimate). None if there is no
            such prompt, or if too few tokens follow.
        repeated_tokens: an estimate of how many tokens after `parts_at` also occur in earlier
            prompts.
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
    parts_at: int | None = None
    repeated_tokens: int = 0


class SharedPrefixes:
    """Finds the longest prefix that a prompt shares with an earlier prompt of its tenant.

    Prompts are compared by the hashes of their blocks. Only recent hashes are remembered.

    Servers use it to record `TracedRequest.shared`.
    """

    def __init__(
        self, block_length: int = BLOCK_TOKENS, max_recent_blocks: int = _MAX_RECENT_BLOCKS
    ) -> None:
        """Compare prompts in blocks of `block_length` tokens, or bytes of their text.

        At least `max_recent_blocks` blocks are remembered, and at most twice as many.
        """
        self.block_length = block_length
        self._max_recent_blocks = max_recent_blocks
        self._recent: dict[int, int] = {}  # the number of the last prompt with a block, by hash
        self._older: dict[int, int] = {}
        self._num_prompts = 0

    def hashes(self, tenant: str, prompt: Sequence[int]) -> array[int]:
        """Return a hash for each block of a tenant's prompt; it covers all earlier blocks, too.

        The prompt is a list of tokens, or bytes.
        """
        size, chain = self.block_length, hash(tenant)
        hashes = array("q")
        for start in range(0, len(prompt) - size + 1, size):
            chain = hash((chain, tuple(prompt[start : start + size])))
            hashes.append(chain)
        return hashes

    def add(self, hashes: Sequence[int]) -> tuple[int, int] | None:
        """Add a prompt by the hashes of its blocks, and find the most similar earlier prompt.

        Returns how many prompts ago the earlier prompt was added, and the length of the prefix that
        both share; None if the prompt shares no whole block with an earlier one.
        """
        number, self._num_prompts = self._num_prompts, self._num_prompts + 1
        similar_prompt, num_shared = 0, 0
        for index, block_hash in enumerate(hashes):
            if num_shared == index:
                known_prompt = self._recent.get(block_hash, self._older.get(block_hash))
                if known_prompt is not None:
                    similar_prompt, num_shared = known_prompt, index + 1
            self._recent[block_hash] = number
        if len(self._recent) > self._max_recent_blocks:
            self._older, self._recent = self._recent, {}
        return (number - similar_prompt, num_shared * self.block_length) if num_shared else None
