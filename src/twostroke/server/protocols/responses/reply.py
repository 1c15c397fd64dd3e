"""Encodes responses of the Responses API: complete, or as a stream of named events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import UNSET

from twostroke.core.json_io import encode_json
from twostroke.core.request import FinishReason
from twostroke.server.generation import events
from twostroke.server.http.errors import to_message
from twostroke.server.http.responses import named_sse
from twostroke.server.protocols.common.fields import OPAQUE_REASONING, encode_opaque_text
from twostroke.server.protocols.common.listing import ENCRYPTED_REASONING
from twostroke.server.protocols.common.logprobs import chat_logprobs
from twostroke.server.protocols.common.usage import timings_body
from twostroke.server.protocols.responses import stream_events as sent
from twostroke.server.protocols.responses.body import (
    IncompleteDetails,
    OutputCall,
    OutputCustomCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ResponseBody,
    ResponseError,
    ThoughtText,
    begin_response,
    exchange_of,
    usage_body,
)
from twostroke.server.protocols.responses.items import derived_id
from twostroke.server.protocols.responses.tools import split_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from twostroke.server.generation.protocol import ResponseInfo
    from twostroke.server.generation.response_store import StoredResponse
    from twostroke.server.protocols.common.logprobs import TokenLogprob
    from twostroke.server.protocols.responses.body import OutputItem, OutputPart


class ResponsesEncoder:
    """Encodes an answer as a response object, with an output item for each block of the answer.

    It also writes the numbered server-sent events of a stream, and stores the response at the end.
    """

    def __init__(self, info: ResponseInfo) -> None:
        """Begin a response without output; `info` has its id, model and job."""
        self._info = info
        self._body = begin_response(info)
        self._body.output = []
        self._block: events.ContentBlock | None = None  # the block that has begun and not ended
        self._logprobs: list[TokenLogprob] = []  # of the open block
        self._num_events = 0
        self._queued: StoredResponse | None = None  # a background response while it runs

    @property
    def body(self) -> ResponseBody:
        """The response object in its present state, which changes with each event."""
        return self._body

    def write(self, event: events.Event) -> bytes:
        """Return the server-sent events for one event of the answer, joined."""
        return b"".join(self.write_each(event))

    def write_each(self, event: events.Event) -> list[bytes]:
        """Return the server-sent events for one event of the answer, as a list."""
        return self._written(self._take(event))

    def queue(self) -> list[bytes]:
        """Store a background response with the status `queued`, and return its first events."""
        body = self._body
        body.background = True
        body.status = "queued"
        self._queued = exchange_of(self._info).store_open(body.id, encode_json(body))
        return self._written([sent.ResponseCreated(body), sent.ResponseQueued(body)])

    def cancel(self) -> list[bytes]:
        """End a background response that was cancelled, store it, and return its last event."""
        if self._block is not None:
            self._complete(self._block, is_cut=True)
        self._body.status = "cancelled"
        self._store()
        return self._written([sent.ResponseIncomplete(self._body)])

    def _written(self, stream_events: Iterable[sent.StreamEvent]) -> list[bytes]:
        """Number the events of a stream, and encode each as a server-sent event.

        Each event is encoded before the next event changes the response object.
        """
        data = []
        for event in stream_events:
            event.sequence_number = self._num_events
            self._num_events += 1
            data.append(named_sse(event))
        return data

    def whole_response(self, stream: Iterable[events.Event]) -> ResponseBody:
        """Return the response object for a request without a stream, from all events."""
        for event in stream:
            for _ in self._take(event):
                pass  # only the changes of the body matter
        return self._result()

    def _result(self) -> ResponseBody:
        return self._body

    def _take(self, event: events.Event) -> Iterator[sent.StreamEvent]:
        """Update the response object with one event of the answer; yield the stream's events."""
        match event:
            case events.ContentAdded():
                yield self._add(event)
            case events.ChoiceStarted():
                yield from self._begin()
            case events.BlockOpened():
                yield from self._open(event.block)
            case events.BlockClosed():
                yield from self._close(event.block)
            case events.ChoiceEnded():
                self._end(event)
            case events.AnswerFinished():
                yield self._finish(event)
            case events.StreamFailed():
                if not self._num_events:
                    yield from self._begin()
                yield self._fail(event)

    def _begin(self) -> Iterator[sent.StreamEvent]:
        self._body.status = "in_progress"
        if self._queued is None:
            yield sent.ResponseCreated(self._body)
        yield sent.ResponseInProgress(self._body)

    def _open(self, block: events.ContentBlock) -> Iterator[sent.StreamEvent]:
        """Add an empty output item for a new block of the answer; yield the stream's events."""
        self._block = block
        item = self._empty_item(block)
        self._body.output.append(item)
        yield sent.OutputItemAdded(block.index, item)
        if part := _add_empty_part(item):
            yield sent.ContentPartAdded(
                item_id=item.id, output_index=block.index, content_index=0, part=part
            )

    def _empty_item(self, block: events.ContentBlock) -> OutputItem:
        """Build the output item of a new block of the answer, without content."""

        def new_id(prefix: str) -> str:
            return derived_id(prefix, self._info.id, block.index)

        match block.kind:
            case events.BlockKind.TEXT:
                return OutputMessage(new_id("msg_"), "in_progress", [])
            case events.BlockKind.REASONING:
                return OutputReasoning(new_id("rs_"), "in_progress", [])
            case events.BlockKind.CALL:
                name, namespace = split_name(block.name, exchange_of(self._info).request.tools)
                item_type = OutputCustomCall if block.is_custom else OutputCall
                return item_type(
                    id=new_id("ctc_" if block.is_custom else "fc_"),
                    call_id=new_id("call_"),
                    name=name,
                    status="in_progress",
                    namespace=namespace or UNSET,
                )

    def _add(self, event: events.ContentAdded) -> sent.StreamEvent:
        """Return the stream's event that adds text to the newest output item."""
        output_index = event.block.index
        id_ = self._body.output[output_index].id
        match event.block.kind:
            case events.BlockKind.TEXT:
                scored = event.scored[event.num_reasoning :]
                logprobs = chat_logprobs(self._info.tokenizer, scored)
                self._logprobs += logprobs
                return sent.OutputTextDelta(
                    item_id=id_,
                    output_index=output_index,
                    content_index=0,
                    delta=event.text,
                    logprobs=logprobs,
                )
            case events.BlockKind.REASONING:
                return sent.ReasoningTextDelta(
                    item_id=id_, output_index=output_index, content_index=0, delta=event.text
                )
            case events.BlockKind.CALL if event.block.is_custom:
                return sent.CustomInputDelta(
                    item_id=id_, output_index=output_index, delta=event.text
                )
            case events.BlockKind.CALL:
                return sent.CallArgumentsDelta(
                    item_id=id_, output_index=output_index, delta=event.text
                )

    def _close(self, block: events.ContentBlock) -> Iterator[sent.StreamEvent]:
        """Complete the output item of a block that has ended; yield the stream's events for it."""
        item = self._complete(block, is_cut=block.is_cut)
        output_index = block.index
        match item:
            case OutputCall():
                yield sent.CallArgumentsDone(
                    item_id=item.id,
                    output_index=output_index,
                    name=item.name,
                    arguments=item.arguments,
                )
            case OutputCustomCall():
                yield sent.CustomInputDone(
                    item_id=item.id, output_index=output_index, input=item.input
                )
            case OutputReasoning(content=[part]):
                yield sent.ReasoningTextDone(
                    item_id=item.id, output_index=output_index, content_index=0, text=part.text
                )
                yield sent.ContentPartDone(
                    item_id=item.id, output_index=output_index, content_index=0, part=part
                )
            case OutputMessage(content=[part]):
                yield sent.OutputTextDone(
                    item_id=item.id,
                    output_index=output_index,
                    content_index=0,
                    text=part.text,
                    logprobs=part.logprobs,
                )
                yield sent.ContentPartDone(
                    item_id=item.id, output_index=output_index, content_index=0, part=part
                )
        yield sent.OutputItemDone(output_index, item)

    def _complete(self, block: events.ContentBlock, *, is_cut: bool) -> OutputItem:
        """Set the content and the status of the output item for a block of the answer; return it.

        `is_cut` tells whether the block is incomplete.
        """
        item = self._body.output[block.index]
        item.status = "incomplete" if is_cut else "completed"
        match item:
            case OutputCall():
                item.arguments = block.text
            case OutputCustomCall():
                item.input = block.text
            case OutputReasoning():
                item.content[0].text = block.text
                if ENCRYPTED_REASONING in (exchange_of(self._info).request.include or ()):
                    item.encrypted_content = encode_opaque_text(block.text, OPAQUE_REASONING)
            case OutputMessage(content=[part]):
                part.text = block.text
                part.logprobs = self._logprobs
                self._logprobs = []
        self._block = None
        return item

    def _end(self, event: events.ChoiceEnded) -> None:
        if event.reason is FinishReason.LENGTH:
            self._body.incomplete_details = IncompleteDetails("max_output_tokens")
        self._body.schema_miss = event.schema_miss or UNSET
        if self._info.job.timings:
            self._body.timings = timings_body(event.usage, event.timings)

    def _finish(self, event: events.AnswerFinished) -> sent.StreamEvent:
        """Complete the response object, store it for later requests, and return the last event."""
        body = self._body
        body.usage = usage_body(event.usage, event.num_reasoning)
        if body.incomplete_details is None:
            body.status = "completed"
            body.completed_at = int(time.time())
        else:
            body.status = "incomplete"
        self._store()
        if body.status == "completed":
            return sent.ResponseCompleted(body)
        return sent.ResponseIncomplete(body)

    def _fail(self, event: events.StreamFailed) -> sent.StreamEvent:
        """End the response with an error, and return the last event.

        The response is stored, so that clients can read the error.
        """
        if self._block is not None:
            self._complete(self._block, is_cut=True)
        code = "server_error" if event.error.http_status >= 500 else "invalid_prompt"
        self._body.status = "failed"
        self._body.error = ResponseError(code, to_message(event.error))
        self._store()
        return sent.ResponseFailed(self._body)

    def _store(self) -> None:
        """Store the response, so that clients can read it and later requests can continue it.

        The response's field `store` then tells whether it was stored with its conversation.
        """
        body = self._body
        exchange = exchange_of(self._info)
        ids = [item.id for item in body.output]
        response = exchange.to_record(body.id, encode_json(body), ids)
        body.store = exchange.store_complete(response, self._queued)
        if self._queued is not None and not body.store:
            exchange.store_alone(self._queued, encode_json(body), ids)
        if body.status not in {"failed", "cancelled"}:
            exchange.join_conversation(response)


def _add_empty_part(item: OutputItem) -> OutputPart | None:
    """Give an output item its first text part, still empty, and return the part.

    Returns None for tool calls, which have no parts.
    """
    match item:
        case OutputMessage():
            item.content = [OutputText("")]
        case OutputReasoning():
            item.content = [ThoughtText("")]
        case OutputCall() | OutputCustomCall():
            return None
    return item.content[0]
