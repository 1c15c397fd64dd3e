"""The request fields that OpenAI's endpoints share, and their translation for the engine."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from twostroke.core.errors import RequestError
from twostroke.core.request import DEFAULT_SERVICE_TIER, SERVICE_TIERS
from twostroke.core.sampling import (
    BOUNDS,
    MAX_BIAS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOKENS,
    SamplingParams,
)
from twostroke.engine.chat.reasoning import EFFORTS, MAX_VARIABLES, NO_BUDGET
from twostroke.engine.client import Caller
from twostroke.server.body import field
from twostroke.server.generation.job import Job
from twostroke.server.http.errors import UnsupportedFieldError
from twostroke.server.http.ignored import Ignored
from twostroke.server.protocols.common.structured_output import (
    ChoiceForm,
    GrammarForm,
    JsonForm,
    RegexForm,
    ResponseFormat,
    StructuredOutputs,
    to_constraint,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.server.generation.job import Prompt
    from twostroke.server.generation.response_store import Tenant

MAX_PRIORITY: Final = 1000

# The service tier for each value of `service_tier`. `scale` is a contract with OpenAI, so it is the
# default tier here.
TIERS: Final = {
    "auto": DEFAULT_SERVICE_TIER,
    "default": DEFAULT_SERVICE_TIER,
    "flex": "flex",
    "scale": DEFAULT_SERVICE_TIER,
    "priority": "priority",
}

# The beginnings of opaque texts, which clients keep and send back without reading: reasoning, and
# summaries of conversations. The texts are encoded, not encrypted: a client that shall not show
# them does not look into them.
OPAQUE_REASONING: Final = "twostroke-reasoning:"
OPAQUE_SUMMARY: Final = "twostroke-summary:"

# A key of `logit_bias`: a token id in decimal digits.
TOKEN_ID: Final = re.compile(r"[0-9]{1,9}")

ReasoningEffort = Annotated[
    str | None,
    field.doc("Whether to reason, and how much if the template can.", enum=[*EFFORTS, None]),
    field.DROPPABLE,
]
ReasoningBudget = Annotated[
    int | None,
    field.doc(
        "The most tokens of the reasoning; 0: answer at once, -1: no limit.",
        minimum=NO_BUDGET,
        maximum=MAX_TOKENS,
    ),
]
StopText = Annotated[str, Meta(extra_json_schema={"maxLength": MAX_STOP_LENGTH})]
Label = Annotated[str, Meta(max_length=512)]
MetadataPairs = Annotated[dict[Annotated[str, Meta(max_length=64)], Label], Meta(max_length=16)]
TopLogprobs = Annotated[
    Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
    field.doc("How many of the likeliest tokens to report for each token."),
]
TemplateVariables = Annotated[
    dict[str, Any] | None,
    field.doc("Variables for the chat template.", maxProperties=MAX_VARIABLES),
]

# Names of fields that have an effect only with a page cache.
CACHE_CONTROL_FIELDS: Final = frozenset({"cache_control", "prompt_cache_retention"})

_CACHE_CONTROL_S: Final = {None: 300.0, "5m": 300.0, "1h": 3600.0}  # by `ttl`
_RETENTION_S: Final = {"24h": 86_400.0}


class CacheControlField(field.TaggedObject, tag="ephemeral"):
    """Anthropic's `cache_control`: caches the prompt up to here, for 5 minutes without `ttl`."""

    ttl: Literal["5m", "1h"] | None = None


CacheControl = Annotated[
    CacheControlField | None,
    field.page_cache_only('`{"type": "ephemeral", "ttl": "1h"}` or `"5m"`'),
]
# `in_memory` is the default behaviour; OpenAI's SDKs have also spelled it in-memory.
Retention = Annotated[
    Literal["24h", "in_memory", "in-memory"] | None,
    field.page_cache_only("`24h`", "in_memory", "in-memory"),
]


class StreamOptions(field.RequestObject):
    """The field `stream_options`: whether a streamed response reports its usage."""

    include_usage: Annotated[bool | None, field.doc("End the stream with the usage.")] = None
    continuous_usage_stats: Annotated[
        bool | None,
        field.doc("With `include_usage`: report the usage so far in each chunk, as vLLM does."),
    ] = None
    include_obfuscation: field.IgnoredOff = None


