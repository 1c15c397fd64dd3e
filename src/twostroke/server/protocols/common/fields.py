"""Fields that several of OpenAI's requests share, and how they become sampling parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta

from twostroke.core.errors import RequestError
from twostroke.core.request import DEFAULT_SERVICE, SERVICES
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
from twostroke.engine.chat.reasoning import EFFORTS, MAX_VARIABLES
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

# OpenAI's words for classes of service; without contracts for more, two of them are the default.
TIERS: Final = {
    "auto": DEFAULT_SERVICE,
    "default": DEFAULT_SERVICE,
    "flex": "flex",
    "scale": DEFAULT_SERVICE,
    "priority": "priority",
}

TOKEN_ID: Final = re.compile(r"[0-9]{1,9}")

ReasoningEffort = Annotated[
    str | None,
    field.doc("Whether to reason, and how much if the template can.", enum=[*EFFORTS, None]),
    field.DROPPABLE,
]
StopText = Annotated[str, Meta(extra_json_schema={"maxLength": MAX_STOP_LENGTH})]
Label = Annotated[str, Meta(max_length=512)]
Pairs = Annotated[dict[Annotated[str, Meta(max_length=64)], Label], Meta(max_length=16)]
TopLogprobs = Annotated[
    Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
    field.doc("How many of the likeliest tokens to report at each place."),
]
TemplateVariables = Annotated[
    dict[str, Any] | None,
    field.doc("Variables for the chat template.", maxProperties=MAX_VARIABLES),
]


# Names of fields that have an effect where there is a page cache.
KEEPING: Final = frozenset({"cache_control", "prompt_cache_retention"})

_MARKED_S: Final = {None: 300.0, "5m": 300.0, "1h": 3600.0}  # by `ttl`
_RETAINED_S: Final = {"24h": 86_400.0}


class CacheControlField(field.TaggedObject, tag="ephemeral"):
    """Anthropic's mark: what stands before it is to be kept, for 5 minutes if it says nothing."""

    ttl: Literal["5m", "1h"] | None = None


CacheControl = Annotated[
    CacheControlField | None, field.keeping('`{"type": "ephemeral", "ttl": "1h"}` or `"5m"`')
]
# OpenAI's reference has in_memory, which is what happens anyway; its SDKs have written in-memory.
Retention = Annotated[
    Literal["24h", "in_memory", "in-memory"] | None,
    field.keeping("`24h`", "in_memory", "in-memory"),
]


class TextPart(field.TaggedObject, tag="text"):
    """A part of a message's content; only text is read."""

    other_types: ClassVar[Mapping[str, str]] = field.TEXT_ONLY

    text: str


class RefusalPart(field.TaggedObject, tag="refusal"):
    """An assistant's reason why there is no other text."""

    refusal: str

    @property
    def text(self) -> str:
        """The reason."""
        return self.refusal


class StreamOptions(field.RequestObject):
    """What a stream carries besides the answer."""

    include_usage: Annotated[bool | None, field.doc("End the stream with the usage.")] = None
    continuous_usage_stats: Annotated[
        bool | None,
        field.doc("With `include_usage`: report the usage so far in each chunk, as vLLM does."),
    ] = None
    include_obfuscation: field.IgnoredOff = None


class PredictionPart(field.TaggedObject, tag="text"):
    """A part of a prediction's content."""

    text: str


class Prediction(field.TaggedObject, tag="content"):
    """A guess at the answer: the more of it is right, the faster the answer comes."""

    content: str | list[PredictionPart]


class ServiceFields(field.RequestObject):
    """The fields of all of OpenAI's requests that the model computes something for."""

    model: field.ModelName = None
    priority: Annotated[
        Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None,
        field.doc("Requests with lower numbers are served first."),
    ] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority"] | None,
        field.doc("The class of service: `priority` is served first, `flex` last."),
        field.DROPPABLE,
    ] = None

    user: field.Ignored = None
    request_id: field.Ignored = None


