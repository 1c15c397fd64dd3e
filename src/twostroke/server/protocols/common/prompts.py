"""The prompts of generation requests: chat messages, texts and token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Protocol

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from twostroke.core.errors import RequestError
from twostroke.core.frozen import Frozen
from twostroke.engine.chat.messages import ROLES
from twostroke.engine.chat.reasoning import AS_IT_IS, Thinking, check_budget
from twostroke.engine.prompts import encode_parts
from twostroke.server.body import field
from twostroke.server.body.lenient import ignored_item
from twostroke.server.generation.job import MAX_MESSAGES, Conversation
from twostroke.server.http.errors import MissingFieldError
from twostroke.server.protocols.common.tools import arguments_text, custom_arguments

if TYPE_CHECKING:
    from twostroke.engine.chat.tools import Tools
    from twostroke.engine.model_card import ModelCard

_EMPTY_VALUES: Final[tuple[object, ...]] = (False, 0, "", [], {})


class TextPart(field.TaggedObject, tag="text"):
    """A text part of a chat message's content; other types, such as images, are refused."""

    other_types: ClassVar[Mapping[str, str]] = field.TEXT_ONLY

    text: str


class RefusalPart(field.TaggedObject, tag="refusal"):
    """A part of an assistant's chat message in which the model refused to answer."""

    refusal: str

    @property
    def text(self) -> str:
        """The refusal, which the model reads like other text of the message."""
        return self.refusal


class InputTextPart(TextPart, tag="input_text"):
    """A text part of a chat message, under the type that the Responses API gives to input."""


class OutputTextPart(TextPart, tag="output_text"):
    """A text part of a chat message, under the type that the Responses API gives to output."""


class CalledFunction(msgspec.Struct):
    """The function of an earlier tool call, with its arguments as JSON text or as an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CalledCustom(msgspec.Struct):
    """The custom tool of an earlier tool call, with its input, a text."""

    name: str
    input: str


class ToolCall(msgspec.Struct):
    """A tool call in an assistant's message of the request: of a `function` or of a `custom` tool.

    Calls of other types ran on another server; they are left out together with their results.
    """

    function: CalledFunction | None = None
    id: str | None = None
    type: Annotated[str, field.doc("", enum=["function", "custom"])] = "function"
    custom: CalledCustom | None = None

    @property
    def is_known(self) -> bool:
        """Whether the model can see the call, because it is of a function or of a custom tool."""
        return self.type in {"function", "custom"}


class ChatMessage(field.RequestObject):
    """A message of a chat request.

    Fields that only this server's answers have are accepted, since SDKs send answers back.
    """

    role: Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
    content: Annotated[
        str
        | Annotated[
            list[TextPart | InputTextPart | OutputTextPart | RefusalPart],
            field.PARTS,
        ]
        | None,
        field.doc("Required, except in an assistant's message."),
    ] = None
    name: str | None = None
    reasoning_content: Annotated[str | None, field.doc("An assistant's reasoning.")] = None
    reasoning: Annotated[str | None, field.doc("The same as `reasoning_content`.")] = None
    tool_calls: Annotated[list[ToolCall] | None, field.doc("An assistant's calls.")] = None
    tool_call_id: Annotated[str | None, field.doc("In a tool's message: its call.")] = None
    refusal: Annotated[
        str | None, field.doc("An assistant's refusal, which is text."), field.DROPPABLE
    ] = None
    annotations: field.SentBack = None
    audio: Annotated[Any, field.unsupported(*_EMPTY_VALUES)] = None
    function_call: Annotated[
        CalledFunction | None,
        field.doc("An assistant's call, as it was before `tool_calls`."),
        field.DROPPABLE,
    ] = None


Messages = Annotated[
    list[ChatMessage],
    Meta(min_length=1, max_length=MAX_MESSAGES, description="The conversation, oldest first."),
]


OpensTurn = Annotated[
    bool | None, field.doc("Begin the assistant's turn after the messages; true if left out.")
]


ContinuesLast = Annotated[bool | None, field.doc("Continue the last message.")]


class ConversationFields(Protocol):
    """The request fields that decide whether a chat prompt opens a new turn at its end."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def to_conversation(
    messages: list[ChatMessage],
    tools: Tools | None,
    *,
    opens_turn: bool | None,
    continues: bool | None,
    thinking: Thinking = AS_IT_IS,
) -> Conversation:
    """Check a request's chat messages, and return the conversation from which the prompt is made.

    Args:
        messages: the messages of the request.
        tools: the tools that the answer may call; None for no tools.
        opens_turn: the field `add_generation_prompt`; true if not set.
        continues: the field `continue_final_message`; false if not set.
        thinking: the options for the model's reasoning.

    Raises:
        RequestError: a message is not valid, or `opens_turn` and `continues` are both true.
    """
    if opens_turn and continues:
        reason = "cannot be combined with add_generation_prompt: leave one of them out."
        raise RequestError(reason, field="continue_final_message")
    messages = [_with_current_fields(message) for message in messages]
    _check_tool_results(messages)
    unknown_calls = {
        call.id: ignored_item(f"messages[{index}].tool_calls[{number}]", call.type)
        for index, message in enumerate(messages)
        for number, call in enumerate(message.tool_calls or ())
        if not call.is_known
    }
    template_messages = tuple(
        _to_template_message(index, message)
        for index, message in enumerate(messages)
        if message.role != "tool" or message.tool_call_id not in unknown_calls
    )
    return Conversation(
        template_messages,
        tools.prompt_tools if tools is not None else (),
        continues=bool(continues),
        has_turn=opens_turn is not False,
        thinking=thinking,
        ignored=tuple(unknown_calls.values()),
    )


