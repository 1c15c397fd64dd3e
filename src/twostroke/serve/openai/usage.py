"""The parts that OpenAI's responses have in common: usage, timings, finish reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from twostroke.core.request import FinishReason

if TYPE_CHECKING:
    from twostroke.engine.output import Timings, Usage


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How much of the prompts came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """How many tokens were reasoning, and how many were guessed ahead.

    Of the latter, right ones are part of the answer, wrong ones of nothing.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """OpenAI's usage object."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TimingsBody(msgspec.Struct, frozen=True):
    """How long an answer took, in seconds; ours, sent when `return_timings` asks for it.

    `ttft_s` includes `queue_s`; `decode_tokens_per_s` is null for an answer of one token.
    """

    queue_s: float
    ttft_s: float
    total_s: float
    decode_tokens_per_s: float | None


def usage_body(usage: Usage, reasoning_tokens: int = 0) -> UsageBody:
    """Return OpenAI's form of a usage, with what of the completion was reasoning."""
    return UsageBody(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptTokensDetails(usage.cached_tokens),
        CompletionTokensDetails(reasoning_tokens, usage.accepted_tokens, usage.rejected_tokens),
    )


def timings_body(usage: Usage, timings: Timings) -> TimingsBody:
    """Return what happened when, as durations."""
    return TimingsBody(
        timings.started_s - timings.arrival_s,
        timings.ttft_s,
        timings.last_token_s - timings.arrival_s,
        decode_rate(usage, timings),
    )


def finish_reason(reason: FinishReason, *, has_calls: bool = False) -> str:
    """Return OpenAI's word for why an answer ended; one with calls ends so that they are made."""
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if has_calls else "stop"


def decode_rate(usage: Usage, timings: Timings) -> float | None:
    """Return tokens per second after the first token, or None for a single token."""
    elapsed_s = timings.last_token_s - timings.first_token_s
    return (usage.completion_tokens - 1) / elapsed_s if elapsed_s > 0 else None
