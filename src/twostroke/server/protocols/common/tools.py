"""Tools of a chat request, as clients send them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from twostroke.core.errors import RequestError, nearest
from twostroke.core.frozen import Frozen
from twostroke.engine.chat.tools import Function, Tools
from twostroke.engine.structured_output.schema.prepare import prepare
from twostroke.server.body import field

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

MAX_TOOLS: Final = 128
_MAX_NAME: Final = 128
_NAME: Final = re.compile(rf"^[A-Za-z0-9_.:/-]{{1,{_MAX_NAME}}}$")  # MCP servers use / and :

FunctionName = Annotated[str, Meta(extra_json_schema={"pattern": _NAME.pattern})]
Strict = Annotated[
    bool | None, field.doc("Refuse a schema that cannot be followed, instead of dropping it.")
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


class FreeText(Frozen):
    """A custom tool: its input is a text, perhaps in a form.

    `syntax` is "regex", which the grammar holds, or "lark", which the model is only shown. Models
    see a function with the argument `input`. `param` is the form's field inside the tool.
    """

    name: str
    description: str | None
    syntax: str = ""
    definition: str = ""
    param: str = ""

    def function(self) -> FunctionBody:
        """Return the function that stands for it."""
        text: dict[str, Any] = {"type": "string"}
        described = [self.description or "A tool whose input is a text."]
        if self.syntax:
            notation = "regular expression" if self.syntax == "regex" else "Lark grammar"
            described.append(f"The input matches this {notation}:\n{self.definition}")
        if self.syntax == "regex":
            pattern = self.definition.removeprefix("^")
            if pattern.endswith("$") and not pattern.endswith("\\$"):
                pattern = pattern[:-1]
            text["pattern"] = f"^(?:{pattern})$"
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        return FunctionBody(self.name, "\n\n".join(described), schema, strict=True)


def arguments_text(arguments: str | Mapping[str, Any] | None) -> str:
    """Return a call's arguments as JSON; clients also send an object, or none for no arguments."""
    if arguments is None:
        return "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def arguments_of(text: str) -> str:
    """Return the arguments of a call of a custom tool with this input."""
    return json.dumps({"input": text}, ensure_ascii=False)


class GrammarDefinition(field.RequestObject):
    """A grammar: a regular expression is enforced, one in Lark's notation only shown."""

    syntax: Annotated[Literal["lark", "regex"], field.hint("regex")]
    definition: str


class ChatGrammar(field.TaggedObject, tag="grammar"):
    """Text that a grammar allows."""

    grammar: GrammarDefinition


class Text(field.TaggedObject, tag="text"):
    """Any text."""


class CustomBody(field.RequestObject):
    """A tool whose input is a text."""

    name: FunctionName
    description: str | None = None
    format: Text | ChatGrammar | None = None


class ToolBody(field.TaggedObject, tag="function"):
    """A function that the model may call."""

    function: FunctionBody

    def offered(self) -> FunctionBody:
        """Return the function."""
        return self.function


class CustomToolBody(field.TaggedObject, tag="custom"):
    """A custom tool that the model may call."""

    custom: CustomBody

    def offered(self) -> FreeText:
        """Return the tool in the form of all protocols."""
        made = self.custom
        if not isinstance(made.format, ChatGrammar):
            return FreeText(made.name, made.description)
        grammar, where = made.format.grammar, "custom.format.grammar.definition"
        return FreeText(made.name, made.description, grammar.syntax, grammar.definition, where)


# Other choices force tools that run on other servers, or that only certain models know.
FUNCTIONS_ONLY: Final = {"*": "Only functions and custom tools can be called here."}


class NamedFunction(field.RequestObject):
    """The name of a function."""

    other_types: ClassVar[Mapping[str, str]] = FUNCTIONS_ONLY
    kind: ClassVar[str] = "function"

    name: str


class NamedCustom(NamedFunction):
    """The name of a custom tool."""

    kind: ClassVar[str] = "custom"


class NamedChoice(field.TaggedObject, tag="function"):
    """The answer must call this function."""

    other_types: ClassVar[Mapping[str, str]] = FUNCTIONS_ONLY

    function: NamedFunction

    @property
    def named(self) -> NamedFunction:
        """The tool."""
        return self.function


class NamedCustomChoice(field.TaggedObject, tag="custom"):
    """The answer must call this custom tool."""

    custom: NamedCustom

    @property
    def named(self) -> NamedCustom:
        """The tool."""
        return self.custom


class AllowedTools(field.RequestObject):
    """Tools that may be called, and whether one of them must be."""

    other_types: ClassVar[Mapping[str, str]] = FUNCTIONS_ONLY

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice | NamedCustomChoice], field.unknown_left_out()]


