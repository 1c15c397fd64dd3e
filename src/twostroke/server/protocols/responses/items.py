"""Items of conversations in the Responses API: reads them, and renders them for the model."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, get_args

import msgspec

from twostroke.core.errors import RequestError
from twostroke.server.body import field
from twostroke.server.body.decode import convert
from twostroke.server.body.explain import MAX_NAME_LENGTH
from twostroke.server.body.lenient import ignored_item
from twostroke.server.http.ignored import MAX_IGNORED, Ignored
from twostroke.server.protocols.common.fields import (
    OPAQUE_REASONING,
    OPAQUE_SUMMARY,
    decode_opaque_text,
)
from twostroke.server.protocols.common.prompts import RefusalPart, TextPart
from twostroke.server.protocols.common.tools import arguments_text, custom_arguments
from twostroke.server.protocols.responses.recall import find_referenced_items, missing_item_error
from twostroke.server.protocols.responses.tools import ResponsesTool

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.server.generation.response_store import Tenant
    from twostroke.server.protocols.responses.recall import RawItem


class InputText(field.TaggedObject, tag="input_text"):
    """A text part of a message or of a tool's result, in a request's `input`."""

    other_types: ClassVar[Mapping[str, str]] = field.TEXT_ONLY

    text: str
    prompt_cache_breakpoint: field.Ignored = None


class AnswerText(field.TaggedObject, tag="output_text"):
    """A text part of an earlier answer in a request's `input`, with fields that SDKs send back."""

    text: str
    annotations: Annotated[Any, field.hint([])] = None
    logprobs: field.SentBack = None
    parsed: field.SentBack = None


Part = InputText | AnswerText | TextPart | RefusalPart
Parts = Annotated[list[Part], field.PARTS]


class MessageItem(field.TaggedObject, tag="message"):
    """An item of `input`: a message of the user or of the assistant; `type` may be left out."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        field.advice({"tool": "Send a function_call_output."}),
    ]
    content: str | Parts
    id: str | None = None
    status: field.SentBack = None
    phase: field.SentBack = None


class CallFields(field.TaggedObject):
    """The fields that the items of tool calls and of their results share."""

    call_id: str
    id: str | None = None
    status: field.SentBack = None
    caller: Annotated[Any, field.hint({"type": "direct"})] = None
    namespace: str | None = None


class FunctionCall(CallFields, tag="function_call", kw_only=True):
    """An item of `input`: a function call of an earlier answer.

    Arguments are JSON text or an object; null stands for no arguments.
    """

    name: str
    arguments: str | dict[str, Any] | None = None
    parsed_arguments: field.SentBack = None
    is_async: field.SentBack = msgspec.field(default=None, name="async")


class FunctionCallOutput(CallFields, tag="function_call_output", kw_only=True):
    """An item of `input`: the result of a function call."""

    output: str | Parts
    name: str | None = None


class CustomToolCall(CallFields, tag="custom_tool_call", kw_only=True):
    """An item of `input`: a custom tool call of an earlier answer."""

    name: str
    input: str
    is_async: field.SentBack = msgspec.field(default=None, name="async")


class CustomToolCallOutput(CallFields, tag="custom_tool_call_output", kw_only=True):
    """An item of `input`: the result of a custom tool call."""

    output: str | Parts
    name: str | None = None


class ReasoningText(field.TaggedObject, tag="reasoning_text"):
    """A text part of a reasoning item in `input`."""

    text: str


class PlainReasoningText(ReasoningText, tag="text"):
    """A text part of a reasoning item in `input`, under the type that some clients send."""


class Reasoning(field.TaggedObject, tag="reasoning"):
    """An item of `input`: the reasoning of an earlier answer, which some chat templates show.

    Codex sends back only the encrypted content. It is read if this server made it. The summary and
    encrypted contents of other servers are ignored.
    """

    content: (
        Annotated[list[ReasoningText | PlainReasoningText], field.unknown_left_out()] | None
    ) = None
    summary: field.SentBack = None
    encrypted_content: field.SentBack = None
    id: str | None = None
    status: field.SentBack = None

    @property
    def text(self) -> str:
        """The reasoning; empty if the item has only a summary, or content of another server."""
        text = "".join(part.text for part in self.content or ())
        return text or decode_opaque_text(self.encrypted_content, OPAQUE_REASONING) or ""


class Compaction(field.TaggedObject, tag="compaction"):
    """An item of `input`: the summary of an earlier conversation, from `/v1/responses/compact`.

    Summaries of other servers are encrypted; they are ignored.
    """

    encrypted_content: str
    id: str | None = None
    created_by: field.SentBack = None


class ToolsItem(field.TaggedObject):
    """The fields of items of `input` that add tools to the request."""

    tools: Annotated[list[ResponsesTool], field.unknown_left_out()]
    id: str | None = None


class AdditionalTools(ToolsItem, tag="additional_tools"):
    """An item of `input`: tools that a client adds during a conversation."""

    role: field.SentBack = None


class ToolSearchOutput(ToolsItem, tag="tool_search_output"):
    """An item of `input`: tools that a client's search found."""

    call_id: field.SentBack = None
    execution: field.SentBack = None
    status: field.SentBack = None


