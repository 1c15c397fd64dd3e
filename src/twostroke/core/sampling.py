"""`SamplingParams`: how the tokens of a request are sampled, and when its answer ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Final

from msgspec import field
from msgspec.structs import force_setattr, replace

from twostroke.core.constraint import (
    Constraint,
    ReasoningSection,
)
from twostroke.core.errors import Field, RequestError
from twostroke.core.frozen import Frozen
from twostroke.core.option_schema import Option, OptionStruct, option_fields

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_LOGIT_BIAS = 1024
MAX_CHOICES = 128
MAX_SEED = 2**64 - 1
MAX_STOP_IDS = 256
MAX_BIAS = 100
MAX_ID = 2**31 - 1
MAX_TOKENS = MAX_ID  # more than any context holds


class Bounds(Frozen):
    """The range of a numeric sampling parameter: its type, least and greatest value, and help text.

    With `above`, the value must be greater than `low`.
    """

    kind: type[int | float]
    low: float
    high: float
    description: str = ""
    above: bool = False


_ID_BOUNDS: Final = Bounds(int, 0, MAX_ID)
_BIAS_BOUNDS: Final = Bounds(float, -MAX_BIAS, MAX_BIAS)
# llama-server's defaults; most values are the same in other local servers.
_LOCAL_VALUES: Final[dict[str, float]] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.0,
}
# The fields that `SamplingDefaults` gives a value if a request leaves them out.
MODEL_DEFAULT_FIELDS: Final = tuple(_LOCAL_VALUES)
_MAY_BE_NONE: Final = frozenset(
    ("max_tokens", "seed", "logprobs", "prompt_logprobs", "reasoning_budget", *MODEL_DEFAULT_FIELDS)
)


def _default_text(name: str) -> str:
    """Return the default of a sampling option for its help: the model's own, or a number."""
    return f"the model's own, else {_LOCAL_VALUES[name]:g}"


