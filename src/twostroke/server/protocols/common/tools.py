"""The tools of chat requests: their fields, and their checks and translation for the engine."""

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
    bool | None, field.doc("Refuse a schema that cannot be enforced, instead of ignoring it.")
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
    """A custom tool, whose input is a text; models see a function with the argument `input`.

    Attributes:
        name: the name of the tool.
        description: the description for the model.
        syntax: the notation of the input's format: "regex", which is enforced, or "lark", which is
            only shown to the model; empty for any text.
        definition: the format in this notation.
        param: the path of the definition inside the tool, for errors.
    """

    name: str
    description: str | None
    syntax: str = ""
    definition: str = ""
    param: str = ""

    def function(self) -> FunctionBody:
        """Return the function that the model sees in place of this custom tool."""
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
        return FunctionBody(
            self.name, description="\n\n".join(described), parameters=schema, strict=True
        )


def arguments_text(arguments: str | Mapping[str, Any] | None) -> str:
    """Return a tool call's arguments as JSON text; None stands for no arguments."""
    if arguments is None:
        return "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def custom_arguments(text: str) -> str:
    """Return a custom tool call's input as JSON arguments.

    The model sees a custom tool as a function with the argument `input`.
    """
    return json.dumps({"input": text}, ensure_ascii=False)


class GrammarDefinition(field.RequestObject):
    """A grammar: a regular expression is enforced, Lark is only shown to the model."""

    syntax: Annotated[Literal["lark", "regex"], field.hint("regex")]
    definition: str


class ChatGrammar(field.TaggedObject, tag="grammar"):
    """The format of a custom tool's input: text that a grammar allows."""

    grammar: GrammarDefinition


class Text(field.TaggedObject, tag="text"):
    """The format of free text, for an answer or for a custom tool's input."""


class CustomBody(field.RequestObject):
    """The definition of a custom tool, whose input is a text."""

    name: FunctionName
    description: str | None = None
    format: Text | ChatGrammar | None = None


class ToolBody(field.TaggedObject, tag="function"):
    """A function that the model may call, as an entry of the request's `tools`."""

    function: FunctionBody

    def offered(self) -> FunctionBody:
        """Return this tool's function, which is shown to the model."""
        return self.function


class CustomToolBody(field.TaggedObject, tag="custom"):
    """A custom tool that the model may call, as an entry of the request's `tools`."""

    custom: CustomBody

    def offered(self) -> FreeText:
        """Return this custom tool in the form that all protocols share."""
        custom = self.custom
        if not isinstance(custom.format, ChatGrammar):
            return FreeText(custom.name, custom.description)
        grammar = custom.format.grammar
        return FreeText(
            custom.name,
            custom.description,
            syntax=grammar.syntax,
            definition=grammar.definition,
            param="custom.format.grammar.definition",
        )


# Other tool choices are for tools of the provider's server, or of certain models.
FUNCTIONS_ONLY: Final = {"*": "Only functions and custom tools can be called here."}


class NamedFunction(field.RequestObject):
    """The name of a function, in a tool choice."""

    other_types: ClassVar[Mapping[str, str]] = FUNCTIONS_ONLY
    kind: ClassVar[str] = "function"

    name: str


class NamedCustom(NamedFunction):
    """The name of a custom tool, in a tool choice."""

    kind: ClassVar[str] = "custom"


class NamedChoice(field.TaggedObject, tag="function"):
    """A tool choice by which the answer must call the named function."""

    other_types: ClassVar[Mapping[str, str]] = FUNCTIONS_ONLY

    function: NamedFunction

    @property
    def named(self) -> NamedFunction:
        """The name of the function that the answer must call."""
        return self.function


class NamedCustomChoice(field.TaggedObject, tag="custom"):
    """A tool choice by which the answer must call the named custom tool."""

    custom: NamedCustom

    @property
    def named(self) -> NamedCustom:
        """The name of the custom tool that the answer must call."""
        return self.custom


class AllowedTools(field.RequestObject):
    """The tools that an answer may call, and whether it must call one of them."""

    other_types: ClassVar[Mapping[str, str]] = FUNCTIONS_ONLY

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice | NamedCustomChoice], field.unknown_left_out()]


