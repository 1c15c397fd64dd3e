"""Anthropic's tools in the form of OpenAI's, and its blocks of content in that of messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from twostroke.server.body import field
from twostroke.server.protocols.common.fields import CacheControl
from twostroke.server.protocols.common.tools import (
    FunctionBody,
    FunctionName,
    NamedFunction,
    Strict,
    to_tools,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.engine.chat.tools import Tools


class Tool(field.RequestObject):
    """A tool of the client; those that run on Anthropic's servers are not supported."""

    name: FunctionName
    input_schema: Annotated[dict[str, Any], field.doc("A JSON schema of the input.")]
    description: str | None = None
    strict: Strict = None
    type: Literal["custom"] | None = None
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

    other_types: ClassVar[Mapping[str, str]] = field.TEXT_ONLY

    text: str
    cache_control: CacheControl = None
    citations: Annotated[Any, field.hint([], {"enabled": False})] = None


class ToolUseBlock(field.TaggedObject, tag="tool_use"):
    """A call that an answer made."""

    id: str
    name: str
    input: Annotated[
        dict[str, Any] | str | None, field.doc("An object, or its JSON; null has no fields.")
    ] = None
    cache_control: CacheControl = None
    caller: field.SentBack = None


class TextSource(field.TaggedObject, tag="text"):
    """The text of a document."""

    other_types: ClassVar[Mapping[str, str]] = field.TEXT_ONLY

    data: str
    media_type: field.SentBack = None

    @property
    def text(self) -> str:
        """The text."""
        return self.data


class ContentSource(field.TaggedObject, tag="content"):
    """The text of a document, in blocks."""

    content: str | Annotated[list[TextBlock], field.PARTS]

    @property
    def text(self) -> str:
        """The text."""
        return text_of(self.content)


class DocumentBlock(field.TaggedObject, tag="document"):
    """A text document; the model reads its title, its context and its text."""

    source: TextSource | ContentSource
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl = None
    citations: Annotated[Any, field.hint([], {"enabled": False})] = None

    @property
    def text(self) -> str:
        """All of its text."""
        return "\n".join(filter(None, (self.title, self.context, self.source.text)))


class SearchResultBlock(field.TaggedObject, tag="search_result"):
    """A result of the client's own search; the model reads it as text."""

    source: str
    title: str
    content: Annotated[list[TextBlock], field.PARTS]
    cache_control: CacheControl = None
    citations: Annotated[Any, field.hint([], {"enabled": False})] = None

    @property
    def text(self) -> str:
        """All of its text."""
        return "\n".join(filter(None, (self.title, self.source, text_of(self.content))))


class ToolResultBlock(field.TaggedObject, tag="tool_result"):
    """The result of a call; its text says whether it failed."""

    tool_use_id: str
    content: (
        str | Annotated[list[TextBlock | DocumentBlock | SearchResultBlock], field.PARTS] | None
    ) = None
    is_error: bool | None = None
    cache_control: CacheControl = None


class ThinkingBlock(field.TaggedObject, tag="thinking"):
    """The reasoning before an answer."""

    thinking: str
    signature: Annotated[str | None, field.doc("Not checked.")] = None


class RedactedThinkingBlock(field.TaggedObject, tag="redacted_thinking"):
    """Reasoning that only Anthropic can read; it is left out."""

    data: str


Block = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | DocumentBlock
    | SearchResultBlock
)
# Blocks about work that Anthropic's servers did have other types. They are left out.
Blocks = Annotated[list[Block], field.PARTS]
_TEXTS: Final = (TextBlock, DocumentBlock, SearchResultBlock)


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
    return "\n".join(block.text for block in content or () if isinstance(block, _TEXTS))
