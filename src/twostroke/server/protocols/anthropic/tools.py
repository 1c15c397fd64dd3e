"""Anthropic's tools, tool choices and content blocks, and their translation for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from twostroke.server.body import field
from twostroke.server.protocols.common.fields import (
    OPAQUE_REASONING,
    CacheControl,
    decode_opaque_text,
)
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
    """An entry of a request's `tools`: a function that the client runs.

    Tools that run on Anthropic's own servers are not supported.
    """

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
    """The field that all of Anthropic's tool choices have: whether to forbid several calls."""

    disable_parallel_tool_use: Annotated[bool | None, field.doc("Allow at most one call.")] = None


class AutoChoice(ChoiceFields, tag="auto"):
    """The `tool_choice` that lets the model answer with text, with tool calls, or with both."""


class AnyChoice(ChoiceFields, tag="any"):
    """The `tool_choice` that requires at least one call of any tool."""


class OneChoice(ChoiceFields, tag="tool", kw_only=True):
    """The `tool_choice` that requires a call of the named tool."""

    name: str


class NoChoice(ChoiceFields, tag="none"):
    """The `tool_choice` that allows no tool calls."""


Choice = AutoChoice | AnyChoice | OneChoice | NoChoice
_MODES: Final[dict[type, str]] = {AnyChoice: "required", NoChoice: "none"}  # OpenAI's names


class TextBlock(field.TaggedObject, tag="text"):
    """A content block of a request's message: text."""

    other_types: ClassVar[Mapping[str, str]] = field.TEXT_ONLY

    text: str
    cache_control: CacheControl = None
    citations: Annotated[Any, field.hint([], {"enabled": False})] = None


class ToolUseBlock(field.TaggedObject, tag="tool_use"):
    """A content block of a request's message: a tool call of an earlier answer."""

    id: str
    name: str
    input: Annotated[
        dict[str, Any] | str | None, field.doc("An object, or its JSON; null is an empty object.")
    ] = None
    cache_control: CacheControl = None
    caller: field.SentBack = None


class TextSource(field.TaggedObject, tag="text"):
    """The source of a document block that is one text."""

    other_types: ClassVar[Mapping[str, str]] = field.TEXT_ONLY

    data: str
    media_type: field.SentBack = None

    @property
    def text(self) -> str:
        """The text of the document."""
        return self.data


class ContentSource(field.TaggedObject, tag="content"):
    """The source of a document block that is a text or a list of text blocks."""

    content: str | Annotated[list[TextBlock], field.PARTS]

    @property
    def text(self) -> str:
        """The text of the document; text blocks are joined by newlines."""
        return text_of(self.content)


class DocumentBlock(field.TaggedObject, tag="document"):
    """A content block of a request's message: a text document, with a title and context if sent."""

    source: TextSource | ContentSource
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl = None
    citations: Annotated[Any, field.hint([], {"enabled": False})] = None

    @property
    def text(self) -> str:
        """The document's title, context and text, joined by newlines, as the model reads them."""
        return "\n".join(filter(None, (self.title, self.context, self.source.text)))


class SearchResultBlock(field.TaggedObject, tag="search_result"):
    """A content block of a request's message: a result of the client's search, read as text."""

    source: str
    title: str
    content: Annotated[list[TextBlock], field.PARTS]
    cache_control: CacheControl = None
    citations: Annotated[Any, field.hint([], {"enabled": False})] = None

    @property
    def text(self) -> str:
        """The search result's title, source and text, joined by newlines, for the model."""
        return "\n".join(filter(None, (self.title, self.source, text_of(self.content))))


class ToolResultBlock(field.TaggedObject, tag="tool_result"):
    """A content block of a request's message: the result of a tool call.

    The model sees only the content, not `is_error`.
    """

    tool_use_id: str
    content: (
        str | Annotated[list[TextBlock | DocumentBlock | SearchResultBlock], field.PARTS] | None
    ) = None
    is_error: bool | None = None
    cache_control: CacheControl = None


class ThinkingBlock(field.TaggedObject, tag="thinking"):
    """A content block of a request's message: the reasoning of an earlier answer.

    If the earlier response left out the reasoning's text, `signature` contains the text.
    """

    thinking: str
    signature: Annotated[str | None, field.doc("Not checked.")] = None

    @property
    def text(self) -> str:
        """The reasoning; empty if another server omitted it."""
        return self.thinking or decode_opaque_text(self.signature, OPAQUE_REASONING) or ""


class RedactedThinkingBlock(field.TaggedObject, tag="redacted_thinking"):
    """A content block with encrypted reasoning, which only Anthropic can read; it is ignored."""

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
# Blocks about work of Anthropic's servers have other types; they are removed from the list.
Blocks = Annotated[list[Block], field.PARTS]
_TEXT_BLOCKS: Final = (TextBlock, DocumentBlock, SearchResultBlock)


def read_tools(tools: Sequence[Tool] | None, choice: Choice | None) -> Tools | None:
    """Translate Anthropic's `tools` and `tool_choice`; return the tools that the answer may call.

    Returns None if the answer may call no tool.

    Raises:
        RequestError: a tool is not valid, or the choice names a tool that does not exist.
    """
    functions = [
        FunctionBody(
            tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
        for tool in tools or ()
    ]
    if isinstance(choice, OneChoice):
        mode: str | NamedFunction | None = NamedFunction(choice.name)
    else:
        mode = _MODES.get(type(choice))
    parallel = not (choice and choice.disable_parallel_tool_use)
    return to_tools(functions, mode, parallel=parallel)


def text_of(content: str | Sequence[Block] | None) -> str:
    """Return the text in the content of a message or a tool result.

    The texts of the content blocks are joined by newlines. Reasoning, tool calls and tool results
    are left out.
    """
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content or () if isinstance(block, _TEXT_BLOCKS))
