"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from twostroke.core.errors import RequestError
from twostroke.core.sampling import MAX_STOPS, MAX_TOKENS, SamplingParams
from twostroke.engine.chat.reasoning import AS_IT_IS, Thinking
from twostroke.engine.client import Caller
from twostroke.server.body import field
from twostroke.server.generation.job import MAX_MESSAGES, Conversation, Job
from twostroke.server.http.ignored import Ignored
from twostroke.server.protocols.anthropic.tools import (
    Blocks,
    Choice,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
    read_tools,
    text_of,
)
from twostroke.server.protocols.common.fields import (
    CacheControl,
    CacheControlField,
    StopText,
    cache_control_s,
)
from twostroke.server.protocols.common.structured_output import to_schema
from twostroke.server.protocols.common.tools import TOOL_CHOICE, ToolsAs, arguments_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from twostroke.core.constraint import Constraint
    from twostroke.engine.chat.tools import Tools
    from twostroke.engine.model_card import ModelCard
    from twostroke.server.generation.response_store import Tenant

# This server's names of efforts, by Anthropic's.
EFFORT_NAMES: Final = {
    **{name: name for name in ("low", "medium", "high", "xhigh")},
    "max": "xhigh",
}
_ANSWER_BLOCKS: Final = (ToolUseBlock, ThinkingBlock, RedactedThinkingBlock)
_WRONG_BLOCKS: Final[dict[str, tuple[type, ...]]] = {
    "user": _ANSWER_BLOCKS,
    "assistant": (ToolResultBlock,),
    "system": (*_ANSWER_BLOCKS, ToolResultBlock),
}


class AnthropicMessage(field.RequestObject):
    """An entry of a request's `messages`: a role, and a text or content blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class JsonFormat(field.TaggedObject, tag="json_schema"):
    """An answer format in a request: the answer is JSON that fits this schema."""

    schema: dict[str, Any]


class OutputConfig(field.RequestObject):
    """The field `output_config` of a request: the answer's format."""

    format: JsonFormat | None = None
    effort: Annotated[
        str | None,
        field.doc("How much to reason, beside `thinking`.", enum=[*EFFORT_NAMES, None]),
        field.DROPPABLE,
    ] = None


Display = Annotated[
    Literal["summarized", "omitted"] | None,
    field.doc("`summarized` sends the reasoning, `omitted` sends its blocks without text."),
]


class ThinkingOn(field.TaggedObject, tag="enabled"):
    """The field `thinking` of a request, which lets the model reason before the answer."""

    budget_tokens: Annotated[
        Annotated[int, Meta(ge=1)],
        field.doc("The most tokens of the reasoning; less than `max_tokens`."),
    ]
    display: Display = None


class ThinkingAsNeeded(field.TaggedObject, tag="adaptive"):
    """The field `thinking` of a request, which lets the model decide whether to reason."""

    display: Display = None


class ThinkingOff(field.TaggedObject, tag="disabled"):
    """The field `thinking` of a request, which makes the model answer without reasoning."""


ThinkingConfig = ThinkingOn | ThinkingAsNeeded | ThinkingOff


class CountRequest(field.RequestObject):
    """The body of a request to `/v1/messages/count_tokens`: all fields that become the prompt.

    A field that is null counts as left out.
    """

    messages: Annotated[
        list[AnthropicMessage],
        Meta(min_length=1, max_length=MAX_MESSAGES, description="The conversation, oldest first."),
    ]
    model: field.ModelName = None
    system: Annotated[
        str | Annotated[list[TextBlock], field.PARTS] | None, field.doc("Text before the messages.")
    ] = None
    output_config: Annotated[OutputConfig | None, field.doc("The format of the answer.")] = None
    output_format: Annotated[
        JsonFormat | None, field.doc("The older name of `output_config.format`.")
    ] = None
    tools: ToolsAs[Tool] = None
    tool_choice: Annotated[Choice | None, TOOL_CHOICE] = None
    thinking: Annotated[ThinkingConfig | None, field.doc("Whether to reason first.")] = None

    cache_control: CacheControl = None
    container: field.Hint = None
    context_management: field.Hint = None
    diagnostics: field.Hint = None
    inference_geo: field.Hint = None
    mcp_servers: Annotated[Any, field.hint([])] = None
    speed: Annotated[Any, field.hint("standard")] = None
    thread: field.Unsupported = None


