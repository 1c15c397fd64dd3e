"""OpenAI's chat completions: a complete response, or a stream of chunks."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import UNSET, UnsetType

from twostroke.core.json_io import encode_json
from twostroke.server.generation import events
from twostroke.server.generation.events import SchemaMiss
from twostroke.server.http.responses import sse
from twostroke.server.models.about import FINGERPRINT
from twostroke.server.protocols.common.llama_completion import LlamaCompletion, VerboseAnswers
from twostroke.server.protocols.common.logprobs import ChatLogprobs, chat_logprobs
from twostroke.server.protocols.common.timings import LlamaTimings, PromptProgress, to_progress
from twostroke.server.protocols.common.usage import (
    Finish,
    RunningUsage,
    TimingsBody,
    UsageBody,
    fail_stream,
    finish_reason,
    finish_stream,
    requested_timings,
    timings_body,
    usage_body,
)
from twostroke.server.protocols.openai.token_ids import PromptLogprobs, TokenIds, to_prompt_logprobs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.core.step import TokenLogprobs
    from twostroke.server.generation.protocol import ResponseInfo


class FunctionCallBody(msgspec.Struct):
    """The `function` of a tool call in an answer, or a piece of its arguments in a stream."""

    arguments: str
    name: str | UnsetType = UNSET


class CustomCallBody(msgspec.Struct):
    """The `custom` tool of a tool call in an answer, or a piece of its input in a stream."""

    input: str
    name: str | UnsetType = UNSET


class CallBody(msgspec.Struct):
    """A tool call in an answer, or a piece of it in a stream.

    Only the first piece has the id, the type and the name.
    """

    function: FunctionCallBody | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    index: int | UnsetType = UNSET
    custom: CustomCallBody | UnsetType = UNSET


class AnswerMessage(msgspec.Struct):
    """The `message` of a complete chat answer.

    Reasoning is in two fields, since some clients read `reasoning`, others `reasoning_content`.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallBody] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """An entry of `choices` in a complete chat completion: one answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    timings: TimingsBody | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    schema_miss: SchemaMiss = UNSET


class ChatCompletion(msgspec.Struct):
    """The response to a chat completion request without a stream."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    service_tier: str | UnsetType = UNSET
    system_fingerprint: str = FINGERPRINT
    timings: LlamaTimings | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    verbose: LlamaCompletion | UnsetType = msgspec.field(default=UNSET, name="__verbose")


class ChatDelta(msgspec.Struct):
    """The `delta` of a chunk: an addition to an answer's message.

    Reasoning is in two fields, since some clients read `reasoning`, others `reasoning_content`.
    """

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallBody] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """An entry of `choices` in a chunk: an addition to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    timings: TimingsBody | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    schema_miss: SchemaMiss = UNSET


class ChatChunk(msgspec.Struct):
    """One chunk of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    system_fingerprint: str = FINGERPRINT
    timings: LlamaTimings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    verbose: LlamaCompletion | UnsetType = msgspec.field(default=UNSET, name="__verbose")


