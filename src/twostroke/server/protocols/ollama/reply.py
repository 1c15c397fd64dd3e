"""Ollama's responses: a stream of JSON lines, or one line with the complete answer."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from twostroke.core.json_io import encode_json
from twostroke.core.request import FinishReason
from twostroke.server.generation import events
from twostroke.server.generation.events import SchemaMiss
from twostroke.server.generation.job import Conversation
from twostroke.server.http.error_forms import OLLAMA
from twostroke.server.protocols.common.logprobs import TokenLogprob, chat_logprobs
from twostroke.server.protocols.common.tools import decode_arguments
from twostroke.server.protocols.ollama.request import keep_alive_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from twostroke.server.generation.protocol import ResponseInfo
    from twostroke.server.protocols.ollama.request import (
        OllamaChatRequest,
        OllamaGenerateRequest,
        OllamaRequest,
    )

    MakeLine = Callable[[str, str, str, list["OllamaCallBody"]], "OllamaLine"]
    Calls = Sequence["OllamaCallBody"]


class CalledBody(msgspec.Struct):
    """The function that a tool call in an answer calls, and its arguments."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCallBody(msgspec.Struct):
    """A tool call in an answer; it is sent only when it is complete."""

    id: str
    function: CalledBody


class OllamaAnswer(msgspec.Struct):
    """The `message` of a chat answer, or the next part of it in a stream."""

    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCallBody] | UnsetType = UNSET


class OllamaLine(msgspec.Struct, kw_only=True):
    """The fields that all lines of an Ollama response have.

    Only the last line has durations and counts. Durations are in nanoseconds. `load_duration` is
    the time in the queue; `prompt_eval_duration` ends with the first token.
    """

    model: str
    created_at: datetime
    done: bool = False
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    schema_miss: SchemaMiss = UNSET


class OllamaChatLine(OllamaLine, kw_only=True):
    """A line of a streamed answer from `/api/chat`, or the complete answer."""

    message: OllamaAnswer


class OllamaGenerateLine(OllamaLine, kw_only=True):
    """A line of a streamed answer from `/api/generate`, or the complete answer.

    `context` has the tokens of prompt and answer, from which a later request can continue.
    """

    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


Line = TypeVar("Line", bound=OllamaLine)


def chat_line(model: str, text: str, thinking: str, calls: list[OllamaCallBody]) -> OllamaChatLine:
    """Build a line of an `/api/chat` response with the next text, reasoning or tool calls.

    `thinking` is the reasoning's text; `model` is the model's name.
    """
    message = OllamaAnswer(
        role="assistant", content=text, thinking=thinking or UNSET, tool_calls=calls or UNSET
    )
    return OllamaChatLine(model=model, created_at=datetime.now(UTC), message=message)


def generate_line(
    model: str, text: str, thinking: str, _calls: list[OllamaCallBody]
) -> OllamaGenerateLine:
    """Build a line of an `/api/generate` response with the next text or reasoning.

    `thinking` is the reasoning's text. Answers of this endpoint never have tool calls.
    """
    now = datetime.now(UTC)
    return OllamaGenerateLine(
        model=model, created_at=now, response=text, thinking=thinking or UNSET
    )


def empty_chat_response(request: OllamaChatRequest, model: str) -> OllamaChatLine | None:
    """Return the response to an `/api/chat` request without messages; None if there are messages.

    Ollama's clients send such a request to load or unload a model.
    """
    return None if request.messages else _loaded_line(request, chat_line(model, "", "", []))


def empty_generate_response(
    request: OllamaGenerateRequest, model: str
) -> OllamaGenerateLine | None:
    """Return the response to an `/api/generate` request without a prompt; None if there is one.

    Ollama's clients send such a request to load or unload a model.
    """
    return None if request.prompt else _loaded_line(request, generate_line(model, "", "", []))


