"""The response object of the Responses protocol, and the items of its output."""

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
    """The text of a message in the output."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """An output item: a message of the model."""

    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """An output item: a function call. Its arguments are JSON, which may be cut off."""

    id: str
    call_id: str
    name: str
    status: Status
    arguments: str = ""
    namespace: str | UnsetType = UNSET


class OutputCustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    """An output item: a custom tool call. Its input is a text, which may be cut off."""

    id: str
    call_id: str
    name: str
    status: Status
    input: str = ""
    namespace: str | UnsetType = UNSET


class ThoughtText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The text of a reasoning item in the output."""

    text: str


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """An output item: the reasoning before the answer, without a summary."""

    id: str
    status: Status
    content: list[ThoughtText]
    summary: list[Any] = []


OutputPart = OutputText | ThoughtText
OutputItem = OutputMessage | OutputCall | OutputCustomCall | OutputReasoning


class InputTokensDetails(msgspec.Struct, frozen=True):
    """The number of prompt tokens found in the prefix cache; cache writes are free."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """The numbers of reasoning tokens, and of draft tokens that were accepted or rejected."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """The usage object of responses: the numbers of input and output tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    """The reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct, frozen=True):
    """The error that ended a response."""

    code: Annotated[str, Meta(extra_json_schema={"enum": ["server_error", "invalid_prompt"]})]
    message: str


class ConversationOfResponse(msgspec.Struct, frozen=True):
    """The stored conversation that a response belongs to."""

    id: str


class ResponseBody(msgspec.Struct, kw_only=True):
    """A response, with the options of its request."""

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
    """Return the JSON body of a response before its first token is generated."""
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
        service_tier=info.job.caller.service,
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
    """Return a tool of the request as the response repeats it.

    Fields that are null are left out, except a function's required fields.
    """
    fields = msgspec.to_builtins(tool)
    required = FunctionBody.__struct_fields__ if isinstance(tool, FunctionTool) else ()
    return {name: value for name, value in fields.items() if value is not None or name in required}


def exchange_of(info: ResponseInfo) -> Exchange:
    """Return the `Exchange` of a response: its conversation, and the parts to store."""
    (exchange,) = info.job.prompts
    assert isinstance(exchange, Exchange)
    return exchange


def usage_body(usage: Usage, num_reasoning: int) -> ResponseUsage:
    """Return the engine's token counts as the usage object of responses.

    `num_reasoning` is the number of reasoning tokens.
    """
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