class CommonFields(ServiceFields):
    """The fields that requests for text have in common; null leaves a field out."""

    stream: field.Stream = None
    stream_options: Annotated[StreamOptions | None, field.doc("Needs `stream`.")] = None
    max_tokens: Annotated[
        int | None, field.limit("The most tokens to generate; left out, or -1: as many as fit.")
    ] = None
    temperature: Annotated[float | None, field.sampling("temperature")] = None
    top_p: Annotated[float | None, field.sampling("top_p")] = None
    n: Annotated[int | None, field.sampling("n")] = None
    stop: Annotated[
        StopText | list[StopText] | None,
        field.doc("Texts before which the answer ends.", maxItems=MAX_STOPS),
    ] = None
    presence_penalty: Annotated[float | None, field.sampling("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, field.sampling("frequency_penalty")] = None
    logit_bias: Annotated[
        dict[str, float] | None,
        field.doc(
            "Numbers to add to the logits of tokens, by token id; other keys are ignored.",
            maxProperties=MAX_LOGIT_BIAS,
            additionalProperties={"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        ),
    ] = None
    seed: Annotated[int | None, field.sampling("seed")] = None

    top_k: Annotated[int | None, field.TOP_K] = None
    min_p: Annotated[float | None, field.sampling("min_p")] = None
    repetition_penalty: Annotated[float | None, field.sampling("repetition_penalty")] = None
    min_tokens: Annotated[int | None, field.sampling("min_tokens")] = None
    ignore_eos: Annotated[bool | None, field.doc("Continue after the model's end token.")] = None
    stop_token_ids: Annotated[
        list[field.TokenId] | None,
        field.doc("Tokens that end the answer.", maxItems=MAX_STOP_IDS),
    ] = None
    include_stop_str_in_output: Annotated[bool | None, field.doc("Include the stop text.")] = None
    return_timings: field.Timings = None
    prediction: Annotated[
        Prediction | None, field.doc("A guess at the answer; it changes the speed only.")
    ] = None
    speculate: Annotated[
        str | None,
        field.doc(
            "Which method guesses tokens; it changes the speed only.", enum=field.Fact.PROPOSERS
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
            "How many of the likeliest tokens to report at each "
            "place of the prompt, in vLLM's form. Not for streams.",
        ),
    ] = None
    return_token_ids: Annotated[
        bool | None, field.doc("Report the ids of the prompt's and the answer's tokens, too.")
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, field.doc("Write tokens of log-probabilities as `token_id:ID`.")
    ] = None

    response_format: Annotated[ResponseFormat | None, field.doc("The form of the answer.")] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, field.doc("The form of the answer, in one of several ways.")
    ] = None
    guided_json: JsonForm = None
    guided_regex: RegexForm = None
    guided_choice: ChoiceForm = None
    guided_grammar: GrammarForm = None

    # llama-server's further fields and names.
    grammar: GrammarForm = None
    json_schema: JsonForm = None
    n_predict: Annotated[
        int | None, field.limit("The same as `max_tokens`; -1: as many as fit.")
    ] = None
    repeat_penalty: Annotated[
        float | None,
        field.sampling("repetition_penalty", "The same as `repetition_penalty`."),
    ] = None
    timings_per_token: Annotated[
        bool | None, field.doc("Report `timings` in llama-server's form.")
    ] = None
    return_progress: Annotated[
        bool | None, field.doc("Report in a stream how much of the prompt is read.")
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


_SAME_NAME: Final = (
    *(name for name in CommonFields.__struct_fields__ if name in BOUNDS),
    *("ignore_eos", "logit_bias", "stop", "stop_token_ids"),
)

# llama-server's names of fields, by ours.
_OTHER_NAMES: Final = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty"}


def other_names(asked: CommonFields) -> dict[str, str]:
    """Return the names of the engine's fields that a request uses besides ours, for errors."""
    return {own: name for own, name in _OTHER_NAMES.items() if getattr(asked, name) is not None}


def check_combinations(asked: CommonFields) -> None:
    """Refuse fields that do not suit each other.

    Raises:
        RequestError: naming the field.
    """
    if asked.best_of and asked.best_of != (asked.n or 1):
        raise UnsupportedFieldError("is not supported yet, unless it equals n.", field="best_of")
    if asked.prompt_logprobs is not None and asked.stream:
        reason = "cannot be combined with stream: leave one of them out."
        raise UnsupportedFieldError(reason, field="prompt_logprobs")


def ignored_in(asked: CommonFields) -> tuple[Ignored, ...]:
    """Return the fields that have no effect because of their values."""
    found: list[Ignored] = []
    if asked.stream_options is not None and not asked.stream:
        error = RequestError("may only be set when stream is true.", field="stream_options")
        found.append(Ignored.of(error))
    if any(not TOKEN_ID.fullmatch(key) for key in asked.logit_bias or ()):
        error = RequestError("A key of {field} must be a token id.", field="logit_bias")
        found.append(Ignored.of(error))
    return tuple(found)


def to_params(asked: CommonFields, **own: Any) -> SamplingParams:
    """Return how to choose tokens; `own` are values that one protocol names otherwise.

    Raises:
        RequestError: a value is out of its bounds.
    """
    values = {name: getattr(asked, name) for name in _SAME_NAME}
    values["include_stop"] = asked.include_stop_str_in_output
    values["constraint"] = to_constraint(asked)
    values |= own
    values |= {own: getattr(asked, name) for own, name in other_names(asked).items()}
    bias = asked.logit_bias or {}
    values["logit_bias"] = {int(key): bias[key] for key in bias if TOKEN_ID.fullmatch(key)}
    least = 1 if values.get("prompt_logprobs") is None else 0
    values["max_tokens"] = to_limit(values["max_tokens"], least)
    if values["top_k"] == -1:
        values["top_k"] = 0
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def to_limit(given: int | None, least: int = 1) -> int | None:
    """Return the most tokens to generate, or None for as many as fit (-1).

    Raises:
        RequestError: it is less than `least`.
    """
    if given is None or given == -1:
        return None
    if given < least:
        raise RequestError(f"must be -1 or at least {least}, got {given}.", field="max_tokens")
    return min(given, MAX_TOKENS)


def to_caller(asked: ServiceFields, prompt_field: str, tenant: Tenant) -> Caller:
    """Return the sender of a request; `prompt_field` is the field with the prompt.

    `priority` overrides the priority of the class of service.
    """
    service = TIERS[asked.service_tier or "auto"]
    priority = SERVICES[service] if asked.priority is None else asked.priority
    is_named = asked.service_tier not in {None, "auto"}
    return Caller(priority, tenant.name, prompt_field, service, names_class=is_named)


def to_job(asked: CommonFields, prompts: tuple[Prompt, ...], **own: Any) -> Job:
    """Return the job of a chat or completion request; `own` are the fields of only one of them."""
    options = asked.stream_options
    return Job(
        model=asked.model,
        prompts=prompts,
        speculate="auto" if asked.speculate is None else asked.speculate,
        prediction=to_prediction(asked),
        stream=bool(asked.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        timings=bool(asked.return_timings),
        shows_progress=bool(asked.stream and asked.return_progress),
        llama_timings=bool(asked.timings_per_token),
        is_verbose=bool(asked.verbose),
        tier=None if asked.service_tier is None else TIERS[asked.service_tier],
        ignored=ignored_in(asked),
        keep_s=retained_s(asked.prompt_cache_retention),
        allowed_ids=None if asked.allowed_token_ids is None else tuple(asked.allowed_token_ids),
        token_ids=bool(asked.return_token_ids),
        tokens_as_ids=bool(asked.return_tokens_as_token_ids),
        prompt_scores=asked.prompt_logprobs is not None,
        **own,
    )


def to_prediction(asked: CommonFields) -> str:
    """Return the text that the answer is expected to resemble; empty for none."""
    if asked.prediction is None:
        return ""
    content = asked.prediction.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


def marked_s(marks: Iterable[CacheControlField | None]) -> float:
    """Return the longest time that marks ask for."""
    return max((_MARKED_S[mark.ttl] for mark in marks if mark is not None), default=0.0)


def retained_s(retention: str | None) -> float:
    """Return the time that a value of `prompt_cache_retention` asks for."""
    return _RETAINED_S.get(retention or "", 0.0)


def split_prompts(
    value: str | list[str | int | list[int]], field: str
) -> tuple[str | list[int], ...]:
    """Return the texts and lists of token ids in a field that takes one or several of either.

    Raises:
        RequestError: the list is empty, or mixes token ids with others.
    """
    if isinstance(value, str):
        return (value,)
    if not value:
        raise RequestError(f"is an empty list: give at least one {field}.", field=field)
    ids = [part for part in value if isinstance(part, int)]
    if ids and len(ids) < len(value):
        reason = f"mixes token ids with texts or lists: give one {field} or a list of {field}s."
        raise RequestError(reason, field=field)
    return (ids,) if ids else tuple(part for part in value if not isinstance(part, int))
