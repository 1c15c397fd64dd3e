"""The durations of an answer and the progress of a prompt's prefill, in llama-server's form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

if TYPE_CHECKING:
    from twostroke.engine.output import Timings, Usage
    from twostroke.server.generation.events import PrefillAdvanced


class LlamaTimings(msgspec.Struct, frozen=True):
    """llama-server's `timings`: token counts and times of a prompt and its answer.

    Fields `prompt_*` describe the prompt, fields `predicted_*` the answer. `prompt_n` excludes the
    `cache_n` tokens found in the prefix cache. Times are in milliseconds. Counts of draft tokens
    are only sent if tokens were drafted.
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
    """llama-server's `prompt_progress`: how many of a prompt's tokens have been prefilled.

    `cache` tokens were found in the prefix cache.
    """

    total: int
    cache: int
    processed: int
    time_ms: float


def to_progress(event: PrefillAdvanced, elapsed_s: float) -> PromptProgress:
    """Return a prompt's prefill progress in llama-server's form, for a chunk of a stream.

    `elapsed_s` is the time since the request started.
    """
    return PromptProgress(
        total=event.usage.prompt_tokens,
        cache=event.usage.cached_tokens,
        processed=event.num_read,
        time_ms=elapsed_s * 1000,
    )


def llama_timings(usage: Usage, prompt_s: float, answer_s: float) -> LlamaTimings:
    """Return the durations of an answer so far, in llama-server's form.

    `prompt_s` is the time of prefill; `answer_s` is the time since the first token.
    """
    num_prefilled = usage.prompt_tokens - usage.cached_tokens
    num_drafted = usage.accepted_tokens + usage.rejected_tokens
    return LlamaTimings(
        cache_n=usage.cached_tokens,
        prompt_n=num_prefilled,
        prompt_ms=prompt_s * 1000,
        prompt_per_token_ms=_ms_per_token(num_prefilled, prompt_s),
        prompt_per_second=_tokens_per_s(num_prefilled, prompt_s),
        predicted_n=usage.completion_tokens,
        predicted_ms=answer_s * 1000,
        predicted_per_token_ms=_ms_per_token(usage.completion_tokens, answer_s),
        predicted_per_second=_tokens_per_s(usage.completion_tokens, answer_s),
        draft_n=num_drafted or UNSET,
        draft_n_accepted=usage.accepted_tokens if num_drafted else UNSET,
    )


def final_timings(usage: Usage, timings: Timings) -> LlamaTimings:
    """Return the durations of a complete answer, in llama-server's form."""
    return llama_timings(
        usage,
        prompt_s=timings.first_token_s - timings.started_s,
        answer_s=timings.last_token_s - timings.first_token_s,
    )


def _ms_per_token(num_tokens: int, seconds: float) -> float:
    return seconds * 1000 / num_tokens if num_tokens else 0.0


def _tokens_per_s(num_tokens: int, seconds: float) -> float:
    return num_tokens / seconds if seconds > 0 else 0.0
