"""Writes tools, calls and results in the form that a chat template supports, or as plain text."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.json_io import parse_json
from twostroke.engine.chat.turn_order import TOOL_RESULT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from twostroke.engine.chat.capabilities import TemplateCapabilities

_SHORT_ID_CHARS: Final = 9
_INSTRUCTIONS: Final = """\
You can call these functions, each described on a line of its own as JSON:
{tools}
To call one, write its name and its arguments as JSON, in this form and nothing else:
{form}
The result comes in the next message. Without need of a function, answer as usual."""


def fit_to_template(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    capabilities: TemplateCapabilities,
) -> list[dict[str, Any]]:
    """Rewrite a conversation's messages so that a chat template shows their tool calls and results.

    Features that the template lacks become text. The system message describes `tools` if the
    template does not show them.
    """
    fitted_messages = [*_with_ids(messages)]
    if capabilities.has_named_ids:
        fitted_messages = [*_with_named_ids(fitted_messages)]
    if capabilities.writes_calls and not capabilities.takes_several:
        fitted_messages = list(_split_parallel_calls(fitted_messages))
    fitted_messages = [_fit_message(message, capabilities) for message in fitted_messages]
    if capabilities.has_tool_responses:
        fitted_messages = list(_with_tool_responses(fitted_messages))
    if capabilities.shows_tools_of_system and tools:
        if fitted_messages[0]["role"] != "system":
            fitted_messages.insert(0, {"role": "system", "content": ""})
        fitted_messages[0]["tools"] = json.dumps(
            [tool["function"] for tool in tools], ensure_ascii=False
        )
    elif tools and not capabilities.shows_tools:
        _add_instructions(fitted_messages, tools, capabilities)
    return fitted_messages if capabilities.writes_results else _join_user_messages(fitted_messages)


def fitted_tools(
    tools: Sequence[Mapping[str, Any]], capabilities: TemplateCapabilities
) -> list[Mapping[str, Any]]:
    """Return tools for a chat template, with empty descriptions and parameters if it needs them."""
    if not capabilities.needs_whole_tools:
        return [*tools]
    whole_tools: list[Mapping[str, Any]] = []
    for tool in tools:
        function = {"description": "", **tool["function"]}
        parameters = {"type": "object", "properties": {}, **function.get("parameters", {})}
        whole_tools.append({**tool, "function": {**function, "parameters": parameters}})
    return whole_tools


def _with_ids(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages in which every tool call and every tool result has an id.

    A result without an id gets the id of the last answer's first unanswered call of the same name
    or, if there is no such call, of its first unanswered call.
    """
    num_calls = 0
    open_ids: dict[str, deque[str]] = {}  # by name; an id may be answered already
    order: deque[str] = deque()
    answered = set[str]()
    for message in messages:
        if calls := message.get("tool_calls"):
            open_ids, order = {}, deque()
            calls_with_ids = []
            for call in calls:
                num_calls += 1
                id_ = call.get("id") or f"call{num_calls:05}"
                calls_with_ids.append(call | {"id": id_})
                open_ids.setdefault(call["function"]["name"], deque()).append(id_)
                order.append(id_)
            yield {**message, "tool_calls": calls_with_ids}
            continue
        id_ = message.get("tool_call_id")
        if message["role"] == "tool" and id_ is None:
            for ids in (open_ids.get(str(message.get("name")), order), order):
                while id_ is None and ids:
                    candidate = ids.popleft()
                    id_ = None if candidate in answered else candidate
        if id_ is None:
            yield dict(message)
            continue
        answered.add(id_)
        yield {**message, "tool_call_id": id_}


