"""Parts of OpenAI's responses: usage, timings, finish reasons, and the ends of streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from twostroke.core.json_io import encode_json
from twostroke.core.request import FinishReason
from twostroke.server.http.errors import OPENAI
from twostroke.server.http.responses import sse
from twostroke.server.protocols.common.timings import LlamaTimings, final_timings

if TYPE_CHECKING:
    from twostroke.engine.output import Timings, Usage
    from twostroke.server.generation.events import (
        AnswerFinished,
        ChoiceEnded,
        ChoiceStarted,
        StreamFailed,
    )
    from twostroke.server.generation.job import Job

_DONE: Final = b"data: [DONE]\n\n"

Finish = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """A part of OpenAI's usage object: the prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """A part of OpenAI's usage object: reasoning tokens, and accepted and rejected draft tokens.

    `cached_tokens`, which OpenAI does not have, counts answer tokens that were computed for an
    equal request.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    cached_tokens: int | UnsetType = UNSET


class UsageBody(msgspec.Struct, frozen=True):
    """OpenAI's usage object: the number of tokens in all prompts and all answers of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TimingsBody(msgspec.Struct, frozen=True):
    """The durations of an answer in seconds, which a request asks for with `return_timings`.

    `ttft_s` (time to first token) includes `queue_s`; `e2e_s` ends with the last token. `tpot_s`
    (the mean time between tokens) and `decode_tokens_per_s` are null for an answer of one token.
    `cached_tokens` counts prompt tokens found in the prefix cache, `accepted_tokens` and
    `rejected_tokens` count draft tokens.
    """

    queue_s: float
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    decode_tokens_per_s: float | None
    cached_tokens: int
    accepted_tokens: int
    rejected_tokens: int


class StreamBody(Protocol):
    """The fields that `finish_stream` sets in the last chunk of an OpenAI stream."""

    choices: list[Any]
    usage: UsageBody | UnsetType | None


class RunningUsage:
    """Reports the usage so far in each chunk of an OpenAI stream.

    A request asks for this with vLLM's `continuous_usage_stats`.
    """

    def __init__(self, job: Job) -> None:
        """Prepare for the answers of one job, before any answer has begun."""
        self.is_reported = job.include_usage and job.continuous_usage
        self._started: dict[int, ChoiceStarted] = {}  # by choice

    def begin(self, event: ChoiceStarted) -> None:
        """Note that an answer begins; its list `event.tokens` grows until the answer ends."""
        self._started[event.choice] = event

    def body(self, choice: int) -> UsageBody | None:
        """Return the usage of the answer with index `choice` so far, for the next chunk.

        Returns None if the request does not ask for it, or the engine has not reported the prompt's
        usage yet.
        """
        started = self._started.get(choice)
        if not self.is_reported or started is None or started.usage is None:
            return None
        return usage_body(replace(started.usage, completion_tokens=len(started.tokens)))


def usage_body(usage: Usage, reasoning_tokens: int = 0) -> UsageBody:
    """Return the engine's token counts as OpenAI's usage object."""
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=reasoning_tokens,
            accepted_prediction_tokens=usage.accepted_tokens,
            rejected_prediction_tokens=usage.rejected_tokens,
            cached_tokens=usage.reused_tokens or UNSET,
        ),
    )


def timings_body(usage: Usage, timings: Timings) -> TimingsBody:
    """Return a complete answer's durations in seconds, for the response field `timings`."""
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


def requested_timings(job: Job, event: ChoiceEnded) -> LlamaTimings | UnsetType:
    """Return a complete answer's durations in llama-server's form.

    If the request does not set `timings_per_token`, returns UNSET, which leaves the field out.
    """
    return final_timings(event.usage, event.timings) if job.llama_timings else UNSET


def finish_reason(reason: FinishReason, *, has_calls: bool = False) -> Finish:
    """Return OpenAI's `finish_reason` for the reason why the engine ended an answer.

    `has_calls` tells whether the answer has tool calls.
    """
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if has_calls else "stop"


def finish_stream(chunk: StreamBody, event: AnswerFinished) -> bytes:
    """Return the last bytes of an OpenAI stream: a chunk with the total usage, then `[DONE]`.

    Sets the usage in `chunk`. If `chunk.usage` is UNSET, the client did not ask for the usage, and
    only `[DONE]` is sent.
    """
    if chunk.usage is UNSET:
        return _DONE
    chunk.choices = []
    chunk.usage = usage_body(event.usage, event.num_reasoning)
    return sse(encode_json(chunk)) + _DONE


def fail_stream(event: StreamFailed) -> bytes:
    """Return the last bytes of an OpenAI stream that failed: the error, then `[DONE]`."""
    return sse(OPENAI.body(event.error, event.request_id, str)) + _DONE
