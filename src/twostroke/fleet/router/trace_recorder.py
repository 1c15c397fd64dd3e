"""Records the requests of a router as a trace: times, lengths, shared prefixes; never text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.prompt_partings import PartingFinder, RecentValues
from twostroke.core.recorded_trace import BLOCK_TOKENS, SharedPrefixes, TracedRequest
from twostroke.core.request import DEFAULT_SERVICE_TIER, SERVICE_TIERS
from twostroke.fleet.router.usage_meter import ProxyLog
from twostroke.fleet.routing.prompt import TracedPrompt
from twostroke.server.http.request_context import RETRYABLE_STATUSES
from twostroke.server.storage.trace_file import TraceFile

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.server.http.request_context import ServedRequest

_BLOCK_BYTES: Final = 64  # of a prompt's text, some 16 tokens
_RUN_BYTES: Final = 32  # compared wherever they stand in a prompt
_MAX_BYTES: Final = 1 << 18  # of a prompt in which repeated text is looked for
_NOT_VALID: Final = "not valid"  # the outcome of a request with an error; it is not recorded


class RouterTraceRecorder:
    """Records a workload for `twostroke simulate`: a line for each request to a model.

    A line has the times, the lengths and the shared prefix of a request that the router has
    forwarded or refused (`TracedRequest`), but no text.

    A router has no tokenizer, so it compares prompts in blocks of 64 bytes of their text. The
    length of a shared prefix in tokens is estimated from the prefix's share of the text. The
    position at which a prompt begins to differ from earlier prompts is estimated in the same way;
    later prompts that begin to differ at the same point get the first estimate again.
    """

    def __init__(self, path: Path) -> None:
        """Open the trace at `path`; raise UsageError as `TraceFile` does."""
        self._file = TraceFile(path)
        self._prefixes = SharedPrefixes(_BLOCK_BYTES)
        self._partings = PartingFinder(_BLOCK_BYTES, _RUN_BYTES, _MAX_BYTES)
        self._positions: RecentValues[int] = RecentValues()  # in tokens, by the key of a parting

    def read(self, tenant: str, text: bytes) -> TracedPrompt | None:
        """Return the facts about a tenant's prompt for the trace; None if nothing is recorded."""
        if not self._file.is_open:
            return None
        return TracedPrompt(self._prefixes.hashes(tenant, text), self._partings.add(tenant, text))

    def observe(self, served_request: ServedRequest) -> None:
        """Record a request that was sent to a replica, or refused because none had room."""
        log, began_s = served_request.running, served_request.began_s
        if not self._file.is_open or not isinstance(log, ProxyLog) or log.prompt is None:
            return
        used, outcome = log.used, _outcome(served_request)
        if outcome == _NOT_VALID or (used is None and outcome == "completed"):
            return  # never computed, or in the background
        num_prompt = log.prompt.num_tokens if used is None else used.prompt_tokens
        if not num_prompt:
            return
        parts_at, num_repeated = self._parting(log, num_prompt)
        service_tier = log.prompt.service_tier
        is_completed = outcome == "completed"
        first_byte_s = log.first_byte_s if is_completed else None
        request = TracedRequest(
            arrival_s=self._file.unix_s(began_s),
            prompt_tokens=num_prompt,
            output_tokens=0 if used is None else used.completion_tokens,
            cached_tokens=0 if used is None else used.cached_tokens,
            ttft_s=None if first_byte_s is None else round(first_byte_s - began_s, 4),
            e2e_s=round(served_request.ended_s - began_s, 4) if is_completed else None,
            service_tier=service_tier if service_tier in SERVICE_TIERS else DEFAULT_SERVICE_TIER,
            outcome=outcome,
            tenant=self._file.tenant_hash(served_request.tenant),
            shared=self._shared(log, num_prompt),
            parts_at=parts_at,
            repeated_tokens=num_repeated,
        )
        self._file.write([request])

    def close(self) -> None:
        """Close the file; every line is already written."""
        self._file.close()

    def _shared(self, log: ProxyLog, num_prompt: int) -> tuple[int, int] | None:
        """Find the earlier prompt that shares the longest prefix with the prompt.

        `log` has the prompt's block hashes, and `num_prompt` is its length in tokens, by which
        bytes are converted to tokens. Returns how many prompts ago that prompt came, and the
        estimated length of the prefix in tokens; None if no earlier prompt shares a prefix.
        """
        assert log.prompt is not None
        traced = log.prompt.traced
        similar = self._prefixes.add(traced.hashes if traced is not None else ())
        if similar is None:
            return None
        num_prompts_back, num_bytes = similar
        num_tokens = num_prompt * num_bytes // max(log.prompt.key.num_units, num_bytes)
        num_tokens -= num_tokens % BLOCK_TOKENS
        return (num_prompts_back, num_tokens) if num_tokens else None

    def _parting(self, log: ProxyLog, num_prompt: int) -> tuple[int | None, int]:
        """Return the position at which a prompt begins to differ from earlier prompts.

        Also returns how many tokens after the position occur in earlier prompts. Both are estimates
        in tokens, from bytes and the prompt's length `num_prompt` in tokens. The position is None,
        and the other number 0, if the prompt does not begin like an earlier one.
        """
        assert log.prompt is not None
        traced = log.prompt.traced
        if traced is None or traced.parting is None:
            return None, 0
        parting, num_bytes = traced.parting, max(1, log.prompt.key.num_units)
        position = self._positions.get(parting.key)
        if position is None:
            position = num_prompt * parting.position // num_bytes
            self._positions.add(parting.key, position)
        position = min(position, num_prompt - 1)
        num_repeated = num_prompt * parting.num_repeated // num_bytes
        return position, min(num_repeated, num_prompt - position)


def _outcome(served_request: ServedRequest) -> str:
    if served_request.is_client_gone:
        return "cancelled"
    if served_request.status in RETRYABLE_STATUSES:
        return "refused"
    if served_request.status >= 500 or (served_request.error and served_request.status < 400):
        return "failed"
    return "completed" if served_request.status < 400 else _NOT_VALID
