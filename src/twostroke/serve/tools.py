"""Tools of a chat request: what the model may call, and what its answer then looks like.

A call is written as Qwen and Hermes models learned it, and asked of others in the prompt:

    <tool_call>
    {"name": "f", "arguments": {...}}
    </tool_call>

A grammar keeps the answer to that form from the marker on, so that names exist and arguments fit.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from twostroke.core.constraint import Constraint
from twostroke.core.errors import RequestError
from twostroke.sample.schema import check_keywords

if TYPE_CHECKING:
    from collections.abc import Sequence

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
MAX_TOOLS: Final = 128
_MAX_NAME: Final = 64
NAME_PATTERN: Final = rf"^[A-Za-z0-9_.-]{{1,{_MAX_NAME}}}$"
_NAME: Final = re.compile(NAME_PATTERN)
_ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}
_JSON_FORM: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


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


@dataclass(frozen=True, slots=True)
class Tools:
    """What may be called in an answer.

    `shown` are the tools for the prompt, as the client sent them. `callable` are the names and
    schemas of those that may be called; one of them must be if `is_forced`, and several may be
    behind one another if `is_parallel`.
    """

    shown: tuple[dict[str, Any], ...]
    callable: tuple[tuple[str, dict[str, Any]], ...]
    is_forced: bool
    is_parallel: bool

    def constraint(self) -> Constraint:
        """Return the form of an answer with calls, or with text before and in place of them."""
        bodies = [
            f"{_literal(_head(name))} %json {json.dumps(_formed(schema))} {_literal('}')}"
            for name, schema in self.callable
        ]
        rules = [f"body: {' | '.join(f'body{i}' for i in range(len(bodies)))}"]
        rules += [f"body{i}: {body}" for i, body in enumerate(bodies)]
        end = _literal(f"\n{END}")
        if self.is_forced:
            more = f'("\\n" {_literal(BEGIN)} "\\n" body {end})*' if self.is_parallel else ""
            rules.append(f'start: {_literal(BEGIN)} "\\n" body {end} {more}')
        else:
            rules.append(f'call: head "\\n" body {end}')
            rules.append(f"head[lazy]: TEXT {_literal(BEGIN)}")
            rules.append("start: call* last" if self.is_parallel else "start: call | last")
            rules += ["last: TEXT", r"TEXT: /(.|\n)*/"]
        return Constraint("lark", "\n".join(rules), "tools")


def to_tools(
    tools: Sequence[ToolBody] | None, choice: ToolChoice | None, *, parallel: bool | None
) -> Tools | None:
    """Return what may be called, or None if nothing.

    Raises:
        RequestError: too many tools, a name that is none or is there twice, a schema that a
            `strict` function cannot be kept to, or the choice of a function that is not there.
    """
    if not tools:
        if choice is not None and choice not in {"none", "auto"}:
            raise RequestError("tool_choice needs tools.", param="tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        message = f"tools takes at most {MAX_TOOLS} tools, not {len(tools)}."
        raise RequestError(message, param="tools")
    functions = [tool.function for tool in tools]
    schemas = {}
    for place, function in enumerate(functions):
        where = f"tools[{place}].function"
        _check_name(function.name, where)
        if function.name in schemas:
            message = f"{where}.name: there is another '{function.name}' before it."
            raise RequestError(message, param=f"{where}.name")
        schemas[function.name] = _schema(function, where)
    if choice == "none":
        return None
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        if name not in schemas:
            message = f"tool_choice names '{name[:_MAX_NAME]}', which is not among the tools."
            raise RequestError(message, param="tool_choice.function.name")
        schemas = {name: schemas[name]}
    is_named = isinstance(choice, NamedChoice)
    return Tools(
        shown=tuple(_shown(function) for function in functions),
        callable=tuple(schemas.items()),
        is_forced=is_named or choice == "required",
        is_parallel=parallel is not False and not is_named,
    )


def _check_name(name: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        message = f"{where}.name must be 1 to {_MAX_NAME} letters, digits, '_', '-' and '.'."
        raise RequestError(message, param=f"{where}.name")


def _schema(function: FunctionBody, where: str) -> dict[str, Any]:
    """Return what arguments are kept to: any object, where there is no more that can be.

    Tools come from programs that write schemas for other readers: unless `strict`, a keyword that
    cannot be kept to frees the arguments instead of refusing the request.
    """
    schema = function.parameters or _ANY_OBJECT
    try:
        check_keywords(json.dumps(schema))
    except ValueError as error:
        if function.strict:
            message = f"{where}.parameters cannot be kept to: {error}."
            raise RequestError(message, param=f"{where}.parameters") from None
        return _ANY_OBJECT
    return schema if schema.get("type", "object") == "object" else _ANY_OBJECT


def _shown(function: FunctionBody) -> dict[str, Any]:
    shown = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
    }
    known = {key: value for key, value in shown.items() if value is not None}
    return {"type": "function", "function": known}


def _head(name: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": '


def _formed(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", **schema, "x-guidance": _JSON_FORM}


def _literal(text: str) -> str:
    """Return a text as a grammar writes it."""
    return json.dumps(text)
