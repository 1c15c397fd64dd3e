"""The response object of the Responses API, and the items of its output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from twostroke.server.generation.events import SchemaMiss
from twostroke.server.protocols.common.logprobs import TokenLogprob
from twostroke.server.protocols.common.tools import FunctionBody
from twostroke.server.protocols.common.usage import TimingsBody
from twostroke.server.protocols.responses.exchange import Exchange
from twostroke.server.protocols.responses.request import conversation_id
from twostroke.server.protocols.responses.tools import FunctionTool

if TYPE_CHECKING:
    from twostroke.engine.output import Usage
    from twostroke.server.generation.protocol import ResponseInfo
    from twostroke.server.protocols.responses.tools import ResponsesTool

# The fields of a request that its response repeats.
_REPEATED_FIELDS: Final = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ResponseStatus = Literal[Status, "queued", "cancelled"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """A text part of a message in a response's output."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """An item of a response's output: a message of the model."""

    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """An item of a response's output: a function call, whose JSON arguments may be cut off."""

    id: str
    call_id: str
    name: str
    status: Status
    arguments: str = ""
    namespace: str | UnsetType = UNSET


class OutputCustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    """An item of a response's output: a custom tool call, whose input text may be cut off."""

    id: str
    call_id: str
    name: str
    status: Status
    input: str = ""
    namespace: str | UnsetType = UNSET


class ThoughtText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """A text part of a reasoning item in a response's output."""

    text: str


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """An item of a response's output: the reasoning before the answer, without a summary.

    A request may ask for `encrypted_content`, which some clients send back in place of the content.
    """

    id: str
    status: Status
    content: list[ThoughtText]
    summary: list[Any] = []
    encrypted_content: str | UnsetType = UNSET


OutputPart = OutputText | ThoughtText
OutputItem = OutputMessage | OutputCall | OutputCustomCall | OutputReasoning


class InputTokensDetails(msgspec.Struct, frozen=True):
    """A part of a response's usage: the prompt tokens found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """A part of a response's usage: reasoning tokens, and accepted and rejected draft tokens."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """The `usage` of a response: the numbers of input and output tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    """The field `incomplete_details` of a response: the reason why it is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct, frozen=True):
    """The field `error` of a response that failed."""

    code: Annotated[str, Meta(extra_json_schema={"enum": ["server_error", "invalid_prompt"]})]
    message: str


class ConversationOfResponse(msgspec.Struct, frozen=True):
    """The field `conversation` of a response: the stored conversation to which it belongs."""

    id: str


class ResponseBody(msgspec.Struct, kw_only=True):
    """The response object of `/v1/responses`, which repeats the options of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus = "in_progress"
    background: bool = False
    completed_at: int | None = None
    conversation: ConversationOfResponse | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    timings: TimingsBody | UnsetType = UNSET
    schema_miss: SchemaMiss = UNSET


def begin_response(info: ResponseInfo) -> ResponseBody:
    """Build the JSON body of a response before its first token is generated, without output."""
    exchange = exchange_of(info)
    params = info.job.params
    request = exchange.request
    format_ = request.text.format if request.text is not None else None
    conversation = conversation_id(request)
    return ResponseBody(
        **{name: getattr(request, name) for name in _REPEATED_FIELDS},
        id=info.id,
        created_at=info.created_s,
        conversation=ConversationOfResponse(conversation) if conversation is not None else None,
        model=info.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning={"effort": request.reasoning and request.reasoning.effort, "summary": None},
        service_tier=info.job.caller.service_tier,
        store=exchange.is_stored,
        temperature=params.values.temperature,
        text={"format": format_ or {"type": "text"}, "verbosity": "medium"},
        tool_choice=request.tool_choice or "auto",
        tools=[_tool_fields(tool) for tool in request.tools or ()],
        top_logprobs=request.top_logprobs or 0,
        top_p=params.values.top_p,
        truncation=request.truncation or "disabled",
        metadata=request.metadata or {},
    )


def _tool_fields(tool: ResponsesTool) -> dict[str, Any]:
    """Return a tool of the request in the form in which the response repeats it.

    Fields that are null are left out, except a function's required fields.
    """
    fields = msgspec.to_builtins(tool)
    required = FunctionBody.__struct_fields__ if isinstance(tool, FunctionTool) else ()
    return {name: value for name, value in fields.items() if value is not None or name in required}


def exchange_of(info: ResponseInfo) -> Exchange:
    """Return the conversation that a response answers, with the data to store for it."""
    (exchange,) = info.job.prompts
    assert isinstance(exchange, Exchange)
    return exchange


def usage_body(usage: Usage, num_reasoning: int) -> ResponseUsage:
    """Convert the engine's token counts to the `usage` of a response."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(
            reasoning_tokens=num_reasoning,
            accepted_prediction_tokens=usage.accepted_tokens,
            rejected_prediction_tokens=usage.rejected_tokens,
        ),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