class LineEncoder:
    """Encodes an answer as Ollama's JSON lines, with a line for each text and each tool call."""

    def __init__(self, info: ResponseInfo, make: MakeLine) -> None:
        """Prepare to encode one response; `info` has its id, model and job.

        `make` builds the lines: `chat_line` or `generate_line`.
        """
        self._info = info
        self._make = make
        self._tokens: list[int] = []  # of the answer so far

    def write(self, event: events.Event) -> bytes:
        """Return the JSON line for one event of the answer; empty if Ollama has no line for it."""
        match event:
            case events.ChoiceStarted():
                self._tokens = event.tokens
                return b""
            case events.ContentAdded(block=block):
                if block.kind is events.BlockKind.CALL and not event.scored:
                    return b""
                line = self._line(**_content(block.kind, event.text))
                if event.scored:
                    line.logprobs = chat_logprobs(self._info.tokenizer, event.scored)
            case events.BlockClosed(block=events.ContentBlock(kind=events.BlockKind.CALL)):
                line = self._line(**_complete_content(event.block))
            case events.ChoiceEnded():
                line = self._line()
                self._end(line, event)
            case events.StreamFailed():
                return OLLAMA.body(event.error, event.request_id, str) + b"\n"
            case _:
                return b""
        return encode_json(line) + b"\n"

    def whole_response(self, stream: Iterable[events.Event]) -> OllamaLine:
        """Return the only line of a response without a stream, from all events of the answer."""
        content: dict[str, Any] = {"text": "", "thinking": "", "calls": []}
        scored: list[TokenLogprob] = []
        for event in stream:
            match event:
                case events.ChoiceStarted():
                    self._tokens = event.tokens
                case events.ContentAdded():
                    scored += chat_logprobs(self._info.tokenizer, event.scored)
                case events.BlockClosed():
                    for name, part in _complete_content(event.block).items():
                        content[name] += part
                case events.ChoiceEnded():
                    line = self._line(**content)
                    self._end(line, event)
        line.logprobs = scored if self._info.has_logprobs else UNSET
        return line

    def _line(self, text: str = "", thinking: str = "", calls: Calls = ()) -> OllamaLine:
        return self._make(self._info.model, text, thinking, list(calls))

    def _end(self, line: OllamaLine, event: events.ChoiceEnded) -> None:
        """Add the finish reason, the durations and the token counts to an answer's last line."""
        usage = event.usage
        times = event.timings
        line.done = True
        line.schema_miss = event.schema_miss or UNSET
        line.done_reason = "length" if event.reason is FinishReason.LENGTH else "stop"
        line.total_duration = nanoseconds(times.e2e_s)
        line.load_duration = nanoseconds(times.queue_s)
        line.prompt_eval_count = usage.prompt_tokens
        line.prompt_eval_duration = nanoseconds(times.first_token_s - times.started_s)
        line.eval_count = usage.completion_tokens
        line.eval_duration = nanoseconds(times.last_token_s - times.first_token_s)
        is_chat = isinstance(self._info.job.prompts[0], Conversation)
        if isinstance(line, OllamaGenerateLine) and is_chat:
            line.context = [*self._info.prompts[0], *self._tokens]


def nanoseconds(seconds: float) -> int:
    """Return a duration in nanoseconds, Ollama's unit."""
    return round(seconds * 1e9)


def _loaded_line(request: OllamaRequest, line: Line) -> Line:
    """Complete the response to a request that only loads or unloads a model."""
    line.done = True
    line.done_reason = "unload" if keep_alive_s(request) == 0 else "load"
    return line


def _content(kind: events.BlockKind, text: str) -> dict[str, Any]:
    """Return the next text of a content block as keyword arguments for a line.

    The result is empty for tool calls, since they are only sent when they are complete.
    """
    if kind is events.BlockKind.CALL:
        return {}
    return {"thinking" if kind is events.BlockKind.REASONING else "text": text}


def _complete_content(block: events.ContentBlock) -> dict[str, Any]:
    """Return a complete content block as keyword arguments for a line.

    The result is empty for a tool call whose JSON was cut off.
    """
    if block.kind is not events.BlockKind.CALL:
        return _content(block.kind, block.text)
    try:
        arguments = decode_arguments(block.text)
    except msgspec.DecodeError:
        return {}
    called = CalledBody(block.call_index, block.name, arguments)
    return {"calls": [OllamaCallBody(f"call_{secrets.token_hex(4)}", called)]}
