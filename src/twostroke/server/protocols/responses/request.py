"""The body of a request to `/v1/responses`, and the check for fields that exclude each other."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_args

from msgspec import Meta

from twostroke.core.errors import RequestError
from twostroke.server.body import field
from twostroke.server.protocols.common.fields import (
    CommonFields,
    Label,
    MetadataPairs,
    ReasoningEffort,
    StreamOptions,
    TemplateVariables,
    TopLogprobs,
    check_combinations,
)
from twostroke.server.protocols.common.listing import INCLUDABLE, LOGPROBS
from twostroke.server.protocols.common.structured_output import JsonObject, NamedSchema
from twostroke.server.protocols.common.tools import TOOL_CHOICE, ParallelCalls, Text, ToolsAs
from twostroke.server.protocols.responses.items import Item
from twostroke.server.protocols.responses.tools import Choice, ResponsesTool

MAX_TOOL_CALLS: Final = 2**31 - 1

ITEMS_SCHEMA: Final[dict[str, Any]] = {
    "oneOf": [
        {"type": ["string", "null"]},
        {"type": "array", "items": {"anyOf": [*map(field.reference, get_args(Item))]}},
    ]
}
Echoed = Annotated[Label | None, field.doc("Returned with the answer."), field.DROPPABLE]


class TextSchema(NamedSchema, tag_field="type", tag="json_schema"):
    """The `text.format` of JSON that fits a schema."""


class TextConfig(field.RequestObject):
    """The field `text` of a request: the answer's format."""

    format: Text | JsonObject | TextSchema | None = None
    verbosity: Annotated[Any, field.hint("medium")] = None


class ReasoningConfig(field.RequestObject):
    """The field `reasoning` of a request: how much the model reasons.

    The response has the reasoning itself, not a summary.
    """

    effort: ReasoningEffort = None

    context: Annotated[Any, field.hint("auto")] = None
    generate_summary: Annotated[Any, field.hint("auto")] = None
    mode: Annotated[Any, field.hint("standard")] = None
    summary: Annotated[Any, field.hint("auto")] = None


class ResponseStreamOptions(StreamOptions):
    """The field `stream_options` of a request."""

    include_usage: Annotated[bool | None, field.doc("The last event always has the usage.")] = None
    include_obfuscation: field.HintOff = None


class ConversationReference(field.RequestObject):
    """The field `conversation` of a request: the stored conversation that it continues."""

    id: str


class ResponsesRequest(CommonFields):
    """The body of a request to `/v1/responses`. Items are decoded later: some have no type."""

    input: Annotated[
        str | list[dict[str, Any]] | None,
        field.doc("A text, or items; may be left out with `previous_response_id`.", **ITEMS_SCHEMA),
    ] = None
    instructions: Annotated[
        str | None,
        field.doc("Text before the conversation; later answers do not inherit it."),
    ] = None
    previous_response_id: Annotated[str | None, field.doc("The stored answer to continue.")] = None
    background: Annotated[
        bool | None,
        field.doc("Return the queued response at once, and compute it in the background."),
    ] = None
    conversation: Annotated[
        str | ConversationReference | None,
        field.doc(
            "The stored conversation to continue: its items come first, the answer is added."
        ),
    ] = None
    max_output_tokens: Annotated[
        int | None,
        field.limit("At most this many tokens are generated, with reasoning."),
    ] = None
    stream_options: Annotated[ResponseStreamOptions | None, field.doc("Needs `stream`.")] = None
    text: Annotated[TextConfig | None, field.doc("The format of the answer's text.")] = None
    reasoning: Annotated[ReasoningConfig | None, field.doc("How much to reason.")] = None
    chat_template_kwargs: TemplateVariables = None
    include: Annotated[
        list[Annotated[str, Meta(extra_json_schema={"enum": INCLUDABLE})]] | None,
        field.doc(
            "Further parts of the answer: log-probabilities, and the reasoning in a form to send "
            "back; other values have no effect."
        ),
        field.DROPPABLE,
    ] = None
    top_logprobs: TopLogprobs = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        field.doc("`auto` drops the oldest exchanges of a conversation that is too long."),
    ] = None

    prompt_logprobs: field.Unsupported = None
    return_token_ids: field.AlwaysOff = None
    return_tokens_as_token_ids: field.AlwaysOff = None

    tools: ToolsAs[ResponsesTool] = None
    tool_choice: Annotated[Choice | None, TOOL_CHOICE] = None
    parallel_tool_calls: ParallelCalls = None
    max_tool_calls: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_TOOL_CALLS)] | None,
        field.doc("Returned with the answer. No effect: the server runs no tools to limit."),
        field.DROPPABLE,
    ] = None

    metadata: Annotated[
        MetadataPairs | None, field.doc("Returned with the answer."), field.DROPPABLE
    ] = None
    prompt_cache_key: Echoed = None
    safety_identifier: Echoed = None
    user: Echoed = None
    store: Annotated[bool | None, field.doc("Keep the answer; true if left out.")] = None
    prompt_cache_options: field.Ignored = None

    access_programs: field.Hint = None
    add_special_tokens: field.AlwaysOff = None
    background_options: field.Hint = None
    context_management: Annotated[Any, field.hint([])] = None
    image: field.Hint = None
    moderation: field.Unsupported = None
    n: Annotated[Any, field.unsupported(1)] = None
    prompt: field.Unsupported = None
    return_progress: field.IgnoredOff = None
    timings_per_token: field.AlwaysOff = None

    max_completion_tokens: Annotated[Any, field.renamed("max_output_tokens")] = None
    max_tokens: Annotated[Any, field.renamed("max_output_tokens")] = None
    messages: Annotated[Any, field.renamed("input")] = None
    n_predict: Annotated[Any, field.renamed("max_output_tokens")] = None
    reasoning_effort: Annotated[Any, field.renamed("reasoning.effort")] = None
    response_format: Annotated[Any, field.renamed("text.format")] = None


def conversation_id(request: ResponsesRequest) -> str | None:
    """Return the id of the stored conversation that a request continues; None if not set."""
    reference = request.conversation
    return reference.id if isinstance(reference, ConversationReference) else reference


def check(request: ResponsesRequest) -> None:
    """Check that no two fields of a `/v1/responses` request contradict each other.

    Raises:
        RequestError: a field cannot be combined with another field.
    """
    check_combinations(request)
    if request.conversation is not None and request.previous_response_id is not None:
        reason = "cannot be combined with previous_response_id: leave one of them out."
        raise RequestError(reason, field="conversation")
    if request.background and request.store is False:
        raise RequestError(
            "needs store: true, so that the answer can be retrieved when it is ready.",
            field="background",
        )
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
        reason = f"may only be set when include has '{LOGPROBS}'."
        raise RequestError(reason, field="top_logprobs")