class ChatEncoder:
    """Encodes the answers to a chat completion request, as a stream of chunks or as one response.

    The chunks of an answer have its role, then its text, and at the end the finish reason.
    """

    def __init__(self, info: ResponseInfo) -> None:
        """Prepare to encode one response; `info` has its id, model and job.

        One chunk object is reused for all events of a stream, to save time.
        """
        self._info = info
        self._choice = ChunkChoice(index=0, delta=ChatDelta())
        self._chunk = ChatChunk(
            id=info.id,
            object="chat.completion.chunk",
            created=info.created_s,
            model=info.model,
            choices=[self._choice],
            usage=None if info.job.include_usage else UNSET,
            service_tier=info.job.caller.service_tier if info.job.tier else UNSET,
        )
        self._started_s = time.monotonic()
        self._usage = RunningUsage(info.job)
        self._ids = TokenIds(info.job)
        self._prompt_scores: list[TokenLogprobs | None] = []  # of the first choice
        self._timings: LlamaTimings | UnsetType = UNSET  # of the newest complete answer
        self._verbose = VerboseAnswers(info)
        self._chunk_around_text: dict[
            int, tuple[bytes, bytes]
        ] = {}  # JSON before and after, by choice

    def write(self, event: events.Event) -> bytes:
        """Return the chunks for one event of the answers, as server-sent events; may be empty."""
        match event:
            case events.ContentAdded():
                if event.scored:
                    self._choice.logprobs = self._logprobs(event)
                elif event.block.kind is events.BlockKind.TEXT and not self._reports_progress:
                    return self._write_text(event.block.choice, event.text)
                return self._write(event.block.choice, _delta(event.block, event.text))
            case events.ChoiceStarted() | events.PrefillAdvanced():
                return self._begin(event)
            case events.BlockOpened(block=events.ContentBlock(kind=events.BlockKind.CALL)):
                return self._write(
                    event.block.choice, ChatDelta(tool_calls=[_first_call_piece(event.block)])
                )
            case events.ChoiceEnded():
                self._end(self._choice, event)
                self._chunk.timings = self._timings
                self._chunk.verbose = self._verbose.body(event)
                return self._write(event.choice, ChatDelta())
            case events.AnswerFinished():
                self._chunk.timings = self._timings
                return finish_stream(self._chunk, event)
            case events.StreamFailed():
                return fail_stream(event)
        return b""

    def whole_response(self, stream: Iterable[events.Event]) -> ChatCompletion:
        """Return the response to a request without a stream, from all events of the answers."""
        info = self._info
        choices: list[ChatChoice] = []
        verbose: LlamaCompletion | UnsetType = UNSET  # of the first answer
        for event in stream:
            match event:
                case events.ChoiceStarted():
                    self._ids.begin(event)
                    self._verbose.begin(event)
                    logprobs = ChatLogprobs([]) if info.has_logprobs else None
                    message = AnswerMessage("assistant", "")
                    choices.append(
                        ChatChoice(
                            index=event.choice,
                            message=message,
                            logprobs=logprobs,
                            finish_reason="stop",
                        )
                    )
                case events.ContentAdded(scored=[_, *_]):
                    if (answer_logprobs := choices[-1].logprobs) is not None:
                        answer_logprobs.content.extend(self._logprobs(event).content)
                case events.BlockClosed():
                    _add_block(choices[-1].message, event.block)
                case events.PromptScored(choice=0):
                    self._prompt_scores += event.logprobs
                case events.ChoiceEnded():
                    message = choices[-1].message
                    if message.tool_calls is not UNSET or info.reading.is_forced:
                        message.content = message.content or None
                    self._end(choices[-1], event)
                    verbose = verbose or self._verbose.body(event)
                case events.AnswerFinished():
                    usage = usage_body(event.usage, event.num_reasoning)
        return ChatCompletion(
            id=info.id,
            object="chat.completion",
            created=info.created_s,
            model=info.model,
            choices=choices,
            usage=usage,
            service_tier=info.job.caller.service_tier if info.job.tier else UNSET,
            timings=self._timings,
            prompt_logprobs=self._prompt_logprobs(),
            prompt_token_ids=list(info.prompts[0]) if self._ids.is_reported else UNSET,
            verbose=verbose,
        )

    def _prompt_logprobs(self) -> PromptLogprobs | UnsetType:
        info = self._info
        if not info.job.prompt_scores:
            return UNSET
        return to_prompt_logprobs(info.tokenizer, info.prompts[0], self._prompt_scores)

    @property
    def _reports_progress(self) -> bool:
        """Whether each chunk of the stream must have usage or token ids besides text."""
        return self._usage.is_reported or self._ids.is_reported

    def _begin(self, event: events.ChoiceStarted | events.PrefillAdvanced) -> bytes:
        """Return an answer's first chunk, with its role, or a chunk with prefill progress."""
        if isinstance(event, events.ChoiceStarted):
            self._usage.begin(event)
            self._ids.begin(event)
            self._verbose.begin(event)
            if self._ids.is_reported:
                self._chunk.prompt_token_ids = list(self._info.prompts[0])
            return self._write(event.choice, self._first_delta)
        self._chunk.prompt_progress = to_progress(event, time.monotonic() - self._started_s)
        return self._write(event.choice, ChatDelta())

    @property
    def _first_delta(self) -> ChatDelta:
        """The `delta` of an answer's first chunk: the role and empty content.

        As in OpenAI's streams, the content is null if the answer may call a tool: clients such as
        Vercel's AI SDK show a text for any content that is not null, even if empty.
        """
        info = self._info
        if info.as_llama_server:
            return ChatDelta("assistant", content=None)
        may_call = info.job.tools is not None
        return ChatDelta("assistant", content=None if may_call else "", refusal=None)

    def _write_text(self, index: int, text: str) -> bytes:
        """Return a chunk that only adds text to the answer `index`.

        The JSON around the text is encoded once for each answer, to save time.
        """
        around = self._chunk_around_text.get(index)
        if around is None:
            chunk = self._write(index, ChatDelta(content=""))
            before, key, after = chunk.partition(b'"content":')
            around = (before + key, after.removeprefix(b'""'))
            self._chunk_around_text[index] = around
        return encode_json(text).join(around)

    def _write(self, index: int, delta: ChatDelta) -> bytes:
        """Return a chunk that adds `delta` to the answer `index`; reset the reused chunk object."""
        choice = self._choice
        choice.index = index
        choice.delta = delta
        if self._usage.is_reported:
            self._chunk.usage = self._usage.body(index)
        choice.token_ids = self._ids.take(index)
        data = sse(encode_json(self._chunk))
        choice.logprobs = None
        choice.finish_reason = None
        choice.timings = UNSET
        choice.schema_miss = UNSET
        self._chunk.timings = self._chunk.prompt_progress = UNSET
        self._chunk.prompt_token_ids = self._chunk.verbose = UNSET
        return data

    def _logprobs(self, event: events.ContentAdded) -> ChatLogprobs:
        as_ids = self._info.job.tokens_as_ids
        return ChatLogprobs(chat_logprobs(self._info.tokenizer, event.scored, as_ids=as_ids))

    def _end(self, choice: ChatChoice | ChunkChoice, event: events.ChoiceEnded) -> None:
        choice.finish_reason = finish_reason(event.reason, has_calls=event.has_calls)
        choice.schema_miss = event.schema_miss or UNSET
        self._timings = requested_timings(self._info.job, event)
        if isinstance(choice, ChatChoice):
            choice.token_ids = self._ids.take(event.choice)
        if self._info.job.timings:
            choice.timings = timings_body(event.usage, event.timings)


