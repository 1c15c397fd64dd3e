"""POST /api/chat and /api/generate: Ollama's requests."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from twostroke.core.errors import RequestError
from twostroke.core.sampling import MAX_LOGPROBS, MAX_STOPS, MAX_TOKENS, SamplingParams
from twostroke.engine.chat.messages import ROLES
from twostroke.engine.chat.reasoning import AS_IT_IS, Thinking
from twostroke.engine.client import Caller
from twostroke.engine.structured_output.schema.prepare import ANY_OBJECT
from twostroke.server.body import field
from twostroke.server.generation.job import MAX_MESSAGES, Conversation, Job
from twostroke.server.http.answer_limits import OLLAMA
from twostroke.server.protocols.common.fields import StopText
from twostroke.server.protocols.common.structured_output import to_schema
from twostroke.server.protocols.common.tools import ToolBody, ToolsAs, to_tools
from twostroke.server.protocols.llama_server.completion import Mixed
from twostroke.server.protocols.openai.chat import (
    CalledFunction,
    ChatMessage,
    ToolCall,
    to_conversation,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.core.constraint import Constraint
    from twostroke.server.generation.job import Prompt
    from twostroke.server.generation.response_store import Tenant

# Ollama's defaults, for models whose files do not say others.
DEFAULTS: Final = SamplingParams(
    temperature=0.8, top_k=40, top_p=0.9, min_p=0.0, repetition_penalty=1.0
)
_EFFORTS: Final = {"max": "xhigh"}  # Ollama's words for efforts that have another name here

NoImages = Annotated[Any, field.unsupported([])]


class OllamaOptions(field.RequestObject):
    """How to choose tokens; left out: the model's own default, else Ollama's."""

    num_predict: Annotated[
        int | None, field.doc("The most tokens to generate; 0 or less: as many as fit.")
    ] = None
    temperature: Annotated[float | None, field.sampling("temperature")] = None
    top_k: Annotated[
        int | None, field.doc("Draw from the k likeliest tokens; 0 or less: from all.")
    ] = None
    top_p: Annotated[float | None, field.sampling("top_p")] = None
    min_p: Annotated[float | None, field.sampling("min_p")] = None
    repeat_penalty: Annotated[float | None, field.sampling("repetition_penalty")] = None
    presence_penalty: Annotated[float | None, field.sampling("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, field.sampling("frequency_penalty")] = None
    seed: Annotated[
        int | None, field.sampling("seed", "The same seed gives the same answer; -1: any.")
    ] = None
    stop: Annotated[
        StopText | list[StopText] | None,
        field.doc("Texts before which the answer ends.", maxItems=MAX_STOPS),
    ] = None

    num_ctx: field.Ignored = None
    num_keep: field.Ignored = None
    repeat_last_n: field.Ignored = None
    typical_p: field.Ignored = None
    tfs_z: field.Ignored = None
    mirostat: field.Ignored = None
    mirostat_eta: field.Ignored = None
    mirostat_tau: field.Ignored = None
    penalize_newline: field.Ignored = None
    num_batch: field.Ignored = None
    num_gpu: field.Ignored = None
    main_gpu: field.Ignored = None
    num_thread: field.Ignored = None
    use_mmap: field.Ignored = None
    use_mlock: field.Ignored = None
    low_vram: field.Ignored = None
    numa: field.Ignored = None
    draft_num_predict: field.Ignored = None


class OllamaFunction(msgspec.Struct):
    """The function of a call, with its arguments as an object or its JSON; null has none."""

    name: str
    arguments: dict[str, Any] | str | None = None
    index: int | None = None


class OllamaCall(msgspec.Struct):
    """A call that an answer made."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(field.RequestObject):
    """A message."""

    role: Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
    content: str | None = None
    thinking: Annotated[str | None, field.doc("An assistant's reasoning.")] = None
    tool_calls: Annotated[list[OllamaCall] | None, field.doc("An assistant's calls.")] = None
    tool_name: Annotated[str | None, field.doc("In a tool's message: its function.")] = None
    tool_call_id: Annotated[str | None, field.doc("In a tool's message: its call.")] = None
    images: NoImages = None


