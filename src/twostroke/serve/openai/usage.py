"""The parts that OpenAI's responses have in common: usage, timings, finish reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import UNSET, UnsetType

from twostroke.core.request import FinishReason

if TYPE_CHECKING:
    from twostroke.engine.output import Timings, Usage
    from twostroke.serve.job import Job

DONE: Final = b"data: [DONE]\n\n"  # the end of a stream


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

    `ttft_s` includes `queue_s`, and `e2e_s` everything up to the last token. `tpot_s`, the mean
    time between tokens, and `decode_tokens_per_s` are null for an answer of one token. The tokens
    are those of its prompt that the prefix cache had, and those of guesses.
    """

    queue_s: float
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    decode_tokens_per_s: float | None
    cached_tokens: int
    accepted_tokens: int
    rejected_tokens: int


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
    tpot_s = timings.tpot_s(usage.completion_tokens)
    return TimingsBody(
        queue_s=timings.queue_s,
        ttft_s=timings.ttft_s,
        tpot_s=tpot_s,
        e2e_s=timings.e2e_s,
        decode_tokens_per_s=1 / tpot_s if tpot_s else None,
        cached_tokens=usage.cached_tokens,
        accepted_tokens=usage.accepted_tokens,
        rejected_tokens=usage.rejected_tokens,
    )


def tier_of(job: Job) -> str | UnsetType:
    """Return what the response says of its class of service, if anything."""
    return UNSET if job.tier is None else job.tier


def finish_reason(reason: FinishReason, *, has_calls: bool = False) -> str:
    """Return OpenAI's word for why an answer ended; one with calls ends so that they are made."""
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if has_calls else "stop"
