"""Items of a conversation in the Responses protocol, and how they become messages."""

from __future__ import annotations

import base64
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
from twostroke.server.protocols.common.fields import RefusalPart, TextPart
from twostroke.server.protocols.common.tools import arguments_text, custom_arguments
from twostroke.server.protocols.responses.recall import missing_item, recall
from twostroke.server.protocols.responses.tools import ResponsesTool

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.server.generation.response_store import Tenant
    from twostroke.server.protocols.responses.recall import RawItem


class InputText(field.TaggedObject, tag="input_text"):
    """A text."""

    other_types: ClassVar[Mapping[str, str]] = field.TEXT_ONLY

    text: str
    prompt_cache_breakpoint: field.Ignored = None


class AnswerText(field.TaggedObject, tag="output_text"):
    """A text of an answer, with the fields that SDKs send back."""

    text: str
    annotations: Annotated[Any, field.hint([])] = None
    logprobs: field.SentBack = None
    parsed: field.SentBack = None


Part = InputText | AnswerText | TextPart | RefusalPart
Parts = Annotated[list[Part], field.PARTS]


class MessageItem(field.TaggedObject, tag="message"):
    """A message of a request or an answer; `type` may be left out."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant"],
        field.advice({"tool": "Send a function_call_output."}),
    ]
    content: str | Parts
    id: str | None = None
    status: field.SentBack = None
    phase: field.SentBack = None


class CallFields(field.TaggedObject):
    """The fields that a call and its result share."""

    call_id: str
    id: str | None = None
    status: field.SentBack = None
    caller: Annotated[Any, field.hint({"type": "direct"})] = None
    namespace: str | None = None


class FunctionCall(CallFields, tag="function_call", kw_only=True):
    """A call that an answer made; arguments are JSON, or an object; null has none."""

    name: str
    arguments: str | dict[str, Any] | None = None
    parsed_arguments: field.SentBack = None
    is_async: field.SentBack = msgspec.field(default=None, name="async")


class FunctionCallOutput(CallFields, tag="function_call_output", kw_only=True):
    """The result of a call."""

    output: str | Parts
    name: str | None = None


class CustomToolCall(CallFields, tag="custom_tool_call", kw_only=True):
    """A call of a custom tool that an answer made."""

    name: str
    input: str
    is_async: field.SentBack = msgspec.field(default=None, name="async")


class CustomToolCallOutput(CallFields, tag="custom_tool_call_output", kw_only=True):
    """The result of a call of a custom tool."""

    output: str | Parts
    name: str | None = None


class ReasoningText(field.TaggedObject, tag="reasoning_text"):
    """A piece of reasoning."""

    text: str


class PlainReasoningText(ReasoningText, tag="text"):
    """A piece of reasoning as some clients call it."""


class Reasoning(field.TaggedObject, tag="reasoning"):
    """The reasoning of an answer, for templates that show it to the model again.

    The summary adds nothing, and only the server that encrypted a content can read it.
    """

    content: (
        Annotated[list[ReasoningText | PlainReasoningText], field.unknown_left_out()] | None
    ) = None
    summary: field.SentBack = None
    encrypted_content: field.SentBack = None
    id: str | None = None
    status: field.SentBack = None


class Compaction(field.TaggedObject, tag="compaction"):
    """The summary of an earlier conversation, from `/v1/responses/compact`.

    Other servers encrypt theirs, which is left out.
    """

    encrypted_content: str
    id: str | None = None
    created_by: field.SentBack = None


class ToolsItem(field.TaggedObject):
    """Tools that join the tools of the request."""

    tools: Annotated[list[ResponsesTool], field.unknown_left_out()]
    id: str | None = None


class AdditionalTools(ToolsItem, tag="additional_tools"):
    """Tools that a client adds in the course of a conversation."""

    role: field.SentBack = None


class ToolSearchOutput(ToolsItem, tag="tool_search_output"):
    """Tools that a client's search found."""

    call_id: field.SentBack = None
    execution: field.SentBack = None
    status: field.SentBack = None


