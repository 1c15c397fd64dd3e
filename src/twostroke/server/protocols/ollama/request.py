"""Requests to POST /api/chat and /api/generate of Ollama's API."""

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
from twostroke.server.protocols.common.prompts import (
    CalledFunction,
    ChatMessage,
    MixedPrompt,
    ToolCall,
    to_conversation,
)
from twostroke.server.protocols.common.structured_output import to_schema
from twostroke.server.protocols.common.tools import ToolBody, ToolsAs, to_tools

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.core.constraint import Constraint
    from twostroke.server.generation.job import Prompt
    from twostroke.server.generation.response_store import Tenant

# Ollama's defaults, for models whose files have no others.
DEFAULTS: Final = SamplingParams(
    temperature=0.8, top_k=40, top_p=0.9, min_p=0.0, repetition_penalty=1.0
)
_EFFORT_NAMES: Final = {"max": "xhigh"}  # Ollama's names of reasoning efforts, where they differ

NoImages = Annotated[Any, field.unsupported([])]


class OllamaOptions(field.RequestObject):
    """The field `options` of a request: the sampling parameters.

    A parameter that is left out has the model's default, or Ollama's if the model has none.
    """

    num_predict: Annotated[
        int | None, field.doc("At most this many tokens are generated; 0 or less: all that fit.")
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
        int | None,
        field.sampling("seed", "The same seed gives the same answer; -1: a random seed."),
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
    """The function of an earlier tool call.

    Its arguments are an object or JSON text; null stands for no arguments.
    """

    name: str
    arguments: dict[str, Any] | str | None = None
    index: int | None = None


class OllamaCall(msgspec.Struct):
    """A tool call in an assistant's message of the request."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(field.RequestObject):
    """A message of an `/api/chat` request."""

    role: Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
    content: str | None = None
    thinking: Annotated[str | None, field.doc("An assistant's reasoning.")] = None
    tool_calls: Annotated[list[OllamaCall] | None, field.doc("An assistant's calls.")] = None
    tool_name: Annotated[str | None, field.doc("In a tool's message: its function.")] = None
    tool_call_id: Annotated[str | None, field.doc("In a tool's message: its call.")] = None
    images: NoImages = None


class OllamaRequest(field.RequestObject):
    """The fields that requests to both `/api/chat` and `/api/generate` have."""

    model: field.ModelName = None
    stream: Annotated[
        bool | None, field.doc("Stream the answer as lines of JSON; true if left out.")
    ] = None
    format: Annotated[
        str | dict[str, Any] | None,
        field.doc("The format of the answer: `json` for any object, or a JSON schema."),
    ] = None
    options: Annotated[OllamaOptions | None, field.doc("The sampling options.")] = None
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
        field.doc("How many of the likeliest tokens to report for each token, with `logprobs`."),
    ] = None

    keep_alive: KeepAlive = None
    shift: field.Ignored = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """The body of a request to `/api/chat`."""

    messages: Annotated[
        Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None,
        field.doc("The conversation, oldest first; without one, there is no answer."),
    ] = None
    tools: ToolsAs[ToolBody] = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """The body of a request to `/api/generate`."""

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
        list[field.TokenId] | None, field.doc("The `context` of an earlier answer, to continue.")
    ] = None

    images: NoImages = None
    template: Annotated[Any, field.unsupported("")] = None


def read_chat(request: OllamaChatRequest, tenant: Tenant) -> Job:
    """Translate the body of an `/api/chat` request into a job that the engine can run.

    Raises:
        RequestError: a value is out of bounds or not supported; the error's `field` names it.
    """
    tools = to_tools([tool.function for tool in request.tools or ()], None, parallel=None)
    messages = [_to_openai_message(message) for message in request.messages or ()]
    last = messages[-1]
    conversation = to_conversation(
        messages,
        tools,
        opens_turn=None,
        continues=last.role == "assistant" and not last.tool_calls,
        thinking=_thinking(request),
    )
    return _job(request, conversation, tenant=tenant, prompt_field="messages", tools=tools)


def read_generate(request: OllamaGenerateRequest, tenant: Tenant) -> Job:
    """Translate the body of an `/api/generate` request into a job that the engine can run.

    Raises:
        RequestError: a value is out of bounds or not supported; the error's `field` names it.
    """
    text = request.prompt or ""
    if request.parse_special is not None and not request.raw:
        raise RequestError("may only be set where raw is true.", field="parse_special")
    if request.suffix:
        return _job(request, text, tenant=tenant, prompt_field="prompt", suffix=request.suffix)
    if not request.raw:
        template_messages = (
            [{"role": "system", "content": request.system}] if request.system else []
        )
        template_messages.append({"role": "user", "content": text})
        conversation = Conversation(tuple(template_messages), thinking=_thinking(request))
        context = tuple(request.context or ())
        return _job(request, conversation, tenant=tenant, prompt_field="prompt", context=context)
    for name in ("system", "context"):
        if getattr(request, name):
            raise RequestError("cannot be combined with raw: leave one of them out.", field=name)
    return _job(
        request, MixedPrompt((text,), request.parse_special), tenant=tenant, prompt_field="prompt"
    )


def field_names(_request: OllamaRequest) -> Mapping[str, str]:
    """Map the engine's parameter names to Ollama's, so that errors name the client's own fields."""
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
    request: OllamaRequest, prompt: Prompt, tenant: Tenant, prompt_field: str, **other_fields: Any
) -> Job:
    """Build the engine job of an `/api/chat` or `/api/generate` request from its prompt.

    `prompt_field` is the name of the field with the prompt, for errors; `other_fields` are further
    fields of `Job`.
    """
    params = _params(request)
    if isinstance(prompt, Conversation) and request.truncate is not False:
        prompt = replace(prompt, drops_oldest=True, reserved_tokens=params.max_tokens)
    return Job(
        model=request.model,
        prompts=(prompt,),
        params=params,
        default_params=DEFAULTS,
        caller=Caller(tenant=tenant.name, prompt_field=prompt_field),
        stream=request.stream is not False,
        **other_fields,
    )


def _params(request: OllamaRequest) -> SamplingParams:
    """Translate a request's `options` into sampling parameters; unset options are left out."""
    options = request.options or OllamaOptions()
    limit = OLLAMA.first_limit(options) or 0
    values = {
        name: getattr(options, name)
        for name in OllamaOptions.__struct_fields__
        if name in SamplingParams.__struct_fields__
    }
    values |= {
        "max_tokens": min(limit, MAX_TOKENS) if limit > 0 else None,
        "top_k": None if options.top_k is None else max(0, options.top_k),
        "seed": None if options.seed == -1 else options.seed,
        "repetition_penalty": options.repeat_penalty,
        "logprobs": (request.top_logprobs or 0) if request.logprobs else None,
        "constraint": _constraint(request),
    }
    set_values = {name: value for name, value in values.items() if value is not None}
    return SamplingParams(**set_values)


def _constraint(request: OllamaRequest) -> Constraint | None:
    """Return the constraint that a request's `format` sets on the answer; None for free text.

    Raises:
        RequestError: `format` is neither "json" nor a JSON schema.
    """
    format_ = request.format
    if not format_ and not isinstance(format_, dict):
        return None
    if isinstance(format_, str):
        if format_ != "json":
            reason = "must be 'json' or a JSON schema, got '{value}'."
            raise RequestError(reason, field="format", value=format_[:40])
        format_ = dict(ANY_OBJECT)
    return to_schema(format_, "format")


def _thinking(request: OllamaRequest) -> Thinking:
    """Return the reasoning options that a request's field `think` sets."""
    if request.think is None:
        return AS_IT_IS
    if isinstance(request.think, bool):
        return Thinking(request.think, param="think")
    return Thinking(effort=_EFFORT_NAMES.get(request.think, request.think), param="think")


def _to_openai_message(message: OllamaMessage) -> ChatMessage:
    """Convert an Ollama message to OpenAI's form, which the shared checks of chat messages read."""
    calls = [
        ToolCall(CalledFunction(call.function.name, call.function.arguments), call.id)
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

_SECONDS_BY_UNIT: Final = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_DURATION_PART: Final = re.compile(r"(\d{1,12}(?:\.\d{0,9})?|\.\d{1,9})(ns|us|µs|ms|s|m|h)")
_NUMBER: Final = re.compile(r"[+-]?\d{1,12}(\.\d{0,9})?")


def keep_alive_s(request: Any) -> float | None:
    """Return how many seconds the model stays loaded after a request, as `keep_alive` asks.

    None if the request does not set `keep_alive`; infinity for no limit.

    Raises:
        RequestError: the value is not a duration.
    """
    value: str | float | None = request.keep_alive
    if value is None or value == "":
        return None
    if isinstance(value, str):
        value = _seconds(value.strip())
    return math.inf if value < 0 or math.isnan(value) else float(value)


def _seconds(text: str) -> float:
    """Convert the text of a duration, such as `300` or `1h30m`, to seconds.

    Raises:
        RequestError: the text is not a duration.
    """
    if _NUMBER.fullmatch(text):
        return float(text)
    unsigned = text.lstrip("+-")
    parts = _DURATION_PART.findall(unsigned)
    if not parts or "".join(number + unit for number, unit in parts) != unsigned:
        reason = "must be seconds, or a time such as 5m or 1h30m, got '{value}'."
        raise RequestError(reason, field="keep_alive", value=text[:40])
    total_s = sum(float(number) * _SECONDS_BY_UNIT[unit] for number, unit in parts)
    return -total_s if text.startswith("-") else total_s
