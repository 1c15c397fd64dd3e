"""The tools and tool choices of the Responses API, and their translation for the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from twostroke.server.body import field
from twostroke.server.protocols.common.tools import (
    MAX_TOOLS,
    FunctionBody,
    FunctionName,
    GrammarDefinition,
    NamedCustom,
    NamedFunction,
    Text,
    TextInputTool,
    check_name,
    restrict_tools,
    to_tools,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.engine.chat.tools import Tools


class FunctionTool(FunctionBody, tag_field="type", tag="function"):
    """An entry of `tools`: a function that the client runs; the server runs no tools."""

    allowed_callers: Annotated[Any, field.unsupported(["direct"])] = None
    defer_loading: field.HintOff = None
    is_async: field.HintOff = msgspec.field(default=None, name="async")
    output_schema: field.Hint = None

    def offered(self) -> FunctionBody:
        """Return the function, in the form that `to_tools` takes from all protocols."""
        return self


class TextGrammar(GrammarDefinition, tag_field="type", tag="grammar"):
    """The `format` of a custom tool whose input a grammar restricts."""


class CustomTool(field.TaggedObject, tag="custom"):
    """An entry of `tools`: a custom tool that the client runs; its input is a text."""

    name: FunctionName
    description: str | None = None
    format: Text | TextGrammar | None = None
    allowed_callers: Annotated[Any, field.unsupported(["direct"])] = None
    defer_loading: field.HintOff = None
    is_async: field.HintOff = msgspec.field(default=None, name="async")

    def offered(self) -> TextInputTool:
        """Return the custom tool, in the form that `to_tools` takes from all protocols."""
        grammar = self.format
        if not isinstance(grammar, TextGrammar):
            return TextInputTool(self.name, self.description)
        return TextInputTool(
            self.name,
            self.description,
            syntax=grammar.syntax,
            definition=grammar.definition,
            param="format.definition",
        )


class NamespaceTool(field.TaggedObject, tag="namespace"):
    """An entry of `tools`: several tools with a namespace; the model sees `namespace.name`."""

    name: FunctionName
    tools: Annotated[
        list[FunctionTool | CustomTool], Meta(max_length=MAX_TOOLS), field.unknown_left_out()
    ]
    description: str | None = None


ResponsesTool = FunctionTool | CustomTool | NamespaceTool


class NamedTool(NamedFunction, tag_field="type", tag="function"):
    """The `tool_choice` by which the answer must call the named function."""


class NamedCustomTool(NamedCustom, tag_field="type", tag="custom"):
    """The `tool_choice` by which the answer must call the named custom tool."""


class AllowedChoice(field.TaggedObject, tag="allowed_tools"):
    """The `tool_choice` that allows only some tools; the model still sees all tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool | NamedCustomTool], field.unknown_left_out()]


Choice = Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedChoice


def read_tools(
    tools: Sequence[ResponsesTool] | None, choice: Choice | None, *, parallel: bool | None
) -> Tools | None:
    """Translate a request's `tools` and `tool_choice`; return the tools that the answer may call.

    Returns None if the answer may call no tool.

    Raises:
        RequestError: a tool is not valid, or the choice names a tool that does not exist.
    """
    mode = choice.mode if isinstance(choice, AllowedChoice) else choice
    tool_fields = []
    callable_tools = []
    for tool_field, tool in _flatten(tools or ()):
        tool_fields.append(tool_field)
        callable_tools.append(tool)
    all_tools = to_tools(callable_tools, mode, parallel=parallel, tool_fields=tool_fields)
    if not isinstance(choice, AllowedChoice):
        return all_tools
    return restrict_tools(all_tools, choice.tools, mode=choice.mode, where="tool_choice.tools")


def split_name(name: str, tools: Sequence[ResponsesTool] | None) -> tuple[str, str | None]:
    """Split the name that the model called, `namespace.name`, into name and namespace.

    The namespace is None for a tool without one.
    """
    for tool in tools or ():
        inner_name = name.removeprefix(f"{tool.name}.")
        if isinstance(tool, NamespaceTool):
            names = [inner_tool.name for inner_tool in tool.tools]
            if inner_name in names:
                return inner_name, tool.name
    return name, None


def _flatten(tools: Sequence[ResponsesTool]) -> Iterator[tuple[str, FunctionBody | TextInputTool]]:
    """Yield each tool of a request with its path in the request, tools in namespaces one by one.

    Raises:
        RequestError: a name is not valid.
    """
    for index, tool in enumerate(tools):
        tool_field = f"tools[{index}]"
        check_name(tool.name, tool_field)
        if not isinstance(tool, NamespaceTool):
            yield tool_field, tool.offered()
            continue
        for inner_index, inner in enumerate(tool.tools):
            inner_field = f"{tool_field}.tools[{inner_index}]"
            check_name(inner.name, inner_field)
            name = f"{tool.name}.{inner.name}"
            description = "\n".join(filter(None, (tool.description, inner.description)))
            yield inner_field, replace(inner.offered(), name=name, description=description or None)