class ItemReference(field.TaggedObject, tag="item_reference"):
    """A stored item; `type` may be left out."""

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
UNTYPED: Final = (MessageItem, ItemReference)  # the type may be left out

_OUTPUTS: Final = (FunctionCallOutput, CustomToolCallOutput)
_RESULTS: Final = frozenset(str(kind.__struct_config__.tag) for kind in _OUTPUTS)
_ADDING_TOOLS: Final = frozenset(("additional_tools", "tool_search_output"))
_KINDS: Final = {str(kind.__struct_config__.tag): kind for kind in get_args(Item)}
_PREFIXES: Final = {
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
_SUMMARY: Final = "twostroke-summary:"  # begins a compaction of ours


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess."""
    return prefix + secrets.token_hex(24)


def encode_summary(text: str) -> str:
    """Return the content of a compaction with this summary."""
    return _SUMMARY + base64.urlsafe_b64encode(text.encode()).decode()


def decode_summary(content: str) -> str | None:
    """Return the summary in a compaction; None for one of another server."""
    if not content.startswith(_SUMMARY):
        return None
    try:
        return base64.urlsafe_b64decode(content.removeprefix(_SUMMARY)).decode()
    except ValueError:
        return None


def read_input(
    given: str | list[RawItem] | None, tenant: Tenant, taken: set[str]
) -> tuple[list[RawItem], list[Ignored]]:
    """Return a request's items complete, with types and ids, references resolved; and fields.

    Fields of items without effect are reported. Items of unknown types, references to items that
    are not stored, and the results of calls in either are left out and reported. An item whose
    id is `taken` by an earlier one gets a new id, so that ids stay unique. All ids of the items are
    added to `taken`.

    Raises:
        RequestError: an item is not valid, or there are too many references.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    raws, ignored = _without_unknown([_with_type(raw) for raw in given or ()])
    read = [_read(raw, f"input[{index}]") for index, raw in enumerate(raws)]
    ignored += [field for _, fields in read for field in fields]
    ids = {
        index: item.id for index, (item, _) in enumerate(read) if isinstance(item, ItemReference)
    }
    referred = recall(ids, tenant)
    missing = ids.keys() - referred.keys()
    ignored += [Ignored.of(missing_item(index, ids[index])) for index in sorted(missing)[:1]]
    has_gaps = bool(missing) and not taken
    calls = {item.call_id for item, _ in read if isinstance(item, FunctionCall | CustomToolCall)}
    found: list[RawItem] = []
    for index, (raw, (item, _)) in enumerate(zip(raws, read, strict=True)):
        if has_gaps and isinstance(item, _OUTPUTS) and item.call_id not in calls:
            ignored.append(ignored_item(f"input[{index}]", raw["type"]))
            continue
        if index in missing:
            continue
        if isinstance(item, Compaction) and decode_summary(item.encrypted_content) is None:
            ignored.append(ignored_item(f"input[{index}]", raw["type"]))
        complete = referred[index] if index in referred else _complete(raw, item)
        if complete["id"] in taken:
            complete = complete | {"id": new_id(_PREFIXES[complete["type"]])}
        taken.add(complete["id"])
        found.append(complete)
    return found, ignored


def tools_in(items: Iterable[RawItem]) -> list[ResponsesTool]:
    """Return the tools that items of a conversation add to the request."""
    of_tools = [raw for raw in items if raw.get("type") in _ADDING_TOOLS]
    return [
        tool
        for raw in of_tools
        if isinstance(item := _read(raw, "input")[0], ToolsItem)
        for tool in item.tools
    ]


def _without_unknown(raws: list[RawItem]) -> tuple[list[RawItem], list[Ignored]]:
    """Return items of known types; others, and the results of calls among them, are left out."""
    call_ids = {_call_id(raw) for raw in raws if _has_unknown_type(raw)} - {None}
    known_items: list[RawItem] = []
    ignored: dict[str, Ignored] = {}  # by type
    for index, raw in enumerate(raws):
        tag = str(raw["type"])
        is_result = tag in _RESULTS and _call_id(raw) in call_ids
        if not (is_result or _has_unknown_type(raw)):
            known_items.append(raw)
        elif len(ignored) < MAX_IGNORED:
            ignored.setdefault(tag, ignored_item(f"input[{index}]", tag))
    return known_items, [*ignored.values()]


def _has_unknown_type(raw: RawItem) -> bool:
    """Return whether an item's type is an unknown text; a type that is not a text is an error."""
    return isinstance(raw["type"], str) and raw["type"] not in _KINDS


def _call_id(raw: RawItem) -> str | None:
    """Return the id of an item's call; None if it has none, or a wrong one."""
    call_id = raw.get("call_id")
    return call_id if isinstance(call_id, str) else None


def to_messages(items: Iterable[RawItem], num_earlier: int) -> list[dict[str, Any]]:
    """Return items as messages for a chat template.

    The reasoning, text and calls of an answer become one message. The first `num_earlier` items
    are stored and not the request's own, so the places in errors start after them.

    Raises:
        RequestError: the result of a call that was not made.
    """
    messages: list[dict[str, Any]] = []  # with lists of texts, which are joined at the end
    thoughts: list[str] = []  # of the next message
    calls = set[str]()
    for place, raw in enumerate(items, -num_earlier):
        item, _ = _read(_with_type(raw), f"input[{place}]")
        if isinstance(item, Reasoning):
            thoughts.append("".join(part.text for part in item.content or ()))
            continue
        if isinstance(item, Compaction):
            if (summary := decode_summary(item.encrypted_content)) is not None:
                text = f"Summary of the conversation so far:\n\n{summary}"
                messages.append({"role": "user", "content": [text]})
            continue
        if isinstance(item, ToolsItem):
            continue
        if isinstance(item, FunctionCall | CustomToolCall):
            calls.add(item.call_id)
        elif isinstance(item, _OUTPUTS) and item.call_id not in calls:
            if place < 0:  # a client has deleted the call, or never added it
                reason = "has the result '{id}' of a call that it does not have: delete that item."
                raise RequestError(reason, field="conversation", id=raw["id"][:MAX_NAME_LENGTH])
            reason = f"is not the id of an earlier {raw['type'].removesuffix('_output')}."
            raise RequestError(reason, field=f"input[{place}].call_id")
        message = _add(item, messages)
        if message["role"] == "assistant":
            message["reasoning_content"] += filter(None, thoughts)
        thoughts = []
    for message in messages:
        message["content"] = "\n\n".join(message["content"])
        if reasoning := "\n\n".join(message.pop("reasoning_content", ())):
            message["reasoning_content"] = reasoning
    return messages


def _add(item: Item, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Add an item to the last message or as a new one, and return the message."""
    message: dict[str, Any]
    last: dict[str, Any] = messages[-1] if messages else {"role": ""}
    if isinstance(item, _OUTPUTS):
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


def _read(raw: RawItem, where: str) -> tuple[Item, list[Ignored]]:
    return convert(raw, _KINDS.get(str(raw["type"]), Item), where)


def _complete(raw: RawItem, item: Item) -> RawItem:
    """Return an item of a request as it is stored and listed."""
    raw = raw | {"id": item.id or new_id(_PREFIXES[raw["type"]])}
    if not isinstance(item, Reasoning | Compaction | ToolsItem):
        raw["status"] = "completed"
    if isinstance(item, FunctionCall):
        raw["arguments"] = arguments_text(item.arguments)
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        part = "output_text" if item.role == "assistant" else "input_text"
        raw["content"] = [{"type": part, "text": item.content}]
    return raw


def _with_type(raw: RawItem) -> RawItem:
    if raw.get("type") is not None:
        return raw
    return raw | {"type": "item_reference" if raw.keys() <= {"id", "type"} else "message"}


def _text(content: str | list[Part]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content)
