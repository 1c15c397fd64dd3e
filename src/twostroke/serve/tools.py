"""Tools of a chat request, as clients send them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from twostroke.chat.tools import Function, Tools
from twostroke.core.errors import RequestError
from twostroke.sample.schema import ANY_OBJECT, check_keywords

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TOOLS: Final = 128
# Beside `properties`, these say themselves which arguments there may be.
_MORE_ARGUMENTS: Final = frozenset(
    ("$ref", "additionalProperties", "allOf", "anyOf", "minProperties", "oneOf")
) | {"patternProperties"}
_MAX_NAME: Final = 64
NAME_PATTERN: Final = rf"^[A-Za-z0-9_.-]{{1,{_MAX_NAME}}}$"
_NAME: Final = re.compile(NAME_PATTERN)


class FunctionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call; without `parameters` it takes any object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"
):
    """One tool; there are functions only."""

    function: FunctionBody


class NamedFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which function."""

    name: str


class NamedChoice(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"
):
    """This function is to be called, and no other."""

    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


def to_tools(
    tools: Sequence[ToolBody] | None, choice: ToolChoice | None, *, parallel: bool | None
) -> Tools | None:
    """Return what may be called, or None if nothing.

    Raises:
        RequestError: too many tools, a name that is none or is there twice, a schema that a
            `strict` function cannot be kept to, or the choice of a function that is not there.
    """
    if not tools:
        if choice is not None and choice not in ("none", "auto"):
            raise RequestError("needs tools.", field="tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"takes at most {MAX_TOOLS} tools, got {len(tools)}.", field="tools")
    functions = [tool.function for tool in tools]
    known: dict[str, Function] = {}
    for place, function in enumerate(functions):
        where = f"tools[{place}]"
        _check_name(function.name, where)
        if function.name in known:
            reason = f"must be unique: an earlier tool is called '{function.name}', too."
            raise RequestError(reason, field=f"{where}.name")
        known[function.name] = _callable(function, f"{where}.parameters")
    if choice == "none":
        return None
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        if name not in known:
            reason = "must be the name of one of the tools, got '{value}'."
            raise RequestError(reason, field="tool_choice.name", value=name[:_MAX_NAME])
        known = {name: known[name]}
    is_named = isinstance(choice, NamedChoice)
    return Tools(
        shown=tuple(_shown(function) for function in functions),
        functions=tuple(known.values()),
        is_forced=is_named or choice == "required",
        is_parallel=parallel is not False and not is_named,
    )


def _check_name(name: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        reason = f"must be 1 to {_MAX_NAME} letters, digits, '_', '-' and '.'."
        raise RequestError(reason, field=f"{where}.name")


def _callable(function: FunctionBody, param: str) -> Function:
    """Return what may be called: with any object, where there is no more that can be kept to.

    Tools come from programs that write schemas for other readers: unless `strict`, a keyword that
    cannot be kept to frees the arguments instead of refusing the request.
    """
    schema = _closed(function.parameters or dict(ANY_OBJECT))
    made = Function(function.name, schema, param, bool(function.strict))
    try:
        check_keywords(json.dumps(schema))
    except ValueError as error:
        if function.strict:
            why = str(error) if str(error).endswith((".", "?")) else f"{error}."
            raise RequestError("cannot be followed: {why}", field=param, why=why) from None
        return made.freed()
    if schema.get("type", "object") == "object":
        return made
    if function.strict:
        raise RequestError("cannot be followed: arguments are an object.", field=param)
    return made.freed()


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that allows no arguments but those that it names, if it names them itself.

    A function that is called with others fails, and a schema that leaves them open hardly means it.
    """
    names = schema.get("properties")
    if not isinstance(names, dict) or not _MORE_ARGUMENTS.isdisjoint(schema):
        return schema
    required = schema.get("required", [])
    if not isinstance(required, list) or any(name not in names for name in map(str, required)):
        return schema
    return schema | {"additionalProperties": False}


def _shown(function: FunctionBody) -> dict[str, Any]:
    shown = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
    }
    known = {key: value for key, value in shown.items() if value is not None}
    return {"type": "function", "function": known}
