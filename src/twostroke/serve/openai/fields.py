"""The fields that chat and completion requests have in common, and what they mean to the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from twostroke.core.errors import RequestError, nearest
from twostroke.core.sampling import BOUNDS, MAX_STOPS, SamplingParams
from twostroke.core.service import DEFAULT_SERVICE, SERVICES
from twostroke.engine.client import Caller
from twostroke.serve.http.decode import MAX_NAME_LENGTH
from twostroke.serve.http.errors import UnsupportedFieldError
from twostroke.serve.openai.structure import ResponseFormat, StructuredOutputs, to_constraint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.serve.store import Tenant

MAX_PRIORITY = 1000
MAX_PAIRS: Final = 16  # of metadata
MAX_KEY: Final = 64
MAX_VALUE: Final = 512

# OpenAI's words for classes of service; without contracts for more, two of them are the default.
TIERS: Final = {
    "auto": DEFAULT_SERVICE,
    "default": DEFAULT_SERVICE,
    "flex": "flex",
    "scale": DEFAULT_SERVICE,
    "priority": "priority",
}

_UNSUPPORTED: Final = "is not supported yet: leave it out."

# What would change the answer and is not there yet is refused, unless its value asks for nothing.
NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "length_penalty": (1.0,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class PredictionPart(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"
):
    """A prediction's content may come in parts."""

    text: str


class Prediction(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="content"
):
    """What the answer will be like: it comes the faster the more of it is right."""

    content: str | list[PredictionPart]


class CommonFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's sampling fields, those that users of other engines send, and the harmless rest.

    null is the same as leaving a field out. Bounds are `SamplingParams`'s.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    service_tier: str | None = None
    return_timings: bool | None = None
    prediction: Prediction | None = None
    speculate: str | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    # Harmless: they change nothing about the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    request_id: str | None = None
    spaces_between_special_tokens: bool | None = None

    # Refused unless neutral.
    add_special_tokens: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    best_of: int | None = None
    cache_salt: Any = None
    length_penalty: Any = None
    prompt_logprobs: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    skip_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None


_SAME_NAME: Final = (
    *(name for name in CommonFields.__struct_fields__ if name in BOUNDS),
    "ignore_eos",
)


def check_neutral(
    asked: CommonFields, neutral: Mapping[str, tuple[object, ...]] | None = None
) -> None:
    """Refuse fields that ask for what is not there; `neutral` has one protocol's own.

    Raises:
        UnsupportedFieldError: naming the field.
        RequestError: of those that change nothing, one is out of its bounds.
    """
    refuse_all_but(asked, NEUTRAL | dict(neutral or {}))
    _check_metadata(asked.metadata or {})
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise UnsupportedFieldError("is not supported yet, unless it equals n.", field="best_of")
    options = asked.stream_options
    if options is not None and not asked.stream:
        raise RequestError("may only be set when stream is true.", field="stream_options")
    if options is not None and options.continuous_usage_stats:
        field = "stream_options.continuous_usage_stats"
        raise UnsupportedFieldError(_UNSUPPORTED, field=field)


def _check_metadata(metadata: Mapping[str, str]) -> None:
    is_long = any(len(key) > MAX_KEY or len(text) > MAX_VALUE for key, text in metadata.items())
    if len(metadata) > MAX_PAIRS or is_long:
        reason = (
            f"takes at most {MAX_PAIRS} pairs, of keys up to {MAX_KEY} and values up "
            f"to {MAX_VALUE} characters."
        )
        raise RequestError(reason, field="metadata")


def refuse_all_but(
    asked: msgspec.Struct, neutral: Mapping[str, tuple[object, ...]], where: str = ""
) -> None:
    """Refuse fields that are neither null nor one of their neutral values.

    `where` is what stands before their names.

    Raises:
        UnsupportedFieldError: naming the field.
    """
    for name, values in neutral.items():
        value = getattr(asked, name)
        if value is not None and not any(_is_same(value, neutral) for neutral in values):
            raise UnsupportedFieldError(_UNSUPPORTED, field=where + name)


def _is_same(value: object, neutral: object) -> bool:
    """Whether JSON has them as one value: true is not 1 there."""
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def to_params(asked: CommonFields, **own: Any) -> SamplingParams:
    """Return how tokens are to be chosen; `own` are values that one protocol names otherwise.

    Raises:
        RequestError: a value is out of its bounds.
    """
    values = {name: getattr(asked, name) for name in _SAME_NAME}
    values["stop"] = _stops(asked.stop)
    values["include_stop"] = asked.include_stop_str_in_output
    values["logit_bias"] = asked.logit_bias
    values["stop_token_ids"] = tuple(asked.stop_token_ids or ())
    values["constraint"] = to_constraint(asked)
    values |= own
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


class Urgent(Protocol):
    """A request that may say how urgent it is."""

    priority: int | None
    service_tier: str | None


def to_caller(asked: Urgent, prompt_field: str, tenant: Tenant) -> Caller:
    """Return on whose behalf the request runs; `prompt_field` is the one with the prompt.

    A `priority` of its own goes before what its class of service means.

    Raises:
        RequestError: there is no such class of service, or the priority is out of bounds.
    """
    asked_tier = "auto" if asked.service_tier is None else asked.service_tier
    service = TIERS.get(asked_tier)
    if service is None:
        word = asked_tier[:MAX_NAME_LENGTH]
        reason = f"must be one of {', '.join(TIERS)}, got '{{value}}'.{nearest(word, TIERS)}"
        raise RequestError(reason, field="service_tier", value=word)
    priority = SERVICES[service] if asked.priority is None else asked.priority
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        reason = f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, got {priority}."
        raise RequestError(reason, field="priority")
    return Caller(priority, tenant.name, prompt_field, service)


def told_tier(asked: CommonFields) -> str | None:
    """Return what the response says of its class of service: nothing where nothing was asked."""
    return None if asked.service_tier is None else TIERS[asked.service_tier]


def to_prediction(asked: CommonFields) -> str:
    """Return the text that the answer is expected to be like; empty for none."""
    if asked.prediction is None:
        return ""
    content = asked.prediction.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    if len(stop) > MAX_STOPS:  # said here, before the list is copied
        raise RequestError(f"takes at most {MAX_STOPS} strings, got {len(stop)}.", field="stop")
    return tuple(stop)