class PredictionPart(field.TaggedObject, tag="text"):
    """A text part of the field `prediction`, which holds a predicted answer."""

    text: str


class Prediction(field.TaggedObject, tag="content"):
    """The field `prediction`: a text that the client expects to be much like the answer.

    The engine uses the text as draft tokens, so a good prediction makes the answer faster.
    """

    content: str | list[PredictionPart]


class ServiceFields(field.RequestObject):
    """The fields that all of OpenAI's generation and embedding requests share, such as `model`."""

    model: field.ModelName = None
    priority: Annotated[
        Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None,
        field.doc("Requests with lower numbers are served first."),
    ] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority"] | None,
        field.doc("The service tier: `priority` is served first, `flex` last."),
        field.DROPPABLE,
    ] = None

    user: field.Ignored = None
    request_id: field.Ignored = None


# Options whose fields in requests are declared in `CommonFields` or by each protocol, because their
# types, names or meanings differ from those in `SamplingParams`.
_DECLARED_OPTIONS: Final = frozenset(
    {"max_tokens", "temperature", "n", "top_k", "logprobs", "prompt_logprobs", "reasoning_budget"}
)

if TYPE_CHECKING:
    SamplingFields = ServiceFields
else:
    # A field for each other numeric option of `SamplingParams`, with the option's bounds and help.
    SamplingFields = msgspec.defstruct(
        "SamplingFields",
        [
            (name, Annotated[bounds.kind | None, field.sampling(name)], None)
            for name, bounds in BOUNDS.items()
            if name not in _DECLARED_OPTIONS
        ],
        bases=(ServiceFields,),
        module=__name__,
    )