class MessagesRequest(CountRequest, kw_only=True):
    """The body of a request to `/v1/messages`."""

    max_tokens: Annotated[int, field.doc("At most this many tokens are generated.", minimum=1)]
    stop_sequences: Annotated[
        list[StopText] | None,
        field.doc("Texts before which the answer ends.", maxItems=MAX_STOPS),
    ] = None
    stream: field.Stream = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None, field.sampling("temperature", maximum=1.0)
    ] = None
    top_k: Annotated[int | None, field.TOP_K] = None
    top_p: Annotated[float | None, field.sampling("top_p")] = None
    return_timings: field.Timings = None

    metadata: Annotated[Any, field.ignored({})] = None
    service_tier: Annotated[Any, field.ignored("auto", "standard_only")] = None


class TokenCount(msgspec.Struct, frozen=True):
    """The response to `/v1/messages/count_tokens`: the prompt's tokens, including cached tokens."""

    input_tokens: int


def read(request: MessagesRequest, tenant: Tenant) -> Job:
    """Translate the body of a `/v1/messages` request into a job that the engine can run.

    Raises:
        RequestError: a value is out of bounds or not supported; the error's `field` names it.
    """
    tools = read_tools(request.tools, request.tool_choice)
    thinking = request.thinking
    if isinstance(thinking, ThinkingOn) and thinking.budget_tokens >= request.max_tokens:
        reason = f"must be at least 1 and less than max_tokens, got {thinking.budget_tokens}."
        raise RequestError(reason, field="thinking.budget_tokens")
    values = {
        "max_tokens": min(request.max_tokens, MAX_TOKENS),
        "temperature": request.temperature,
        "top_k": 0 if request.top_k == -1 else request.top_k,
        "top_p": request.top_p,
        "stop": tuple(request.stop_sequences or ()),
        "constraint": _constraint(request),
    }
    sampling_values: dict[str, Any] = {
        name: value for name, value in values.items() if value is not None
    }
    return Job(
        model=request.model,
        prompts=(_conversation(request, tools),),
        params=SamplingParams(**sampling_values),
        caller=Caller(tenant=tenant.name, prompt_field="messages"),
        stream=bool(request.stream),
        timings=bool(request.return_timings),
        omits_reasoning=getattr(thinking, "display", None) == "omitted",
        tools=tools,
        keep_s=cache_control_s(_cache_marks(request)),
    )


def _cache_marks(request: MessagesRequest) -> Iterator[CacheControlField | None]:
    """Yield the `cache_control` of a request and of its tools and content blocks.

    Yields None for the request, a tool or a block that does not set the field.
    """
    yield request.cache_control
    parts: list[Any] = [
        request.system,
        *(message.content for message in request.messages),
        request.tools,
    ]
    while parts:
        part = parts.pop()
        for block in part if isinstance(part, (list, tuple)) else ():
            yield getattr(block, "cache_control", None)
            parts.append(getattr(block, "content", None))  # of a tool's result


def count_tokens(request: CountRequest, card: ModelCard) -> TokenCount:
    """Answer POST /v1/messages/count_tokens with the number of tokens in the request's prompt.

    Raises:
        RequestError: a field is not supported, or the messages do not suit the chat template.
    """
    tools = read_tools(request.tools, request.tool_choice)
    return TokenCount(len(_conversation(request, tools).encode(card)))


def _conversation(request: CountRequest, tools: Tools | None) -> Conversation:
    """Return a request's system prompt and messages as a conversation for the chat template.

    Raises:
        RequestError: a content block does not suit its message's role, or the answer cannot
            continue the last message, because that message ends with a tool call or a space.
    """
    template_messages: list[dict[str, Any]] = []
    call_ids = set[str]()
    if request.system:
        template_messages.append({"role": "system", "content": text_of(request.system)})
    for index, message in enumerate(request.messages):
        _check_blocks(message, f"messages[{index}].content", call_ids)
        for template_message in _template_messages(message):
            call_ids.update(call["id"] for call in template_message.get("tool_calls", ()))
            template_messages.append(template_message)
    last = template_messages[-1]
    continues = last["role"] == "assistant"
    if continues and (last.get("tool_calls") or last["content"] != last["content"].rstrip()):
        end = "a tool call" if last.get("tool_calls") else "a space"
        reason = f"must not end with {end} if the last message is the assistant's."
        raise RequestError(reason, field="messages")
    shown_tools = tools.prompt_tools if tools is not None else ()
    thinking, ignored = _thinking(request)
    return Conversation(
        tuple(template_messages),
        shown_tools,
        continues=continues,
        thinking=thinking,
        ignored=ignored,
    )