class ItemReference(field.TaggedObject, tag="item_reference"):
    """An item of `input` that refers to a stored item by its id; `type` may be left out."""

    id: str


Item = (
    MessageItem
    | FunctionCall
    | FunctionCallOutput
    | CustomToolCall
    | CustomToolCallOutput
    | Reasoning
    | Compaction
    | AdditionalTools
    | ToolSearchOutput
    | ItemReference
)
UNTYPED: Final = (MessageItem, ItemReference)  # their `type` may be left out

_RESULT_TYPES: Final = (FunctionCallOutput, CustomToolCallOutput)
_RESULT_TAGS: Final = frozenset(str(kind.__struct_config__.tag) for kind in _RESULT_TYPES)
_TOOL_ITEM_TAGS: Final = frozenset(("additional_tools", "tool_search_output"))
_ITEM_TYPES: Final = {str(kind.__struct_config__.tag): kind for kind in get_args(Item)}
_ID_PREFIXES: Final = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
    "compaction": "cmp_",
    "additional_tools": "at_",
    "tool_search_output": "tso_",
}


def derived_id(prefix: str, response_id: str, index: int) -> str:
    """Return the id of the item with this index in the output of a response.

    The id is the same on all servers that write the response. Other clients cannot guess the id,
    since they do not know the id of the response.
    """
    digest = hashlib.sha256(f"{response_id} {prefix} {index}".encode()).hexdigest()
    return prefix + digest[:48]


def new_id(prefix: str) -> str:
    """Create a random id for a stored item, which other clients cannot guess.

    It consists of a prefix, such as `msg_`, and hexadecimal digits.
    """
    return prefix + secrets.token_hex(24)


