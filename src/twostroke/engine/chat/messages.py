"""Checks chat messages, and copies them as plain dictionaries for a template."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import RequestError, nearest
from twostroke.core.json_io import parse_json

if TYPE_CHECKING:
    from collections.abc import Sequence

ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_DEPTH = 64


class RefusedByTemplateError(RequestError):
    """The chat template refuses a conversation, or fails on it."""


def check_messages(
    messages: Sequence[Mapping[str, object]],
    *,
    keep_parts: bool = False,
    has_text_arguments: bool = False,
) -> list[dict[str, Any]]:
    """Check the messages of a conversation, and return copies for the chat template.

    Content is a string, null, or a list of text parts. Parts are joined with line breaks, unless
    the template reads parts (`keep_parts`). Arguments of tool calls, which are a JSON string in
    OpenAI's protocol, become objects, unless the template needs the string (`has_text_arguments`).

    Raises:
        RequestError: a message is not valid.
    """
    check_are_messages(messages)
    checked = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    for index, message in enumerate(checked):
        for call in message.get("tool_calls") or ():
            _check_call(call, f"messages[{index}].tool_calls")
            if not has_text_arguments:
                _read_arguments(call["function"], f"messages[{index}].tool_calls")
        if isinstance(message["content"], list) and not keep_parts:
            message["content"] = "\n".join(part["text"] for part in message["content"])
    return checked


def check_are_messages(messages: Sequence[Mapping[str, object]]) -> None:
    """Raise RequestError unless `messages` is a list of objects that is not empty."""
    if isinstance(messages, (str, bytes, Mapping)) or not hasattr(messages, "__len__"):
        raise RequestError("must be a list.", field="messages")
    if not messages:
        raise RequestError("must have at least one message.", field="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            reason = "must be an object with role and content."
            raise RequestError(reason, field=f"messages[{index}]")


def to_plain_json(value: object, where: str, *, depth: int = 0) -> Any:
    """Copy a part of a message, and check that it has only JSON's types.

    `where` names the part in errors.

    Raises:
        RequestError: the value has another type, or is nested too deeply.
    """
    if depth > _MAX_DEPTH:
        raise RequestError(f"is nested deeper than {_MAX_DEPTH} levels.", field=where)
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"has the number {value}, which is not JSON.", field=where)
    if value is None or type(value) in {str, bool, int, float}:
        return value
    if isinstance(value, (list, tuple)):
        return [to_plain_json(item, where, depth=depth + 1) for item in value]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: to_plain_json(item, where, depth=depth + 1) for key, item in value.items()}
    raise RequestError(f"has a {type(value).__name__}, which is not JSON.", field=where)


def _message(message: Mapping[str, object], where: str) -> dict[str, Any]:
    checked: dict[str, Any] = to_plain_json(dict(message), where)
    role = checked.get("role")
    if not isinstance(role, str) or role not in ROLES:
        if role is None:
            raise RequestError("is missing.", field=f"{where}.role")
        hint = nearest(role, ROLES) if isinstance(role, str) else ""
        reason = f"must be one of {', '.join(ROLES)}, got {{value!r}}.{hint}"
        raise RequestError(reason, field=f"{where}.role", value=role)
    if "content" not in checked and "tool_calls" not in checked:
        raise RequestError("is missing.", field=f"{where}.content")
    checked["content"] = _content(checked.get("content"), f"{where}.content")
    return checked


def _content(content: object, where: str) -> str | list[dict[str, str]] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError("must be a string or a list of parts.", field=where)
    parts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            reason = "must have parts of type text only: this model reads nothing else."
            raise RequestError(reason, field=where)
        parts.append({"type": "text", "text": text})
    return parts or ""


def _check_call(call: object, where: str) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError("must be objects with function.name.", field=where)


def _read_arguments(function: dict[str, Any], where: str) -> None:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return
    try:
        value = to_plain_json(parse_json(arguments), where) if arguments else None
        function["arguments"] = {} if value is None else value  # null stands for no arguments
    except (ValueError, RecursionError):
        # A model may have written arguments that are not JSON: the template gets the string.
        function["arguments"] = arguments
