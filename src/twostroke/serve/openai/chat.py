"""POST /v1/chat/completions: OpenAI's chat protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from twostroke.core.errors import RequestError
from twostroke.core.sampling import MAX_LOGPROBS
from twostroke.serve.calls import CallReader, TextPiece
from twostroke.serve.dialect import DONE, Dialect, Reply, event
from twostroke.serve.http.errors import MissingFieldError, UnsupportedFieldError
from twostroke.serve.job import Conversation, Job
from twostroke.serve.openai.call_bodies import AnswerMessage, CallBody, answer_message, call_body
from twostroke.serve.openai.fields import (
    CommonFields,
    check_neutral,
    to_caller,
    to_params,
    to_prediction,
)
from twostroke.serve.openai.logprobs import ChatLogprobs, chat_logprobs
from twostroke.serve.openai.structure import to_constraint
from twostroke.serve.openai.usage import (
    TimingsBody,
    UsageBody,
    finish_reason,
    timings_body,
    usage_body,
)
from twostroke.serve.tools import ToolBody, ToolChoice, Tools, to_tools

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.engine.output import Completion, Output, Usage

ROLES: Final = ("system", "developer", "user", "assistant", "tool")

NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class TextPart(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"
):
    """A message's content may come in parts; only text is read."""

    text: str


class CalledFunction(msgspec.Struct, kw_only=True):
    """What was called, with its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that an answer made."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message; beside role and content stands what SDKs echo of our own answers."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class ChatRequest(CommonFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a request."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    tools: list[ToolBody] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    # Refused unless neutral.
    audio: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class Choice(msgspec.Struct):
    """One whole answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    timings: TimingsBody | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """A response that is not streamed."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody


class Delta(msgspec.Struct):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[CallBody] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    """One answer's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    timings: TimingsBody | UnsetType = UNSET