def read_input(
    value: str | list[RawItem] | None, tenant: Tenant, used_ids: set[str]
) -> tuple[list[RawItem], list[Ignored]]:
    """Check the items of a request's `input`, and convert them to their stored form.

    Stored items have types and ids, and references are replaced by the items that they name. Items
    of unknown types and references to items that are not stored are left out, together with the
    results of their calls. Returns the stored items, and reports of the parts that were ignored. An
    item whose id is in `used_ids` gets a new id; the ids of all returned items are added to
    `used_ids`.

    Raises:
        RequestError: an item is not valid, or there are too many references.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    raw_items, ignored = _drop_unknown_items([_with_type(raw) for raw in value or ()])
    items: list[Item] = []
    for index, raw in enumerate(raw_items):
        item, ignored_fields = _read_item(raw, f"input[{index}]")
        items.append(item)
        ignored += ignored_fields
    ids = {index: item.id for index, item in enumerate(items) if isinstance(item, ItemReference)}
    referenced = find_referenced_items(ids, tenant)
    missing_indices = ids.keys() - referenced.keys()
    ignored += [
        Ignored.of(missing_item_error(index, ids[index])) for index in sorted(missing_indices)[:1]
    ]
    call_ids = {item.call_id for item in items if isinstance(item, FunctionCall | CustomToolCall)}
    # A result without a call is an error, unless its call may be a missing item.
    may_lack_calls = bool(missing_indices) and not used_ids
    stored_items: list[RawItem] = []
    for index, (raw, item) in enumerate(zip(raw_items, items, strict=True)):
        if may_lack_calls and isinstance(item, _RESULT_TYPES) and item.call_id not in call_ids:
            ignored.append(ignored_item(f"input[{index}]", raw["type"]))
            continue
        if index in missing_indices:
            continue
        if (
            isinstance(item, Compaction)
            and decode_opaque_text(item.encrypted_content, OPAQUE_SUMMARY) is None
        ):
            ignored.append(ignored_item(f"input[{index}]", raw["type"]))
        stored_item = referenced[index] if index in referenced else _to_stored_item(raw, item)
        if stored_item["id"] in used_ids:
            stored_item = stored_item | {"id": new_id(_ID_PREFIXES[stored_item["type"]])}
        used_ids.add(stored_item["id"])
        stored_items.append(stored_item)
    return stored_items, ignored


def tools_in(items: Iterable[RawItem]) -> list[ResponsesTool]:
    """Return the tools that a client has added by items of a conversation."""
    tools: list[ResponsesTool] = []
    for raw in items:
        if raw.get("type") in _TOOL_ITEM_TAGS:
            item, _ = _read_item(raw, "input")
            assert isinstance(item, ToolsItem)
            tools += item.tools
    return tools


def _drop_unknown_items(raw_items: list[RawItem]) -> tuple[list[RawItem], list[Ignored]]:
    """Remove items of types that the server does not know from a request's input.

    Returns the other items, and a report for each unknown type. The results of calls of unknown
    types are removed, too.
    """
    call_ids = {_call_id(raw) for raw in raw_items if _has_unknown_type(raw)} - {None}
    known_items: list[RawItem] = []
    ignored: dict[str, Ignored] = {}  # by type
    for index, raw in enumerate(raw_items):
        tag = str(raw["type"])
        is_result = tag in _RESULT_TAGS and _call_id(raw) in call_ids
        if not (is_result or _has_unknown_type(raw)):
            known_items.append(raw)
        elif len(ignored) < MAX_IGNORED:
            ignored.setdefault(tag, ignored_item(f"input[{index}]", tag))
    return known_items, [*ignored.values()]


def _has_unknown_type(raw: RawItem) -> bool:
    """Whether an item of `input` has a type that the server does not know, so that it is ignored.

    A type that is not even a text is an error, which the check of the item raises later.
    """
    return isinstance(raw["type"], str) and raw["type"] not in _ITEM_TYPES


def _call_id(raw: RawItem) -> str | None:
    """Return the `call_id` of an item that is not checked yet; None if missing or not a text."""
    call_id = raw.get("call_id")
    return call_id if isinstance(call_id, str) else None


def to_messages(items: Iterable[RawItem], num_earlier: int) -> list[dict[str, Any]]:
    """Convert the items of a conversation to the messages that chat templates read.

    The reasoning, the text and the calls of an answer become one message. The first `num_earlier`
    items are not part of the request's `input`, so errors count items from there.

    Raises:
        RequestError: a tool result has no earlier call.
    """
    messages: list[dict[str, Any]] = []  # `content` is a list of texts, joined below
    reasoning_texts: list[str] = []  # for the next message
    call_ids = set[str]()
    for index, raw in enumerate(items, -num_earlier):
        item, _ = _read_item(_with_type(raw), f"input[{index}]")
        if isinstance(item, Reasoning):
            reasoning_texts.append(item.text)
            continue
        if isinstance(item, Compaction):
            if (summary := decode_opaque_text(item.encrypted_content, OPAQUE_SUMMARY)) is not None:
                text = f"Summary of the conversation so far:\n\n{summary}"
                messages.append({"role": "user", "content": [text]})
            continue
        if isinstance(item, ToolsItem):
            continue
        if isinstance(item, FunctionCall | CustomToolCall):
            call_ids.add(item.call_id)
        elif isinstance(item, _RESULT_TYPES) and item.call_id not in call_ids:
            if index < 0:  # a client has deleted the call from the conversation
                reason = "has the result '{id}' of a call that it does not have: delete that item."
                raise RequestError(reason, field="conversation", id=raw["id"][:MAX_NAME_LENGTH])
            reason = f"is not the id of an earlier {raw['type'].removesuffix('_output')}."
            raise RequestError(reason, field=f"input[{index}].call_id")
        message = _add_to_messages(item, messages)
        if message["role"] == "assistant":
            message["reasoning_content"] += filter(None, reasoning_texts)
        reasoning_texts = []
    for message in messages:
        message["content"] = "\n\n".join(message["content"])
        if reasoning := "\n\n".join(message.pop("reasoning_content", ())):
            message["reasoning_content"] = reasoning
    return messages


def _add_to_messages(item: Item, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Add an item to the messages for a chat template; return the message to which it was added.

    A tool call is added to the assistant's last message; other items become new messages.
    """
    message: dict[str, Any]
    last: dict[str, Any] = messages[-1] if messages else {"role": ""}
    if isinstance(item, _RESULT_TYPES):
        content = [_text(item.output)]
        message = {"role": "tool", "tool_call_id": item.call_id, "content": content}
    elif isinstance(item, FunctionCall | CustomToolCall):
        name = f"{item.namespace}.{item.name}" if item.namespace else item.name
        if isinstance(item, CustomToolCall):
            arguments = custom_arguments(item.input)
        else:
            arguments = arguments_text(item.arguments)
        function = {"name": name, "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        if last["role"] == "assistant":
            last.setdefault("tool_calls", []).append(call)
            return last
        message = {"role": "assistant", "content": [""], "tool_calls": [call]}
    else:
        assert isinstance(item, MessageItem)
        message = {"role": item.role, "content": [_text(item.content)]}
    if message["role"] == "assistant":
        message["reasoning_content"] = []
    messages.append(message)
    return message


def _read_item(raw: RawItem, where: str) -> tuple[Item, list[Ignored]]:
    """Decode an item of a request, and return it with the item's fields that are ignored.

    `where` is the path of the item in the request.

    Raises:
        RequestError: a field of the item is missing or not valid.
    """
    return convert(raw, _ITEM_TYPES.get(str(raw["type"]), Item), where)


def _to_stored_item(raw: RawItem, item: Item) -> RawItem:
    """Convert an item of a request to the form in which it is stored, with an id and a status."""
    raw = raw | {"id": item.id or new_id(_ID_PREFIXES[raw["type"]])}
    if not isinstance(item, Reasoning | Compaction | ToolsItem):
        raw["status"] = "completed"
    if isinstance(item, FunctionCall):
        raw["arguments"] = arguments_text(item.arguments)
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        part = "output_text" if item.role == "assistant" else "input_text"
        raw["content"] = [{"type": part, "text": item.content}]
    return raw


def _with_type(raw: RawItem) -> RawItem:
    """Add the `type` to an item of a request whose client left it out.

    An item that only has an id is a reference to a stored item; other items are messages.
    """
    if raw.get("type") is not None:
        return raw
    return raw | {"type": "item_reference" if raw.keys() <= {"id", "type"} else "message"}


def _text(content: str | list[Part]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content)
