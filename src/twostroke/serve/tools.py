"""Tools of a chat request, as clients send them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from msgspec import Meta

from twostroke.chat.tools import Function, Tools
from twostroke.core.errors import RequestError
from twostroke.schema.prepare import ANY_OBJECT, check_keywords
from twostroke.serve.describe import field

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

MAX_TOOLS: Final = 128
# With one of these, `properties` need not list all arguments.
_MORE_ARGUMENTS: Final = frozenset(
    ("$ref", "additionalProperties", "allOf", "anyOf", "minProperties", "oneOf")
) | {"patternProperties"}
_MAX_NAME: Final = 64
_NAME: Final = re.compile(rf"^[A-Za-z0-9_.-]{{1,{_MAX_NAME}}}$")

FunctionName = Annotated[str, Meta(extra_json_schema={"pattern": _NAME.pattern})]
Strict = Annotated[
    bool | None, field.doc("Refuse a schema that cannot be enforced, instead of dropping it.")
]


class FunctionBody(field.RequestObject):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[
        dict[str, Any] | None,
        field.doc("A JSON schema of the arguments; left out: any object."),
    ] = None
    strict: Strict = None


class ToolBody(field.TaggedObject, tag="function"):
    """A tool; all are functions."""

    function: FunctionBody


class NamedFunction(field.RequestObject):
    """The name of a function."""

    name: str


class NamedChoice(field.TaggedObject, tag="function"):
    """The answer must call this function."""

    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice
ToolsAs = Annotated[
    Annotated[list[T], Meta(max_length=MAX_TOOLS)] | None,
    field.doc("The functions that the model may call."),
]
TOOL_CHOICE: Final = field.doc("Whether the model may call tools, must, or must call one.")
ParallelCalls = Annotated[
    bool | None, field.doc("Allow several calls in one answer; true if left out.")
]


def to_tools(
    functions: Sequence[FunctionBody], choice: str | NamedFunction | None, *, parallel: bool | None
) -> Tools | None:
    """Return the tools that the answer may call, or None if there are none.

    Raises:
        RequestError: a name is not valid or used twice, the schema of a `strict` function cannot
            be enforced, or the choice names a function that does not exist.
    """
    if not functions:
        if choice is not None and choice not in ("none", "auto"):
            raise RequestError("needs tools.", field="tool_choice")
        return None
    known: dict[str, Function] = {}
    for place, function in enumerate(functions):
        where = f"tools[{place}]"
        if not _NAME.fullmatch(function.name):
            reason = f"must be 1 to {_MAX_NAME} letters, digits, '_', '-' and '.'."
            raise RequestError(reason, field=f"{where}.name")
        if function.name in known:
            reason = f"must be unique: an earlier tool is named '{function.name}', too."
            raise RequestError(reason, field=f"{where}.name")
        known[function.name] = _callable(function, f"{where}.parameters")
    if choice == "none":
        return None
    is_named = isinstance(choice, NamedFunction)
    if isinstance(choice, NamedFunction):
        if choice.name not in known:
            reason = "must be the name of one of the tools, got '{value}'."
            raise RequestError(reason, field="tool_choice.name", value=choice.name[:_MAX_NAME])
        known = {choice.name: known[choice.name]}
    return Tools(
        shown=tuple(_shown(function) for function in functions),
        functions=tuple(known.values()),
        is_forced=is_named or choice == "required",
        is_parallel=parallel is not False and not is_named,
    )


def _callable(function: FunctionBody, param: str) -> Function:
    """Return a function whose arguments follow its schema, or are any object if that is impossible.

    Many tools have schemas written for other readers, so only `strict` functions are refused.
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
    """Return a schema that allows only the arguments in its `properties`, if it lists them there.

    Other arguments would make most functions fail, although JSON Schema allows them by default.
    """
    names = schema.get("properties")
    if not isinstance(names, dict) or not _MORE_ARGUMENTS.isdisjoint(schema):
        return schema
    required = schema.get("required", [])
    if not isinstance(required, list) or any(name not in names for name in map(str, required)):
        return schema
    return schema | {"additionalProperties": False}


def _shown(function: FunctionBody) -> dict[str, Any]:
    values = {name: getattr(function, name) for name in ("name", "description", "parameters")}
    known = {name: value for name, value in values.items() if value is not None}
    return {"type": "function", "function": known}