class CommonFields(SamplingFields):
    """The fields that all of OpenAI's generation requests share; null counts as left out."""

    stream: field.Stream = None
    stream_options: Annotated[StreamOptions | None, field.doc("Needs `stream`.")] = None
    max_tokens: Annotated[
        int | None,
        field.limit("At most this many tokens are generated; left out, or -1: all that fit."),
    ] = None
    temperature: Annotated[float | None, field.sampling("temperature")] = None
    n: Annotated[int | None, field.sampling("n")] = None
    stop: Annotated[
        StopText | list[StopText] | None,
        field.doc("Texts before which the answer ends.", maxItems=MAX_STOPS),
    ] = None
    logit_bias: Annotated[
        dict[str, float] | None,
        field.doc(
            "Numbers to add to the logits of tokens, by token id; other keys are ignored.",
            maxProperties=MAX_LOGIT_BIAS,
            additionalProperties={"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        ),
    ] = None

    top_k: Annotated[int | None, field.TOP_K] = None
    ignore_eos: Annotated[bool | None, field.doc("Continue after the model's end token.")] = None
    stop_token_ids: Annotated[
        list[field.TokenId] | None,
        field.doc("Tokens that end the answer.", maxItems=MAX_STOP_IDS),
    ] = None
    include_stop_str_in_output: Annotated[bool | None, field.doc("Include the stop text.")] = None
    return_timings: field.Timings = None
    prediction: Annotated[
        Prediction | None, field.doc("A predicted answer; it changes the speed only.")
    ] = None
    speculate: Annotated[
        str | None,
        field.doc(
            "Which method drafts tokens; it changes the speed only.", enum=field.Fact.PROPOSERS
        ),
    ] = None

    # vLLM's further fields.
    allowed_token_ids: Annotated[
        list[field.TokenId] | None,
        field.doc("The only tokens that an answer may have; without an end token it is cut."),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        field.sampling(
            "prompt_logprobs",
            "How many of the likeliest tokens to report for each "
            "token of the prompt, in vLLM's form. Not for streams.",
        ),
    ] = None
    return_token_ids: Annotated[
        bool | None, field.doc("Report the ids of the prompt's and the answer's tokens, too.")
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, field.doc("Write tokens of log-probabilities as `token_id:ID`.")
    ] = None

    response_format: Annotated[ResponseFormat | None, field.doc("The format of the answer.")] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, field.doc("The format of the answer, set by one of its fields.")
    ] = None
    guided_json: JsonForm = None
    guided_regex: RegexForm = None
    guided_choice: ChoiceForm = None
    guided_grammar: GrammarForm = None

    # llama-server's further fields and names.
    grammar: GrammarForm = None
    json_schema: JsonForm = None
    n_predict: Annotated[int | None, field.limit("The same as `max_tokens`; -1: all that fit.")] = (
        None
    )
    repeat_penalty: Annotated[
        float | None,
        field.sampling("repetition_penalty", "The same as `repetition_penalty`."),
    ] = None
    timings_per_token: Annotated[
        bool | None, field.doc("Report `timings` in llama-server's form.")
    ] = None
    return_progress: Annotated[
        bool | None, field.doc("Report in a stream how much of the prompt is prefilled.")
    ] = None
    verbose: Annotated[
        bool | None,
        field.doc("Add `__verbose`: the prompt and the answer in the form of `/completion`."),
    ] = None
    id_slot: field.Ignored = None
    cache_prompt: field.IgnoredOn = None

    metadata: Annotated[Any, field.ignored({})] = None
    store: field.IgnoredOff = None
    safety_identifier: field.Ignored = None
    prompt_cache_key: field.Ignored = None
    prompt_cache_retention: Retention = None
    spaces_between_special_tokens: field.IgnoredOn = None

    bad_words: Annotated[Any, field.unsupported([])] = None
    best_of: Annotated[int | None, field.doc("Accepted if it equals `n`.")] = None
    cache_salt: field.Unsupported = None
    length_penalty: Annotated[Any, field.hint(1.0)] = None
    skip_special_tokens: field.AlwaysOn = None
    truncate_prompt_tokens: field.Unsupported = None
    use_beam_search: field.AlwaysOff = None


# Fields that have the same name in `SamplingParams`.
_ENGINE_NAMES: Final = (
    *(name for name in CommonFields.__struct_fields__ if name in BOUNDS),
    *("ignore_eos", "logit_bias", "stop", "stop_token_ids"),
)

# llama-server's names of fields, by the engine's names.
_LLAMA_NAMES: Final = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty"}


def llama_server_aliases(request: CommonFields) -> dict[str, str]:
    """Map the engine's parameter names to llama-server's, for each alias that a request uses.

    For example, `n_predict` is llama-server's name of `max_tokens`. Errors then name the field that
    the client has sent.
    """
    return {
        name: llama_name
        for name, llama_name in _LLAMA_NAMES.items()
        if getattr(request, llama_name) is not None
    }


def check_combinations(request: CommonFields) -> None:
    """Check that no two fields of a chat or completion request contradict each other.

    Raises:
        UnsupportedFieldError: a field cannot be combined with another field.
    """
    if request.best_of and request.best_of != (request.n or 1):
        raise UnsupportedFieldError("is not supported yet, unless it equals n.", field="best_of")
    if request.prompt_logprobs is not None and request.stream:
        reason = "cannot be combined with stream: leave one of them out."
        raise UnsupportedFieldError(reason, field="prompt_logprobs")


def ignored_fields(request: CommonFields) -> tuple[Ignored, ...]:
    """Return the request fields that have no effect, so that the response can report them.

    An example is `stream_options` without `stream`.
    """
    ignored: list[Ignored] = []
    if request.stream_options is not None and not request.stream:
        error = RequestError("may only be set when stream is true.", field="stream_options")
        ignored.append(Ignored.of(error))
    if any(not TOKEN_ID.fullmatch(key) for key in request.logit_bias or ()):
        error = RequestError("A key of {field} must be a token id.", field="logit_bias")
        ignored.append(Ignored.of(error))
    return tuple(ignored)


def to_params(request: CommonFields, **overrides: Any) -> SamplingParams:
    """Translate a chat or completion request's fields into the engine's sampling parameters.

    Args:
        request: the request.
        overrides: sampling parameters, by the engine's names, that replace the request's own
            values. Protocols pass fields that they name or interpret differently.

    Raises:
        RequestError: a value is out of its bounds.
    """
    values = {name: getattr(request, name) for name in _ENGINE_NAMES}
    values["include_stop"] = request.include_stop_str_in_output
    values["constraint"] = to_constraint(request)
    values |= overrides
    for name, llama_name in llama_server_aliases(request).items():
        values[name] = getattr(request, llama_name)
    bias = request.logit_bias or {}
    values["logit_bias"] = {int(key): bias[key] for key in bias if TOKEN_ID.fullmatch(key)}
    minimum = 1 if values.get("prompt_logprobs") is None else 0
    values["max_tokens"] = to_max_tokens(values["max_tokens"], minimum)
    if values["top_k"] == -1:
        values["top_k"] = 0
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def to_max_tokens(requested: int | None, minimum: int = 1) -> int | None:
    """Check a request's `max_tokens`, and return the maximum number of answer tokens.

    Returns None if only the context limits the answer, that is, if `requested` is None or -1.

    Raises:
        RequestError: the number is less than `minimum`.
    """
    if requested is None or requested == -1:
        return None
    if requested < minimum:
        raise RequestError(
            f"must be -1 or at least {minimum}, got {requested}.", field="max_tokens"
        )
    return min(requested, MAX_TOKENS)


def to_caller(request: ServiceFields, prompt_field: str, tenant: Tenant) -> Caller:
    """Return the engine's record of a request's sender: its tenant, service tier and priority.

    The scheduler orders requests by this record. The request's `priority` overrides the priority of
    its service tier. `prompt_field` is the name of the field with the prompt, for errors.
    """
    service_tier = TIERS[request.service_tier or "auto"]
    priority = SERVICE_TIERS[service_tier] if request.priority is None else request.priority
    names_service_tier = request.service_tier not in {None, "auto"}
    return Caller(
        priority=priority,
        tenant=tenant.name,
        prompt_field=prompt_field,
        service_tier=service_tier,
        names_service_tier=names_service_tier,
    )


def to_job(request: CommonFields, prompts: tuple[Prompt, ...], **other_fields: Any) -> Job:
    """Build the engine job of a chat or completion request from the fields that all requests share.

    `other_fields` are the job's fields that depend on the protocol, such as the tools.
    """
    options = request.stream_options
    return Job(
        model=request.model,
        prompts=prompts,
        speculate="auto" if request.speculate is None else request.speculate,
        prediction=to_prediction(request),
        stream=bool(request.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        timings=bool(request.return_timings),
        shows_progress=bool(request.stream and request.return_progress),
        llama_timings=bool(request.timings_per_token),
        is_verbose=bool(request.verbose),
        tier=None if request.service_tier is None else TIERS[request.service_tier],
        ignored=ignored_fields(request),
        keep_s=retention_s(request.prompt_cache_retention),
        allowed_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        prompt_scores=request.prompt_logprobs is not None,
        **other_fields,
    )


def to_prediction(request: CommonFields) -> str:
    """Return the text of a request's `prediction`, the predicted answer; empty if there is none."""
    if request.prediction is None:
        return ""
    content = request.prediction.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


def cache_control_s(marks: Iterable[CacheControlField | None]) -> float:
    """Return for how many seconds to keep a prompt's KV pages, as a request's `cache_control` asks.

    If several are set, the longest time counts. Returns 0 if all `marks` are None.
    """
    return max((_CACHE_CONTROL_S[mark.ttl] for mark in marks if mark is not None), default=0.0)


def retention_s(retention: str | None) -> float:
    """Return for how many seconds to keep a prompt's KV pages, as `prompt_cache_retention` asks.

    Returns 0 if the pages need only stay in memory as long as there is room.
    """
    return _RETENTION_S.get(retention or "", 0.0)


def encode_opaque_text(text: str, kind: str) -> str:
    """Encode a text for a field that clients do not read, but send back in later requests.

    `kind`, such as `OPAQUE_SUMMARY`, is encoded, too: `decode_opaque_text` checks the kind.
    """
    return kind + base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode()


def decode_opaque_text(content: str | None, kind: str) -> str | None:
    """Return the text of `kind` that `encode_opaque_text` has encoded in a field's content.

    Returns None if the field is missing, damaged or of another kind, or if another server made it.
    """
    if not isinstance(content, str) or not content.startswith(kind):
        return None
    try:
        return base64.urlsafe_b64decode(content.removeprefix(kind)).decode()
    except ValueError:
        return None
