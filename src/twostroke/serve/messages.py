"""POST /v1/messages: Anthropic's protocol, and the count of a request's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import RequestError
from twostroke.core.sampling import MAX_STOP_LENGTH, MAX_STOPS, SamplingParams
from twostroke.engine.client import Caller
from twostroke.serve.dialect import Dialect, Inquiry
from twostroke.serve.fields import refuse_all_but
from twostroke.serve.job import Conversation, Job
from twostroke.serve.messages_reply import MessageWriter, whole
from twostroke.serve.structure import to_schema

if TYPE_CHECKING:
    from twostroke.core.constraint import Constraint
    from twostroke.engine.client import ModelCard

ROLES: Final = ("user", "assistant")

_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "cache_control": (),
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "tools": ([],),
}
_NEUTRAL_OF_TEXT: Final[dict[str, tuple[object, ...]]] = {"cache_control": (), "citations": ([],)}
_NEUTRAL_OF_OUTPUT: Final[dict[str, tuple[object, ...]]] = {"effort": ()}


class TextBlock(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"
):
    """Content may come in blocks; only text is read."""

    text: str
    cache_control: Any = None
    citations: Any = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message."""

    role: str
    content: str | list[TextBlock]


class JsonFormat(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """JSON that a schema allows."""

    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the answer has to look like."""

    format: JsonFormat | None = None
    effort: Any = None


class CountRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What becomes the prompt. null is the same as leaving a field out."""

    messages: list[Message]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    output_config: OutputConfig | None = None

    # Refused unless neutral.
    cache_control: Any = None
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None
    speed: Any = None
    thinking: Any = None
    tool_choice: Any = None
    tools: Any = None


class MessagesRequest(CountRequest, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to be answered."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    # Harmless: they change nothing about the answer.
    metadata: Any = None
    service_tier: Any = None


class TokenCount(msgspec.Struct, frozen=True):
    """How many tokens a prompt has; those in the cache count as well."""

    input_tokens: int


def read(asked: MessagesRequest) -> Job:
    """Translate a request.

    Raises:
        RequestError: a value is out of bounds or not supported; `param` names the field.
    """
    temperature = asked.temperature
    if temperature is not None and not 0 <= temperature <= 1:
        message = f"temperature must be from 0 to 1, not {temperature:g}."
        raise RequestError(message, param="temperature")
    values = {
        "max_tokens": asked.max_tokens,
        "temperature": temperature,
        "top_k": asked.top_k,
        "top_p": asked.top_p,
        "stop": _stops(asked.stop_sequences or []),
        "constraint": _constraint(asked.output_config),
    }
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    return Job(
        model=asked.model,
        prompts=(_conversation(asked),),
        params=SamplingParams(**given),
        caller=Caller(prompt_field="messages"),
        stream=bool(asked.stream),
    )


def count(asked: CountRequest, card: ModelCard) -> TokenCount:
    """Return how many tokens a request's prompt would have.

    Raises:
        RequestError: a field is not supported, or the messages do not suit the chat template.
    """
    return TokenCount(len(_conversation(asked).encode(card)))


def _conversation(asked: CountRequest) -> Conversation:
    """Return the messages, a system prompt first; turns of one role in a row become one."""
    refuse_all_but(asked, _NEUTRAL)
    if asked.output_config is not None:
        refuse_all_but(asked.output_config, _NEUTRAL_OF_OUTPUT, "output_config.")
    if not asked.messages:
        raise RequestError("messages must have at least one message.", param="messages")
    turns: list[dict[str, str]] = []
    if asked.system:
        turns.append({"role": "system", "content": _text(asked.system, "system")})
    for place, message in enumerate(asked.messages):
        where = f"messages[{place}]"
        if message.role not in ROLES:
            hint = ": use the field system" if message.role == "system" else ""
            error = f"{where}.role must be user or assistant, not '{message.role}'{hint}."
            raise RequestError(error, param=f"{where}.role")
        text = _text(message.content, f"{where}.content")
        if turns and turns[-1]["role"] == message.role:
            turns[-1]["content"] += "\n" + text
        else:
            turns.append({"role": message.role, "content": text})
    continues = turns[-1]["role"] == "assistant"
    if continues and turns[-1]["content"] != turns[-1]["content"].rstrip():
        error = "messages: a last one of the assistant's, to be continued, cannot end in a space."
        raise RequestError(error, param="messages")
    return Conversation(tuple(turns), continues=continues)


def _text(content: str | list[TextBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    for place, block in enumerate(content):
        refuse_all_but(block, _NEUTRAL_OF_TEXT, f"{where}[{place}].")
    return "".join(block.text for block in content)


def _stops(stops: list[str]) -> tuple[str, ...]:
    """Return the stop sequences; their bounds are said here, where their name is known."""
    if len(stops) > MAX_STOPS or any(not 1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
        message = (
            f"stop_sequences takes at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} "
            "characters."
        )
        raise RequestError(message, param="stop_sequences")
    return tuple(stops)


def _constraint(config: OutputConfig | None) -> Constraint | None:
    if config is None or config.format is None:
        return None
    return to_schema(config.format.schema, "output_config.format.schema")


DIALECT: Final = Dialect("messages", "msg_", MessagesRequest, read, MessageWriter, whole)
COUNT: Final = Inquiry(CountRequest, count)