class OllamaRequest(field.RequestObject):
    """The fields of both requests."""

    model: field.ModelName = None
    stream: Annotated[
        bool | None, field.doc("Send the answer in pieces, as lines of JSON; true if left out.")
    ] = None
    format: Annotated[
        str | dict[str, Any] | None,
        field.doc("The form of the answer: `json` for any object, or a JSON schema."),
    ] = None
    options: Annotated[OllamaOptions | None, field.doc("How to choose tokens.")] = None
    think: Annotated[
        bool | str | None,
        field.doc("Whether to reason first, or how much: `low`, `medium`, `high` or `max`."),
    ] = None
    truncate: Annotated[
        bool | None,
        field.doc(
            "Drop the oldest exchanges of a conversation that is too long; true if left out."
        ),
    ] = None
    logprobs: Annotated[bool | None, field.doc("Report how likely each token was.")] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        field.doc("How many of the likeliest tokens to report at each place, with `logprobs`."),
    ] = None

    keep_alive: KeepAlive = None
    shift: field.Ignored = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """The body of a request for an answer to a conversation."""

    messages: Annotated[
        Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None,
        field.doc("The conversation, oldest first; without one, there is no answer."),
    ] = None
    tools: ToolsAs[ToolBody] = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """The body of a request for an answer to a prompt."""

    prompt: Annotated[str | None, field.doc("A message; without one, there is no answer.")] = None
    system: Annotated[str | None, field.doc("Text before the prompt.")] = None
    suffix: Annotated[
        str | None, field.doc("Text after the answer, for models that can fill in the middle.")
    ] = None
    raw: Annotated[
        bool | None,
        field.doc("Continue the prompt as it is, with its special tokens, without the template."),
    ] = None
    parse_special: field.ParseSpecial = None
    context: Annotated[
        list[field.TokenId] | None, field.doc("The `context` of an earlier answer, to go on from.")
    ] = None

    images: NoImages = None
    template: Annotated[Any, field.unsupported("")] = None


def read_chat(asked: OllamaChatRequest, tenant: Tenant) -> Job:
    """Translate a request.

    Raises:
        RequestError: a value is out of bounds or not supported; `field` names it.
    """
    tools = to_tools([tool.function for tool in asked.tools or ()], None, parallel=None)
    messages = [_message(message) for message in asked.messages or ()]
    last = messages[-1]
    conversation = to_conversation(
        messages,
        tools,
        opens_turn=None,
        continues=last.role == "assistant" and not last.tool_calls,
        thinking=_thinking(asked),
    )
    return _job(asked, conversation, tenant, "messages", tools=tools)


def read_generate(asked: OllamaGenerateRequest, tenant: Tenant) -> Job:
    """Translate a request; raises as `read_chat` does."""
    text = asked.prompt or ""
    if asked.parse_special is not None and not asked.raw:
        raise RequestError("may only be set where raw is true.", field="parse_special")
    if asked.suffix:
        return _job(asked, text, tenant, "prompt", suffix=asked.suffix)
    if not asked.raw:
        turns = [{"role": "system", "content": asked.system}] if asked.system else []
        turns.append({"role": "user", "content": text})
        conversation = Conversation(tuple(turns), thinking=_thinking(asked))
        context = tuple(asked.context or ())
        return _job(asked, conversation, tenant, "prompt", context=context)
    for name in ("system", "context"):
        if getattr(asked, name):
            raise RequestError("cannot be combined with raw: leave one of them out.", field=name)
    return _job(asked, Mixed((text,), asked.parse_special), tenant, "prompt")


def names(_asked: OllamaRequest) -> Mapping[str, str]:
    """Return the protocol's names for the engine's fields."""
    return _NAMES


_NAMES: Final = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{
        name: f"options.{name}"
        for name in OllamaOptions.__struct_fields__
        if name in SamplingParams.__struct_fields__
    },
    "messages[].reasoning_content": "messages[].thinking",
    "tools[].name": "tools[].function.name",
    "tools[].parameters": "tools[].function.parameters",
}


def _job(
    asked: OllamaRequest, prompt: Prompt, tenant: Tenant, prompt_field: str, **own: Any
) -> Job:
    params = _params(asked)
    if isinstance(prompt, Conversation) and asked.truncate is not False:
        prompt = replace(prompt, drops_oldest=True, reserved_tokens=params.max_tokens)
    return Job(
        model=asked.model,
        prompts=(prompt,),
        params=params,
        default_params=DEFAULTS,
        caller=Caller(tenant=tenant.name, prompt_field=prompt_field),
        stream=asked.stream is not False,
        **own,
    )


def _params(asked: OllamaRequest) -> SamplingParams:
    given = asked.options or OllamaOptions()
    limit = OLLAMA.first_limit(given) or 0
    values = {
        name: getattr(given, name)
        for name in OllamaOptions.__struct_fields__
        if name in SamplingParams.__struct_fields__
    }
    values |= {
        "max_tokens": min(limit, MAX_TOKENS) if limit > 0 else None,
        "top_k": None if given.top_k is None else max(0, given.top_k),
        "seed": None if given.seed == -1 else given.seed,
        "repetition_penalty": given.repeat_penalty,
        "logprobs": (asked.top_logprobs or 0) if asked.logprobs else None,
        "constraint": _constraint(asked),
    }
    known = {name: value for name, value in values.items() if value is not None}
    return SamplingParams(**known)


def _constraint(asked: OllamaRequest) -> Constraint | None:
    form = asked.format
    if not form and not isinstance(form, dict):
        return None
    if isinstance(form, str):
        if form != "json":
            reason = "must be 'json' or a JSON schema, got '{value}'."
            raise RequestError(reason, field="format", value=form[:40])
        form = dict(ANY_OBJECT)
    return to_schema(form, "format")


def _thinking(asked: OllamaRequest) -> Thinking:
    if asked.think is None:
        return AS_IT_IS
    if isinstance(asked.think, bool):
        return Thinking(asked.think, param="think")
    return Thinking(effort=_EFFORTS.get(asked.think, asked.think), param="think")


def _message(message: OllamaMessage) -> ChatMessage:
    """Return a message in OpenAI's form."""
    calls = [
        ToolCall(
            CalledFunction(call.function.name, call.function.arguments),
            call.id,
        )
        for call in message.tool_calls or ()
    ]
    return ChatMessage(
        role=message.role.lower(),
        content=message.content or "",
        name=message.tool_name,
        reasoning_content=message.thinking,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
    )


KeepAlive = Annotated[
    str | float | None,
    field.doc(
        "How long the model stays loaded after this request, if the server has several: seconds, "
        "or a text such as `5m` or `1h30m`; 0 unloads it at once, a negative number never."
    ),
]

_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = re.compile(r"(\d{1,12}(?:\.\d{0,9})?|\.\d{1,9})(ns|us|µs|ms|s|m|h)")
_NUMBER: Final = re.compile(r"[+-]?\d{1,12}(\.\d{0,9})?")


def keep_alive_s(request: Any) -> float | None:
    """Return the seconds of a request's `keep_alive`, inf for ever; None if it does not say.

    Raises:
        RequestError: it is not a time.
    """
    value: str | float | None = request.keep_alive
    if value is None or value == "":
        return None
    if isinstance(value, str):
        value = _seconds(value.strip())
    return math.inf if value < 0 or math.isnan(value) else float(value)


def _seconds(text: str) -> float:
    if _NUMBER.fullmatch(text):
        return float(text)
    bare = text.lstrip("+-")
    parts = _PART.findall(bare)
    if not parts or "".join(number + unit for number, unit in parts) != bare:
        reason = "must be seconds, or a time such as 5m or 1h30m, got '{value}'."
        raise RequestError(reason, field="keep_alive", value=text[:40])
    total_s = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return -total_s if text.startswith("-") else total_s
