"""POST /v1/messages: Anthropic's protocol, and the count of a request's tokens."""

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

_OF_ANSWERS: Final = (ToolUseBlock, ThinkingBlock, RedactedThinkingBlock)
_WRONG_BLOCKS: Final[dict[str, tuple[type, ...]]] = {
    "user": _OF_ANSWERS,
    "assistant": (ToolResultBlock,),
    "system": (*_OF_ANSWERS, ToolResultBlock),
}


class AnthropicMessage(field.RequestObject):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class JsonFormat(field.TaggedObject, tag="json_schema"):
    """JSON that a schema allows."""

    schema: dict[str, Any]


class OutputConfig(field.RequestObject):
    """The form of the answer."""

    format: JsonFormat | None = None
    effort: field.Hint = None


Display = Annotated[
    Literal["summarized", "omitted"] | None,
    field.doc("`summarized` sends the reasoning itself, `omitted` blocks without it."),
]


class ThinkingOn(field.TaggedObject, tag="enabled"):
    """The model is to reason."""

    budget_tokens: Annotated[
        Annotated[int, Meta(ge=1)],
        field.doc("Less than `max_tokens`; without effect: the model does not know it."),
    ]
    display: Display = None


class ThinkingAsNeeded(field.TaggedObject, tag="adaptive"):
    """The model decides whether to reason."""

    display: Display = None


class ThinkingOff(field.TaggedObject, tag="disabled"):
    """The model is not to reason."""


ThinkingConfig = ThinkingOn | ThinkingAsNeeded | ThinkingOff


class CountRequest(field.RequestObject):
    """The fields that become the prompt; null leaves a field out."""

    messages: Annotated[
        list[AnthropicMessage],
        Meta(min_length=1, max_length=MAX_MESSAGES, description="The conversation, oldest first."),
    ]
    model: field.ModelName = None
    system: Annotated[
        str | Annotated[list[TextBlock], field.PARTS] | None, field.doc("Text before the messages.")
    ] = None
    output_config: Annotated[OutputConfig | None, field.doc("The form of the answer.")] = None
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
    """The body of a request to be answered."""

    max_tokens: Annotated[int, field.doc("The most tokens to generate.", minimum=1)]
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
    """The number of tokens in a prompt, cached ones included."""

    input_tokens: int


def read(asked: MessagesRequest, tenant: Tenant) -> Job:
    """Translate a request.

    Raises:
        RequestError: a value is out of bounds or not supported; `field` names it.
    """
    tools = read_tools(asked.tools, asked.tool_choice)
    if isinstance(asked.thinking, ThinkingOn) and asked.thinking.budget_tokens >= asked.max_tokens:
        reason = f"must be at least 1 and less than max_tokens, got {asked.thinking.budget_tokens}."
        raise RequestError(reason, field="thinking.budget_tokens")
    values = {
        "max_tokens": min(asked.max_tokens, MAX_TOKENS),
        "temperature": asked.temperature,
        "top_k": 0 if asked.top_k == -1 else asked.top_k,
        "top_p": asked.top_p,
        "stop": tuple(asked.stop_sequences or ()),
        "constraint": _constraint(asked),
    }
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    return Job(
        model=asked.model,
        prompts=(_conversation(asked, tools),),
        params=SamplingParams(**given),
        caller=Caller(tenant=tenant.name, prompt_field="messages"),
        stream=bool(asked.stream),
        timings=bool(asked.return_timings),
        omits_reasoning=getattr(asked.thinking, "display", None) == "omitted",
        tools=tools,
        keep_s=cache_control_s(_marks(asked)),
    )


def _marks(asked: MessagesRequest) -> Iterator[CacheControlField | None]:
    """Yield the fields `cache_control` of a request, of its tools and of its texts."""
    yield asked.cache_control
    parts: list[Any] = [asked.system, *(message.content for message in asked.messages), asked.tools]
    while parts:
        part = parts.pop()
        for block in part if isinstance(part, (list, tuple)) else ():
            yield getattr(block, "cache_control", None)
            parts.append(getattr(block, "content", None))  # of a tool's result


def count(asked: CountRequest, card: ModelCard) -> TokenCount:
    """Return how many tokens a request's prompt would have.

    Raises:
        RequestError: a field is not supported, or the messages do not suit the chat template.
    """
    tools = read_tools(asked.tools, asked.tool_choice)
    return TokenCount(len(_conversation(asked, tools).encode(card)))


def _conversation(asked: CountRequest, tools: Tools | None) -> Conversation:
    """Return the messages after the system prompt; each tool result becomes a message."""
    turns: list[dict[str, Any]] = []
    known = set[str]()  # ids of calls
    if asked.system:
        turns.append({"role": "system", "content": text_of(asked.system)})
    for place, message in enumerate(asked.messages):
        _check_blocks(message, f"messages[{place}].content", known)
        for turn in _turns(message):
            known.update(call["id"] for call in turn.get("tool_calls", ()))
            turns.append(turn)
    last = turns[-1]
    continues = last["role"] == "assistant"
    if continues and (last.get("tool_calls") or last["content"] != last["content"].rstrip()):
        end = "a tool call" if last.get("tool_calls") else "a space"
        reason = f"must not end with {end} if the last message is the assistant's."
        raise RequestError(reason, field="messages")
    shown = tools.shown if tools is not None else ()
    thinking = AS_IT_IS
    if asked.thinking is not None and not isinstance(asked.thinking, ThinkingAsNeeded):
        thinking = Thinking(isinstance(asked.thinking, ThinkingOn), param="thinking")
    return Conversation(tuple(turns), shown, continues=continues, thinking=thinking)


def _check_blocks(message: AnthropicMessage, where: str, known: set[str]) -> None:
    """Refuse blocks that the message's role cannot have, and results of calls that are not `known`.

    Raises:
        RequestError: naming the block.
    """
    blocks = () if isinstance(message.content, str) else message.content
    wrong = _WRONG_BLOCKS[message.role]
    for place, block in enumerate(blocks):
        if isinstance(block, wrong):
            reason = f"cannot be part of a message of the role {message.role}."
            raise RequestError(reason, field=f"{where}[{place}]")
        if isinstance(block, ToolResultBlock) and block.tool_use_id not in known:
            reason = "is not the id of an earlier call."
            raise RequestError(reason, field=f"{where}[{place}].tool_use_id")


def _turns(message: AnthropicMessage) -> list[dict[str, Any]]:
    """Return a message as turns for a chat template; each tool result is a turn."""
    turn: dict[str, Any] = {"role": message.role, "content": text_of(message.content)}
    results, thoughts = [], []
    for block in () if isinstance(message.content, str) else message.content:
        if isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": arguments_text(block.input)}
            call = {"id": block.id, "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolResultBlock):
            text = text_of(block.content)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
    if reasoning := "\n".join(thoughts):
        turn["reasoning_content"] = reasoning
    return [*results, turn] if turn["content"] or not results else results


def _constraint(request: MessagesRequest) -> Constraint | None:
    config = request.output_config
    if config is not None and config.format is not None:
        return to_schema(config.format.schema, "output_config.format.schema", is_strict=True)
    if request.output_format is not None:
        return to_schema(request.output_format.schema, "output_format.schema", is_strict=True)
    return None


def names(_asked: CountRequest) -> Mapping[str, str]:
    """Return the protocol's names for the engine's fields."""
    return {"stop": "stop_sequences", "tools[].parameters": "tools[].input_schema"}