class Chunk(msgspec.Struct):
    """One event of a streamed response."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET


class ChatWriter:
    """Writes chunks: the role first, then pieces of text, then the finish reason alone."""

    def __init__(self, reply: Reply) -> None:
        """Write `reply`; one struct of each shape is filled again and again."""
        self._reply = reply
        usage = None if reply.job.include_usage else UNSET
        self._choice = ChunkChoice(0, Delta())
        self._chunk = Chunk(
            reply.id,
            "chat.completion.chunk",
            reply.created_s,
            reply.model,
            [self._choice],
            usage,
        )
        self._has_logprobs = reply.job.params.logprobs is not None
        self._begun: set[int] = set()
        self._readers: dict[int, CallReader] = {}  # where there may be calls

    def feed(self, output: Output) -> bytes:
        """Return the events of an output."""
        choice = self._choice
        choice.index = output.index
        events = b""
        if output.index not in self._begun:
            self._begun.add(output.index)
            choice.delta = Delta("assistant", "")
            events = event(self._chunk)
        choice.logprobs = (
            chat_logprobs(self._reply.tokenizer, output) if self._has_logprobs else None
        )
        for choice.delta in self._deltas(output):
            events += event(self._chunk)
            choice.logprobs = None
        if choice.logprobs is not None and choice.logprobs.content:
            choice.delta = Delta(content="")
            events += event(self._chunk)
        choice.logprobs = None
        return events + self._last(output) if output.finish_reason is not None else events

    def _deltas(self, output: Output) -> Iterator[Delta]:
        """Yield what an output adds to the message."""
        functions = self._reply.job.functions
        if not functions:
            if output.text:
                yield Delta(content=output.text)
            return
        reader = self._readers.setdefault(output.index, CallReader(functions))
        pieces = reader.feed(output.text)
        if output.finish_reason is not None:
            pieces += reader.finish()
        for piece in pieces:
            if isinstance(piece, TextPiece):
                yield Delta(content=piece.text)
            else:
                yield Delta(tool_calls=[call_body(piece)])

    def finish(self, usage: Usage) -> bytes:
        """Return the usage, where asked for, and the end."""
        if not self._reply.job.include_usage:
            return DONE
        self._chunk.choices = []
        self._chunk.usage = usage_body(usage)
        return event(self._chunk) + DONE

    def _last(self, output: Output) -> bytes:
        assert output.finish_reason is not None
        choice = self._choice
        choice.delta = Delta()
        reader = self._readers.get(output.index)
        has_calls = reader is not None and reader.num_calls > 0
        choice.finish_reason = finish_reason(output.finish_reason, has_calls=has_calls)
        if self._reply.job.timings:
            assert output.usage is not None
            assert output.timings is not None
            choice.timings = timings_body(output.usage, output.timings)
        last = event(self._chunk)
        choice.finish_reason, choice.timings = None, UNSET
        return last


def read(asked: ChatRequest) -> Job:
    """Translate a request.

    Raises:
        RequestError: a value is out of bounds or not supported; `param` names the field.
    """
    check_neutral(asked, NEUTRAL)
    options = asked.stream_options
    own: dict[str, Any] = {"logprobs": _top(asked)}
    tools = to_tools(asked.tools, asked.tool_choice, parallel=asked.parallel_tool_calls)
    if tools is not None:
        if to_constraint(asked) is not None:
            message = "tools cannot be combined with a form of the answer: leave one of them out."
            raise RequestError(message, param="tools")
        own["constraint"] = tools.constraint()
    conversation = to_conversation(
        asked.messages,
        tools,
        has_turn=asked.add_generation_prompt,
        continues=asked.continue_final_message,
    )
    if asked.max_completion_tokens is not None:  # the newer name of the same limit
        own["max_tokens"] = asked.max_completion_tokens
    return Job(
        model=asked.model,
        prompts=(conversation,),
        params=to_params(asked, **own),
        caller=to_caller(asked, "messages"),
        speculate="auto" if asked.speculate is None else asked.speculate,
        prediction=to_prediction(asked),
        stream=bool(asked.stream),
        include_usage=options is not None and bool(options.include_usage),
        timings=bool(asked.return_timings),
        functions=() if tools is None else tuple(name for name, _ in tools.callable),
    )


def whole(reply: Reply, answers: list[Completion], usage: Usage) -> ChatCompletion:
    """Return the response that is not streamed."""
    has_logprobs = reply.job.params.logprobs is not None
    choices = []
    for answer in answers:
        message = answer_message(answer.text, reply.job.functions)
        choice = Choice(
            answer.index,
            message,
            chat_logprobs(reply.tokenizer, answer) if has_logprobs else None,
            finish_reason(answer.finish_reason, has_calls=message.tool_calls is not UNSET),
            timings_body(answer.usage, answer.timings) if reply.job.timings else UNSET,
        )
        choices.append(choice)
    return ChatCompletion(
        reply.id, "chat.completion", reply.created_s, reply.model, choices, usage_body(usage)
    )


def _top(asked: ChatRequest) -> int | None:
    """How many alternatives to report; None for no log-probabilities."""
    top = asked.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        message = f"top_logprobs must be from 0 to {MAX_LOGPROBS}, not {top}."
        raise RequestError(message, param="top_logprobs")
    if top and not asked.logprobs:
        message = "top_logprobs may only be set when logprobs is true."
        raise RequestError(message, param="top_logprobs")
    return (top or 0) if asked.logprobs else None


def to_conversation(
    messages: list[Message],
    tools: Tools | None,
    *,
    has_turn: bool | None,
    continues: bool | None,
) -> Conversation:
    """Return messages for the chat template.

    `has_turn` is the field `add_generation_prompt`, `continues` the field `continue_final_message`.

    Raises:
        RequestError: there are none, one is not as it should be, or the fields contradict.
    """
    if has_turn and continues:
        message = "continue_final_message excludes add_generation_prompt: leave one of them out."
        raise RequestError(message, param="continue_final_message")
    if not messages:
        raise RequestError("messages must have at least one message.", param="messages")
    said = tuple(_message(i, message) for i, message in enumerate(messages))
    shown = tools.shown if tools is not None else ()
    return Conversation(said, shown, bool(continues), has_turn is not False)


def _message(place: int, message: Message) -> dict[str, Any]:
    where = f"messages[{place}]"
    for name in ("function_call", "audio"):
        if getattr(message, name):
            param = f"{where}.{name}"
            raise UnsupportedFieldError(f"{param} is not supported yet.", param=param)
    if message.role not in ROLES:
        known = ", ".join(ROLES)
        error = f"{where}.role must be one of {known}, not '{message.role}'."
        raise RequestError(error, param=f"{where}.role")
    for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and message.role != role:
            error = f"{where}.{name} belongs to a message of role {role}, not {message.role}."
            raise RequestError(error, param=f"{where}.{name}")
    if message.content is None and not message.tool_calls:
        raise MissingFieldError(f"{where}.content is missing.", param=f"{where}.content")
    content = message.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    said: dict[str, Any] = {"role": role, "content": text}
    if message.tool_calls:
        said["tool_calls"] = [msgspec.to_builtins(call) for call in message.tool_calls]
    more = {"name": message.name, "tool_call_id": message.tool_call_id}
    return said | {key: value for key, value in more.items() if value is not None}


DIALECT: Final = Dialect("chat", "chatcmpl-", ChatRequest, read, ChatWriter, whole)
