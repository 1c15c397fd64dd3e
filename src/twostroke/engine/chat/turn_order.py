"""Puts the messages of a conversation into an order that the model's chat template accepts.

Many templates refuse a second system message, two messages of one role in a row, or a role that
they do not know. Some drop such messages silently. Each template is tried once with small
conversations of several kinds. If the template fails on a kind, conversations of that kind are
rearranged before they are rendered. All other conversations are rendered unchanged.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Message = dict[str, Any]

_TEXT: Final = re.compile(r"probed\d+text")
_SEPARATOR: Final = "\n\n"  # between texts that are joined into one message
TOOL_RESULT: Final = "<tool_response>\n{}\n</tool_response>"


class TurnOrder(Frozen):
    """Which sequences of messages a chat template accepts and writes in full.

    Each attribute is true if the template accepts such conversations.

    Attributes:
        developer: messages of the role developer.
        system: a system message at the beginning.
        lone_system: a system message at the beginning, without any message of the user.
        answered_system: a system message at the beginning, and a last message that is not the
            user's.
        several_systems: several system messages at the beginning.
        late_system: system messages after other messages.
        empty_answer: an assistant's message without text and calls.
        unanswered_call: calls whose results are missing.
        lone_result: the result of a tool that no message has called.
        user_after_result: a user's message after the result of a tool.
        text_with_calls: an assistant's message with text and calls.
        assistant_first: an assistant's message before all messages of the user.
        same_role: several messages of the user or of the assistant in a row.
    """

    developer: bool = True
    system: bool = True
    lone_system: bool = True
    answered_system: bool = True
    several_systems: bool = True
    late_system: bool = True
    empty_answer: bool = True
    unanswered_call: bool = True
    lone_result: bool = True
    user_after_result: bool = True
    text_with_calls: bool = True
    assistant_first: bool = True
    same_role: bool = True


ANY_ORDER: Final = TurnOrder()
ALTERNATING: Final = TurnOrder(
    developer=False,
    several_systems=False,
    late_system=False,
    empty_answer=False,
    unanswered_call=False,
    lone_result=False,
    user_after_result=False,
    text_with_calls=False,
    assistant_first=False,
    same_role=False,
)
STRICTEST: Final = replace(ALTERNATING, system=False)


def arrange_turns(
    messages: Sequence[Message], order: TurnOrder, *, continues: bool = False
) -> list[Message]:
    """Rearrange a conversation's messages into an order that a chat template accepts.

    No text is dropped. Each of the following changes is made only if the template needs it. System
    messages at the beginning are joined. Later system messages become text of the next user
    message; so do all system messages if the template has no system role. Neighbouring messages of
    one role are joined. `continues` says whether the answer continues the last message.
    """
    turns = [_with_lists(message) for message in messages]
    if not order.developer:
        turns = with_system_role(turns)
    if not order.several_systems:
        turns = _with_one_leading_system(turns)
    turns = _with_systems_as_text(turns, order)
    if not order.empty_answer:
        last = turns[-1:] if continues else []
        turns = [turn for turn in turns[: len(turns) - len(last)] if not _is_empty(turn)] + last
        turns = turns or [{"role": "user", "content": []}]
    if not order.unanswered_call:
        turns = _with_empty_results(turns)
    if not order.lone_result:
        turns = _without_lone_results(turns)
    if not order.user_after_result:
        turns = _join_turns(turns, "tool", "user")
    if not order.same_role:
        turns = _join_turns(_join_turns(turns, "user", "user"), "assistant", "assistant")
    if not order.text_with_calls:
        turns = _with_text_before_calls(turns, order)
    if not order.assistant_first:
        start = _num_leading_systems(turns)
        if start == len(turns) or turns[start]["role"] != "user":
            turns.insert(start, {"role": "user", "content": []})
    return [_with_texts(turn) for turn in turns]


def with_system_role(messages: Sequence[Message]) -> list[Message]:
    """Replace the role developer in messages by system, its older name."""
    return [
        message | {"role": "system"} if message["role"] == "developer" else message
        for message in messages
    ]


def find_turn_order(
    shows: Callable[[list[Message]], bool], *, names_developer: bool, writes_tools: bool
) -> TurnOrder:
    """Find out by test conversations which orders of messages a chat template accepts.

    `shows` renders a conversation; it returns false if the template refuses the conversation or
    drops a text. `names_developer` says whether the template has a case for the role developer,
    `writes_tools` whether it writes calls and their results. An order counts as not accepted only
    if the template accepts the rearranged messages.
    """
    order = replace(ANY_ORDER, developer=names_developer)
    for kind, conversation, has_tools in _CONVERSATIONS:
        if (has_tools and not writes_tools) or shows(arrange_turns(conversation, order)):
            continue
        stricter = replace(order, **{kind: False})
        if shows(arrange_turns(conversation, stricter)):
            order = stricter
    return order


def is_shown(messages: Sequence[Message], rendered: str) -> bool:
    """Whether a rendered test conversation has all texts of the messages from `find_turn_order`.

    That includes the arguments of calls.
    """
    return all(
        text in rendered
        for message in messages
        for written in (message["content"] or "", *_arguments_of(message))
        for text in _TEXT.findall(written)
    )


def _arguments_of(message: Message) -> list[str]:
    return [call["function"]["arguments"] for call in message.get("tool_calls") or ()]


_PROBE_ID: Final = "abcdef123"
_FIRST_ARGUMENT: Final = 100  # texts with larger numbers are arguments of calls


def _probe_call(index: int) -> dict[str, Any]:
    """Return the call of the message with this index in a test conversation."""
    arguments = f'{{"probed_key": "probed{_FIRST_ARGUMENT + index}text"}}'
    function = {"name": "probed_call", "arguments": arguments}
    return {"id": _PROBE_ID, "type": "function", "function": function}


def _probe(turns: str) -> list[Message]:
    """Return a test conversation from words such as `system user assistant`, one per message."""
    messages: list[Message] = []
    for index, word in enumerate(turns.split()):
        role, _, kind = word.partition("-")
        message: Message = {
            "role": role,
            "content": "" if kind == "empty" else f"probed{index}text",
        }
        if kind == "call":
            message["content"] = ""
        if kind in {"call", "callwithtext"}:
            message["tool_calls"] = [_probe_call(index)]
        if role == "tool":
            message |= {"tool_call_id": _PROBE_ID, "name": "probed_call"}
        messages.append(message)
    return messages


_WORDS: Final = (
    ("system", "system user"),
    ("system", "system user assistant user"),
    ("several_systems", "system system user"),
    ("several_systems", "system system system user assistant user"),
    ("developer", "developer user"),
    ("developer", "system developer user"),
    ("developer", "developer user assistant developer user"),
    ("lone_system", "system"),
    ("answered_system", "system user assistant"),
    ("answered_system", "system user assistant-call tool"),
    ("late_system", "user system"),
    ("late_system", "user assistant system user"),
    ("late_system", "system user system assistant user"),
    ("late_system", "system user assistant user system"),
    ("late_system", "system user assistant system"),
    ("late_system", "system user assistant-call tool system"),
    ("empty_answer", "user assistant-empty user"),
    ("lone_result", "user tool"),
    ("lone_result", "user assistant tool assistant user"),
    ("user_after_result", "user assistant-call tool user"),
    ("unanswered_call", "user assistant-call user"),
    ("unanswered_call", "user assistant-call assistant user"),
    ("same_role", "user user"),
    ("same_role", "user assistant assistant user"),
    ("same_role", "system user user assistant user user"),
    ("same_role", "user assistant assistant-call tool assistant user"),
    ("text_with_calls", "user assistant-callwithtext tool assistant user"),
    ("assistant_first", "assistant user"),
    ("assistant_first", "system assistant user"),
    ("assistant_first", "assistant-call tool assistant user"),
)
_CONVERSATIONS: Final = tuple(
    (kind, _probe(words), "call" in words or "tool" in words) for kind, words in _WORDS
)


def _with_one_leading_system(turns: list[Message]) -> list[Message]:
    count = _num_leading_systems(turns)
    return [*_join_turns(turns[:count], "system", "system"), *turns[count:]]


def _with_systems_as_text(turns: list[Message], order: TurnOrder) -> list[Message]:
    """Turn system messages that the template would drop into text of user messages."""
    has_user = any(turn["role"] == "user" for turn in turns)
    keeps_leading = (
        order.system
        and (order.answered_system or _ends_with_user(turns, order))
        and (order.lone_system or has_user)
    )
    num_leading = _num_leading_systems(turns)
    ordered: list[Message] = []
    pending: Message | None = None  # system text for the user's next message
    for index, turn in enumerate(turns):
        keeps = keeps_leading if index < num_leading else order.late_system
        if turn["role"] == "system" and not keeps:
            user_text = {"role": "user", "content": turn["content"]}
            pending = user_text if pending is None else _join_pair(pending, user_text)
            continue
        if pending is not None and turn["role"] == "user":
            ordered.append(_join_pair(pending, turn))
        elif pending is not None:
            _append_user(ordered, pending)
            ordered.append(turn)
        else:
            ordered.append(turn)
        pending = None
    if pending is not None:
        _append_user(ordered, pending)
    return ordered


def _ends_with_user(turns: list[Message], order: TurnOrder) -> bool:
    """Whether the rearranged conversation will end with a user message.

    It will not if the user's text must be joined to the tool result before it. An unanswered call
    may get an empty result, which counts, too.
    """
    roles = [
        "tool" if turn.get("tool_calls") and not order.unanswered_call else turn["role"]
        for index, turn in enumerate(turns)
        if order.empty_answer or index == len(turns) - 1 or not _is_empty(turn)
    ]
    num_roles = len(roles)
    while roles and roles[-1] in {"user", "system"}:
        roles.pop()
    has_ending = len(roles) < num_roles
    return has_ending and (order.user_after_result or roles[-1:] != ["tool"])


def _append_user(turns: list[Message], turn: Message) -> None:
    """Append a user message, or join it to the last message if that is a user message, too."""
    if turns and turns[-1]["role"] == "user":
        turns[-1] = _join_pair(turns[-1], turn)
    else:
        turns.append(turn)


def _without_lone_results(turns: list[Message]) -> list[Message]:
    """Turn tool results without a call into user messages."""
    ordered: list[Message] = []
    is_called = False
    for turn in turns:
        if turn["role"] != "tool":
            is_called = bool(turn.get("tool_calls"))
        if turn["role"] == "tool" and not is_called:
            text = TOOL_RESULT.format(_with_texts(turn)["content"])
            ordered.append({"role": "user", "content": [text]})
        else:
            ordered.append(turn)
    return ordered


def _with_empty_results(turns: list[Message]) -> list[Message]:
    """Add an empty tool result after each tool call that has none, except in the last message."""
    ordered: list[Message] = []
    for turn in turns:
        calls = ordered[-1].get("tool_calls") if ordered else None
        if calls and turn["role"] != "tool":
            ordered += [_empty_result(call) for call in calls]
        ordered.append(turn)
    return ordered


def _empty_result(call: dict[str, Any]) -> Message:
    name = call["function"]["name"]
    return {"role": "tool", "tool_call_id": call.get("id"), "name": name, "content": []}


def _join_turns(turns: list[Message], first: str, second: str) -> list[Message]:
    """Join each message of the role `first` with the next message if it has the role `second`.

    Two assistant messages with calls are not joined, since each has its own results.
    """
    ordered: list[Message] = []
    for turn in turns:
        last = ordered[-1] if ordered else {"role": ""}
        both_call = bool(last.get("tool_calls") and turn.get("tool_calls"))
        if last["role"] == first and turn["role"] == second and not both_call:
            ordered[-1] = _join_pair(last, turn)
        else:
            ordered.append(turn)
    return ordered


def _with_text_before_calls(turns: list[Message], order: TurnOrder) -> list[Message]:
    """Split each assistant message that has text and tool calls into two: first the text."""
    ordered: list[Message] = []
    for turn in turns:
        if turn["role"] != "assistant" or not any(turn["content"]) or not turn.get("tool_calls"):
            ordered.append(turn)
            continue
        ordered.append({key: value for key, value in turn.items() if key != "tool_calls"})
        if not order.same_role:
            ordered.append({"role": "user", "content": []})
        ordered.append({"role": "assistant", "content": [], "tool_calls": turn["tool_calls"]})
    return ordered


def _join_pair(first: Message, second: Message) -> Message:
    """Return two messages joined into one, with the role and other fields of the first."""
    joined = second | first
    for name in ("content", "reasoning_content"):
        if name in joined:  # the list is extended in place: joining many turns takes linear time
            joined[name] = first.get(name, [])
            joined[name] += second.get(name, [])
    if calls := first.get("tool_calls") or second.get("tool_calls"):
        joined["tool_calls"] = calls
    return joined


def _with_lists(message: Message) -> Message:
    """Turn a message's content and reasoning into lists, so that messages can be joined.

    `_with_texts` undoes this.
    """
    lists = {name: [message[name]] for name in ("content", "reasoning_content") if name in message}
    return message | lists


def _with_texts(turn: Message) -> Message:
    """Turn a message's lists of contents and of reasoning back into one content and one reasoning.

    Several texts become one text with blank lines between. If a content has parts, all contents
    become one list of parts.
    """
    contents = [content for content in turn["content"] if content]
    content: Any = (
        _SEPARATOR.join(contents)
        if all(isinstance(c, str) for c in contents)
        else [part for content in contents for part in _parts(content)]
    )
    if not contents and turn["content"]:
        content = turn["content"][0]  # an empty text, or null
    turn = turn | {"content": content}
    if "reasoning_content" in turn:
        turn["reasoning_content"] = _SEPARATOR.join(filter(None, turn["reasoning_content"]))
    return turn


def _parts(content: Any) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _num_leading_systems(turns: list[Message]) -> int:
    others = (index for index, turn in enumerate(turns) if turn["role"] != "system")
    return next(others, len(turns))


def _is_empty(turn: Message) -> bool:
    texts = (*turn["content"], *turn.get("reasoning_content", ()))
    return turn["role"] == "assistant" and not any(texts) and not turn.get("tool_calls")
