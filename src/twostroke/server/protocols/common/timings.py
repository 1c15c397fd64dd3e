"""How long an answer took, as llama-server reports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

if TYPE_CHECKING:
    from twostroke.engine.output import Timings, Usage
    from twostroke.server.generation.events import PrefillAdvanced


class LlamaTimings(msgspec.Struct, frozen=True):
    """Tokens and times of the prompt, without the `cache_n` found in the cache, and of the answer.

    Times are in milliseconds. Drafts are reported where there were some.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


class PromptProgress(msgspec.Struct, frozen=True):
    """How many tokens of a prompt are read; `cache` of them were in the cache already."""

    total: int
    cache: int
    processed: int
    time_ms: float


def to_progress(event: PrefillAdvanced, elapsed_s: float) -> PromptProgress:
    """Return the report of a prompt that is being read."""
    usage = event.usage
    return PromptProgress(
        usage.prompt_tokens, usage.cached_tokens, event.num_read, elapsed_s * 1000
    )


def llama_timings(usage: Usage, prompt_s: float, answer_s: float) -> LlamaTimings:
    """Return the report; the answer's time begins with its first token."""
    num_read = usage.prompt_tokens - usage.cached_tokens
    num_drafted = usage.accepted_tokens + usage.rejected_tokens
    return LlamaTimings(
        usage.cached_tokens,
        num_read,
        *_rates(num_read, prompt_s),
        usage.completion_tokens,
        *_rates(usage.completion_tokens, answer_s),
        num_drafted or UNSET,
        usage.accepted_tokens if num_drafted else UNSET,
    )


def final_timings(usage: Usage, timings: Timings) -> LlamaTimings:
    """Return the report of a whole answer."""
    prompt_s = timings.first_token_s - timings.started_s
    return llama_timings(usage, prompt_s, timings.last_token_s - timings.first_token_s)


def _rates(count: int, seconds: float) -> tuple[float, float, float]:
    """Return milliseconds, milliseconds for each token, and tokens in a second."""
    ms = seconds * 1000
    return ms, ms / count if count else 0.0, count / seconds if seconds > 0 else 0.0