def to_thinking(
    variables: dict[str, Any] | None,
    effort: str | None = None,
    *,
    param: str = "reasoning_effort",
    is_on: bool | None = None,
    budget: tuple[str, int] | None = None,
) -> Thinking:
    """Return a request's reasoning options for the chat template.

    Args:
        variables: the template's variables, from `chat_template_kwargs`.
        effort: the effort, from the field `param`.
        param: the name of the field with the effort, or with `is_on`.
        is_on: whether the request switches reasoning on or off, if it has no effort.
        budget: the name and the value of the field with the maximum number of reasoning tokens.

    Raises:
        RequestError: the budget is no number of tokens.
    """
    if not variables and effort is None and is_on is None and budget is None:
        return AS_IT_IS
    if budget is not None:
        check_budget(budget[1], budget[0])
    return Thinking(
        is_on=is_on,
        effort=effort,
        param=param,
        budget=None if budget is None else budget[1],
        variables=variables or {},
    )


def continues_in_llama_server(request: ConversationFields) -> bool | None:
    """Return whether the answer continues the last chat message, by llama-server's rules.

    If neither `add_generation_prompt` nor `continue_final_message` is set, the answer continues a
    last message that is an assistant's text.

    Raises:
        RequestError: the last two messages are both the assistant's.
    """
    is_open = request.add_generation_prompt is None and request.continue_final_message is None
    last = request.messages[-1]
    if not is_open or last.role != "assistant":
        return request.continue_final_message
    if len(request.messages) > 1 and request.messages[-2].role == "assistant":
        reason = "must not end with two messages of the role assistant: join them."
        raise RequestError(reason, field="messages")
    return not last.tool_calls and not last.function_call


def _with_current_fields(message: ChatMessage) -> ChatMessage:
    """Replace OpenAI's deprecated `function_call` and role `function` in a chat message."""
    if message.function_call is not None and not message.tool_calls:
        calls = [ToolCall(message.function_call)]
        return replace(message, function_call=None, tool_calls=calls)
    return replace(message, role="tool") if message.role == "function" else message