class SamplingParams(OptionStruct, repr_omit_defaults=True):
    """How the next token of a request is sampled, and when the answer ends.

    The rules apply in this order: logit bias; repetition, frequency and presence penalties;
    `min_tokens` (end tokens are barred); the constraint's mask; temperature; top-k; min-p; top-p;
    sampling.

    Attributes:
        max_tokens: maximum number of tokens of the answer; None fills the context. It may be 0 with
            `prompt_logprobs`.
        temperature: 0 is greedy: the token with the largest logit, and of equal logits the lowest
            id. None in this field, and in `top_k`, `top_p`, `min_p` and `repetition_penalty`, is
            the model's default (`SamplingDefaults`).
        logit_bias: numbers to add to logits, by token id.
        seed: the seed of the random numbers; None takes a new seed for each request.
        stop: strings that end the answer. A single string may be given. Empty strings are removed,
            because clients send them for "none".
        stop_token_ids: token ids that end the answer.
        include_stop: whether the answer's text includes the stop string that ended it.
        ignore_eos: whether the model's end tokens do not end the answer.
        logprobs: which log-probabilities are reported. None: none; 0: of each sampled token; k:
            also of the k likeliest tokens. They belong to the model's distribution before all of
            the rules above.
        prompt_logprobs: the same for each prompt token except the first.
        constraint: the rule that the answer follows; an answer that is cut short is the beginning
            of a text that the rule allows. If the rule allows no further token, the answer ends,
            even before `min_tokens`.
        preface: reasoning before the answer, to which `constraint` and `stop` do not apply.
        reasoning_budget: maximum number of tokens of the reasoning, without its marks. After them
            the engine writes the text that closes the reasoning, and the answer follows. If
            `max_tokens` or the context is short, the budget is lowered, so that a quarter of the
            tokens is left for the answer. 0 is no reasoning; None and -1 are no limit.
        shown_ids: special tokens that the answer's text includes; other special tokens are left
            out.
        end_ids: the model's tokens that end the answer. They do not count towards the limit of
            `stop_token_ids`.
        drops_space: whether to remove a space at the start of the answer's text, for chats with
            tokenizers that put a space before every text (SentencePiece).

    Raises:
        RequestError: a value is outside its bounds; `field` names it.
    """

    SECTION: ClassVar[str] = "Choosing tokens"

    max_tokens: Annotated[
        int | None,
        Option(
            "--max-tokens",
            low=1,
            high=MAX_TOKENS,
            help="The most tokens to generate; left out: as many as fit.",
        ),
    ] = None
    min_tokens: Annotated[
        int,
        Option(
            "--min-tokens",
            low=0,
            high=MAX_TOKENS,
            help="Do not end before this many tokens.",
        ),
    ] = 0
    temperature: Annotated[
        float | None,
        Option(
            "--temperature",
            low=0.0,
            high=100.0,
            default=_default_text("temperature"),
            help="0 always takes the likeliest token.",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Option(
            "--top-k",
            low=0,
            high=MAX_ID,
            default=_default_text("top_k"),
            help="Draw from the k likeliest tokens; 0: from all.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Option(
            "--top-p",
            low=0.0,
            high=1.0,
            default=_default_text("top_p"),
            help="Draw from the likeliest tokens with this total probability; 0: take the "
            "likeliest.",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        Option(
            "--min-p",
            low=0.0,
            high=1.0,
            default=_default_text("min_p"),
            help="Draw from tokens at least p times as likely as the best.",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Option(
            "--repetition-penalty",
            low=0.0,
            high=100.0,
            excludes_low=True,
            default=_default_text("repetition_penalty"),
            help="Above 1: makes tokens of prompt and answer less likely.",
        ),
    ] = None
    presence_penalty: Annotated[
        float,
        Option(
            "--presence-penalty",
            low=-2.0,
            high=2.0,
            help="Above 0: makes tokens of the answer less likely.",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Option(
            "--frequency-penalty",
            low=-2.0,
            high=2.0,
            help="Above 0: makes a token of the answer less likely each time that it occurs.",
        ),
    ] = 0.0
    reasoning_budget: Annotated[
        int | None,
        Option(
            "--reasoning-budget",
            low=-1,
            high=MAX_TOKENS,
            default="no limit",
            help="The most tokens that a model reasons before its answer; 0: answer at once, -1: "
            "no limit.",
        ),
    ] = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: Annotated[
        int | None,
        Option(
            "--seed",
            low=-(2**63),
            high=MAX_SEED,
            help="The same seed gives the same answer again.",
        ),
    ] = None
    n: Annotated[
        int,
        Option("", low=1, high=MAX_CHOICES, help="How many answers; answer i has the seed plus i."),
    ] = 1
    stop: Annotated[
        Sequence[str],
        Option("--stop", help="Stop before this text; repeatable."),
    ] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Do not stop at end tokens.")] = False
    logprobs: Annotated[
        int | None,
        Option(
            "",
            low=0,
            high=MAX_LOGPROBS,
            help="Report log-probabilities of each token: 0 of the chosen token only, k also of "
            "the k likeliest tokens.",
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Option(
            "",
            low=0,
            high=MAX_LOGPROBS,
            help="The same for each token of the prompt except the first.",
        ),
    ] = None
    constraint: Constraint | None = None
    preface: ReasoningSection | None = None
    shown_ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()
    drops_space: bool = False

    def __post_init__(self) -> None:
        """Raise RequestError if a sampling value is not valid, or values contradict each other."""
        for name, bounds in BOUNDS.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            has_zero = name == "max_tokens" and self.prompt_logprobs is not None
            _check(name, value, replace(bounds, low=0) if has_zero else bounds)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            reason = f"must be at most {{other}} ({self.max_tokens}), got {self.min_tokens}."
            raise RequestError(reason, field="min_tokens", other=Field("max_tokens"))
        if not isinstance(self.constraint, Constraint | None):
            kind = type(self.constraint).__name__
            reason = f"must be a Constraint, such as Constraint.regex('[0-9]+'), not {kind}."
            raise RequestError(reason, field="constraint")
        if self.constraint is not None and self.ignore_eos:
            reason = "cannot be combined with a constraint, whose answers end."
            raise RequestError(reason, field="ignore_eos")
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        stops, ids = (_as_tuple(name, getattr(self, name)) for name in ("stop", "stop_token_ids"))
        force_setattr(self, "stop", tuple(stop for stop in stops if stop != ""))
        force_setattr(self, "stop_token_ids", ids)
        if not all(isinstance(stop, str) for stop in stops):
            raise RequestError("must be a string or a list of strings.", field="stop")
        is_wrong = any(not 1 <= len(stop) <= MAX_STOP_LENGTH for stop in self.stop)
        if is_wrong or len(self.stop) > MAX_STOPS:
            bounds = f"{MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters"
            raise RequestError(f"takes at most {bounds}.", field="stop")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise RequestError(f"takes at most {MAX_STOP_IDS} ids.", field="stop_token_ids")
        for token in self.stop_token_ids:
            _check("stop_token_ids", token, _ID_BOUNDS)

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            force_setattr(self, "logit_bias", {})
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError("must map token ids to numbers.", field="logit_bias")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"takes at most {MAX_LOGIT_BIAS} tokens.", field="logit_bias")
        for token, bias in self.logit_bias.items():
            _check("logit_bias", token, _ID_BOUNDS)
            _check("logit_bias", bias, _BIAS_BOUNDS)

    @property
    def is_greedy(self) -> bool:
        """Whether sampling always takes the likeliest token, since the temperature is 0."""
        return self.temperature == 0.0

    @property
    def values(self) -> SamplingValues:
        """The temperature, top-k, top-p, min-p and repetition penalty, as numbers.

        A field that is None gets the number that has no effect, such as 1.0 for `top_p`.
        """
        values = {name: getattr(self, name) for name in MODEL_DEFAULT_FIELDS}
        return SamplingValues(
            **{name: value for name, value in values.items() if value is not None}
        )

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty applies, so that sampling depends on the tokens so far."""
        return (
            self.repetition_penalty not in {None, 1.0}
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _bounds() -> dict[str, Bounds]:
    """Return the bounds of the numeric fields of `SamplingParams`, by field name."""
    return {
        name: Bounds(
            kind=field.number_type,
            low=field.option.low,
            high=field.option.high,
            description=field.option.help,
            above=field.option.excludes_low,
        )
        for name, field in option_fields(SamplingParams).items()
        if field.number_type and field.option.low is not None and field.option.high is not None
    }


# The checks of requests and the descriptions of the OpenAPI document use these.
BOUNDS: Final = _bounds()


class SamplingValues(Frozen):
    """A request's temperature, top-k, top-p, min-p and repetition penalty, all as numbers.

    The defaults of this class have no effect on sampling.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def _as_tuple(param: str, value: object) -> tuple[object, ...]:
    if value is None:  # "none", as vLLM and OpenAI's clients say it
        return ()
    if isinstance(value, str) and param == "stop":
        return (value,)
    if not isinstance(value, list | tuple):
        raise RequestError("must be a list, got {value!r}.", field=param, value=value)
    return tuple(value)


def _check(param: str, value: object, bounds: Bounds) -> None:
    kinds = int if bounds.kind is int else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        kind = "an integer" if bounds.kind is int else "a finite number"
        raise RequestError(f"must be {kind}, got {{value!r}}.", field=param, value=value)
    assert isinstance(value, int | float)
    if not bounds.low <= value <= bounds.high or (bounds.above and value == bounds.low):
        low, high = _text(bounds.low), _text(bounds.high)
        span = f"greater than {low} and at most" if bounds.above else f"from {low} to"
        hint = " Write 0 to draw from all tokens." if param == "top_k" and value == -1 else ""
        raise RequestError(f"must be {span} {high}, got {_text(value)}.{hint}", field=param)


def _text(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


LOCAL_DEFAULTS: Final = SamplingParams(**_LOCAL_VALUES)  # type: ignore[arg-type]
# OpenAI's defaults: tokens are drawn from the model's whole distribution.
OPENAI_DEFAULTS: Final = SamplingParams(
    temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0
)


class SamplingDefaults(Frozen):
    """Values for the sampling parameters that a request leaves out.

    The parameters are temperature, top-k, top-p, min-p and repetition penalty
    (`MODEL_DEFAULT_FIELDS`).

    Attributes:
        recommended: the values that the operator or the model's files name; None in a field for
            which they name no value.
        usual: a value for each field, which applies if `recommended` has None.
    """

    recommended: SamplingParams = SamplingParams()
    usual: SamplingParams = LOCAL_DEFAULTS

    def fill(self, params: SamplingParams, usual: SamplingParams | None = None) -> SamplingParams:
        """Return a request's sampling parameters with values in place of None.

        `usual` has the defaults that a protocol, such as OpenAI's, documents; they replace
        `self.usual`.
        """
        missing = [name for name in MODEL_DEFAULT_FIELDS if getattr(params, name) is None]
        if not missing:
            return params
        sources = (self.recommended, usual or self.usual, self.usual)
        values = {
            name: next(value for source in sources if (value := getattr(source, name)) is not None)
            for name in missing
        }
        return replace(params, **values)