def _with_tool_responses(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages in which results are in the field `tool_responses` of their answers.

    The text of such an answer becomes a separate message before it.
    """
    answer: dict[str, Any] | None = None  # with calls whose results follow
    names: dict[object, str] = {}
    for message in messages:
        if answer is not None and message["role"] == "tool":
            name = names.get(message.get("tool_call_id")) or str(message.get("name"))
            answer["tool_responses"].append({"name": name, "response": message["content"]})
            continue
        if answer is not None:
            yield answer
            answer = None
        if not message.get("tool_calls"):
            yield message
            continue
        if message["content"]:
            yield {"role": "assistant", "content": message["content"]}
        names = {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        answer = message | {"content": "", "tool_responses": []}
    if answer is not None:
        yield answer


def _with_named_ids(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages in which the id of a call contains its function's name and its number.

    Such ids are `functions.NAME:0` and so on. Results get the ids of their calls.
    """
    named_ids: dict[object, str] = {}
    num_calls = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            named_ids[call["id"]] = f"functions.{call['function']['name']}:{num_calls}"
            num_calls += 1
            calls.append(call | {"id": named_ids[call["id"]]})
        if calls:
            yield message | {"tool_calls": calls}
        elif message.get("tool_call_id") in named_ids:
            yield message | {"tool_call_id": named_ids[message["tool_call_id"]]}
        else:
            yield message


def _add_instructions(
    messages: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    capabilities: TemplateCapabilities,
) -> None:
    """Describe the functions, and how to write calls of them, in the system message."""
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=described, form=capabilities.form.example())
    if messages and messages[0]["role"] == "system":
        content = f"{messages[0]['content']}\n\n{instructions}"
        messages[0] = messages[0] | {"content": content}
    else:
        messages.insert(0, {"role": "system", "content": instructions})


def _fit_message(message: dict[str, Any], capabilities: TemplateCapabilities) -> dict[str, Any]:
    content, calls = message.get("content") or "", message.get("tool_calls")
    if message["role"] == "tool":
        if not capabilities.writes_results:
            return {"role": "user", "content": TOOL_RESULT.format(content)}
        if capabilities.has_short_ids and "tool_call_id" in message:
            message["tool_call_id"] = _short_id(message["tool_call_id"])
        return message
    if not calls:
        return message | {"content": content}
    if not capabilities.writes_calls:
        functions = [call["function"] for call in calls]
        written = capabilities.form.write((f["name"], _arguments(f)) for f in functions)
        del message["tool_calls"]
        return message | {"content": "\n".join(filter(None, [content, written]))}
    if capabilities.has_text_arguments:
        calls = [_with_text_arguments(call) for call in calls]
    if capabilities.needs_object_arguments:
        calls = [_with_object_arguments(call) for call in calls]
    if capabilities.has_short_ids:
        calls = [call | {"id": _short_id(str(call.get("id")))} for call in calls]
    empty_content = None if capabilities.has_null_content else ""
    return message | {"content": content or empty_content, "tool_calls": calls}


def _arguments(function: Mapping[str, Any]) -> str:
    """Return a tool call's arguments as JSON text; they may be text already."""
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": _arguments(function)}}


def _with_object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, as its template needs.

    Models sometimes write arguments that are no object, or not even JSON, and agents send them
    back. The returned object then has the model's text as its member `arguments`.
    """
    function = call["function"]
    arguments = function.get("arguments")
    value = arguments
    if isinstance(arguments, str):
        try:
            value = parse_json(arguments) if arguments else None
        except (ValueError, RecursionError):
            value = arguments
    if isinstance(value, dict):
        return call
    wrapped = {} if value is None else {"arguments": value}
    return call | {"function": function | {"arguments": wrapped}}


def _short_id(call_id: str) -> str:
    """Return a tool call's id of nine letters or digits; equal ids have equal short ids."""
    if len(call_id) == _SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:_SHORT_ID_CHARS]


def _split_parallel_calls(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages in which each answer has at most one tool call.

    An answer with several calls is split into an answer for each call, followed by its result.
    """
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        end = index
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results: dict[object, list[dict[str, Any]]] = {}
        for result in messages[index:end]:
            results.setdefault(result.get("tool_call_id"), []).append(result)
        index = end
        for call in calls:
            yield message | {"tool_calls": [call]}
            message = message | {"content": ""}  # only the first answer has the text
            yield from results.pop(call.get("id"), ())
        for rest in results.values():
            yield from rest


def _join_user_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which neighbouring user messages are joined, so that roles alternate."""
    joined: list[dict[str, Any]] = []
    for role, group in groupby(messages, key=itemgetter("role")):
        run = [*group]
        if role == "user":
            run = [run[0] | {"content": "\n".join(message["content"] for message in run)}]
        joined += run
    return joined
