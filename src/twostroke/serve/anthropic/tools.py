"""Anthropic's tools in the form of OpenAI's, and its blocks of content in that of messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from twostroke.serve.describe import field
from twostroke.serve.pins import CacheControl
from twostroke.serve.tools import FunctionBody, FunctionName, NamedFunction, Strict, to_tools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.chat.tools import Tools


class Tool(field.RequestObject):
    """A tool of the client; those that run on Anthropic's servers are not supported."""

    name: FunctionName
    input_schema: Annotated[dict[str, Any], field.doc("A JSON schema of the input.")]
    description: str | None = None
    strict: Strict = None
    type: Annotated[
        Literal["custom"] | None,
        field.advice({"*": "Tools that Anthropic defines or runs are not supported."}),
    ] = None
    eager_input_streaming: field.Ignored = None

    allowed_callers: Annotated[Any, field.unsupported(["direct"])] = None
    cache_control: CacheControl = None
    defer_loading: field.HintOff = None
    input_examples: Annotated[Any, field.hint([])] = None


class ChoiceFields(field.TaggedObject):
    """The field that all choices share."""

    disable_parallel_tool_use: Annotated[bool | None, field.doc("Allow at most one call.")] = None


class AutoChoice(ChoiceFields, tag="auto"):
    """Text or calls."""


class AnyChoice(ChoiceFields, tag="any"):
    """At least one call."""


class OneChoice(ChoiceFields, tag="tool", kw_only=True):
    """A call of this tool."""

    name: str


class NoChoice(ChoiceFields, tag="none"):
    """No call."""


Choice = AutoChoice | AnyChoice | OneChoice | NoChoice
_MODES: Final[dict[type, str]] = {AnyChoice: "required", NoChoice: "none"}  # OpenAI's words


class TextBlock(field.TaggedObject, tag="text"):
    """A text."""

    text: str
    cache_control: CacheControl = None
    citations: Annotated[Any, field.hint([], {"enabled": False})] = None


class ToolUseBlock(field.TaggedObject, tag="tool_use"):
    """A call that an answer made."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: field.SentBack = None


class ToolResultBlock(field.TaggedObject, tag="tool_result"):
    """The result of a call; its text says whether it failed."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None


class ThinkingBlock(field.TaggedObject, tag="thinking"):
    """The reasoning before an answer."""

    thinking: str
    signature: Annotated[str | None, field.doc("Not checked.")] = None


class RedactedThinkingBlock(field.TaggedObject, tag="redacted_thinking"):
    """Reasoning that only Anthropic can read; it is left out."""

    data: str


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


def read_tools(tools: Sequence[Tool] | None, choice: Choice | None) -> Tools | None:
    """Return the tools that the answer may call, or None without tools; raises as `to_tools`."""
    functions = [
        FunctionBody(tool.name, tool.description, tool.input_schema, tool.strict)
        for tool in tools or ()
    ]
    mode = NamedFunction(choice.name) if isinstance(choice, OneChoice) else _MODES.get(type(choice))
    parallel = not (choice and choice.disable_parallel_tool_use)
    return to_tools(functions, mode, parallel=parallel)


def text_of(content: str | Sequence[Block] | None) -> str:
    """Return the text of a content."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content or () if isinstance(block, TextBlock))
