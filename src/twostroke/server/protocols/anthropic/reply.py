"""Anthropic's responses: a complete message, or a stream of named server-sent events."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from twostroke.core.request import FinishReason
from twostroke.server.generation import events
from twostroke.server.generation.events import SchemaMiss
from twostroke.server.http.error_forms import ANTHROPIC
from twostroke.server.http.responses import named_sse
from twostroke.server.protocols.common.fields import OPAQUE_REASONING, encode_opaque_text
from twostroke.server.protocols.common.tools import decode_arguments
from twostroke.server.protocols.common.usage import TimingsBody, timings_body

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.engine.output import Usage
    from twostroke.server.generation.protocol import ResponseInfo


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(msgspec.Struct, frozen=True):
    """The `usage` of a message; `input_tokens` excludes prompt tokens found in the prefix cache.

    Caching is automatic and free, so no token counts as cache creation.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBody(msgspec.Struct, tag_field="type", tag="text"):
    """A content block of a response: text."""

    text: str


class ThinkingBody(msgspec.Struct, tag_field="type", tag="thinking"):
    """A content block of a response: the model's reasoning.

    Clients expect a `signature`. The server makes one, and does not check it when clients send it
    back.
    """

    thinking: str
    signature: str


class ToolUseBody(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A content block of a response: a tool call, whose input a stream sends in later events."""

    id: str
    name: str
    input: dict[str, Any]


BlockBody = TextBody | ThinkingBody | ToolUseBody


class MessageBody(msgspec.Struct, tag_field="type", tag="message"):
    """The response to `/v1/messages`: the model's message.

    `stop_reason` and `stop_sequence` are null until the message ends.
    """

    id: str
    role: Literal["assistant"]
    model: str
    content: list[BlockBody]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    timings: TimingsBody | UnsetType = UNSET
    schema_miss: SchemaMiss = UNSET


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The first event of a streamed message, with all fields of the message but no content."""

    message: MessageBody


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """The event of a streamed message that begins a content block."""

    index: int
    content_block: BlockBody


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """The event `ping` of a streamed message. It says nothing, but clients expect one."""


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """The next text of a text block in a streamed message."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """The next text of a reasoning block in a streamed message."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The signature of a reasoning block, sent when the block is complete."""

    signature: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """The next piece of a tool call's input in a streamed message, as JSON text."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """The event of a streamed message that adds content to the open content block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """The event of a streamed message that ends a content block."""

    index: int


class StopBody(msgspec.Struct):
    """The reason why the model ended a streamed message, and the stop sequence if one ended it."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """The event after a streamed message's content, with the stop reason and the total usage."""

    delta: StopBody
    usage: MessageUsage
    timings: TimingsBody | UnsetType = UNSET
    schema_miss: SchemaMiss = UNSET


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event of a streamed message."""


_PING: Final = named_sse(Ping())
_DELTAS: Final[dict[events.BlockKind, type[TextDelta | ThinkingDelta | InputDelta]]] = {
    events.BlockKind.TEXT: TextDelta,
    events.BlockKind.REASONING: ThinkingDelta,
    events.BlockKind.CALL: InputDelta,
}


class MessageEncoder:
    """Encodes one answer as Anthropic's message, complete or as named server-sent events."""

    def __init__(self, info: ResponseInfo) -> None:
        """Prepare to encode one response; `info` has its id, model and job."""
        self._info = info
        self._stop = StopBody("end_turn", None)
        self._timings: TimingsBody | UnsetType = UNSET
        self._schema_miss: SchemaMiss = UNSET

    def write(self, event: events.Event) -> bytes:
        """Return Anthropic's server-sent events for one event of the answer; may be empty."""
        match event:
            case events.ContentAdded(block=block):
                if self._is_omitted(block):
                    return b""
                return named_sse(BlockDelta(block.index, _DELTAS[block.kind](event.text)))
            case events.BlockOpened(block=block):
                start = named_sse(BlockStart(block.index, _empty_block(block)))
                return start if block.index else start + _PING
            case events.BlockClosed(block=block):
                last = b""
                if block.kind is events.BlockKind.REASONING:
                    signature = _signature(block.text, is_omitted=self._is_omitted(block))
                    last = named_sse(BlockDelta(block.index, SignatureDelta(signature)))
                return last + named_sse(BlockStop(block.index))
            case events.ChoiceStarted():
                assert event.usage is not None
                return named_sse(MessageStart(self._message([], event.usage)))
            case events.ChoiceEnded():
                self._end(event, has_calls=event.has_calls)
            case events.AnswerFinished():
                usage = _usage_body(event.usage)
                last_delta = MessageDelta(
                    self._stop, usage=usage, timings=self._timings, schema_miss=self._schema_miss
                )
                return named_sse(last_delta) + named_sse(MessageStop())
            case events.StreamFailed():
                error = ANTHROPIC.body(event.error, event.request_id, str)
                return b"event: error\ndata: %b\n\n" % error
        return b""

    def whole_response(self, stream: Iterable[events.Event]) -> MessageBody:
        """Return the message for a request without a stream, from all events of the answer."""
        content: list[BlockBody] = []
        for event in stream:
            match event:
                case events.BlockClosed():
                    block = _complete_block(event.block)
                    if isinstance(block, ThinkingBody) and self._is_omitted(event.block):
                        block.thinking = ""
                        block.signature = _signature(event.block.text, is_omitted=True)
                    content += [block] if block is not None else []
                case events.ChoiceEnded():
                    is_called = any(isinstance(block, ToolUseBody) for block in content)
                    self._end(event, has_calls=event.has_calls and is_called)
                case events.AnswerFinished():
                    message = self._message(content, event.usage)
        message.stop_reason = self._stop.stop_reason
        message.stop_sequence = self._stop.stop_sequence
        message.timings = self._timings
        message.schema_miss = self._schema_miss
        return message

    def _is_omitted(self, block: events.ContentBlock) -> bool:
        """Whether to leave out a block's text: reasoning, if `thinking.display` is "omitted"."""
        is_reasoning = block.kind is events.BlockKind.REASONING
        return is_reasoning and self._info.job.omits_reasoning

    def _message(self, content: list[BlockBody], usage: Usage) -> MessageBody:
        """Return a message's JSON body with the given content and usage, and no stop reason yet."""
        return MessageBody(
            id=self._info.id,
            role="assistant",
            model=self._info.model,
            content=content,
            stop_reason=None,
            stop_sequence=None,
            usage=_usage_body(usage),
        )

    def _end(self, event: events.ChoiceEnded, *, has_calls: bool) -> None:
        """Remember an answer's stop reason and timings for the last events of the message."""
        self._schema_miss = event.schema_miss or UNSET
        if event.reason is FinishReason.LENGTH:
            self._stop = StopBody("max_tokens", None)
        elif has_calls:
            self._stop = StopBody("tool_use", None)
        elif isinstance(event.stop, str):
            self._stop = StopBody("stop_sequence", event.stop)
        else:
            self._stop = StopBody("end_turn", None)
        if self._info.job.timings:
            self._timings = timings_body(event.usage, event.timings)


def _empty_block(block: events.ContentBlock) -> BlockBody:
    """Return the JSON body of a content block without content, as a stream begins it."""
    match block.kind:
        case events.BlockKind.TEXT:
            return TextBody("")
        case events.BlockKind.REASONING:
            return ThinkingBody("", "")
        case events.BlockKind.CALL:
            return ToolUseBody(f"toolu_{secrets.token_hex(12)}", block.name, {})


def _complete_block(block: events.ContentBlock) -> BlockBody | None:
    """Return the JSON body of a complete content block for a message without a stream.

    Returns None for a tool call whose JSON was cut off by the token limit.
    """
    body = _empty_block(block)
    text = block.text
    match body:
        case TextBody():
            body.text = text
        case ThinkingBody():
            body.thinking = text
            body.signature = _signature(text, is_omitted=False)
        case ToolUseBody():
            try:
                body.input = decode_arguments(text)
            except msgspec.DecodeError:
                return None
    return body


def _signature(reasoning: str, *, is_omitted: bool) -> str:
    """Return the signature of a reasoning block.

    If the response leaves out the reasoning's text (`is_omitted`), the signature contains the text.
    Clients send the signature back, so that a later request's chat template gets the reasoning.
    """
    if is_omitted:
        return encode_opaque_text(reasoning, OPAQUE_REASONING)
    return hashlib.sha256(reasoning.encode("utf-8", "replace")).hexdigest()


def _usage_body(usage: Usage) -> MessageUsage:
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )
