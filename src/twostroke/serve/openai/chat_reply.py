"""OpenAI's chat completions: the response, whole or as a stream of chunks."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import UNSET, UnsetType

from twostroke.serve import events
from twostroke.serve.dialect import Reply, encode_json, sse
from twostroke.serve.http.errors import OPENAI
from twostroke.serve.openai.logprobs import ChatLogprobs, TokenLogprob, chat_logprobs
from twostroke.serve.openai.usage import (
    DONE,
    Finish,
    TimingsBody,
    UsageBody,
    finish_reason,
    tier_of,
    timings_body,
    usage_body,
)

if TYPE_CHECKING:
    from collections.abc import Iterable


class FunctionCallBody(msgspec.Struct):
    """A call's function, or a piece of its arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class CallBody(msgspec.Struct):
    """A call, or a piece of one: only the first piece has id, type and name."""

    function: FunctionCallBody
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    index: int | UnsetType = UNSET


class AnswerMessage(msgspec.Struct):
    """The message of an answer; clients look for reasoning under either name."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallBody] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One whole answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    timings: TimingsBody | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """A response that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    service_tier: str | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What a chunk adds to the message; clients look for reasoning under either name."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallBody] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """One answer's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    timings: TimingsBody | UnsetType = UNSET


class Chunk(msgspec.Struct):
    """One event of a streamed response."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET


class ChatEncoder:
    """Writes each answer's role first, then its pieces, then its finish reason alone."""

    def __init__(self, reply: Reply) -> None:
        """Write `reply`; one chunk is filled again and again."""
        self._reply = reply
        self._choice = ChunkChoice(0, Delta())
        self._chunk = Chunk(
            reply.id,
            "chat.completion.chunk",
            reply.created_s,
            reply.model,
            [self._choice],
            None if reply.job.include_usage else UNSET,
            tier_of(reply.job),
        )
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # by choice
        self._scored: dict[int, list[TokenLogprob]] = {}  # by choice; until its next chunk

    def write(self, event: events.Event) -> bytes:
        """Return the chunks of an event."""
        match event:
            case events.Added(block=block) if block.kind is events.BlockKind.TEXT:
                return self._write_text(block.choice, event.text)
            case events.Added():
                return self._write(event.block.choice, _delta(event.block, event.text))
            case events.Began():
                return self._write(event.choice, Delta("assistant", ""))
            case events.Opened(block=events.ContentBlock(kind=events.BlockKind.CALL)):
                return self._write(event.block.choice, Delta(tool_calls=[_call(event.block)]))
            case events.Scored():
                told = self._scored.setdefault(event.choice, [])
                told += chat_logprobs(self._reply.tokenizer, event.tokens)
            case events.Ended():
                return self._end(event)
            case events.Finished():
                return self._finish(event)
            case events.Failed():
                return sse(OPENAI.body(event.error, event.request_id, str)) + DONE
        return b""

    def whole(self, stream: Iterable[events.Event]) -> ChatCompletion:
        """Return the response that is not streamed."""
        reply = self._reply
        usage: UsageBody | None = None
        choices: list[ChatChoice] = []
        for event in stream:
            match event:
                case events.Began():
                    logprobs = ChatLogprobs([]) if reply.has_logprobs else None
                    choices.append(
                        ChatChoice(event.choice, AnswerMessage("assistant", ""), logprobs, "stop")
                    )
                case events.Scored():
                    told = choices[-1].logprobs
                    assert told is not None
                    told.content.extend(chat_logprobs(reply.tokenizer, event.tokens))
                case events.Closed():
                    _add(choices[-1].message, event.block)
                case events.Ended():
                    self._end_whole(choices[-1], event)
                case events.Finished():
                    usage = usage_body(event.usage, event.num_reasoning)
        assert usage is not None
        return ChatCompletion(
            reply.id,
            "chat.completion",
            reply.created_s,
            reply.model,
            choices,
            usage,
            tier_of(reply.job),
        )

    def _write_text(self, index: int, text: str) -> bytes:
        """Write what most chunks have; all of it but the text is encoded once for each choice."""
        if index in self._scored:
            return self._write(index, Delta(content=text))
        around = self._around_text.get(index)
        if around is None:
            before, key, after = self._write(index, Delta(content="")).partition(b'"content":')
            around = before + key, after.removeprefix(b'""')
            self._around_text[index] = around
        return encode_json(text).join(around)

    def _write(self, index: int, delta: Delta) -> bytes:
        choice = self._choice
        choice.index, choice.delta, choice.logprobs = index, delta, None
        if self._scored and (told := self._scored.pop(index, None)):
            choice.logprobs = ChatLogprobs(told)
        return sse(encode_json(self._chunk))

    def _end(self, event: events.Ended) -> bytes:
        rest = b""
        if event.choice in self._scored:  # of tokens that have no text
            rest = self._write(event.choice, Delta(content=""))
        choice = self._choice
        choice.finish_reason = finish_reason(event.reason, has_calls=event.has_calls)
        if self._reply.job.timings:
            choice.timings = timings_body(event.usage, event.timings)
        last = self._write(event.choice, Delta())
        choice.finish_reason, choice.timings = None, UNSET
        return rest + last

    def _finish(self, event: events.Finished) -> bytes:
        if not self._reply.job.include_usage:
            return DONE
        self._chunk.choices = []
        self._chunk.usage = usage_body(event.usage, event.num_reasoning)
        return sse(encode_json(self._chunk)) + DONE

    def _end_whole(self, choice: ChatChoice, event: events.Ended) -> None:
        message = choice.message
        if message.tool_calls is not UNSET or self._reply.reading.is_forced:
            message.content = message.content or None
        choice.finish_reason = finish_reason(event.reason, has_calls=event.has_calls)
        if self._reply.job.timings:
            choice.timings = timings_body(event.usage, event.timings)


def _delta(block: events.ContentBlock, text: str) -> Delta:
    match block.kind:
        case events.BlockKind.TEXT:
            return Delta(content=text)
        case events.BlockKind.REASONING:
            return Delta(reasoning_content=text, reasoning=text)
        case events.BlockKind.CALL:
            return Delta(tool_calls=[CallBody(FunctionCallBody(text), index=block.call_index)])


def _call(block: events.ContentBlock) -> CallBody:
    """Return the first piece of a call."""
    call_id = f"call_{secrets.token_hex(12)}"
    return CallBody(FunctionCallBody("", block.name), call_id, "function", block.call_index)


def _add(message: AnswerMessage, block: events.ContentBlock) -> None:
    """Add a complete block to its message."""
    match block.kind:
        case events.BlockKind.TEXT:
            message.content = (message.content or "") + block.text
        case events.BlockKind.REASONING:
            message.reasoning = (message.reasoning or "") + block.text
            message.reasoning_content = message.reasoning
        case events.BlockKind.CALL:
            call = _call(block)
            call.function.arguments, call.index = block.text, UNSET
            message.tool_calls = [*(message.tool_calls or ()), call]
