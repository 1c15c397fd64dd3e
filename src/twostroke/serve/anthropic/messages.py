"""POST /v1/messages: Anthropic's protocol, and the count of a request's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from twostroke.chat.reasoning import AS_IT_IS, Thinking
from twostroke.core.errors import RequestError
from twostroke.core.sampling import SamplingParams
from twostroke.engine.client import Caller
from twostroke.serve.anthropic.tools import (
    Block,
    CacheControl,
    Choice,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
    calls_of,
    read_tools,
    reasoning_of,
    results_of,
    text_of,
)
from twostroke.serve.job import Conversation, Job, check_messages
from twostroke.serve.openai.fields import refuse_all_but
from twostroke.serve.openai.structure import to_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.chat.tools import Tools
    from twostroke.core.constraint import Constraint
    from twostroke.engine.client import ModelCard
    from twostroke.serve.store import Tenant

ROLES: Final = ("user", "assistant")

_OF_ANSWERS: Final = (ToolUseBlock, ThinkingBlock, RedactedThinkingBlock)

NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
}
NEUTRAL_OF_OUTPUT: Final[dict[str, tuple[object, ...]]] = {"effort": ()}


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message."""

    role: str
    content: str | list[Block]


class Metadata(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """On whose behalf a request is sent."""

    user_id: str | None = None


class JsonFormat(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """JSON that a schema allows."""

    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the answer has to look like."""

    format: JsonFormat | None = None
    effort: Any = None


class ThinkingOn(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="enabled"
):
    """The model is to reason; the budget is a wish that it knows nothing of."""

    budget_tokens: int
    display: Literal["summarized"] | None = None


class ThinkingAsNeeded(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="adaptive"
):
    """The model is to reason where it thinks fit."""

    display: Literal["summarized"] | None = None


class ThinkingOff(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="disabled"
):
    """The model is not to reason."""


ThinkingConfig = ThinkingOn | ThinkingAsNeeded | ThinkingOff


class CountRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What becomes the prompt. null is the same as leaving a field out."""

    messages: list[Message]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    output_config: OutputConfig | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingConfig | None = None

    # Refused unless neutral.
    cache_control: CacheControl | None = None
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None
    speed: Any = None
    thread: Any = None


class MessagesRequest(CountRequest, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to be answered."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    return_timings: bool | None = None

    # Harmless: they change nothing about the answer.
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class TokenCount(msgspec.Struct, frozen=True):
    """How many tokens a prompt has; those in the cache count as well."""

    input_tokens: int


def read(asked: MessagesRequest, tenant: Tenant) -> Job:
    """Translate a request.

    Raises:
        RequestError: a value is out of bounds or not supported; `field` names it.
    """
    temperature = asked.temperature
    if temperature is not None and not 0 <= temperature <= 1:
        raise RequestError(f"must be from 0 to 1, got {temperature:g}.", field="temperature")
    tools, constraint = read_tools(asked.tools, asked.tool_choice), _constraint(asked.output_config)
    if tools is not None and constraint is not None:
        reason = "cannot be combined with output_config.format: leave one of them out."
        raise RequestError(reason, field="tools")
    _check_thinking(asked)
    values = {
        "max_tokens": asked.max_tokens,
        "temperature": temperature,
        "top_k": asked.top_k,
        "top_p": asked.top_p,
        "stop": tuple(asked.stop_sequences or ()),
        "constraint": constraint,
    }
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    return Job(
        model=asked.model,
        prompts=(_conversation(asked, tools),),
        params=SamplingParams(**given),
        caller=Caller(tenant=tenant.name, prompt_field="messages"),
        stream=bool(asked.stream),
        timings=bool(asked.return_timings),
        tools=tools,
    )


def count(asked: CountRequest, card: ModelCard) -> TokenCount:
    """Return how many tokens a request's prompt would have.

    Raises:
        RequestError: a field is not supported, or the messages do not suit the chat template.
    """
    tools = read_tools(asked.tools, asked.tool_choice)
    return TokenCount(len(_conversation(asked, tools).encode(card)))


def _conversation(asked: CountRequest, tools: Tools | None) -> Conversation:
    """Return the messages, a system prompt first; turns of one role in a row become one."""
    refuse_all_but(asked, NEUTRAL)
    if asked.output_config is not None:
        refuse_all_but(asked.output_config, NEUTRAL_OF_OUTPUT, "output_config.")
    if not asked.messages:
        raise RequestError("must have at least one message.", field="messages")
    check_messages(len(asked.messages), "messages")
    turns: list[dict[str, Any]] = []
    texts: list[list[str]] = []  # of each turn, joined at the end
    known = set[str]()  # ids of calls
    if asked.system:
        turns.append({"role": "system"})
        texts.append([text_of(asked.system, "system")])
    for place, message in enumerate(asked.messages):
        _check(message, f"messages[{place}]", known)
        for turn in _turns(message, f"messages[{place}].content"):
            before = turns[-1] if turns else {}
            if turn["role"] == before.get("role") != "tool" and not before.get("tool_calls"):
                turns[-1] = before | turn
                texts[-1].append(turn["content"])
            else:
                turns.append(turn)
                texts.append([turn["content"]])
            known.update(call["id"] for call in turn.get("tool_calls", ()))
    for turn, said in zip(turns, texts, strict=True):
        turn["content"] = "\n".join(filter(None, said))
    last = turns[-1]
    continues = last["role"] == "assistant"
    if continues and (last.get("tool_calls") or last["content"] != last["content"].rstrip()):
        end = "a tool call" if last.get("tool_calls") else "a space"
        reason = f"must not end with {end}, where the last message is the assistant's."
        raise RequestError(reason, field="messages")
    shown = tools.shown if tools is not None else ()
    thinking = AS_IT_IS
    if asked.thinking is not None and not isinstance(asked.thinking, ThinkingAsNeeded):
        thinking = Thinking(isinstance(asked.thinking, ThinkingOn), param="thinking")
    return Conversation(tuple(turns), shown, continues=continues, thinking=thinking)


def _check_thinking(asked: MessagesRequest) -> None:
    if isinstance(asked.thinking, ThinkingOn):
        budget = asked.thinking.budget_tokens
        if not 1 <= budget < asked.max_tokens:
            reason = f"must be at least 1 and less than max_tokens, got {budget}."
            raise RequestError(reason, field="thinking.budget_tokens")


def _check(message: Message, where: str, known: set[str]) -> None:
    """Refuse a role that is none, and blocks that its message cannot have.

    The calls before it have the ids that are `known`.
    """
    if message.role not in ROLES:
        hint = ": use the field system" if message.role == "system" else ""
        reason = "must be user or assistant, got '{value}'{hint}."
        raise RequestError(reason, field=f"{where}.role", value=message.role, hint=hint)
    if isinstance(message.content, str):
        return
    for place, block in enumerate(message.content):
        at = f"{where}.content[{place}]"
        wrong = _OF_ANSWERS if message.role == "user" else ToolResultBlock
        if isinstance(block, wrong):
            reason = f"cannot be part of a message of the role {message.role}."
            raise RequestError(reason, field=at)
        if isinstance(block, ToolResultBlock) and block.tool_use_id not in known:
            reason = "is not the id of an earlier call."
            raise RequestError(reason, field=f"{at}.tool_use_id")


def _turns(message: Message, where: str) -> list[dict[str, Any]]:
    """Return what a message is to a chat template: results of tools are turns of their own."""
    turn: dict[str, Any] = {"role": message.role, "content": text_of(message.content, where)}
    if isinstance(message.content, str):
        return [turn]
    if calls := calls_of(message.content):
        turn["tool_calls"] = calls
    if reasoning := reasoning_of(message.content):
        turn["reasoning_content"] = reasoning
    results = results_of(message.content, where)
    return [*results, turn] if turn["content"] or not results else results


def _constraint(config: OutputConfig | None) -> Constraint | None:
    if config is None or config.format is None:
        return None
    return to_schema(config.format.schema, "output_config.format.schema")


def names(_asked: CountRequest) -> Mapping[str, str]:
    """Return what errors call the engine's fields."""
    return {"stop": "stop_sequences", "tools[].parameters": "tools[].input_schema"}
