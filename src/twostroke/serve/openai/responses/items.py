"""Items of a conversation: what a request says, what an answer was, and both as messages."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import RequestError, nearest
from twostroke.serve.http.decode import MAX_NAME_LENGTH, convert
from twostroke.serve.http.errors import UnsupportedFieldError
from twostroke.serve.openai.fields import refuse_all_but
from twostroke.serve.openai.responses.recall import recall

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.serve.openai.responses.recall import RawItem
    from twostroke.serve.store import Tenant

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


def read_input(given: str | list[RawItem] | None, tenant: Tenant, taken: set[str]) -> list[RawItem]:
    """Return a request's items whole: with types and ids, references resolved.

    An item whose id is `taken` by one before it, here or earlier in the conversation, gets
    another: an id is that of one item. The new ids are taken, too.

    Raises:
        RequestError: an item is not as it should be, or a reference leads nowhere.
    """
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = [_read(raw, f"input[{place}]") for place, raw in enumerate(given)]
    ids = {place: item.id for place, item in enumerate(items) if isinstance(item, ItemReference)}
    referred = recall(ids, tenant)
    found: list[RawItem] = []
    for place, (raw, item) in enumerate(zip(given, items, strict=True)):
        one = referred[place] if place in referred else _whole(raw, item)
        if one["id"] in taken:
            one = one | {"id": new_id(_PREFIXES[one["type"]])}
        taken.add(one["id"])
        found.append(one)
    return found


def to_messages(items: Iterable[RawItem], num_earlier: int) -> list[dict[str, Any]]:
    """Return items as a chat template wants them.

    What an answer consists of, thoughts, text and the calls behind it, is one message.
    `num_earlier` of the items are not the request's own; errors count from there.

    Raises:
        RequestError: the result of a call that was not made.
    """
    talk = _Talk()
    for place, raw in enumerate(items, -num_earlier):
        where = f"input[{place}]"
        talk.add(_read(raw, where), where)
    return talk.end()


class _Talk:
    """Messages while they are put together; what may grow item by item is joined at the end."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._leading: list[str] = []  # of the system's message at the beginning
        self._thoughts: list[str] = []  # of the message that comes next
        self._calls: set[str] = set()

    def add(self, item: Item, where: str) -> None:
        """Add an item; `where` it stands is for errors.

        Raises:
            RequestError: the result of a call that was not made.
        """
        if isinstance(item, Reasoning):
            thought = "".join(part.text for part in item.content or ())
            self._thoughts += [thought] if thought else []
            return
        if isinstance(item, FunctionCallOutput):
            if item.call_id not in self._calls:
                reason = "is not the id of an earlier function_call."
                raise RequestError(reason, field=f"{where}.call_id")
            self._say("tool", _text(item.output), tool_call_id=item.call_id)
        elif isinstance(item, FunctionCall):
            self._calls.add(item.call_id)
            if not self._messages or self._messages[-1]["role"] != "assistant":
                self._say("assistant", "")
            self._think()
            self._messages[-1].setdefault("tool_calls", []).append(_call(item))
        elif isinstance(item, Message):
            self._add_message(item)
        self._thoughts = []

    def end(self) -> list[dict[str, Any]]:
        """Return the messages."""
        if self._leading:
            self._messages[0]["content"] = "\n\n".join(self._leading)
        for message in self._messages:
            if thoughts := message.get("reasoning_content"):
                message["reasoning_content"] = "\n\n".join(thoughts)
        return self._messages

    def _add_message(self, item: Message) -> None:
        """Add a message; leading ones of the system's join.

        Many templates take a system message in the first place only.
        """
        role, text = "system" if item.role == "developer" else item.role, _text(item.content)
        if role == "system" and len(self._messages) == bool(self._leading):
            self._leading.append(text)
            if self._messages:
                return
        self._say(role, text)
        if role == "assistant":
            self._think()

    def _say(self, role: str, content: str, **more: Any) -> None:
        self._messages.append({"role": role, **more, "content": content})

    def _think(self) -> None:
        """Add what was thought to the last message."""
        if self._thoughts:
            self._messages[-1].setdefault("reasoning_content", []).extend(self._thoughts)


def _whole(raw: RawItem, item: Item) -> RawItem:
    """Return an item of a request as it is to be kept and listed."""
    kind = _kind(raw)
    raw = raw | {"type": kind, "id": item.id or new_id(_PREFIXES[kind])}
    if not isinstance(item, Reasoning):
        raw["status"] = "completed"
    if isinstance(item, Message) and isinstance(item.content, str):
        part = "output_text" if item.role == "assistant" else "input_text"
        raw["content"] = [{"type": part, "text": item.content}]
    return raw


def _kind(raw: RawItem) -> str:
    kind = raw.get("type")
    if kind is None:
        return "item_reference" if raw.keys() <= {"id", "type"} else "message"
    return str(kind)


def _read(raw: RawItem, where: str) -> Item:
    kind = _kind(raw)
    if kind not in KINDS:
        word = kind[:MAX_NAME_LENGTH]
        reason = f"must be one of {', '.join(KINDS)}, got '{{value}}'.{nearest(word, KINDS)}"
        raise UnsupportedFieldError(reason, field=f"{where}.type", value=word)
    item = convert(raw, KINDS[kind], where)
    if isinstance(item, Message):
        _check(item, where)
    elif isinstance(item, FunctionCall | FunctionCallOutput):
        refuse_all_but(item, NEUTRAL_OF_CALLS, f"{where}.")
    return item


def _check(item: Message, where: str) -> None:
    if item.role not in ROLES:
        hint = ": send a function_call_output" if item.role == "tool" else ""
        reason = f"must be one of {', '.join(ROLES)}, got '{{value}}'{hint}."
        raise RequestError(reason, field=f"{where}.role", value=item.role)
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
