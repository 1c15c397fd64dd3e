"""What Anthropic's protocol answers: a message, whole or as a stream of named events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from twostroke.core.request import FinishReason
from twostroke.serve.dialect import encode_json

if TYPE_CHECKING:
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


class MessageBody(msgspec.Struct, tag_field="type", tag="message"):
    """A message; the reason why it ended and the stop sequence are null while it goes on."""

    id: str
    role: str
    model: str
    content: list[TextBody]
    stop_reason: str | None
    stop_sequence: str | None
    usage: UsageBody


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The first event."""

    message: MessageBody


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """The answer's text begins."""

    index: int
    content_block: TextBody


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """Nothing."""


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """A piece of text."""

    text: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """The text goes on."""

    index: int
    delta: TextDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """The text is over."""

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
    """Writes the events of one message with one block of text."""

    def __init__(self, reply: Reply) -> None:
        """Write `reply`; the struct of deltas is filled again and again."""
        self._reply = reply
        self._delta = BlockDelta(0, TextDelta(""))
        self._has_begun = False
        self._end = End("", None)

    def feed(self, output: Output) -> bytes:
        """Return the events of an output."""
        events = b""
        if not self._has_begun:
            self._has_begun = True
            assert output.usage is not None
            message = _message(self._reply, [], None, output.usage)
            events = _event(MessageStart(message)) + _event(BlockStart(0, TextBody("")))
            events += _event(Ping())
        if output.text:
            self._delta.delta.text = output.text
            events += _event(self._delta)
        if output.finish_reason is not None:
            self._end = _end(output.finish_reason, output.stop)
            events += _event(BlockStop(0))
        return events

    def finish(self, usage: Usage) -> bytes:
        """Return why it ended, the usage, and the end."""
        return _event(MessageDelta(self._end, _usage_body(usage))) + _event(MessageStop())


def whole(reply: Reply, answers: list[Completion], usage: Usage) -> MessageBody:
    """Return the response that is not streamed."""
    (answer,) = answers
    end = _end(answer.finish_reason, answer.stop)
    return _message(reply, [TextBody(answer.text)], end, usage)


def _message(reply: Reply, content: list[TextBody], end: End | None, usage: Usage) -> MessageBody:
    return MessageBody(
        id=reply.id,
        role="assistant",
        model=reply.model,
        content=content,
        stop_reason=end.stop_reason if end else None,
        stop_sequence=end.stop_sequence if end else None,
        usage=_usage_body(usage),
    )


def _end(reason: FinishReason, stop: str | int | None) -> End:
    if reason is FinishReason.LENGTH:
        return End("max_tokens", None)
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