class AllowedToolsChoice(field.TaggedObject, tag="allowed_tools"):
    """A tool choice by which only some tools may be called; the model sees all tools."""

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
    """Check a request's tools and tool choice; return the tools that the answer may call.

    Returns None if the answer may call no tool.

    Args:
        tools: the functions and custom tools of the request.
        choice: "none", "auto", "required", or the tool that must be called.
        parallel: whether an answer may have several calls; None allows them.
        tool_fields: the path of each tool in the request, if the tools are not a plain list;
            then the names are already checked.

    Raises:
        RequestError: a name is not valid or used twice, the schema of a `strict` function
            cannot be enforced, or the choice names a function that does not exist.
    """
    if not tools:
        if choice is not None and choice not in ("none", "auto"):
            raise RequestError("needs tools.", field="tool_choice")
        return None
    functions_by_name: dict[str, Function] = {}
    bodies = []
    for index, tool in enumerate(tools):
        tool_field = tool_fields[index] if tool_fields else f"tools[{index}]"
        body = tool.function() if isinstance(tool, FreeText) else tool
        bodies.append(body)
        if not tool_fields:
            check_name(body.name, tool_field)
        if body.name in functions_by_name:
            reason = f"must be unique: an earlier tool is named '{body.name}', too."
            raise RequestError(reason, field=f"{tool_field}.name")
        functions_by_name[body.name] = _to_function(tool, body, tool_field)
    if choice == "none":
        return None
    is_named = isinstance(choice, NamedFunction)
    if isinstance(choice, NamedFunction):
        if choice.name not in functions_by_name:
            reason = "must be the name of one of the tools, got '{value}'."
            raise RequestError(reason, field="tool_choice.name", value=choice.name[:_MAX_NAME])
        _check_kind(choice, functions_by_name[choice.name], "tool_choice")
        functions_by_name = {choice.name: functions_by_name[choice.name]}
    return Tools(
        prompt_tools=tuple(_function_for_template(body) for body in bodies),
        functions=tuple(functions_by_name.values()),
        is_forced=is_named or choice == "required",
        is_parallel=parallel is not False and not is_named,
    )


def _to_function(tool: FunctionBody | FreeText, body: FunctionBody, tool_field: str) -> Function:
    """Return a request's tool in the form of the engine's tool calls.

    Args:
        tool: the tool.
        body: the function that the model sees for the tool.
        tool_field: the path of the tool in the request.

    Raises:
        RequestError: a `strict` schema or a custom tool's format cannot be enforced.
    """
    is_custom = isinstance(tool, FreeText)
    param = f"{tool_field}.{tool.param if isinstance(tool, FreeText) else 'parameters'}"
    function = Function.described(body.name, body.parameters, param, is_strict=bool(body.strict))
    function = replace(function, is_custom=is_custom)
    if is_custom and not _is_fully_enforced(function):
        reason = "cannot be followed: it must have no look-around and no back-references."
        raise RequestError(reason, field=param)
    return function


def check_name(name: str, where: str) -> None:
    """Check a tool's name; raise RequestError if it is wrong. `where` is the tool's path."""
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
    """Restrict which tools the answer may call; return None if it may call none.

    Args:
        tools: all tools of the request; the model sees all of them.
        allowed: the tools that may be called, without tools of unknown types.
        mode: "auto", or "required" if the answer must call a tool.
        where: the path of the allowed tools in the request.
        name_field: the path of the name inside an allowed tool.

    Raises:
        RequestError: an allowed tool does not exist, or `mode` requires a call of no tool.
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
    """Check that a tool choice names the type of the chosen tool: function or custom.

    Raises a RequestError if it names the other type.
    """
    kind = "custom" if function.is_custom else "function"
    if named.kind != kind:
        reason = "must be '{kind}', the type of the tool '{name}', got '{got}'."
        facts = {"kind": kind, "name": function.name, "got": named.kind}
        raise RequestError(reason, field=f"{where}.type", **facts)


def _is_fully_enforced(function: Function) -> bool:
    """Whether a grammar can enforce the whole JSON schema of a function's arguments.

    True for a schema that is not valid, which is refused when it is compiled.
    """
    try:
        return not prepare(json.dumps(function.schema)).gaps
    except ValueError:
        return True


def _function_for_template(function: FunctionBody) -> dict[str, Any]:
    """Return a function in the form in which chat templates read `tools`."""
    values = {name: getattr(function, name) for name in ("name", "description", "parameters")}
    present_values = {name: value for name, value in values.items() if value is not None}
    return {"type": "function", "function": present_values}
