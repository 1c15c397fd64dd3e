"""POST /v1/chat/completions: OpenAI's chat protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from twostroke.chat.reasoning import AS_IT_IS, Thinking
from twostroke.core.errors import RequestError
from twostroke.core.sampling import MAX_LOGPROBS
from twostroke.serve.http.errors import MissingFieldError, UnsupportedFieldError
from twostroke.serve.job import Conversation, Job, check_messages
from twostroke.serve.openai.fields import (
    CommonFields,
    check_neutral,
    to_caller,
    to_params,
    to_prediction,
    told_tier,
)
from twostroke.serve.openai.structure import to_constraint
from twostroke.serve.tools import ToolBody, ToolChoice, to_tools

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.chat.tools import Tools
    from twostroke.serve.store import Tenant

TOOL_NAMES: Final = {
    "tool_choice.name": "tool_choice.function.name",
    "tools[].name": "tools[].function.name",
    "tools[].parameters": "tools[].function.parameters",
}
NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
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
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same; some clients know it by this name
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

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    tools: list[ToolBody] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    # Refused unless neutral.
    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    verbosity: Any = None
    web_search_options: Any = None


def read(asked: ChatRequest, tenant: Tenant) -> Job:
    """Translate a request.

    Raises:
        RequestError: a value is out of bounds or not supported; `field` names it.
    """
    check_neutral(asked, NEUTRAL)
    options = asked.stream_options
    own: dict[str, Any] = {"logprobs": _top(asked)}
    tools = to_tools(asked.tools, asked.tool_choice, parallel=asked.parallel_tool_calls)
    if tools is not None and to_constraint(asked) is not None:
        reason = "cannot be combined with a form of the answer: leave one of them out."
        raise RequestError(reason, field="tools")
    conversation = to_conversation(
        asked.messages,
        tools,
        has_turn=asked.add_generation_prompt,
        continues=asked.continue_final_message,
        thinking=to_thinking(asked.chat_template_kwargs, asked.reasoning_effort),
    )
    if asked.max_completion_tokens is not None:  # the newer name of the same limit
        if asked.max_tokens not in {None, asked.max_completion_tokens}:
            reason = "is the newer name of max_tokens: leave one of them out."
            raise RequestError(reason, field="max_completion_tokens")
        own["max_tokens"] = asked.max_completion_tokens
    return Job(
        model=asked.model,
        prompts=(conversation,),
        params=to_params(asked, **own),
        caller=to_caller(asked, "messages", tenant),
        speculate="auto" if asked.speculate is None else asked.speculate,
        prediction=to_prediction(asked),
        stream=bool(asked.stream),
        include_usage=options is not None and bool(options.include_usage),
        timings=bool(asked.return_timings),
        tier=told_tier(asked),
        tools=tools,
    )


def _top(asked: ChatRequest) -> int | None:
    """How many alternatives to report; None for no log-probabilities."""
    top = asked.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(f"must be from 0 to {MAX_LOGPROBS}, got {top}.", field="top_logprobs")
    if top and not asked.logprobs:
        raise RequestError("may only be set when logprobs is true.", field="top_logprobs")
    return (top or 0) if asked.logprobs else None


def to_conversation(
    messages: list[Message],
    tools: Tools | None,
    *,
    has_turn: bool | None,
    continues: bool | None,
    thinking: Thinking = AS_IT_IS,
) -> Conversation:
    """Return messages for the chat template.

    `has_turn` is the field `add_generation_prompt`, `continues` the field `continue_final_message`.

    Raises:
        RequestError: there are none, one is not as it should be, or the fields contradict.
    """
    if has_turn and continues:
        reason = "cannot be combined with add_generation_prompt: leave one of them out."
        raise RequestError(reason, field="continue_final_message")
    if not messages:
        raise RequestError("must have at least one message.", field="messages")
    check_messages(len(messages), "messages")
    _check_results(messages)
    said = tuple(_message(i, message) for i, message in enumerate(messages))
    shown = tools.shown if tools is not None else ()
    return Conversation(said, shown, bool(continues), has_turn is not False, thinking)


def _check_results(messages: list[Message]) -> None:
    """Refuse results of tools that answer no call; clients without ids leave them out of both.

    Raises:
        RequestError: there is one.
    """
    known = set[str | None]()
    for place, message in enumerate(messages):
        known.update(call.id for call in message.tool_calls or ())
        id_, where = message.tool_call_id, f"messages[{place}].tool_call_id"
        if message.role != "tool" or id_ in known or (id_ is None and known):
            continue
        reason = "must be the id of an earlier call, and there is none."
        raise RequestError(reason, field=where)


def to_thinking(variables: dict[str, Any] | None, effort: str | None = None) -> Thinking:
    """Return what is asked of the model's reasoning."""
    if not variables and effort is None:
        return AS_IT_IS
    return Thinking(effort=effort, param="reasoning_effort", variables=variables or {})


def _message(place: int, message: Message) -> dict[str, Any]:
    where = f"messages[{place}]"
    for name in ("function_call", "audio"):
        if getattr(message, name):
            raise UnsupportedFieldError("is not supported yet.", field=f"{where}.{name}")
    for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and message.role != role:
            reason = f"belongs to a message of the role {role}."
            raise RequestError(reason, field=f"{where}.{name}")
    reasoning = message.reasoning_content or message.reasoning
    if reasoning and message.role != "assistant":
        reason = "belongs to a message of the role assistant."
        raise RequestError(reason, field=f"{where}.reasoning_content")
    if message.content is None and not message.tool_calls and not reasoning:
        raise MissingFieldError("is missing.", field=f"{where}.content")
    content = message.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    said: dict[str, Any] = {"role": role, "content": text}
    if message.tool_calls:
        said["tool_calls"] = [msgspec.to_builtins(call) for call in message.tool_calls]
    more = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": reasoning or None,
    }
    return said | {key: value for key, value in more.items() if value is not None}


def names(asked: ChatRequest) -> Mapping[str, str]:
    """Return what errors call the engine's fields, among them the limit by the name it has."""
    has_newer = asked.max_completion_tokens is not None
    return TOOL_NAMES | ({"max_tokens": "max_completion_tokens"} if has_newer else {})
