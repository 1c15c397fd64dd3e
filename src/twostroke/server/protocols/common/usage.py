"""The parts that OpenAI's responses have in common: usage, timings, finish reasons, ends."""

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
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Tokens of reasoning, and drafted tokens; only accepted ones are in the answer."""

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
    """Durations of an answer in seconds, our extension; sent if `return_timings` is set.

    `ttft_s` includes `queue_s`; `e2e_s` ends with the last token. `tpot_s` (the mean time between
    tokens) and `decode_tokens_per_s` are null for an answer of one token. `cached_tokens` are
    prompt tokens found in the prefix cache; accepted and rejected ones are drafts.
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
    """An event of a stream that may have the usage."""

    choices: list[Any]
    usage: UsageBody | UnsetType | None


class UsageSoFar:
    """The usage of each answer up to the newest chunk, for streams that report it in each."""

    def __init__(self, job: Job) -> None:
        """Report usage if the request of `job` asks for it."""
        self.is_reported = job.include_usage and job.continuous_usage
        self._begun: dict[int, ChoiceStarted] = {}  # by choice

    def begin(self, event: ChoiceStarted) -> None:
        """Count the tokens of a choice from now on."""
        self._begun[event.choice] = event

    def body(self, choice: int) -> UsageBody | None:
        """Return the usage of a choice so far; None where it is not reported or not known."""
        begun = self._begun.get(choice)
        if not self.is_reported or begun is None or begun.usage is None:
            return None
        return usage_body(replace(begun.usage, completion_tokens=len(begun.tokens)))


def usage_body(usage: Usage, reasoning_tokens: int = 0) -> UsageBody:
    """Return OpenAI's form of a usage."""
    return UsageBody(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptTokensDetails(usage.cached_tokens),
        CompletionTokensDetails(reasoning_tokens, usage.accepted_tokens, usage.rejected_tokens),
    )


def timings_body(usage: Usage, timings: Timings) -> TimingsBody:
    """Return the durations of an answer."""
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


def asked_timings(job: Job, event: ChoiceEnded) -> LlamaTimings | UnsetType:
    """Return the durations of an answer in llama-server's form, if the request asks for it."""
    return final_timings(event.usage, event.timings) if job.llama_timings else UNSET


def finish_reason(reason: FinishReason, *, has_calls: bool = False) -> Finish:
    """Return OpenAI's finish reason."""
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if has_calls else "stop"


def finish_stream(chunk: StreamBody, event: AnswerFinished) -> bytes:
    """Return the end of a stream; `chunk` has a usage if the request asked for it."""
    if chunk.usage is UNSET:
        return _DONE
    chunk.choices, chunk.usage = [], usage_body(event.usage, event.num_reasoning)
    return sse(encode_json(chunk)) + _DONE


def fail_stream(event: StreamFailed) -> bytes:
    """Return the end of a stream that failed."""
    return sse(OPENAI.body(event.error, event.request_id, str)) + _DONE
