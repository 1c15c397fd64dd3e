"""The format of recorded traces: the times and lengths of requests and shared beginnings, no text.

A recorded trace is a file of JSON lines: a header, then a line for each answer, in the order in
which requests ended. A server that starts again adds another header to the same file.
"""

from __future__ import annotations

from typing import Final

from msgspec import field

from twostroke.core.frozen import Frozen

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
