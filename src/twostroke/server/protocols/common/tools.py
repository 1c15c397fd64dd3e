"""The tools of OpenAI's requests: their fields, checks and translation for the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec
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
    """The definition of a function in a request's `tools`: its name, description and arguments."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[
        dict[str, Any] | None,
        field.doc("A JSON schema of the arguments; left out: any object."),
    ] = None
    strict: Strict = None


class TextInputTool(Frozen):
    """A custom tool, whose input is a text; the model sees a function with the argument `input`.

    Attributes:
        name: the name of the tool.
        description: the description for the model.
        syntax: the notation of the input's format: "regex", which is enforced, or "lark", which
            is only shown to the model; empty for any text.
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
    """Return the arguments of an earlier tool call as JSON text; None stands for no arguments."""
    if arguments is None:
        return "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def custom_arguments(text: str) -> str:
    """Wrap a custom tool call's input in JSON arguments, `{"input": text}`.

    The model sees each custom tool as a function with this one argument.
    """
    return json.dumps({"input": text}, ensure_ascii=False)


class GrammarDefinition(field.RequestObject):
    """The grammar of a custom tool's input.

    A regular expression is enforced. A Lark grammar is only shown to the model.
    """

    syntax: Annotated[Literal["lark", "regex"], field.hint("regex")]
    definition: str


class ChatGrammar(field.TaggedObject, tag="grammar"):
    """The `format` of a custom tool whose input a grammar restricts."""

    grammar: GrammarDefinition


class Text(field.TaggedObject, tag="text"):
    """The `format` of an answer or of a custom tool's input that may be any text."""


class CustomBody(field.RequestObject):
    """The definition of a custom tool in a request's `tools`; the tool's input is a text."""

    name: FunctionName
    description: str | None = None
    format: Text | ChatGrammar | None = None


class ToolBody(field.TaggedObject, tag="function"):
    """An entry of a request's `tools`: a function that the model may call."""

    function: FunctionBody

    def offered(self) -> FunctionBody:
        """Return the function, in the form that `to_tools` takes from all protocols."""
        return self.function


class CustomToolBody(field.TaggedObject, tag="custom"):
    """An entry of a request's `tools`: a custom tool that the model may call."""

    custom: CustomBody

    def offered(self) -> TextInputTool:
        """Return the custom tool, in the form that `to_tools` takes from all protocols."""
        custom = self.custom
        if not isinstance(custom.format, ChatGrammar):
            return TextInputTool(custom.name, custom.description)
        grammar = custom.format.grammar
        return TextInputTool(
            custom.name,
            custom.description,
            syntax=grammar.syntax,
            definition=grammar.definition,
            param="custom.format.grammar.definition",
        )


# Other tool choices are for tools of the provider's server, or of certain models.
FUNCTIONS_ONLY: Final = {"*": "Only functions and custom tools can be called here."}


class NamedFunction(field.RequestObject):
    """The function that a `tool_choice` names."""

    other_types: ClassVar[Mapping[str, str]] = FUNCTIONS_ONLY
    kind: ClassVar[str] = "function"

    name: str


class NamedCustom(NamedFunction):
    """The custom tool that a `tool_choice` names."""

    kind: ClassVar[str] = "custom"


class NamedChoice(field.TaggedObject, tag="function"):
    """The `tool_choice` by which the answer must call the named function."""

    other_types: ClassVar[Mapping[str, str]] = FUNCTIONS_ONLY

    function: NamedFunction

    @property
    def named(self) -> NamedFunction:
        """The name of the function that the answer must call."""
        return self.function


class NamedCustomChoice(field.TaggedObject, tag="custom"):
    """The `tool_choice` by which the answer must call the named custom tool."""

    custom: NamedCustom

    @property
    def named(self) -> NamedCustom:
        """The name of the custom tool that the answer must call."""
        return self.custom


class AllowedTools(field.RequestObject):
    """The tools that a `tool_choice` allows, and whether the answer must call one of them."""

    other_types: ClassVar[Mapping[str, str]] = FUNCTIONS_ONLY

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice | NamedCustomChoice], field.unknown_left_out()]


