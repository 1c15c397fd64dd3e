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
_REPEATED: Final = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "user"),
)

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ResponseStatus = Literal[Status, "queued", "cancelled"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call to make; arguments are JSON and may be cut off."""

    id: str
    call_id: str
    name: str
    status: Status
    arguments: str = ""
    namespace: str | UnsetType = UNSET


class OutputCustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool to make; its input is a text that may be cut off."""

    id: str
    call_id: str
    name: str
    status: Status
    input: str = ""
    namespace: str | UnsetType = UNSET


class ThoughtText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The reasoning before an answer, without a summary."""

    id: str
    status: Status
    content: list[ThoughtText]
    summary: list[Any] = []


OutputPart = OutputText | ThoughtText
OutputItem = OutputMessage | OutputCall | OutputCustomCall | OutputReasoning


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Prompt tokens found in the prefix cache; writing to it costs nothing."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Tokens of reasoning, and guessed tokens; accepted ones are part of the answer."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """The usage object of responses."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct, frozen=True):
    """What went wrong."""

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


def begun(reply: ResponseInfo) -> ResponseBody:
    """Return the response before its first token."""
    exchange, params = exchange_of(reply), reply.job.params
    asked = exchange.asked
    form = asked.text.format if asked.text is not None else None
    conversation = conversation_id(asked)
    return ResponseBody(
        **{name: getattr(asked, name) for name in _REPEATED},
        id=reply.id,
        created_at=reply.created_s,
        conversation=ConversationOfResponse(conversation) if conversation is not None else None,
        model=reply.model,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        reasoning={"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
        service_tier=reply.job.caller.service,
        store=exchange.is_stored,
        temperature=params.values.temperature,
        text={"format": form or {"type": "text"}, "verbosity": "medium"},
        tool_choice=asked.tool_choice or "auto",
        tools=[_shown(tool) for tool in asked.tools or ()],
        top_logprobs=asked.top_logprobs or 0,
        top_p=params.values.top_p,
        truncation=asked.truncation or "disabled",
        metadata=asked.metadata or {},
    )


def _shown(tool: ResponsesTool) -> dict[str, Any]:
    """Return a tool as the response repeats it: a function always has all its own fields."""
    fields = msgspec.to_builtins(tool)
    own = FunctionBody.__struct_fields__ if isinstance(tool, FunctionTool) else ()
    return {name: value for name, value in fields.items() if value is not None or name in own}


def exchange_of(reply: ResponseInfo) -> Exchange:
    """Return the conversation that a reply answers."""
    (exchange,) = reply.job.prompts
    assert isinstance(exchange, Exchange)
    return exchange


def usage_body(usage: Usage, num_reasoning: int) -> ResponseUsage:
    """Return this protocol's form of a usage; `num_reasoning` of the tokens were reasoning."""
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(num_reasoning, usage.accepted_tokens, usage.rejected_tokens),
        usage.prompt_tokens + usage.completion_tokens,
    )