class AllowedToolsChoice(field.TaggedObject, tag="allowed_tools"):
    """Only these tools may be called, although the model sees all."""

    other_types: ClassVar[Mapping[str, str]] = FUNCTIONS_ONLY

    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"] | NamedChoice | NamedCustomChoice | AllowedToolsChoice
)
ToolsAs = Annotated[
    Annotated[list[T], Meta(max_length=MAX_TOOLS), field.unknown_left_out("custom")] | None,
    field.doc("The functions that the model may call."),
]
TOOL_CHOICE: Final = field.doc("Whether the model may call tools, must, or must call one.")
ParallelCalls = Annotated[
    bool | None, field.doc("Allow several calls in one answer; true if left out.")
]


def to_tools(
    tools: Sequence[FunctionBody | FreeText],
    choice: str | NamedFunction | None,
    *,
    parallel: bool | None,
    tool_fields: Sequence[str] = (),
) -> Tools | None:
    """Return the tools that the answer may call, or None if there are none.

    `tool_fields` are the request's fields with the tools, where these are not a plain list; their
    names are checked already.

    Raises:
        RequestError: a name is not valid or used twice, the schema of a `strict` function cannot
            be enforced, or the choice names a function that does not exist.
    """
    if not tools:
        if choice is not None and choice not in ("none", "auto"):
            raise RequestError("needs tools.", field="tool_choice")
        return None
    known: dict[str, Function] = {}
    functions = []
    for place, tool in enumerate(tools):
        where = tool_fields[place] if tool_fields else f"tools[{place}]"
        is_custom = isinstance(tool, FreeText)
        function = tool.function() if isinstance(tool, FreeText) else tool
        functions.append(function)
        if not tool_fields:
            check_name(function.name, where)
        if function.name in known:
            reason = f"must be unique: an earlier tool is named '{function.name}', too."
            raise RequestError(reason, field=f"{where}.name")
        param = f"{where}.{tool.param if isinstance(tool, FreeText) else 'parameters'}"
        known[function.name] = replace(
            Function.described(
                function.name, function.parameters, param, is_strict=bool(function.strict)
            ),
            is_custom=is_custom,
        )
        if is_custom and not _is_held(known[function.name]):
            reason = "cannot be followed: it must have no look-around and no back-references."
            raise RequestError(reason, field=param)
    if choice == "none":
        return None
    is_named = isinstance(choice, NamedFunction)
    if isinstance(choice, NamedFunction):
        if choice.name not in known:
            reason = "must be the name of one of the tools, got '{value}'."
            raise RequestError(reason, field="tool_choice.name", value=choice.name[:_MAX_NAME])
        _check_kind(choice, known[choice.name], "tool_choice")
        known = {choice.name: known[choice.name]}
    return Tools(
        shown=tuple(_shown(function) for function in functions),
        functions=tuple(known.values()),
        is_forced=is_named or choice == "required",
        is_parallel=parallel is not False and not is_named,
    )


def check_name(name: str, where: str) -> None:
    """Raise RequestError unless the tool at the place `where` may have this name."""
    if not _NAME.fullmatch(name):
        reason = f"must be 1 to {_MAX_NAME} letters, digits, '_', '-', '.', ':' and '/'."
        raise RequestError(reason, field=f"{where}.name")


def only_allowed(
    tools: Tools | None,
    allowed: Sequence[NamedFunction],
    *,
    mode: str,
    where: str,
    name_field: str = "name",
) -> Tools | None:
    """Return tools with calls of the `allowed` ones only; None if there are none.

    `where` is the request's field with the allowed tools; tools that cannot be called here are left
    out of it; `name_field` is the field of an allowed tool with its name.

    Raises:
        RequestError: a tool does not exist, or one must be called and there are none.
    """
    if tools is None:
        return None
    names = [tool.name for tool in allowed]
    functions_by_name = {function.name: function for function in tools.functions}
    for index, name in enumerate(names):
        if name not in functions_by_name:
            reason = "must be the name of one of the tools, got '{value}'.{hint}"
            param = f"{where}[{index}].{name_field}"
            hint = nearest(name[:_MAX_NAME], tools.names)
            raise RequestError(reason, field=param, value=name[:_MAX_NAME], hint=hint)
        _check_kind(allowed[index], functions_by_name[name], f"{where}[{index}]")
    if not names and mode == "required":
        raise RequestError("must have a tool that can be called here.", field=where)
    functions = tuple(function for function in tools.functions if function.name in names)
    return replace(tools, functions=functions) if functions else None


def _check_kind(named: NamedFunction, function: Function, where: str) -> None:
    """Raise RequestError unless a tool has the right type, function or custom tool."""
    kind = "custom" if function.is_custom else "function"
    if named.kind != kind:
        reason = "must be '{kind}', the type of the tool '{name}', got '{got}'."
        facts = {"kind": kind, "name": function.name, "got": named.kind}
        raise RequestError(reason, field=f"{where}.type", **facts)


def _is_held(function: Function) -> bool:
    """Whether the grammar holds the arguments wholly; a wrong schema shows when it is compiled."""
    try:
        return not prepare(json.dumps(function.schema)).gaps
    except ValueError:
        return True


def _shown(function: FunctionBody) -> dict[str, Any]:
    values = {name: getattr(function, name) for name in ("name", "description", "parameters")}
    known = {name: value for name, value in values.items() if value is not None}
    return {"type": "function", "function": known}
