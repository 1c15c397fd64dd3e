"""What Anthropic's protocol answers: a message, whole or as a stream of named events."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from twostroke.chat.call_reader import ArgumentsPiece, CallBegin, ReasoningPiece, TextPiece
from twostroke.core.request import FinishReason
from twostroke.serve.dialect import encode_json
from twostroke.serve.openai.usage import TimingsBody, timings_body

if TYPE_CHECKING:
    from twostroke.chat.call_reader import Piece
    from twostroke.chat.reader import AnswerReader
    from twostroke.engine.output import Completion, Output, Usage
    from twostroke.serve.dialect import Reply


class UsageBody(msgspec.Struct, frozen=True):
    """Anthropic's usage object: input tokens are those that the prefix cache did not have.

    Whatever is computed is cached without being asked, and costs nothing more: none of it counts
    as the creation of a cache.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBody(msgspec.Struct, tag_field="type", tag="text"):
    """A block of text."""

    text: str


class ThinkingBody(msgspec.Struct, tag_field="type", tag="thinking"):
    """A block of reasoning; clients want a signature and send it back, nobody checks it."""

    thinking: str
    signature: str


class ToolUseBody(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool; in a stream the input comes in pieces behind it."""

    id: str
    name: str
    input: dict[str, Any]


BlockBody = TextBody | ThinkingBody | ToolUseBody


class MessageBody(msgspec.Struct, tag_field="type", tag="message"):
    """A message; the reason why it ended and the stop sequence are null while it goes on."""

    id: str
    role: str
    model: str
    content: list[BlockBody]
    stop_reason: str | None
    stop_sequence: str | None
    usage: UsageBody
    timings: TimingsBody | UnsetType = UNSET


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The first event."""

    message: MessageBody


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: BlockBody


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """Nothing."""


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """A piece of text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """A piece of reasoning."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The signature of the reasoning, which is over."""

    signature: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """A piece of the JSON of a call's input."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """A block goes on."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """A block is over."""

    index: int


class End(msgspec.Struct):
    """Why a message ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """What is known of the message at its end; usage is that of the whole."""

    delta: End
    usage: UsageBody
    timings: TimingsBody | UnsetType = UNSET


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


class MessageWriter:
    """Writes the events of one message: a block of text, or of each kind that comes and goes."""

    def __init__(self, reply: Reply) -> None:
        """Write `reply`."""
        self._reply = reply
        self._reader = reply.reader()
        self._has_begun = False
        self._index = -1  # of the newest block
        self._block: BlockBody | None = None  # that one
        self._thought = ""
        self._end = End("", None)
        self._timings: TimingsBody | UnsetType = UNSET

    def feed(self, output: Output) -> bytes:
        """Return the events of an output."""
        events = b""
        if not self._has_begun:
            self._has_begun = True
            assert output.usage is not None
            events = _event(MessageStart(_message(self._reply, [], None, output.usage)))
            if self._reply.reading.is_plain:
                events += self._open(TextBody(""))
            events += _event(Ping())
        for piece in self._reader.take(output):
            events += self._piece(piece)
        if output.finish_reason is not None:
            if self._index < 0:
                events += self._open(TextBody(""))
            has_calls = self._reader.has_whole_calls
            self._end = _end(output.finish_reason, output.stop, has_calls=has_calls)
            if self._reply.job.timings:
                assert output.usage is not None
                assert output.timings is not None
                self._timings = timings_body(output.usage, output.timings)
            events += self._close()
        return events

    def finish(self, usage: Usage) -> bytes:
        """Return why it ended, the usage, and the end."""
        last = MessageDelta(self._end, _usage_body(usage), self._timings)
        return _event(last) + _event(MessageStop())

    def _piece(self, piece: Piece) -> bytes:
        match piece:
            case CallBegin():
                return self._open(_tool_use(piece))
            case ArgumentsPiece():
                return _event(BlockDelta(self._index, InputDelta(piece.text)))
            case ReasoningPiece():
                self._thought += piece.text
                begin = self._open_unless(ThinkingBody("", ""))
                return begin + _event(BlockDelta(self._index, ThinkingDelta(piece.text)))
            case TextPiece():
                begin = self._open_unless(TextBody(""))
                return begin + _event(BlockDelta(self._index, TextDelta(piece.text)))

    def _open_unless(self, block: BlockBody) -> bytes:
        """Begin a block, unless the newest is of the same kind."""
        return b"" if type(self._block) is type(block) else self._open(block)

    def _open(self, block: BlockBody) -> bytes:
        """Begin the next block."""
        end = self._close() if self._index >= 0 else b""
        self._index += 1
        self._block = block
        return end + _event(BlockStart(self._index, block))

    def _close(self) -> bytes:
        """End the newest block."""
        last = b""
        if isinstance(self._block, ThinkingBody):
            last = _event(BlockDelta(self._index, SignatureDelta(_signature(self._thought))))
        return last + _event(BlockStop(self._index))


def whole(reply: Reply, answers: list[Completion], usage: Usage) -> MessageBody:
    """Return the response that is not streamed."""
    (answer,) = answers
    reader = reply.reader()
    content: list[BlockBody] = []
    arguments: dict[int, str] = {}  # JSON, by place in the content
    for piece in reader.take(answer):
        last = content[-1] if content else None
        match piece:
            case ArgumentsPiece():
                place = len(content) - 1
                arguments[place] = arguments.get(place, "") + piece.text
            case CallBegin():
                content.append(_tool_use(piece))
            case ReasoningPiece() if isinstance(last, ThinkingBody):
                last.thinking += piece.text
            case ReasoningPiece():
                content.append(ThinkingBody(piece.text, ""))
            case TextPiece() if isinstance(last, TextBody):
                last.text += piece.text
            case TextPiece():
                content.append(TextBody(piece.text))
    blocks = [
        _filled(block, arguments.get(place, ""))
        for place, block in enumerate(content or [TextBody("")])
    ]
    end = _end(answer.finish_reason, answer.stop, has_calls=_has_calls(reader, blocks))
    message = _message(reply, blocks, end, usage)
    if reply.job.timings:
        message.timings = timings_body(answer.usage, answer.timings)
    return message


def _has_calls(reader: AnswerReader, blocks: list[BlockBody]) -> bool:
    """Whether the client is to make calls: all of those that were begun are there."""
    return reader.has_whole_calls and any(isinstance(block, ToolUseBody) for block in blocks)


def _tool_use(piece: CallBegin) -> ToolUseBody:
    return ToolUseBody(f"toolu_{secrets.token_hex(12)}", piece.name, {})


def _signature(thought: str) -> str:
    return hashlib.sha256(thought.encode("utf-8", "replace")).hexdigest()


def _filled(block: BlockBody, arguments: str) -> BlockBody:
    """Return a block whole: with a call's input, or a signature.

    A call that was cut, or is no JSON, is what the model wrote.
    """
    if isinstance(block, ThinkingBody):
        return ThinkingBody(block.thinking, _signature(block.thinking))
    if isinstance(block, TextBody):
        return block
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return TextBody(arguments)
    return ToolUseBody(block.id, block.name, given)


def _message(reply: Reply, content: list[BlockBody], end: End | None, usage: Usage) -> MessageBody:
    return MessageBody(
        id=reply.id,
        role="assistant",
        model=reply.model,
        content=content,
        stop_reason=end.stop_reason if end else None,
        stop_sequence=end.stop_sequence if end else None,
        usage=_usage_body(usage),
    )


def _end(reason: FinishReason, stop: str | int | None, *, has_calls: bool) -> End:
    if reason is FinishReason.LENGTH:
        return End("max_tokens", None)
    if has_calls:
        return End("tool_use", None)
    return End("stop_sequence", stop) if isinstance(stop, str) else End("end_turn", None)


def _usage_body(usage: Usage) -> UsageBody:
    return UsageBody(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def _event(data: msgspec.Struct) -> bytes:
    name = data.__struct_config__.tag
    assert isinstance(name, str)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(data))
