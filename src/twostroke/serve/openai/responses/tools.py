"""Tools of the Responses protocol: functions, and which of them the answer may call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from twostroke.core.errors import RequestError, nearest
from twostroke.serve.describe import field
from twostroke.serve.http.explain import MAX_NAME_LENGTH
from twostroke.serve.tools import FunctionBody, NamedFunction, to_tools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.chat.tools import Tools


class FunctionTool(FunctionBody, tag_field="type", tag="function"):
    """A function of the client; the server has no tools of its own."""

    allowed_callers: Annotated[Any, field.unsupported(["direct"])] = None
    defer_loading: field.HintOff = None
    is_async: field.AlwaysOff = msgspec.field(default=None, name="async")
    output_schema: field.Hint = None


class NamedTool(NamedFunction, tag_field="type", tag="function"):
    """The name of one of the functions."""


class AllowedChoice(field.TaggedObject, tag="allowed_tools"):
    """Only these functions may be called, although the model sees all."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


Choice = Literal["none", "auto", "required"] | NamedTool | AllowedChoice


def read_tools(
    tools: Sequence[FunctionTool] | None, choice: Choice | None, *, parallel: bool | None
) -> Tools | None:
    """Return the tools that the answer may call, or None if there are none.

    Raises:
        RequestError: as `to_tools`, or the choice names a function that does not exist.
    """
    mode = choice.mode if isinstance(choice, AllowedChoice) else choice
    found = to_tools(tools or (), mode, parallel=parallel)
    if found is None or not isinstance(choice, AllowedChoice):
        return found
    for place, tool in enumerate(choice.tools):
        if tool.name not in found.names:
            word, where = tool.name[:MAX_NAME_LENGTH], f"tool_choice.tools[{place}].name"
            reason = "must be one of the tools, got '{value}'.{hint}"
            hint = nearest(word, found.names)
            raise RequestError(reason, field=where, value=word, hint=hint)
    allowed = {tool.name for tool in choice.tools}
    return replace(found, functions=tuple(one for one in found.functions if one.name in allowed))
