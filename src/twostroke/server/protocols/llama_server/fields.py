"""Fields that llama-server's requests for text share, and how they become sampling parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta

from twostroke.core.errors import RequestError
from twostroke.core.sampling import (
    BOUNDS,
    LOCAL_DEFAULTS,
    MAX_BIAS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOKENS,
    MODEL_DEFAULT_FIELDS,
    SamplingParams,
)
from twostroke.server.body import field
from twostroke.server.http.answer_limits import LLAMA
from twostroke.server.protocols.common.fields import TOKEN_ID
from twostroke.server.protocols.common.llama_completion import (
    RANDOM_SEED,
    SAMPLERS,
    settings_of,
)
from twostroke.server.protocols.common.structured_output import (
    GrammarForm,
    JsonForm,
    single_constraint,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.model.tokenizer import Tokenizer
    from twostroke.server.protocols.common.llama_completion import GenerationSettings
    from twostroke.server.protocols.common.structured_output import NotatedFormat

# llama-server's defaults, which its clients expect, for models whose files have no others.
DEFAULTS: Final = LOCAL_DEFAULTS
_NUMBER_FIELDS: Final = (*MODEL_DEFAULT_FIELDS, "presence_penalty", "frequency_penalty")
# llama-server's names of fields, by the engine's names.
_LLAMA_NAMES: Final = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "n": "n_cmpl",
}
MAX_RESPONSE_FIELDS: Final = 256
_MIN_TOP_P: Final = 1e-6

_BIAS_SCHEMA: Final = {"anyOf": [{"type": "number"}, {"const": False}]}
_BIASED_TOKEN_SCHEMA: Final = {
    "anyOf": [{"type": "integer"}, {"type": "string", "maxLength": MAX_STOP_LENGTH}]
}
_BIAS_PAIR_SCHEMA: Final = {
    "type": "array",
    "prefixItems": [_BIASED_TOKEN_SCHEMA, _BIAS_SCHEMA],
    "minItems": 2,
    "maxItems": 2,
}
_BIAS_SCHEMAS: Final = [
    {"type": "object", "maxProperties": MAX_LOGIT_BIAS, "additionalProperties": _BIAS_SCHEMA},
    {"type": "array", "maxItems": MAX_LOGIT_BIAS, "items": _BIAS_PAIR_SCHEMA},
    {"type": "null"},
]

SameAsNPredict = Annotated[int | None, field.doc("The same as `n_predict`.", minimum=-1)]


class TextFields(field.RequestObject, kw_only=True):
    """The fields that `/completion` and `/infill` requests share; null counts as left out."""

    model: field.ModelName = None
    stream: field.Stream = None
    n_predict: Annotated[
        int | None,
        field.doc(
            "At most this many tokens are generated; -1: all that fit; 0: only prefill the prompt.",
            minimum=-1,
        ),
    ] = None
    max_tokens: SameAsNPredict = None
    max_completion_tokens: SameAsNPredict = None
    n_cmpl: Annotated[int | None, field.sampling("n")] = None
    n: Annotated[int | None, field.sampling("n", "The same as `n_cmpl`.")] = None
    temperature: Annotated[
        float | None,
        field.doc("0 or less always takes the likeliest token. Default: the model's, else 0.8."),
    ] = None
    top_k: Annotated[
        int | None,
        field.doc("Draw from the k likeliest tokens; 0: from all. Default: the model's, else 40."),
    ] = None
    top_p: Annotated[
        float | None,
        field.doc(
            "Draw from the likeliest tokens with this total probability. Default: the model's, "
            "else 0.95."
        ),
    ] = None
    min_p: Annotated[
        float | None,
        field.doc(
            "Draw from tokens at least p times as likely as the best. Default: the model's, "
            "else 0.05."
        ),
    ] = None
    repeat_penalty: Annotated[float | None, field.sampling("repetition_penalty")] = None
    presence_penalty: Annotated[float | None, field.sampling("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, field.sampling("frequency_penalty")] = None
    seed: Annotated[
        int | None,
        field.sampling("seed", "The same seed gives the same answer again; -1: a random seed."),
    ] = None
    samplers: Annotated[
        list[str] | str | None,
        field.doc(
            "The samplers to use, as names or letters; the others are off. Their order is fixed."
        ),
    ] = None
    stop: Annotated[
        str | list[Annotated[str, Meta(extra_json_schema={"maxLength": MAX_STOP_LENGTH})]] | None,
        field.doc("Texts before which the answer ends.", maxItems=MAX_STOPS),
    ] = None
    ignore_eos: Annotated[bool | None, field.doc("Continue after the model's end token.")] = None
    logit_bias: Annotated[
        list[Any] | dict[str, Any] | None,
        field.doc(
            "Pairs, or an object, of a token (an id, or a text for all its tokens) and a number to "
            "add to its logit, or false to ban it.",
            oneOf=_BIAS_SCHEMAS,
        ),
    ] = None
    grammar: GrammarForm = None
    json_schema: JsonForm = None
    n_probs: Annotated[
        int | None, field.sampling("logprobs", "How many of the likeliest tokens to report.")
    ] = None

    post_sampling_probs: Annotated[
        bool | None,
        field.doc(
            "Report probabilities after all samplers instead. Needs temperature 0, or `top_k` from "
            f"1 to {MAX_LOGPROBS} without penalties, `logit_bias` and an answer format."
        ),
    ] = None

    return_tokens: Annotated[bool | None, field.doc("Return the answer's token ids, too.")] = None
    timings_per_token: Annotated[
        bool | None, field.doc("Report the timings so far in every event of a stream.")
    ] = None
    return_progress: Annotated[
        bool | None, field.doc("Begin a stream with how much of the prompt is prefilled.")
    ] = None
    response_fields: Annotated[
        Annotated[list[str], Meta(max_length=MAX_RESPONSE_FIELDS)] | None,
        field.doc("Return these fields only; `a/b` is field b of field a."),
    ] = None
    id_slot: Annotated[int | None, field.doc("Returned with the answer; there are no slots.")] = (
        None
    )

    adaptive_decay: field.Ignored = None
    backend_sampling: field.Ignored = None
    cache_prompt: field.IgnoredOn = None
    dry_allowed_length: field.Ignored = None
    dry_base: field.Ignored = None
    dry_penalty_last_n: field.Ignored = None
    dry_sequence_breakers: field.Ignored = None
    dynatemp_exponent: field.Ignored = None
    mirostat_eta: field.Ignored = None
    mirostat_tau: field.Ignored = None
    n_cache_reuse: field.Ignored = None
    n_discard: Annotated[Any, field.ignored(0)] = None
    n_keep: Annotated[Any, field.ignored(0)] = None
    sse_ping_interval: field.Ignored = None
    t_max_prompt_ms: field.Ignored = None
    verbose: field.IgnoredOff = None
    xtc_threshold: field.Ignored = None

    adaptive_target: Annotated[Any, field.hint(-1)] = None
    dry_multiplier: Annotated[Any, field.hint(0)] = None
    dynatemp_range: Annotated[Any, field.hint(0)] = None
    min_keep: Annotated[Any, field.hint(0)] = None
    mirostat: Annotated[Any, field.hint(0)] = None
    n_indent: Annotated[Any, field.hint(0)] = None
    repeat_last_n: Annotated[Any, field.hint(-1)] = None
    t_max_predict_ms: Annotated[Any, field.hint(0, -1)] = None
    top_n_sigma: Annotated[Any, field.hint(-1, 0)] = None
    typical_p: Annotated[Any, field.hint(1)] = None
    xtc_probability: Annotated[Any, field.hint(0)] = None

    lora: Annotated[Any, field.unsupported([])] = None


def to_params(request: TextFields) -> SamplingParams:
    """Translate llama-server's request fields into the engine's sampling parameters.

    Values beyond the range of a sampler become the nearest valid values, as in llama-server.
    `logit_bias` is left out, since its texts need the tokenizer; `LlamaJob.encode` adds it.

    Raises:
        RequestError: another value is out of its bounds.
    """
    llama_names = {"repetition_penalty": "repeat_penalty"}
    numbers = {name: getattr(request, llama_names.get(name, name)) for name in _NUMBER_FIELDS}
    values = {name: value for name, value in numbers.items() if value is not None}
    for name in values.keys() & {"temperature", "top_k", "top_p", "min_p"}:
        low = _MIN_TOP_P if name == "top_p" else BOUNDS[name].low
        values[name] = max(low, min(BOUNDS[name].high, values[name]))
    for name in SAMPLERS.keys() - used_samplers(request):
        values |= SAMPLERS[name][1]
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or ()
    limit = num_predict(request)
    other_values: dict[str, Any] = {
        "max_tokens": None if limit < 0 else max(LLAMA.min_tokens, min(limit, MAX_TOKENS)),
        "n": num_answers(request),
        "seed": None if request.seed in {-1, RANDOM_SEED} else request.seed,
        "stop": [stop for stop in stops if stop],
        "ignore_eos": bool(request.ignore_eos),
        "logprobs": request.n_probs or None,
        "constraint": single_constraint(_requested_formats(request)),
    }
    return SamplingParams(**values, **other_values)


def field_names(request: TextFields) -> dict[str, str]:
    """Map the engine's parameter names to llama-server's, so that errors name the client's fields.

    A field that the request sends by the engine's name is left out.
    """
    return {
        name: llama_name
        for name, llama_name in _LLAMA_NAMES.items()
        if getattr(request, llama_name) is not None or getattr(request, name, None) is None
    }


def num_predict(request: TextFields) -> int:
    """Return the maximum number of tokens that a request's answer may have; -1 for no limit.

    Raises:
        RequestError: the number is less than -1.
    """
    first_limit = LLAMA.first_limit(request)
    limit = -1 if first_limit is None else first_limit
    if limit < -1:
        raise RequestError(f"must be at least -1, got {limit}.", field="max_tokens")
    return limit


def num_answers(request: TextFields) -> int:
    """Return how many answers to generate for each prompt: `n_cmpl` or `n`, by default 1."""
    num_requested = request.n if request.n_cmpl is None else request.n_cmpl
    return 1 if num_requested is None else num_requested


def used_samplers(request: TextFields) -> list[str]:
    """Return the names of the samplers that a request's field `samplers` turns on, in their order.

    Without the field, all samplers are on.
    """
    samplers = request.samplers
    if samplers is None:
        return [*SAMPLERS]
    if isinstance(samplers, str):
        return [name for name, (letter, _) in SAMPLERS.items() if letter in samplers]
    return [name for name in SAMPLERS if name in samplers]


def to_logit_bias(entries: list[Any] | dict[str, Any], tokenizer: Tokenizer) -> dict[int, float]:
    """Return a request's `logit_bias` as the number to add to the logit of each token id.

    `false` bans a token by the largest negative bias. Ids that the vocabulary lacks are ignored.

    Raises:
        RequestError: there are too many entries, or an entry is not a token with a bias.
    """
    if len(entries) > MAX_LOGIT_BIAS:
        raise RequestError(f"takes at most {MAX_LOGIT_BIAS} tokens.", field="logit_bias")
    bias_by_id: dict[int, float] = {}
    pairs = entries if isinstance(entries, list) else [list(pair) for pair in entries.items()]
    for index, pair in enumerate(pairs):
        match pair:
            case [int() | str() as token, False] if not isinstance(token, bool):
                bias = float(-MAX_BIAS)
            case [int() | str() as token, int() | float() as number] if not (
                isinstance(token, bool) or number is True
            ):
                bias = max(-MAX_BIAS, min(MAX_BIAS, number))
            case _:
                reason = "must be a pair: a token id or a text, and a number or false."
                raise RequestError(reason, field=f"logit_bias[{index}]")
        is_id = isinstance(entries, dict) and TOKEN_ID.fullmatch(str(token))
        ids = _token_ids(int(token) if is_id else token, tokenizer)
        bias_by_id |= dict.fromkeys(ids, bias)
    return bias_by_id


def _token_ids(token: int | str, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of one entry of `logit_bias`: a token id, or a text with any tokens."""
    if isinstance(token, int):
        return [token] if 0 <= token < tokenizer.vocab_size else []
    if len(token) > MAX_STOP_LENGTH:
        reason = f"takes texts of at most {MAX_STOP_LENGTH} characters."
        raise RequestError(reason, field="logit_bias")
    return tokenizer.encode(token)


def _requested_formats(request: TextFields) -> Iterator[NotatedFormat]:
    """Yield an entry for each request field that could set the answer's format.

    An entry has the notation, such as "json_schema", the format or None, and the field's name. An
    empty grammar sets no format.
    """
    yield "grammar", request.grammar or None, "grammar"
    yield "json_schema", request.json_schema, "json_schema"


def generation_settings(request: TextFields, params: SamplingParams) -> GenerationSettings:
    """Return a request's settings in the form in which llama-server's responses repeat them.

    `params` are the request's sampling parameters.
    """
    return settings_of(
        params,
        limit=num_predict(request),
        stream=bool(request.stream),
        num_probs=request.n_probs or 0,
        samplers=used_samplers(request),
        timings_per_token=bool(request.timings_per_token),
        post_sampling_probs=bool(request.post_sampling_probs),
    )
