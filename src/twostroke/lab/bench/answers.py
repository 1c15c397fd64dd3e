"""Streamed answers: reads their events as they arrive, and stores the time of each chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from twostroke.core.frozen import Frozen
from twostroke.engine.output import Timings
from twostroke.lab.measure.requests import COMPLETED, FAILED, REFUSED, RequestLog

if TYPE_CHECKING:
    from twostroke.fleet.router.response import Head
    from twostroke.lab.bench.request_form import PlannedRequest

_MAX_ERROR_BYTES: Final = 1 << 16
_MAX_MESSAGE_CHARS: Final = 300
_MAX_LINE_BYTES: Final = 1 << 24
INCOMPLETE: Final = "incomplete stream"
EMPTY: Final = "empty answer"
NO_STREAM: Final = "no stream"


class AssistantReply(Frozen):
    """An answer as a message of a conversation: its content, and its tool calls."""

    content: str
    calls: tuple[dict[str, Any], ...] = ()

    def message(self) -> dict[str, Any]:
        """Return the message of the assistant."""
        fields: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            fields["tool_calls"] = list(self.calls)
        return fields


class MeasuredAnswer(Frozen):
    """One request of a run, as the client saw it; times are in seconds since the run's start.

    Attributes:
        log: the times and counts from which latencies are computed.
        number: the number of the request in its load.
        ended_s: when the last byte of the response came.
        wanted_prompt: tokens that the prompt should have; 0 if unknown.
        max_output: the limit of the answer's tokens that was sent; 0 for none.
        first_reasoning_s, first_content_s: times of the first token of reasoning and of content;
            None without such a token.
        chunk_times_s: when each chunk with tokens came.
        chunk_tokens: tokens of each chunk by the server's running count; empty if unknown.
        empty_chunk_times_s: when each chunk with a choice but without tokens came, such as a first
            chunk with the role and a last chunk with the finish reason.
        has_usage: whether the server reported its counts of tokens.
        finish_reason: as the server reported it.
        failure: why the request failed, in few words; empty if it is completed.
        message: the error's text.
        text: the answer; only stored for a few requests, to check counts of tokens.
        turn: the turn of a conversation, from 1 on; 0 outside conversations.
        num_reusable: tokens of the prompt that the conversation's last request computed.
        reports_cached: whether the server reported how many prompt tokens were cached.
        wanted_call, num_calls: whether a tool call was asked for, and how many came.
        reply: the answer as a message, for the next request of its conversation.
    """

    log: RequestLog
    number: int
    ended_s: float = 0.0
    wanted_prompt: int = 0
    max_output: int = 0
    first_reasoning_s: float | None = None
    first_content_s: float | None = None
    chunk_times_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    empty_chunk_times_s: tuple[float, ...] = ()
    has_usage: bool = False
    finish_reason: str = ""
    failure: str = ""
    message: str = ""
    text: str = ""
    turn: int = 0
    num_reusable: int = 0
    reports_cached: bool = False
    wanted_call: bool = False
    num_calls: int = 0
    reply: AssistantReply | None = None

    @property
    def is_completed(self) -> bool:
        """Whether the whole answer came."""
        return self.log.outcome == COMPLETED

    @property
    def tokens_by_chunk(self) -> tuple[float, ...]:
        """The tokens of each chunk; if the server does not count them, an equal share."""
        if self.chunk_tokens:
            return self.chunk_tokens
        count = len(self.chunk_times_s)
        return (self.log.num_output / count,) * count if count else ()


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _ChunkUsage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _ChunkDelta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _ChunkChoice(Struct):
    delta: _ChunkDelta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _AnswerChunk(Struct):
    """The fields of a chunk of Chat Completions or Completions that a measurement needs."""

    choices: list[_ChunkChoice] = []
    usage: _ChunkUsage | None = None
    error: Any = None


_chunk_decoder = msgspec.json.Decoder(_AnswerChunk)


class ReceivedAnswer:
    """Receives one streamed answer.

    Attributes:
        chunk_times_s, chunk_tokens: times and token counts of chunks with tokens; the counts are
            the server's.
        empty_chunk_times_s: times of chunks with a choice, but without tokens.
        last_s: when the last byte came.
    """

    def __init__(self, *, keeps_text: bool, keeps_reply: bool = False) -> None:
        """Create a receiver.

        With `keeps_text` it stores the answer's text, and with `keeps_reply` the answer as a
        message.
        """
        self.chunk_times_s: list[float] = []
        self.chunk_tokens: list[int] = []
        self.empty_chunk_times_s: list[float] = []
        self.first_reasoning_s: float | None = None
        self.first_content_s: float | None = None
        self.last_s = 0.0
        self.status = 0
        self._texts: list[str] | None = [] if keeps_text else None
        self._contents: list[str] | None = [] if keeps_reply else None
        self._calls: dict[int, dict[str, Any]] = {}
        self._is_stream = False
        self._held_data = b""  # an incomplete line, or the body of an error
        self._num_counted = 0  # tokens in the server's running count
        self._usage: _ChunkUsage | None = None
        self._finish_reason = ""
        self._is_done = False
        self._failure = ""
        self._message = ""

    def begin(self, head: Head) -> None:
        """Take the status and the content type of the response."""
        self.status = head.status
        self._is_stream = head.status == 200 and b"event-stream" in head.media_type

    def take(self, data: bytes, at_s: float) -> None:
        """Read the events in a part of the stream, which came at `at_s`."""
        self.last_s = at_s
        if not self._is_stream:
            if len(self._held_data) < _MAX_ERROR_BYTES:
                self._held_data += data
            return
        *lines, self._held_data = (self._held_data + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take_event(line[5:].strip(), at_s)
        if len(self._held_data) > _MAX_LINE_BYTES:
            self._failure, self._held_data = "invalid event", b""

    def measured(
        self, planned: PlannedRequest, *, scheduled_s: float, sent_s: float, failure: str = ""
    ) -> MeasuredAnswer:
        """Return the measured answer; `failure` says why the response is incomplete, if it is.

        Times are in seconds since the run's start: `scheduled_s` when the request was due, and
        `sent_s` when it was sent.
        """
        failure = failure or self._fault()
        usage = self._usage or _ChunkUsage()
        details = usage.prompt_tokens_details or _PromptDetails()
        num_output = usage.completion_tokens
        if num_output is None:
            num_output = self._num_counted or len(self.chunk_times_s)
        times_s = self.chunk_times_s
        is_refused = bool(self.status) and self.status != 200
        timings = Timings(
            arrival_s=scheduled_s,
            started_s=0.0,
            first_token_s=times_s[0] if times_s else 0.0,
            last_token_s=times_s[-1] if times_s else 0.0,
        )
        log = RequestLog(
            timings=timings,
            sent_s=sent_s,
            num_prompt=usage.prompt_tokens or planned.num_prompt or 1,
            num_output=num_output,
            num_cached=details.cached_tokens or 0,
            outcome=REFUSED if is_refused else FAILED if failure else COMPLETED,
        )
        is_counted = len(self.chunk_tokens) == len(times_s) and self._num_counted == num_output
        return MeasuredAnswer(
            log=log,
            number=planned.number,
            ended_s=self.last_s,
            wanted_prompt=planned.num_prompt,
            max_output=planned.num_output,
            first_reasoning_s=self.first_reasoning_s,
            first_content_s=self.first_content_s,
            chunk_times_s=tuple(times_s),
            chunk_tokens=tuple(self.chunk_tokens) if is_counted else (),
            empty_chunk_times_s=tuple(self.empty_chunk_times_s),
            has_usage=usage.completion_tokens is not None,
            finish_reason=self._finish_reason,
            failure=failure,
            message=self.message if failure else "",
            text="".join(self._texts or ()),
            turn=planned.turn,
            num_reusable=planned.num_reusable,
            reports_cached=details.cached_tokens is not None,
            wanted_call=planned.wants_call,
            num_calls=len(self._calls),
            reply=self._reply(),
        )

    @property
    def message(self) -> str:
        """The text of the error that the server reported; empty if there is none."""
        text = self._message or error_message(self._held_data)
        return text[:_MAX_MESSAGE_CHARS]

    def _reply(self) -> AssistantReply | None:
        if self._contents is None:
            return None
        for number, call in self._calls.items():
            call["id"] = call["id"] or f"call_{number}"
        return AssistantReply("".join(self._contents), tuple(self._calls.values()))

    def _fault(self) -> str:
        """Return why a complete response is not a valid answer; empty if it is one."""
        if self.status != 200:
            return f"HTTP {self.status}"
        if not self._is_stream:
            return NO_STREAM
        if self._failure:
            return self._failure
        if not self._is_done and not self._finish_reason:
            return INCOMPLETE
        return "" if self.chunk_times_s else EMPTY

    def _take_event(self, data: bytes, at_s: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            chunk = _chunk_decoder.decode(data)
        except msgspec.MsgspecError:
            self._failure = self._failure or "invalid event"
            return
        if chunk.error is not None:
            self._failure, self._message = "error in the stream", _text_of(chunk.error)
        num_new = 0
        if chunk.usage is not None:
            self._usage = chunk.usage
            count = chunk.usage.completion_tokens or 0
            num_new, self._num_counted = count - self._num_counted, max(count, self._num_counted)
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        if choice.finish_reason:
            self._finish_reason = choice.finish_reason
        # A server that reports its count only at the end adds it to a chunk without text.
        has_running_count = len(self.chunk_tokens) == len(self.chunk_times_s)
        if self._take_text(choice, at_s) or (num_new > 0 and has_running_count):
            self.chunk_times_s.append(at_s)
            if num_new > 0:
                self.chunk_tokens.append(num_new)
        else:
            self.empty_chunk_times_s.append(at_s)

    def _take_text(self, choice: _ChunkChoice, at_s: float) -> bool:
        """Take the text of a choice that came at `at_s`.

        Returns whether it has text, reasoning or a part of a tool call.
        """
        delta = choice.delta
        if delta is None:
            reasoning, content = None, choice.text
        else:
            reasoning, content = delta.reasoning_content or delta.reasoning, delta.content
        has_calls = delta is not None and bool(delta.tool_calls)
        if reasoning and self.first_reasoning_s is None:
            self.first_reasoning_s = at_s
        if (content or has_calls) and self.first_content_s is None:
            self.first_content_s = at_s
        if self._contents is not None:
            self._contents.append(content or "")
            if delta is not None and has_calls:
                self._add_calls(delta.tool_calls)
        if self._texts is not None:
            self._texts.append((reasoning or "") + (content or ""))
        return bool(reasoning or content or has_calls)

    def _add_calls(self, deltas: object) -> None:
        """Add parts of tool calls to the calls with the same index."""
        for delta in deltas if isinstance(deltas, list) else ():
            if not isinstance(delta, dict):
                continue
            function = delta.get("function") or {}
            call = self._calls.setdefault(
                int(delta.get("index") or 0),
                {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
            )
            call["id"] = call["id"] or delta.get("id") or ""
            for name in ("name", "arguments"):
                call["function"][name] += function.get(name) or ""


def error_message(body: bytes) -> str:
    """Return the message of an error in OpenAI's form, or the beginning of any other body."""
    try:
        fields = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return " ".join(body[:_MAX_MESSAGE_CHARS].decode(errors="replace").split())
    error = fields.get("error", fields) if isinstance(fields, dict) else fields
    return _text_of(error)


def _text_of(error: object) -> str:
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return " ".join(str(error).split())[:_MAX_MESSAGE_CHARS]
