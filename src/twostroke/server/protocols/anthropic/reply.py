"""Anthropic's messages: the response, whole or as a stream of named events."""

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
from twostroke.server.protocols.common.usage import TimingsBody, timings_body

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.engine.output import Usage
    from twostroke.server.generation.protocol import ResponseInfo


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(msgspec.Struct, frozen=True):
    """Anthropic's usage object; input tokens are those that the prefix cache did not have.

    Caching is automatic and free, so no token counts as cache creation.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBody(msgspec.Struct, tag_field="type", tag="text"):
    """A block of text."""

    text: str


class ThinkingBody(msgspec.Struct, tag_field="type", tag="thinking"):
    """A block of reasoning; clients expect a signature and send it back; we do not check it."""

    thinking: str
    signature: str


class ToolUseBody(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool; in a stream its input follows in pieces."""

    id: str
    name: str
    input: dict[str, Any]


BlockBody = TextBody | ThinkingBody | ToolUseBody


class MessageBody(msgspec.Struct, tag_field="type", tag="message"):
    """A message; stop reason and stop sequence are null until it ends."""

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
    """The first event."""

    message: MessageBody


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: BlockBody


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """An event without meaning, which Anthropic's streams have."""


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """A piece of text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """A piece of reasoning."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The signature of a complete block of reasoning."""

    signature: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """A piece of the JSON of a call's input."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: int


class StopBody(msgspec.Struct):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """The end of the message, with the usage of all of it."""

    delta: StopBody
    usage: MessageUsage
    timings: TimingsBody | UnsetType = UNSET
    schema_miss: SchemaMiss = UNSET


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


_PING: Final = named_sse(Ping())
_DELTAS: Final[dict[events.BlockKind, type[TextDelta | ThinkingDelta | InputDelta]]] = {
    events.BlockKind.TEXT: TextDelta,
    events.BlockKind.REASONING: ThinkingDelta,
    events.BlockKind.CALL: InputDelta,
}


class MessageEncoder:
    """Writes the events of one message."""

    def __init__(self, reply: ResponseInfo) -> None:
        """Write `reply`."""
        self._reply = reply
        self._stop = StopBody("end_turn", None)
        self._timings: TimingsBody | UnsetType = UNSET
        self._schema_miss: SchemaMiss = UNSET

    def write(self, event: events.Event) -> bytes:
        """Return the named server-sent events of an event."""
        match event:
            case events.ContentAdded(block=block):
                if self._is_omitted(block):
                    return b""
                return named_sse(BlockDelta(block.index, _DELTAS[block.kind](event.text)))
            case events.BlockOpened(block=block):
                start = named_sse(BlockStart(block.index, _begun(block)))
                return start if block.index else start + _PING
            case events.BlockClosed(block=block):
                last = b""
                if block.kind is events.BlockKind.REASONING:
                    signature = SignatureDelta(_signature(block.text))
                    last = named_sse(BlockDelta(block.index, signature))
                return last + named_sse(BlockStop(block.index))
            case events.ChoiceStarted():
                assert event.usage is not None
                return named_sse(MessageStart(self._message([], event.usage)))
            case events.ChoiceEnded():
                self._end(event, has_calls=event.has_calls)
            case events.AnswerFinished():
                usage = _usage_body(event.usage)
                last_delta = MessageDelta(self._stop, usage, self._timings, self._schema_miss)
                return named_sse(last_delta) + named_sse(MessageStop())
            case events.StreamFailed():
                error = ANTHROPIC.body(event.error, event.request_id, str)
                return b"event: error\ndata: %b\n\n" % error
        return b""

    def whole_response(self, stream: Iterable[events.Event]) -> MessageBody:
        """Return the response that is not streamed."""
        content: list[BlockBody] = []
        for event in stream:
            match event:
                case events.BlockClosed():
                    block = _complete(event.block)
                    if isinstance(block, ThinkingBody) and self._is_omitted(event.block):
                        block.thinking = ""
                    content += [block] if block is not None else []
                case events.ChoiceEnded():
                    is_called = any(isinstance(block, ToolUseBody) for block in content)
                    self._end(event, has_calls=event.has_calls and is_called)
                case events.AnswerFinished():
                    message = self._message(content, event.usage)
        message.stop_reason = self._stop.stop_reason
        message.stop_sequence = self._stop.stop_sequence
        message.timings, message.schema_miss = self._timings, self._schema_miss
        return message

    def _is_omitted(self, block: events.ContentBlock) -> bool:
        """Whether clients get a block without its text, as `thinking.display` can ask for."""
        is_reasoning = block.kind is events.BlockKind.REASONING
        return is_reasoning and self._reply.job.omits_reasoning

    def _message(self, content: list[BlockBody], usage: Usage) -> MessageBody:
        """Return the message, which has not ended yet."""
        id_, model = self._reply.id, self._reply.model
        return MessageBody(id_, "assistant", model, content, None, None, _usage_body(usage))

    def _end(self, event: events.ChoiceEnded, *, has_calls: bool) -> None:
        """Note why the answer ended."""
        self._schema_miss = event.schema_miss or UNSET
        if event.reason is FinishReason.LENGTH:
            self._stop = StopBody("max_tokens", None)
        elif has_calls:
            self._stop = StopBody("tool_use", None)
        elif isinstance(event.stop, str):
            self._stop = StopBody("stop_sequence", event.stop)
        else:
            self._stop = StopBody("end_turn", None)
        if self._reply.job.timings:
            self._timings = timings_body(event.usage, event.timings)


def _begun(block: events.ContentBlock) -> BlockBody:
    """Return a block without content."""
    match block.kind:
        case events.BlockKind.TEXT:
            return TextBody("")
        case events.BlockKind.REASONING:
            return ThinkingBody("", "")
        case events.BlockKind.CALL:
            return ToolUseBody(f"toolu_{secrets.token_hex(12)}", block.name, {})


def _complete(block: events.ContentBlock) -> BlockBody | None:
    """Return a block with its content; None for a call that was cut off, so is not valid JSON."""
    body, text = _begun(block), block.text
    match body:
        case TextBody():
            body.text = text
        case ThinkingBody():
            body.thinking, body.signature = text, _signature(text)
        case ToolUseBody():
            try:
                body.input = msgspec.json.decode(text, type=dict[str, Any])
            except msgspec.DecodeError:
                return None
    return body


def _signature(thought: str) -> str:
    return hashlib.sha256(thought.encode("utf-8", "replace")).hexdigest()


def _usage_body(usage: Usage) -> MessageUsage:
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )
