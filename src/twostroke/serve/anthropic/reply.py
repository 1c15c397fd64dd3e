"""What Anthropic's protocol answers: a message, whole or as a stream of named events."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from twostroke.core.request import FinishReason
from twostroke.serve.calls import ArgumentsPiece, CallBegin, CallReader, TextPiece
from twostroke.serve.dialect import encode_json

if TYPE_CHECKING:
    from twostroke.engine.output import Completion, Output, Usage
    from twostroke.serve.calls import Piece
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


class ToolUseBody(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool; in a stream the input comes in pieces behind it."""

    id: str
    name: str
    input: dict[str, Any]


class MessageBody(msgspec.Struct, tag_field="type", tag="message"):
    """A message; the reason why it ended and the stop sequence are null while it goes on."""

    id: str
    role: str
    model: str
    content: list[TextBody | ToolUseBody]
    stop_reason: str | None
    stop_sequence: str | None
    usage: UsageBody


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The first event."""

    message: MessageBody


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: TextBody | ToolUseBody


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """Nothing."""


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """A piece of text."""

    text: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """A piece of the JSON of a call's input."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """A block goes on."""

    index: int
    delta: TextDelta | InputDelta


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


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


class MessageWriter:
    """Writes the events of one message: a block of text, or of each call and what is between."""

    def __init__(self, reply: Reply) -> None:
        """Write `reply`."""
        self._reply = reply
        functions = reply.job.functions
        self._reader = CallReader(functions) if functions else None
        self._has_begun = False
        self._index = -1  # of the newest block
        self._is_text = False  # whether that is one
        self._end = End("", None)

    def feed(self, output: Output) -> bytes:
        """Return the events of an output."""
        events = b""
        if not self._has_begun:
            self._has_begun = True
            assert output.usage is not None
            events = _event(MessageStart(_message(self._reply, [], None, output.usage)))
            if self._reader is None:
                events += self._open(TextBody(""))
            events += _event(Ping())
        is_last = output.finish_reason is not None
        for piece in _pieces(self._reader, output.text, is_last=is_last):
            events += self._piece(piece)
        if output.finish_reason is not None:
            if self._index < 0:
                events += self._open(TextBody(""))
            has_calls = self._reader is not None and self._reader.num_calls > 0
            self._end = _end(output.finish_reason, output.stop, has_calls=has_calls)
            events += _event(BlockStop(self._index))
        return events

    def finish(self, usage: Usage) -> bytes:
        """Return why it ended, the usage, and the end."""
        return _event(MessageDelta(self._end, _usage_body(usage))) + _event(MessageStop())

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, CallBegin):
            return self._open(_tool_use(piece))
        if isinstance(piece, ArgumentsPiece):
            return _event(BlockDelta(self._index, InputDelta(piece.text)))
        begin = b"" if self._is_text else self._open(TextBody(""))
        return begin + _event(BlockDelta(self._index, TextDelta(piece.text)))

    def _open(self, block: TextBody | ToolUseBody) -> bytes:
        """Begin the next block."""
        end = _event(BlockStop(self._index)) if self._index >= 0 else b""
        self._index += 1
        self._is_text = isinstance(block, TextBody)
        return end + _event(BlockStart(self._index, block))


def whole(reply: Reply, answers: list[Completion], usage: Usage) -> MessageBody:
    """Return the response that is not streamed."""
    (answer,) = answers
    functions = reply.job.functions
    content: list[TextBody | ToolUseBody] = []
    arguments: dict[int, str] = {}  # JSON, by place in the content
    for piece in _pieces(CallReader(functions) if functions else None, answer.text, is_last=True):
        if isinstance(piece, ArgumentsPiece):
            arguments[len(content) - 1] = arguments.get(len(content) - 1, "") + piece.text
        elif isinstance(piece, CallBegin):
            content.append(_tool_use(piece))
        elif content and isinstance(content[-1], TextBody):
            content[-1].text += piece.text
        else:
            content.append(TextBody(piece.text))
    blocks = [
        _filled(block, arguments.get(place, "")) if isinstance(block, ToolUseBody) else block
        for place, block in enumerate(content or [TextBody("")])
    ]
    has_calls = any(isinstance(block, ToolUseBody) for block in blocks)
    end = _end(answer.finish_reason, answer.stop, has_calls=has_calls)
    return _message(reply, blocks, end, usage)


def _pieces(reader: CallReader | None, text: str, *, is_last: bool) -> list[Piece]:
    if reader is None:
        return [TextPiece(text)] if text else []
    return [*reader.feed(text), *(reader.finish() if is_last else ())]


def _tool_use(piece: CallBegin) -> ToolUseBody:
    return ToolUseBody(f"toolu_{secrets.token_hex(12)}", piece.name, {})


def _filled(block: ToolUseBody, arguments: str) -> TextBody | ToolUseBody:
    """Return a call with its input; one that was cut, or is no JSON, is what the model wrote."""
    try:
        given = msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return TextBody(arguments)
    return ToolUseBody(block.id, block.name, given)


def _message(
    reply: Reply, content: list[TextBody | ToolUseBody], end: End | None, usage: Usage
) -> MessageBody:
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
