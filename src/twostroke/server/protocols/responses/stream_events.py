"""The events of a streamed response, each with its number in the stream."""

from __future__ import annotations

from typing import Final

import msgspec

from twostroke.server.protocols.common.logprobs import TokenLogprob
from twostroke.server.protocols.responses.body import OutputItem, OutputPart, ResponseBody


class StreamEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    """The common fields of all events of a streamed response; `type` is the tag."""

    sequence_number: int = 0


class ResponseCreated(StreamEvent, tag="response.created"):
    """The first event of a streamed response."""

    response: ResponseBody


class ResponseQueued(StreamEvent, tag="response.queued"):
    """The second event of a streamed background response, which waits in the queue."""

    response: ResponseBody


class ResponseInProgress(StreamEvent, tag="response.in_progress"):
    """The event of a streamed response before its first token."""

    response: ResponseBody


class OutputItemAdded(StreamEvent, tag="response.output_item.added"):
    """The event of a streamed response that begins an output item."""

    output_index: int
    item: OutputItem


class ContentPartAdded(StreamEvent, tag="response.content_part.added"):
    """The event of a streamed response that begins a part of an output item."""

    item_id: str
    output_index: int
    content_index: int
    part: OutputPart


class OutputTextDelta(StreamEvent, tag="response.output_text.delta"):
    """The event of a streamed response with the next text of a message."""

    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(StreamEvent, tag="response.output_text.done"):
    """The event of a streamed response with the complete text of a message."""

    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDelta(StreamEvent, tag="response.reasoning_text.delta"):
    """The event of a streamed response with the next text of the reasoning."""

    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningTextDone(StreamEvent, tag="response.reasoning_text.done"):
    """The event of a streamed response with the complete text of the reasoning."""

    item_id: str
    output_index: int
    content_index: int
    text: str


class ContentPartDone(StreamEvent, tag="response.content_part.done"):
    """The event of a streamed response with a complete part of an output item."""

    item_id: str
    output_index: int
    content_index: int
    part: OutputPart


class CallArgumentsDelta(StreamEvent, tag="response.function_call_arguments.delta"):
    """The event of a streamed response with the next piece of a function call's arguments."""

    item_id: str
    output_index: int
    delta: str


class CallArgumentsDone(StreamEvent, tag="response.function_call_arguments.done"):
    """The event of a streamed response with the complete arguments of a function call."""

    item_id: str
    output_index: int
    name: str
    arguments: str


class CustomInputDelta(StreamEvent, tag="response.custom_tool_call_input.delta"):
    """The event of a streamed response with the next piece of a custom tool call's input."""

    item_id: str
    output_index: int
    delta: str


class CustomInputDone(StreamEvent, tag="response.custom_tool_call_input.done"):
    """The event of a streamed response with the complete input of a custom tool call."""

    item_id: str
    output_index: int
    input: str


class OutputItemDone(StreamEvent, tag="response.output_item.done"):
    """The event of a streamed response with a complete output item."""

    output_index: int
    item: OutputItem


class ResponseCompleted(StreamEvent, tag="response.completed"):
    """The last event of a streamed response that is complete."""

    response: ResponseBody


class ResponseIncomplete(StreamEvent, tag="response.incomplete"):
    """The last event of a streamed response that reached the token limit, or was cancelled."""

    response: ResponseBody


class ResponseFailed(StreamEvent, tag="response.failed"):
    """The last event of a streamed response that failed."""

    response: ResponseBody


class StreamError(StreamEvent, tag="error"):
    """The last event of a stream that ends too early; clients can read the response later."""

    code: str | None
    message: str
    param: str | None


EVENTS: Final = (
    ResponseCreated,
    ResponseQueued,
    ResponseInProgress,
    OutputItemAdded,
    ContentPartAdded,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    CallArgumentsDelta,
    CallArgumentsDone,
    CustomInputDelta,
    CustomInputDone,
    ContentPartDone,
    OutputItemDone,
    ResponseCompleted,
    ResponseIncomplete,
    ResponseFailed,
    StreamError,
)
