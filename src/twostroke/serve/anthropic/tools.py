"""Tools of Anthropic's protocol: its fields as OpenAI's, and blocks of content as messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from twostroke.serve.openai.fields import refuse_all_but
from twostroke.serve.tools import FunctionBody, NamedChoice, NamedFunction, ToolBody, to_tools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.chat.tools import Tools
    from twostroke.serve.tools import ToolChoice

NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
NEUTRAL_OF_TEXT: Final[dict[str, tuple[object, ...]]] = {"citations": ([],)}


class CacheControl(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where a prefix is to be kept: nothing to do, for all are kept without being asked."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of the client's; those of Anthropic's servers are not there."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    eager_input_streaming: Any = None  # which is what we do

    # Refused unless neutral.
    allowed_callers: Any = None
    cache_control: CacheControl | None = None
    defer_loading: Any = None
    input_examples: Any = None


class AutoChoice(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="auto"
):
    """Text or calls."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="any"
):
    """A call at least."""

    disable_parallel_tool_use: bool | None = None


class OneChoice(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool"
):
    """A call of this tool."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="none"
):
    """No call."""

    disable_parallel_tool_use: bool | None = None


Choice = AutoChoice | AnyChoice | OneChoice | NoChoice


class TextBlock(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"
):
    """A text."""

    text: str
    cache_control: CacheControl | None = None
    citations: Any = None


class ToolUseBlock(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_use"
):
    """A call that an answer made."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None


class ToolResultBlock(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_result"
):
    """What came of a call; the text says whether it failed."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="thinking"
):
    """The reasoning before an answer; whoever signed it is believed."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(
    msgspec.Struct,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="type",
    tag="redacted_thinking",
):
    """Reasoning that nobody but Anthropic can read; it is left out."""

    data: str


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


def read_tools(tools: Sequence[Tool] | None, choice: Choice | None) -> Tools | None:
    """Return what may be called, or None if nothing.

    Raises:
        RequestError: as `to_tools`; a tool has a field that is not supported.
    """
    for place, tool in enumerate(tools or ()):
        refuse_all_but(tool, NEUTRAL, f"tools[{place}].")
    bodies = [ToolBody(function=_function(tool)) for tool in tools or ()]
    parallel = not (choice and choice.disable_parallel_tool_use)
    return to_tools(bodies, _choice(choice), parallel=parallel)


def text_of(content: str | Sequence[Block], where: str) -> str:
    """Return the text of a content; `where` is its field.

    Raises:
        RequestError: a block has a field that is not supported.
    """
    if isinstance(content, str):
        return content
    texts = []
    for place, block in enumerate(content):
        at = f"{where}[{place}]."
        if isinstance(block, TextBlock):
            refuse_all_but(block, NEUTRAL_OF_TEXT, at)
            texts.append(block.text)
    return "\n".join(texts)


def reasoning_of(content: Sequence[Block]) -> str:
    """Return the reasoning in an answer's content."""
    return "\n".join(block.thinking for block in content if isinstance(block, ThinkingBlock))


def calls_of(content: Sequence[Block]) -> list[dict[str, Any]]:
    """Return the calls in an answer's content, as chat templates have them."""
    return [
        {
            "id": block.id,
            "type": "function",
            "function": {
                "name": block.name,
                "arguments": json.dumps(block.input, ensure_ascii=False),
            },
        }
        for block in content
        if isinstance(block, ToolUseBlock)
    ]


def results_of(content: Sequence[Block], where: str) -> list[dict[str, Any]]:
    """Return the results in a content, each a message of its own for chat templates."""
    return [
        {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": text_of(block.content or "", f"{where}[{place}].content"),
        }
        for place, block in enumerate(content)
        if isinstance(block, ToolResultBlock)
    ]


def _function(tool: Tool) -> FunctionBody:
    return FunctionBody(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )


def _choice(choice: Choice | None) -> ToolChoice | None:
    match choice:
        case OneChoice(name=name):
            return NamedChoice(function=NamedFunction(name=name))
        case AnyChoice():
            return "required"
        case NoChoice():
            return "none"
        case _:
            return None
