"""Tools of the Responses protocol, and which of them the answer may call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from twostroke.server.body import field
from twostroke.server.protocols.common.tools import (
    MAX_TOOLS,
    FreeText,
    FunctionBody,
    FunctionName,
    GrammarDefinition,
    NamedCustom,
    NamedFunction,
    Text,
    check_name,
    only_allowed,
    to_tools,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.engine.chat.tools import Tools


class FunctionTool(FunctionBody, tag_field="type", tag="function"):
    """A function of the client; the server has no tools of its own."""

    allowed_callers: Annotated[Any, field.unsupported(["direct"])] = None
    defer_loading: field.HintOff = None
    is_async: field.HintOff = msgspec.field(default=None, name="async")
    output_schema: field.Hint = None

    def offered(self) -> FunctionBody:
        """Return the tool in the form of all protocols."""
        return self


class TextGrammar(GrammarDefinition, tag_field="type", tag="grammar"):
    """Text that a grammar allows."""


class CustomTool(field.TaggedObject, tag="custom"):
    """A tool of the client whose input is a text."""

    name: FunctionName
    description: str | None = None
    format: Text | TextGrammar | None = None
    allowed_callers: Annotated[Any, field.unsupported(["direct"])] = None
    defer_loading: field.HintOff = None
    is_async: field.HintOff = msgspec.field(default=None, name="async")

    def offered(self) -> FreeText:
        """Return the tool in the form of all protocols."""
        form = self.format
        if not isinstance(form, TextGrammar):
            return FreeText(self.name, self.description)
        where = "format.definition"
        return FreeText(self.name, self.description, form.syntax, form.definition, where)


class NamespaceTool(field.TaggedObject, tag="namespace"):
    """Tools under a common name; the model sees `namespace.name`."""

    name: FunctionName
    tools: Annotated[
        list[FunctionTool | CustomTool], Meta(max_length=MAX_TOOLS), field.unknown_left_out()
    ]
    description: str | None = None


ResponsesTool = FunctionTool | CustomTool | NamespaceTool


class NamedTool(NamedFunction, tag_field="type", tag="function"):
    """The name of one of the functions."""


class NamedCustomTool(NamedCustom, tag_field="type", tag="custom"):
    """The name of one of the custom tools."""


class AllowedChoice(field.TaggedObject, tag="allowed_tools"):
    """Only these functions may be called, although the model sees all."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool | NamedCustomTool], field.unknown_left_out()]


Choice = Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedChoice


def read_tools(
    tools: Sequence[ResponsesTool] | None, choice: Choice | None, *, parallel: bool | None
) -> Tools | None:
    """Return the tools that the answer may call, or None if there are none.

    Raises:
        RequestError: as `to_tools`, or the choice names a function that does not exist.
    """
    mode = choice.mode if isinstance(choice, AllowedChoice) else choice
    tool_fields, offered = [], []
    for tool_field, tool in _flat(tools or ()):
        tool_fields.append(tool_field)
        offered.append(tool)
    all_tools = to_tools(offered, mode, parallel=parallel, tool_fields=tool_fields)
    if not isinstance(choice, AllowedChoice):
        return all_tools
    return only_allowed(all_tools, choice.tools, mode=choice.mode, where="tool_choice.tools")


def split_name(name: str, tools: Sequence[ResponsesTool] | None) -> tuple[str, str | None]:
    """Return the name of a called function, and its namespace if it has one."""
    for tool in tools or ():
        inner = name.removeprefix(f"{tool.name}.")
        if isinstance(tool, NamespaceTool) and any(one.name == inner for one in tool.tools):
            return inner, tool.name
    return name, None


def _flat(tools: Sequence[ResponsesTool]) -> Iterator[tuple[str, FunctionBody | FreeText]]:
    """Yield all tools and their fields of the request; tools of namespaces get longer names.

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
            described = "\n".join(filter(None, (tool.description, inner.description)))
            yield inner_field, replace(inner.offered(), name=name, description=described or None)
