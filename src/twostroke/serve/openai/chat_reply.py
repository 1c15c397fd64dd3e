"""What OpenAI's chat protocol answers: a completion, whole or as a stream of chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from twostroke.chat.call_reader import ReasoningPiece, TextPiece
from twostroke.serve.dialect import DONE, Reply, event
from twostroke.serve.openai.call_bodies import AnswerMessage, CallBody, answer_message, call_body
from twostroke.serve.openai.logprobs import ChatLogprobs, chat_logprobs
from twostroke.serve.openai.usage import (
    TimingsBody,
    UsageBody,
    finish_reason,
    tier_of,
    timings_body,
    usage_body,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.chat.reader import AnswerReader
    from twostroke.engine.output import Completion, Output, Usage


class Choice(msgspec.Struct):
    """One whole answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    timings: TimingsBody | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """A response that is not streamed."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody
    service_tier: str | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What a chunk adds to the message; clients look for reasoning under either name."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallBody] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """One answer's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    timings: TimingsBody | UnsetType = UNSET


class Chunk(msgspec.Struct):
    """One event of a streamed response."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET


class ChatWriter:
    """Writes chunks: the role first, then pieces of text, then the finish reason alone."""

    def __init__(self, reply: Reply) -> None:
        """Write `reply`; one struct of each shape is filled again and again."""
        self._reply = reply
        usage = None if reply.job.include_usage else UNSET
        self._choice = ChunkChoice(0, Delta())
        self._chunk = Chunk(
            reply.id,
            "chat.completion.chunk",
            reply.created_s,
            reply.model,
            [self._choice],
            usage,
            tier_of(reply.job),
        )
        self._has_logprobs = reply.job.params.logprobs is not None
        self._begun: set[int] = set()
        self._readers: dict[int, AnswerReader] = {}  # where there is more than text

    def feed(self, output: Output) -> bytes:
        """Return the events of an output."""
        choice = self._choice
        choice.index = output.index
        events = b""
        if output.index not in self._begun:
            self._begun.add(output.index)
            choice.delta = Delta("assistant", "")
            events = event(self._chunk)
        choice.logprobs = (
            chat_logprobs(self._reply.tokenizer, output) if self._has_logprobs else None
        )
        for choice.delta in self._deltas(output):
            events += event(self._chunk)
            choice.logprobs = None
        if choice.logprobs is not None and choice.logprobs.content:
            choice.delta = Delta(content="")
            events += event(self._chunk)
        choice.logprobs = None
        return events + self._last(output) if output.finish_reason is not None else events

    def _deltas(self, output: Output) -> Iterator[Delta]:
        """Yield what an output adds to the message."""
        if self._reply.reading.is_plain:
            if output.text:
                yield Delta(content=output.text)
            return
        reader = self._readers.get(output.index)
        if reader is None:
            reader = self._readers[output.index] = self._reply.reader()
        for piece in reader.take(output):
            if isinstance(piece, TextPiece):
                yield Delta(content=piece.text)
            elif isinstance(piece, ReasoningPiece):
                yield Delta(reasoning_content=piece.text, reasoning=piece.text)
            else:
                yield Delta(tool_calls=[call_body(piece)])

    def finish(self, usage: Usage) -> bytes:
        """Return the usage, where asked for, and the end."""
        if not self._reply.job.include_usage:
            return DONE
        self._chunk.choices = []
        reasoning = sum(reader.num_reasoning_tokens for reader in self._readers.values())
        self._chunk.usage = usage_body(usage, reasoning)
        return event(self._chunk) + DONE

    def _last(self, output: Output) -> bytes:
        assert output.finish_reason is not None
        choice = self._choice
        choice.delta = Delta()
        reader = self._readers.get(output.index)
        has_calls = reader is not None and reader.has_whole_calls
        choice.finish_reason = finish_reason(output.finish_reason, has_calls=has_calls)
        if self._reply.job.timings:
            assert output.usage is not None
            assert output.timings is not None
            choice.timings = timings_body(output.usage, output.timings)
        last = event(self._chunk)
        choice.finish_reason, choice.timings = None, UNSET
        return last


def whole(reply: Reply, answers: list[Completion], usage: Usage) -> ChatCompletion:
    """Return the response that is not streamed."""
    has_logprobs = reply.job.params.logprobs is not None
    choices = []
    reasoning = 0
    for answer in answers:
        reader = reply.reader()
        message = answer_message(reader.take(answer), has_text=not reply.reading.is_forced)
        reasoning += reader.num_reasoning_tokens
        choice = Choice(
            answer.index,
            message,
            chat_logprobs(reply.tokenizer, answer) if has_logprobs else None,
            finish_reason(answer.finish_reason, has_calls=reader.has_whole_calls),
            timings_body(answer.usage, answer.timings) if reply.job.timings else UNSET,
        )
        choices.append(choice)
    return ChatCompletion(
        reply.id,
        "chat.completion",
        reply.created_s,
        reply.model,
        choices,
        usage_body(usage, reasoning),
        tier_of(reply.job),
    )
