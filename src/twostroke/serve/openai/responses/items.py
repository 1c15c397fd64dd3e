"""Items of a conversation: what a request says, what an answer was, and both as messages."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import RequestError, nearest
from twostroke.serve.http.decode import MAX_NAME_LENGTH, convert
from twostroke.serve.http.errors import UnsupportedFieldError
from twostroke.serve.openai.fields import refuse_all_but

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.serve.store import Kept, Tenant

RawItem = dict[str, Any]  # as JSON has it

ROLES: Final = ("system", "developer", "user", "assistant")
NEUTRAL_OF_CALLS: Final[dict[str, tuple[object, ...]]] = {
    "caller": ({"type": "direct"},),
    "namespace": (),
}
NEUTRAL_OF_TEXT: Final[dict[str, tuple[object, ...]]] = {"annotations": ([],)}


class InputText(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"
):
    """A text; prefixes are cached whether or not it says where one ends."""

    text: str
    prompt_cache_breakpoint: Any = None


class OutputText(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"
):
    """A text of an answer, with what SDKs echo."""

    text: str
    annotations: Any = None
    logprobs: Any = None
    parsed: Any = None


class RefusalPart(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"
):
    """A text that says why there is no other."""

    refusal: str


Part = InputText | OutputText | RefusalPart


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message of a request or an answer."""

    role: str
    content: str | list[Part]
    type: str | None = None
    id: str | None = None
    status: Any = None
    phase: Any = None


class FunctionCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call that an answer made; arguments are JSON."""

    call_id: str
    name: str
    arguments: str
    type: str | None = None
    id: str | None = None
    status: Any = None
    parsed_arguments: Any = None
    caller: Any = None
    namespace: Any = None
    is_async: Any = msgspec.field(default=None, name="async")


class FunctionCallOutput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What came of a call."""

    call_id: str
    output: str | list[InputText]
    type: str | None = None
    id: str | None = None
    name: str | None = None
    status: Any = None
    caller: Any = None
    namespace: Any = None


class ReasoningText(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"
):
    """A thought."""

    text: str


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What an answer thought; templates show it to models that want to see it again.

    A summary says nothing new, and what another server has encrypted nobody can read here.
    """

    content: list[ReasoningText] | None = None
    summary: Any = None
    encrypted_content: Any = None
    type: str | None = None
    id: str | None = None
    status: Any = None


class ItemReference(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An item that is kept here."""

    id: str
    type: str | None = None


Item = Message | FunctionCall | FunctionCallOutput | Reasoning | ItemReference

