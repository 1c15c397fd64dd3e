"""The parts that OpenAI's responses share: usage, timings, finish reasons, ends of streams."""

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
    """The number of prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """The numbers of reasoning tokens, and of draft tokens that were accepted or rejected."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """OpenAI's usage object: the numbers of tokens of the prompts and of the answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TimingsBody(msgspec.Struct, frozen=True):
    """The durations of an answer in seconds, an extension; sent if `return_timings` is set.

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
    """The fields of a chunk of a stream that `finish_stream` fills in."""

    choices: list[Any]
    usage: UsageBody | UnsetType | None


class UsageSoFar:
    """Counts the tokens of each answer while it is streamed.

    Chunks report the counts if the request sets `continuous_usage_stats`.
    """

    def __init__(self, job: Job) -> None:
        """Prepare for the answers of a request's job, without any answer yet."""
        self.is_reported = job.include_usage and job.continuous_usage
        self._started: dict[int, ChoiceStarted] = {}  # by choice

    def begin(self, event: ChoiceStarted) -> None:
        """Note that the engine has started an answer. `event` holds its growing list of tokens."""
        self._started[event.choice] = event

    def body(self, choice: int) -> UsageBody | None:
        """Return the usage of an answer so far.

        Returns None if the request does not ask for it, or the engine has not reported the prompt's
        usage. `choice` is the index of the answer.
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
        ),
    )


def timings_body(usage: Usage, timings: Timings) -> TimingsBody:
    """Return a complete answer's durations in seconds, for the field `timings`."""
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

    Returns UNSET, which leaves the field out, if the request does not set `timings_per_token`.
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
    """Return the last bytes of an OpenAI stream: a chunk with the usage, and [DONE].

    The usage is left out if `chunk.usage` is UNSET. `chunk` is changed.
    """
    if chunk.usage is UNSET:
        return _DONE
    chunk.choices = []
    chunk.usage = usage_body(event.usage, event.num_reasoning)
    return sse(encode_json(chunk)) + _DONE


def fail_stream(event: StreamFailed) -> bytes:
    """Return the last bytes of an OpenAI stream that failed: the error, and [DONE]."""
    return sse(OPENAI.body(event.error, event.request_id, str)) + _DONE
