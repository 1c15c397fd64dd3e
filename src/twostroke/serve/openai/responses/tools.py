"""Tools of the Responses protocol: functions, and which of them may be called."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from twostroke.core.errors import RequestError, nearest
from twostroke.serve.http.decode import MAX_NAME_LENGTH
from twostroke.serve.http.errors import UnsupportedFieldError
from twostroke.serve.openai.fields import refuse_all_but
from twostroke.serve.tools import FunctionBody, NamedChoice, NamedFunction, ToolBody, to_tools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.chat.tools import Tools
    from twostroke.serve import tools as neutral

NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "output_schema": (),
}


class FunctionTool(
    msgspec.Struct,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="function",
):
    """A function of the client's; there are no tools of the server's."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    # Refused unless neutral.
    allowed_callers: Any = None
    defer_loading: Any = None
    is_async: bool | None = msgspec.field(default=None, name="async")
    output_schema: Any = None


class FunctionChoice(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"
):
    """This function is to be called, and no other."""

    name: str


class NamedTool(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"
):
    """One of the functions that may be called."""

    name: str


class AllowedChoice(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"
):
    """Only these may be called, though the model is told of all."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


Choice = Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice


def read_tools(
    tools: Sequence[FunctionTool] | None, choice: Choice | None, *, parallel: bool | None
) -> Tools | None:
    """Return what may be called, or None if nothing.

    Raises:
        RequestError: as `to_tools`; a tool is no function, or the choice names one that is not
            there.
    """
    bodies = [
        ToolBody(function=_function(tool, f"tools[{place}]"))
        for place, tool in enumerate(tools or ())
    ]
    found = to_tools(bodies, _choice(choice), parallel=parallel)
    if found is None:
        return None
    allowed = _allowed(found, choice) if isinstance(choice, AllowedChoice) else found.names
    return replace(found, functions=tuple(one for one in found.functions if one.name in allowed))


def _function(given: FunctionTool, where: str) -> FunctionBody:
    refuse_all_but(given, NEUTRAL, f"{where}.")
    if given.is_async:
        reason = "is not supported yet: leave it out."
        raise UnsupportedFieldError(reason, field=f"{where}.async")
    return FunctionBody(
        name=given.name,
        description=given.description,
        parameters=given.parameters,
        strict=given.strict,
    )


def _choice(choice: Choice | None) -> neutral.ToolChoice | None:
    if isinstance(choice, FunctionChoice):
        return NamedChoice(function=NamedFunction(name=choice.name))
    return choice.mode if isinstance(choice, AllowedChoice) else choice


def _allowed(tools: Tools, choice: AllowedChoice) -> set[str]:
    """Return the names of the functions that may be called by a choice."""
    if not choice.tools:
        raise RequestError("must name at least one function.", field="tool_choice.tools")
    for place, tool in enumerate(choice.tools):
        if tool.name not in tools.names:
            word, where = tool.name[:MAX_NAME_LENGTH], f"tool_choice.tools[{place}].name"
            reason = "must be one of the tools, got '{value}'.{hint}"
            hint = nearest(word, tools.names)
            raise RequestError(reason, field=where, value=word, hint=hint)
    return {tool.name for tool in choice.tools}