KINDS: Final[dict[str, type[Item]]] = {
    "message": Message,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": Reasoning,
    "item_reference": ItemReference,
}
_PREFIXES: Final = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
}


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess."""
    return prefix + secrets.token_hex(24)


def read_input(given: str | list[RawItem] | None, tenant: Tenant) -> list[RawItem]:
    """Return a request's items whole: with ids and types, references resolved.

    Raises:
        RequestError: an item is not as it should be, or a reference leads nowhere.
    """
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_whole(item, f"input[{place}]", tenant) for place, item in enumerate(given)]


def items_of(kept: Kept) -> list[RawItem]:
    """Return what was asked and answered at one point of a conversation."""
    asked: list[RawItem] = msgspec.json.decode(kept.asked)
    answer: dict[str, Any] = msgspec.json.decode(kept.answer)
    return [*asked, *answer["output"]]


def to_messages(items: Iterable[RawItem], num_earlier: int) -> list[dict[str, Any]]:
    """Return items as a chat template wants them.

    What an answer consists of, thoughts, text and calls, is one message. `num_earlier` of the items
    are not the request's own; errors count from there.

    Raises:
        RequestError: the result of a call that was not made.
    """
    messages: list[dict[str, Any]] = []
    calls = set[str]()
    thought = ""
    for place, raw in enumerate(items, -num_earlier):
        where = f"input[{place}]"
        item = _read(raw, where)
        if isinstance(item, Reasoning):
            thought += "".join(part.text for part in item.content or ())
            continue
        if isinstance(item, FunctionCallOutput):
            if item.call_id not in calls:
                error = f"{where}.call_id is the id of no function_call before it."
                raise RequestError(error, param=f"{where}.call_id")
            result = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            messages.append(result)
        elif isinstance(item, FunctionCall):
            calls.add(item.call_id)
            _turn(messages, thought).setdefault("tool_calls", []).append(_call(item))
        elif isinstance(item, Message):
            _add(messages, item, thought)
        thought = ""
    return messages


def _whole(raw: RawItem, where: str, tenant: Tenant) -> RawItem:
    """Return an item of a request as it is to be kept and listed."""
    item, kind = _read(raw, where), _kind(raw)
    if isinstance(item, ItemReference):
        return _referred(item.id, where, tenant)
    raw = raw | {"type": kind, "id": item.id or new_id(_PREFIXES[kind])}
    if not isinstance(item, Reasoning):
        raw["status"] = "completed"
    if isinstance(item, Message) and isinstance(item.content, str):
        part = "output_text" if item.role == "assistant" else "input_text"
        raw["content"] = [{"type": part, "text": item.content}]
    return raw


def _referred(id_: str, where: str, tenant: Tenant) -> RawItem:
    kept = tenant.find_item(id_)
    found = [item for item in items_of(kept) if item["id"] == id_] if kept else []
    if not found:
        message = f"Item with id '{id_[:MAX_NAME_LENGTH]}' not found: items are kept with the "
        message += "response that they belong to, unless store is false. Send the item itself."
        raise RequestError(message, param=f"{where}.id")
    return found[0]


def _kind(raw: RawItem) -> str:
    kind = raw.get("type")
    if kind is None:
        return "item_reference" if raw.keys() <= {"id", "type"} else "message"
    return str(kind)


def _read(raw: RawItem, where: str) -> Item:
    kind = _kind(raw)
    if kind not in KINDS:
        word = kind[:MAX_NAME_LENGTH]
        known = f"{', '.join(KINDS)} are supported.{nearest(word, KINDS)}"
        message = f"{where}.type does not support '{word}': {known}"
        raise UnsupportedFieldError(message, param=f"{where}.type")
    item = convert(raw, KINDS[kind], where)
    if isinstance(item, Message):
        _check(item, where)
    elif isinstance(item, FunctionCall | FunctionCallOutput):
        refuse_all_but(item, NEUTRAL_OF_CALLS, f"{where}.")
    return item


def _check(item: Message, where: str) -> None:
    if item.role not in ROLES:
        hint = ": send a function_call_output" if item.role == "tool" else ""
        error = f"{where}.role must be one of {', '.join(ROLES)}, not '{item.role}'{hint}."
        raise RequestError(error, param=f"{where}.role")
    if isinstance(item.content, str):
        return
    for place, part in enumerate(item.content):
        if isinstance(part, OutputText):
            refuse_all_but(part, NEUTRAL_OF_TEXT, f"{where}.content[{place}].")


def _text(content: str | list[Part] | list[InputText]) -> str:
    if isinstance(content, str):
        return content
    texts = (part.refusal if isinstance(part, RefusalPart) else part.text for part in content)
    return "".join(texts)


def _call(item: FunctionCall) -> dict[str, Any]:
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _turn(messages: list[dict[str, Any]], thought: str) -> dict[str, Any]:
    """Return the assistant's message that is being said, or begin one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    if thought:
        messages[-1]["reasoning_content"] = thought
    return messages[-1]


def _add(messages: list[dict[str, Any]], item: Message, thought: str) -> None:
    """Add a message; one of the assistant's joins its calls, and leading ones of the system's join.

    Many templates take a system message in the first place only.
    """
    role = "system" if item.role == "developer" else item.role
    text, last = _text(item.content), messages[-1] if messages else None
    if role == "assistant":
        if last is None or (last["role"] == role and last["content"]):
            messages.append({"role": role, "content": ""})
        _turn(messages, thought)["content"] = text
    elif role == "system" and last is not None and len(messages) == 1 and last["role"] == role:
        last["content"] += f"\n\n{text}"
    else:
        messages.append({"role": role, "content": text})
