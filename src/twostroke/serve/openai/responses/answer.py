"""What the Responses protocol answers: items, put together piece by piece, whole or as events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from twostroke.chat.call_reader import ArgumentsPiece, CallBegin, ReasoningPiece, TextPiece
from twostroke.core.request import FinishReason
from twostroke.serve.dialect import Dialect, encode_json
from twostroke.serve.http.errors import to_message
from twostroke.serve.openai.logprobs import chat_logprobs
from twostroke.serve.openai.responses import events
from twostroke.serve.openai.responses.body import (
    IncompleteDetails,
    OutputCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ResponseBody,
    ResponseError,
    ThoughtText,
    begun,
    exchange_of,
    usage_body,
)
from twostroke.serve.openai.responses.exchange import read
from twostroke.serve.openai.responses.items import new_id
from twostroke.serve.openai.responses.request import ResponsesRequest
from twostroke.serve.openai.usage import timings_body

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.chat.call_reader import Piece
    from twostroke.core.errors import TwostrokeError
    from twostroke.engine.output import Completion, Output, Usage
    from twostroke.serve.dialect import Reply
    from twostroke.serve.openai.logprobs import TokenLogprob
    from twostroke.serve.openai.responses.body import OutputItem, Status


class Answer:
    """One response while it comes: reasoning, text, and each call are items of their own."""

    def __init__(self, reply: Reply) -> None:
        """Answer `reply`."""
        self.body = begun(reply)
        self.body.output = []
        self._reply = reply
        self._reader = reply.reader()
        self._texts: list[str] = []  # of the newest item
        self._logprobs: list[TokenLogprob] = []  # of it
        self._untold: list[TokenLogprob] = []  # of tokens whose text is still to come
        self._num_passed = 0  # tokens of the reasoning, whose log-probabilities nobody is told
        self._is_open = False  # whether the newest item goes on

    def take(self, output: Output | Completion) -> Iterator[events.Event]:
        """Yield the events of an output; each is to be written before the next is asked for."""
        pieces = self._reader.take(output)
        if self._reply.job.params.logprobs is not None:
            self._untold += chat_logprobs(self._reply.tokenizer, output).content
            num_reasoning = self._reader.num_reasoning_tokens
            del self._untold[: num_reasoning - self._num_passed]
            self._num_passed = num_reasoning
        for piece in pieces:
            yield from self._take(piece)
        if output.finish_reason is None:
            return
        if self._untold or not self.body.output:
            yield from self._take(TextPiece(""))
        is_cut = output.finish_reason is FinishReason.LENGTH
        yield from self._close("incomplete" if is_cut else "completed")
        if is_cut:
            self.body.incomplete_details = IncompleteDetails("max_output_tokens")
        if self._reply.job.timings and output.usage and output.timings:
            self.body.timings = timings_body(output.usage, output.timings)

    def end(self, usage: Usage) -> ResponseBody:
        """Return the response, which is whole now, and keep it for later requests."""
        self.body.usage = usage_body(usage, self._reader.num_reasoning_tokens)
        if self.body.incomplete_details is None:
            self.body.status, self.body.completed_at = "completed", int(time.time())
        else:
            self.body.status = "incomplete"
        self._keep()
        return self.body

    def fail(self, error: TwostrokeError) -> ResponseBody:
        """Return the response, which goes no further, and keep it to be looked at."""
        for _ in self._close("incomplete"):
            pass
        code = "server_error" if error.http_status >= 500 else "invalid_prompt"
        self.body.status, self.body.error = "failed", ResponseError(code, to_message(error))
        self._keep()
        return self.body

    def _take(self, piece: Piece) -> Iterator[events.Event]:
        """Add a piece to its item, which it may begin."""
        match piece:
            case CallBegin():
                yield from self._open(
                    OutputCall(new_id("fc_"), new_id("call_"), piece.name, "in_progress")
                )
                return
            case ReasoningPiece() if not self._goes_on(OutputReasoning):
                yield from self._open(OutputReasoning(new_id("rs_"), "in_progress", []))
            case TextPiece() if not self._goes_on(OutputMessage):
                yield from self._open(OutputMessage(new_id("msg_"), "in_progress", []))
        self._texts.append(piece.text)
        place = len(self.body.output) - 1
        id_ = self.body.output[place].id
        match piece:
            case ArgumentsPiece():
                yield events.CallArgumentsDelta(id_, place, piece.text)
            case ReasoningPiece():
                yield events.ReasoningTextDelta(id_, place, 0, piece.text)
            case TextPiece():
                told, self._untold = self._untold, []
                self._logprobs += told
                if piece.text or told:
                    yield events.OutputTextDelta(id_, place, 0, piece.text, told)

    def _goes_on(self, kind: type[OutputItem]) -> bool:
        """Whether the newest item is one of a kind and not over."""
        return self._is_open and isinstance(self.body.output[-1], kind)

    def _open(self, item: OutputItem) -> Iterator[events.Event]:
        """Begin the next item."""
        yield from self._close("completed")
        place = len(self.body.output)
        self.body.output.append(item)
        self._is_open = True
        self._texts, self._logprobs = [], []
        yield events.OutputItemAdded(place, item)
        if isinstance(item, OutputMessage):
            item.content = [OutputText("")]
            yield events.ContentPartAdded(item.id, place, 0, item.content[0])
        elif isinstance(item, OutputReasoning):
            item.content = [ThoughtText("")]
            yield events.ContentPartAdded(item.id, place, 0, item.content[0])

    def _close(self, status: Status) -> Iterator[events.Event]:
        """End the newest item, if it has not been."""
        if not self._is_open:
            return
        self._is_open = False
        item, place, text = self.body.output[-1], len(self.body.output) - 1, "".join(self._texts)
        item.status = status
        if isinstance(item, OutputCall):
            item.arguments = text
            yield events.CallArgumentsDone(item.id, place, item.name, text)
        elif isinstance(item, OutputReasoning):
            item.content[0].text = text
            yield events.ReasoningTextDone(item.id, place, 0, text)
            yield events.ContentPartDone(item.id, place, 0, item.content[0])
        else:
            part = item.content[0]
            part.text, part.logprobs = text, self._logprobs
            yield events.OutputTextDone(item.id, place, 0, text, self._logprobs)
            yield events.ContentPartDone(item.id, place, 0, part)
        yield events.OutputItemDone(place, item)

    def _keep(self) -> None:
        """Keep the response for later requests, or let it say that it is not kept."""
        if self.body.store:
            ids = [item.id for item in self.body.output]
            exchange, whole = exchange_of(self._reply), encode_json(self.body)
            self.body.store = exchange.keep(self.body.id, whole, ids)


class ResponsesWriter:
    """Writes the named events of one response; there is no [DONE] behind the last."""

    def __init__(self, reply: Reply) -> None:
        """Write `reply`."""
        self._answer = Answer(reply)
        self._num_events = 0

    def feed(self, output: Output) -> bytes:
        """Return the events of an output."""
        return self._begin() + b"".join(self._event(event) for event in self._answer.take(output))

    def finish(self, usage: Usage) -> bytes:
        """Return the whole response as the last event."""
        body = self._answer.end(usage)
        kind = events.ResponseCompleted if body.status == "completed" else events.ResponseIncomplete
        return self._event(kind(body))

    def fail(self, error: TwostrokeError) -> bytes:
        """Return the response as far as it came, and why, as the last event."""
        begin = self._begin()
        return begin + self._event(events.ResponseFailed(self._answer.fail(error)))

    def _begin(self) -> bytes:
        if self._num_events:
            return b""
        body = self._answer.body
        first = self._event(events.ResponseCreated(body))
        return first + self._event(events.ResponseInProgress(body))

    def _event(self, event: events.Event) -> bytes:
        event.sequence_number = self._num_events
        self._num_events += 1
        name = event.__struct_config__.tag
        assert isinstance(name, str)
        return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(event))


def whole(reply: Reply, answers: list[Completion], usage: Usage) -> ResponseBody:
    """Return the response that is not streamed."""
    (completion,) = answers
    answer = Answer(reply)
    for _ in answer.take(completion):
        pass  # the same, with nobody to be told on the way
    return answer.end(usage)


DIALECT: Final = Dialect(
    "responses", "resp_", ResponsesRequest, read, ResponsesWriter, whole, recalls=True
)