def _delta(block: events.ContentBlock, text: str) -> ChatDelta:
    match block.kind:
        case events.BlockKind.TEXT:
            return ChatDelta(content=text)
        case events.BlockKind.REASONING:
            return ChatDelta(reasoning_content=text, reasoning=text)
        case events.BlockKind.CALL:
            return ChatDelta(tool_calls=[_call_piece(block, text)])


def _first_call_piece(block: events.ContentBlock) -> CallBody:
    """Return the first piece of a streamed tool call; give the call an id if it has none."""
    call = _call_piece(block, "", block.name)
    block.id = block.id or f"call_{secrets.token_hex(12)}"
    call.id = block.id
    call.type = "custom" if block.is_custom else "function"
    return call


def _call_piece(block: events.ContentBlock, text: str, name: str | UnsetType = UNSET) -> CallBody:
    """Return a piece of a streamed tool call.

    The piece has more of a function's arguments or of a custom tool's input. `name` is only set in
    the first piece.
    """
    if block.is_custom:
        return CallBody(custom=CustomCallBody(text, name), index=block.call_index)
    return CallBody(FunctionCallBody(text, name), index=block.call_index)


def _add_block(message: AnswerMessage, block: events.ContentBlock) -> None:
    """Add a complete block (text, reasoning or a tool call) to the message of a complete answer."""
    match block.kind:
        case events.BlockKind.TEXT:
            message.content = (message.content or "") + block.text
        case events.BlockKind.REASONING:
            message.reasoning = (message.reasoning or "") + block.text
            message.reasoning_content = message.reasoning
        case events.BlockKind.CALL:
            first = _first_call_piece(block)
            call = _call_piece(block, block.text, block.name)
            call.id = first.id
            call.type = first.type
            call.index = UNSET
            message.tool_calls = [*(message.tool_calls or ()), call]