def _thinking(request: CountRequest) -> tuple[Thinking, tuple[Ignored, ...]]:
    """Return a request's options for the model's reasoning, and a field without effect.

    An effort has an effect only if the request lets the model reason.
    """
    config = request.thinking
    effort = request.output_config.effort if request.output_config is not None else None
    if config is None or isinstance(config, ThinkingOff):
        off = AS_IT_IS if config is None else Thinking(is_on=False, param="thinking")
        if effort is None:
            return off, ()
        reason = "has no effect unless thinking is enabled or adaptive."
        return off, (Ignored.of(RequestError(reason, field="output_config.effort")),)
    effort_name = None if effort is None else EFFORT_NAMES.get(effort, effort)
    if isinstance(config, ThinkingOn):
        budget = config.budget_tokens
        return Thinking(is_on=True, effort=effort_name, param="thinking", budget=budget), ()
    if effort is None:
        return AS_IT_IS, ()
    return Thinking(effort=effort_name, param="output_config.effort"), ()


def _check_blocks(message: AnthropicMessage, path: str, call_ids: set[str]) -> None:
    """Check that a message's content blocks suit its role, and that results follow their calls.

    Args:
        message: the message to check.
        path: where the message's content is in the request, for errors.
        call_ids: the ids of all tool calls in earlier messages.

    Raises:
        RequestError: the role cannot have such a block, or a tool result belongs to no earlier
            call.
    """
    blocks = () if isinstance(message.content, str) else message.content
    wrong_types = _WRONG_BLOCKS[message.role]
    for index, block in enumerate(blocks):
        if isinstance(block, wrong_types):
            reason = f"cannot be part of a message of the role {message.role}."
            raise RequestError(reason, field=f"{path}[{index}]")
        if isinstance(block, ToolResultBlock) and block.tool_use_id not in call_ids:
            reason = "must be the id of an earlier call, and no earlier call has this id."
            raise RequestError(reason, field=f"{path}[{index}].tool_use_id")


def _template_messages(message: AnthropicMessage) -> list[dict[str, Any]]:
    """Convert one Anthropic message to the messages that chat templates read.

    A chat template needs a separate message for each tool result, so one Anthropic message may
    become several messages.
    """
    template_message: dict[str, Any] = {"role": message.role, "content": text_of(message.content)}
    results = []
    reasoning_texts = []
    for block in () if isinstance(message.content, str) else message.content:
        if isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": arguments_text(block.input)}
            call = {"id": block.id, "type": "function", "function": function}
            template_message.setdefault("tool_calls", []).append(call)
        elif isinstance(block, ThinkingBlock):
            reasoning_texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            text = text_of(block.content)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
    if reasoning := "\n".join(filter(None, reasoning_texts)):
        template_message["reasoning_content"] = reasoning
    return [*results, template_message] if template_message["content"] or not results else results


def _constraint(request: MessagesRequest) -> Constraint | None:
    """Return the constraint that a request sets on the answer's format; None for free text."""
    config = request.output_config
    if config is not None and config.format is not None:
        return to_schema(config.format.schema, "output_config.format.schema", is_strict=True)
    if request.output_format is not None:
        return to_schema(request.output_format.schema, "output_format.schema", is_strict=True)
    return None


def field_names(_request: CountRequest) -> Mapping[str, str]:
    """Map the engine's parameter names to Anthropic's field names, for error messages."""
    return {
        "stop": "stop_sequences",
        "tools[].parameters": "tools[].input_schema",
        "reasoning_budget": "thinking.budget_tokens",
    }