def _check_tool_results(messages: list[ChatMessage]) -> None:
    """Check that each tool result among the chat messages follows the tool call with its id.

    A result without an id is valid after any call, since some clients send no ids at all.

    Raises:
        RequestError: there is no earlier call, or no earlier call with this id.
    """
    call_ids = set[str | None]()
    for index, message in enumerate(messages):
        call_ids.update(call.id for call in message.tool_calls or ())
        id_ = message.tool_call_id
        if message.role != "tool" or id_ in call_ids:
            continue
        if id_ is None and not call_ids:
            reason = "is the result of a tool, and no earlier message calls a tool."
            raise RequestError(reason, field=f"messages[{index}]")
        if id_ is not None:
            reason = "must be the id of an earlier call, and no earlier call has this id."
            raise RequestError(reason, field=f"messages[{index}].tool_call_id")


def _to_template_message(message_index: int, message: ChatMessage) -> dict[str, Any]:
    """Convert a chat message to the dictionary that chat templates read.

    Raises:
        RequestError: a field does not suit the message's role, or a required field is missing.
    """
    path = f"messages[{message_index}]"
    reasoning = message.reasoning_content or message.reasoning
    for name, value, role in (
        ("tool_calls", message.tool_calls, "assistant"),
        ("tool_call_id", message.tool_call_id, "tool"),
        ("reasoning_content", reasoning, "assistant"),
    ):
        if value and message.role != role:
            reason = f"belongs to a message of the role {role}."
            raise RequestError(reason, field=f"{path}.{name}")
    if message.content is None and message.role not in {"assistant", "tool"}:
        raise MissingFieldError("is missing.", field=f"{path}.content")
    content = message.content or message.refusal or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    template_message: dict[str, Any] = {"role": message.role, "content": text}
    calls = [
        _to_template_call(call, f"{path}.tool_calls[{index}]")
        for index, call in enumerate(message.tool_calls or ())
        if call.is_known
    ]
    if calls:
        template_message["tool_calls"] = calls
    optional_fields = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": reasoning or None,
    }
    return template_message | {
        key: value for key, value in optional_fields.items() if value is not None
    }


def _to_template_call(call: ToolCall, path: str) -> dict[str, Any]:
    """Convert an earlier tool call to the dictionary that chat templates read.

    A call of a custom tool becomes a function call. `path` is where the call is in the request, for
    errors.
    """
    function = call.function
    if call.custom is not None:
        function = CalledFunction(call.custom.name, custom_arguments(call.custom.input))
    if function is None:
        raise MissingFieldError("is missing.", field=f"{path}.function")
    arguments = arguments_text(function.arguments)
    function_fields = {"name": function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function_fields}


def split_prompts(
    value: str | list[str | int | list[int]], field_name: str
) -> tuple[str | list[int], ...]:
    """Return the prompts of a request field that takes one prompt or a list of prompts.

    A prompt is a text or a list of token ids. `field_name` is the field's name in errors.

    Raises:
        RequestError: the list is empty, or mixes token ids with texts or lists.
    """
    if isinstance(value, str):
        return (value,)
    if not value:
        raise RequestError(f"is an empty list: give at least one {field_name}.", field=field_name)
    ids = [part for part in value if isinstance(part, int)]
    if ids and len(ids) < len(value):
        reason = "mixes token ids with texts or lists: "
        reason += f"give one {field_name} or a list of {field_name}s."
        raise RequestError(reason, field=field_name)
    return (ids,) if ids else tuple(part for part in value if not isinstance(part, int))


class MixedPrompt(Frozen):
    """A prompt that joins texts and token ids.

    `parse_special` tells whether special tokens that are spelled out in the texts become tokens;
    None leaves that to the server's default.
    """

    parts: tuple[int | str, ...]
    parse_special: bool | None = None

    def encode(self, card: ModelCard) -> list[int]:
        """Return the prompt's token ids.

        A text at the beginning gets the model's begin-of-sequence token.

        Raises:
            ContextLengthError: there are more tokens than the context can hold.
        """
        return encode_parts(card, self.parts, parse_special=self.parse_special)
