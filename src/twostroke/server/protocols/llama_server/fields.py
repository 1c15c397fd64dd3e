"""The fields that llama-server's requests for text share, and their meaning for the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta

from twostroke.core.errors import RequestError
from twostroke.core.sampling import (
    BOUNDS,
    DEFAULTED,
    LOCAL_DEFAULTS,
    MAX_BIAS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOKENS,
    SamplingParams,
)
from twostroke.server.body import field
from twostroke.server.http.answer_limits import LLAMA
from twostroke.server.protocols.common.fields import TOKEN_ID
from twostroke.server.protocols.common.structured_output import (
    GrammarForm,
    JsonForm,
    one_constraint,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.model.tokenizer import Tokenizer
    from twostroke.server.protocols.common.structured_output import Notated

# llama-server's defaults, which its clients count on, for models whose files do not say others.
DEFAULTS: Final = LOCAL_DEFAULTS
_NUMBERS: Final = (*DEFAULTED, "presence_penalty", "frequency_penalty")
RANDOM_SEED: Final = 2**32 - 1  # what llama-server makes of -1
_NAMES: Final = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "n": "n_cmpl",
}
MAX_RESPONSE_FIELDS: Final = 256
_LEAST_TOP_P: Final = 1e-6
# By a sampler's name: the letter that stands for it, and the values that turn it off.
SAMPLERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "penalties": (
        "e",
        {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    ),
    "temperature": ("t", {"temperature": 1.0}),
    "top_k": ("k", {"top_k": 0}),
    "min_p": ("m", {"min_p": 0.0}),
    "top_p": ("p", {"top_p": 1.0}),
}

_BIAS: Final = {"anyOf": [{"type": "number"}, {"const": False}]}
_BIASED: Final = {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": MAX_STOP_LENGTH}]}
_PAIR: Final = {"type": "array", "prefixItems": [_BIASED, _BIAS], "minItems": 2, "maxItems": 2}
_BIAS_WAYS: Final = [
    {"type": "object", "maxProperties": MAX_LOGIT_BIAS, "additionalProperties": _BIAS},
    {"type": "array", "maxItems": MAX_LOGIT_BIAS, "items": _PAIR},
    {"type": "null"},
]


SameAsPredict = Annotated[int | None, field.doc("The same as `n_predict`.", minimum=-1)]


class TextFields(field.RequestObject, kw_only=True):
    """The fields of llama-server's requests for text; null leaves a field out."""

    model: field.ModelName = None
    stream: field.Stream = None
    n_predict: Annotated[
        int | None,
        field.doc(
            "The most tokens to generate; -1: as many as fit; 0: only read the prompt.", minimum=-1
        ),
    ] = None
    max_tokens: SameAsPredict = None
    max_completion_tokens: SameAsPredict = None
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
        field.sampling("seed", "The same seed gives the same answer again; -1: another each time."),
    ] = None
    samplers: Annotated[
        list[str] | str | None,
        field.doc("The samplers to use, as names or letters; the others are off. Order: ours."),
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
            oneOf=_BIAS_WAYS,
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
            f"1 to {MAX_LOGPROBS} without penalties, `logit_bias` and a form of the answer."
        ),
    ] = None

    return_tokens: Annotated[bool | None, field.doc("Return the answer's token ids, too.")] = None
    timings_per_token: Annotated[
        bool | None, field.doc("Report the timings so far in every event of a stream.")
    ] = None
    return_progress: Annotated[
        bool | None, field.doc("Begin a stream with how much of the prompt was read.")
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


def to_params(asked: TextFields) -> SamplingParams:
    """Return how to choose tokens, without `logit_bias`, whose texts the tokenizer must read.

    Values beyond the range of a sampler become the nearest ones, as in llama-server.

    Raises:
        RequestError: a value is out of its bounds.
    """
    asked_of = {"repetition_penalty": "repeat_penalty"}
    numbers = {name: getattr(asked, asked_of.get(name, name)) for name in _NUMBERS}
    values = {name: value for name, value in numbers.items() if value is not None}
    for name in values.keys() & {"temperature", "top_k", "top_p", "min_p"}:
        low = _LEAST_TOP_P if name == "top_p" else BOUNDS[name].low
        values[name] = max(low, min(BOUNDS[name].high, values[name]))
    for name in SAMPLERS.keys() - used_samplers(asked):
        values |= SAMPLERS[name][1]
    stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or ()
    limit = num_predict(asked)
    more: dict[str, Any] = {
        "max_tokens": None if limit < 0 else max(LLAMA.min_tokens, min(limit, MAX_TOKENS)),
        "n": num_answers(asked),
        "seed": None if asked.seed in {-1, RANDOM_SEED} else asked.seed,
        "stop": [stop for stop in stops if stop],
        "ignore_eos": bool(asked.ignore_eos),
        "logprobs": asked.n_probs or None,
        "constraint": one_constraint(_forms(asked)),
    }
    return SamplingParams(**values, **more)


def names(asked: TextFields) -> dict[str, str]:
    """Return the names of the engine's fields for errors, as the request uses them."""
    return {
        own: name
        for own, name in _NAMES.items()
        if getattr(asked, name) is not None or getattr(asked, own, None) is None
    }


def num_predict(asked: TextFields) -> int:
    """Return the most tokens to generate; -1 for as many as fit."""
    first_limit = LLAMA.first_limit(asked)
    limit = -1 if first_limit is None else first_limit
    if limit < -1:
        raise RequestError(f"must be at least -1, got {limit}.", field="max_tokens")
    return limit


def num_answers(asked: TextFields) -> int:
    """Return how many answers each prompt gets."""
    given = asked.n if asked.n_cmpl is None else asked.n_cmpl
    return 1 if given is None else given


def used_samplers(asked: TextFields) -> list[str]:
    """Return the names of the samplers that are on, in the order in which they are applied."""
    given = asked.samplers
    if given is None:
        return [*SAMPLERS]
    if isinstance(given, str):
        return [name for name, (letter, _) in SAMPLERS.items() if letter in given]
    return [name for name in SAMPLERS if name in given]


def to_bias(given: list[Any] | dict[str, Any], tokenizer: Tokenizer) -> dict[int, float]:
    """Return the bias of each token; a ban is the strongest bias that there is.

    Ids that the vocabulary lacks are passed over.

    Raises:
        RequestError: an entry has another form, or there are too many.
    """
    if len(given) > MAX_LOGIT_BIAS:
        raise RequestError(f"takes at most {MAX_LOGIT_BIAS} tokens.", field="logit_bias")
    found: dict[int, float] = {}
    pairs = given if isinstance(given, list) else [list(pair) for pair in given.items()]
    for place, pair in enumerate(pairs):
        match pair:
            case [int() | str() as token, False] if not isinstance(token, bool):
                bias = float(-MAX_BIAS)
            case [int() | str() as token, int() | float() as number] if not (
                isinstance(token, bool) or number is True
            ):
                bias = max(-MAX_BIAS, min(MAX_BIAS, number))
            case _:
                reason = "must be a pair of a token id or a text and a number or false."
                raise RequestError(reason, field=f"logit_bias[{place}]")
        is_id = isinstance(given, dict) and TOKEN_ID.fullmatch(str(token))
        ids = _ids(int(token) if is_id else token, tokenizer)
        found |= dict.fromkeys(ids, bias)
    return found


def _ids(token: int | str, tokenizer: Tokenizer) -> list[int]:
    if isinstance(token, int):
        return [token] if 0 <= token < tokenizer.vocab_size else []
    if len(token) > MAX_STOP_LENGTH:
        reason = f"takes texts of at most {MAX_STOP_LENGTH} characters."
        raise RequestError(reason, field="logit_bias")
    return tokenizer.encode(token)


def _forms(asked: TextFields) -> Iterator[Notated]:
    """Yield the forms of the answer; an empty grammar allows any text."""
    yield "grammar", asked.grammar or None, "grammar"
    yield "json_schema", asked.json_schema, "json_schema"