class AllowedToolsChoice(field.TaggedObject, tag="allowed_tools"):
    """The `tool_choice` that allows only some tools; the model still sees all tools."""

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
    tools: Sequence[FunctionBody | TextInputTool],
    choice: str | NamedFunction | None,
    *,
    parallel: bool | None,
    tool_fields: Sequence[str] = (),
) -> Tools | None:
    """Check a request's tools and tool choice; return the tools that the answer may call.

    All protocols that have tools use this. Returns None if the answer may call no tool.

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
        body = tool.function() if isinstance(tool, TextInputTool) else tool
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
        _check_tool_type(choice, functions_by_name[choice.name], "tool_choice")
        functions_by_name = {choice.name: functions_by_name[choice.name]}
    return Tools(
        prompt_tools=tuple(_function_for_template(body) for body in bodies),
        functions=tuple(functions_by_name.values()),
        is_forced=is_named or choice == "required",
        is_parallel=parallel is not False and not is_named,
    )


def _to_function(
    tool: FunctionBody | TextInputTool, body: FunctionBody, tool_field: str
) -> Function:
    """Convert a request's tool to the engine's description of a callable function.

    Args:
        tool: the tool.
        body: the function that the model sees for the tool.
        tool_field: the path of the tool in the request.

    Raises:
        RequestError: a `strict` schema or a custom tool's format cannot be enforced.
    """
    is_custom = isinstance(tool, TextInputTool)
    param = f"{tool_field}.{tool.param if isinstance(tool, TextInputTool) else 'parameters'}"
    function = Function.described(body.name, body.parameters, param, is_strict=bool(body.strict))
    function = replace(function, is_custom=is_custom)
    if is_custom and not _is_fully_enforced(function):
        reason = "cannot be followed: it must have no look-around and no back-references."
        raise RequestError(reason, field=param)
    return function


def check_name(name: str, where: str) -> None:
    """Check that a tool's name has only allowed characters.

    `where` is the tool's path in the request, for errors.

    Raises:
        RequestError: the name is empty, too long, or has other characters.
    """
    if not _NAME.fullmatch(name):
        reason = f"must be 1 to {_MAX_NAME} letters, digits, '_', '-', '.', ':' and '/'."
        raise RequestError(reason, field=f"{where}.name")


def restrict_tools(
    tools: Tools | None,
    allowed: Sequence[NamedFunction],
    *,
    mode: str,
    where: str,
    name_field: str = "name",
) -> Tools | None:
    """Limit an answer's tool calls to the tools that the request's `tool_choice` allows.

    Returns None if the answer may call no tool. The model still sees all tools in its prompt.

    Args:
        tools: all tools of the request.
        allowed: the tools that may be called, without tools of unknown types.
        mode: "auto", or "required" if the answer must call a tool.
        where: the path of the allowed tools in the request.
        name_field: the path of the name inside an allowed tool.

    Raises:
        RequestError: an allowed tool does not exist, or `mode` requires a call but no tool is
            allowed.
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
        _check_tool_type(allowed[index], functions_by_name[name], f"{where}[{index}]")
    if not names and mode == "required":
        raise RequestError("must have a tool that can be called here.", field=where)
    functions = tuple(function for function in tools.functions if function.name in names)
    return replace(tools, functions=functions) if functions else None


def _check_tool_type(named: NamedFunction, function: Function, where: str) -> None:
    """Check that a tool choice states the right type of the tool that it names: function or custom.

    Raises:
        RequestError: the tool has the other type.
    """
    kind = "custom" if function.is_custom else "function"
    if named.kind != kind:
        reason = "must be '{kind}', the type of the tool '{name}', got '{got}'."
        facts = {"kind": kind, "name": function.name, "got": named.kind}
        raise RequestError(reason, field=f"{where}.type", **facts)


def _is_fully_enforced(function: Function) -> bool:
    """Whether a grammar can enforce the whole JSON schema of a function's arguments.

    A schema that is not valid counts as enforced, because compiling it reports the error later.
    """
    try:
        return not prepare(json.dumps(function.schema)).unenforced_keywords
    except ValueError:
        return True


def _function_for_template(function: FunctionBody) -> dict[str, Any]:
    """Return a function as an entry of `tools` in the form that chat templates read."""
    values = {name: getattr(function, name) for name in ("name", "description", "parameters")}
    present_values = {name: value for name, value in values.items() if value is not None}
    return {"type": "function", "function": present_values}


def decode_arguments(text: str) -> dict[str, msgspec.Raw]:
    """Return the arguments of a call, each with its value as JSON in the model's own spelling.

    The values are not decoded, because a number may be too large for a float. Line breaks between
    tokens of JSON are removed, since they would end a line in a stream of JSON lines.

    Raises:
        msgspec.DecodeError: the text is not a JSON object: for example, the call was cut off.
    """
    return msgspec.json.decode(msgspec.json.format(text, indent=-1), type=dict[str, msgspec.Raw])
